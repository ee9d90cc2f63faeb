"""The recurrence as ``jax.lax.associative_scan``: per chunk for use, per token as a cross-check.

Both rest on equation (15): a run of tokens acts on the memory (key dimension first) as the affine
map ``S ↦ F S + G``, and ``(later) ∘ (earlier) = (F₂ F₁, F₂ G₁ + G₂)``. Written for the transposed
``S`` of the equations this is multiplication from the *right*; the published code multiplies from
the left, which only has the right shape because it takes D = E.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from vla_jax import chunkwise, numerics
from vla_jax.bundles import Bundle
from vla_jax.chunks import Scans, kept
from vla_jax.types import Array


def _affine_scan(factor: Array, term: Array, dot, reverse: bool = False) -> tuple[Array, Array]:
    """Inclusive composition of ``S ↦ factor S + term`` along the leading axis."""
    combine = functools.partial(numerics.compose, dot=functools.partial(dot, "...ij,...jk->...ik"))
    return jax.lax.associative_scan(combine, (factor, term), reverse=reverse)


def _exclusive(initial: Array, inclusive: Array, reverse: bool) -> tuple[Array, Array]:
    """States before each element and after the last one."""
    if reverse:
        states = jnp.concatenate([inclusive, initial[None]])
        return states[1:], states[0]
    states = jnp.concatenate([initial[None], inclusive])
    return states[:-1], states[-1]


def sweep(
    left: Array,
    right: Array,
    inner: Array,
    outer: Array | None,
    keep: Array | None,
    initial: Array,
    policy: numerics.Policy,
    *,
    reverse: bool = False,
) -> tuple[Array, Array, Array]:
    """``chunks.sweep`` in logarithmic depth over chunks, at D³ more arithmetic a chunk."""
    dot = policy.dot
    identity = jnp.eye(left.shape[-1], dtype=policy.accumulator)
    factor = kept(keep, identity) - dot("...td,...te->...de", left, right)
    term = dot("...td,...te->...de", left, inner)
    term = term if outer is None else term + outer
    factor, term = _affine_scan(factor, term, dot, reverse)
    states = dot("...ij,...jk->...ik", factor, initial[None]) + term
    starts, final = _exclusive(initial, states, reverse)
    return starts, inner - dot("...td,...de->...te", right, starts), final


def running_sum(
    terms: Array, keep: Array | None, initial: Array, *, reverse: bool = False
) -> tuple[Array, Array]:
    """``chunks.running_sum`` in logarithmic depth."""
    if keep is None:
        sums = jax.lax.associative_scan(jnp.add, terms, reverse=reverse)
        return _exclusive(initial, initial + sums, reverse)

    def combine(earlier, later):
        keep1, x1 = earlier
        keep2, x2 = later
        return keep1 & keep2, jnp.where(keep2, x1, 0) + x2

    kept, sums = jax.lax.associative_scan(combine, (keep, terms), reverse=reverse)
    return _exclusive(initial, jnp.where(kept, initial, 0) + sums, reverse)


def decayed_sum(
    terms: Array, log_decay: Array, initial: tuple[Array, Array], *, reverse: bool = False
) -> tuple[Array, tuple[Array, Array]]:
    """``decay.running_sum`` in logarithmic depth, with a rest of zero."""

    def combine(earlier, later):
        (decay1, x1), (decay2, x2) = earlier, later
        return decay1 + decay2, jnp.exp(decay2) * x1 + x2

    log_decay, sums = jax.lax.associative_scan(combine, (log_decay, terms), reverse=reverse)
    first = initial[0] + initial[1]
    starts, final = _exclusive(first, sums + jnp.exp(log_decay) * first, reverse)
    return starts, (final, jnp.zeros_like(final))


LOGARITHMIC = Scans(sweep, running_sum, decayed_sum, span=None)
RULES = chunkwise.rules(LOGARITHMIC)


def unsupported(bundle: Bundle, chunk_size: int | None) -> None:
    """None: every dtype, size and device is served."""


def delta_rule_per_token(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    *,
    initial_memory: Array | None = None,
) -> tuple[Array, Array]:
    """The delta rule as one ``associative_scan`` over tokens (the published Blelloch form).

    Makes two ``[T, B, H, D, ·]`` arrays: for small D and as a cross-check of everything else. Plain
    JAX, so every kind of differentiation works.

    Args:
      query, key, write_key: ``[B, T, H, D]``.
      value: ``[B, T, H, E]``.
      initial_memory: ``[B, H, D, E]``, zeros by default.

    Returns:
      ``(out [B, T, H, E], memory [B, H, D, E])``.
    """
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    k, a, v = (jnp.moveaxis(x, 1, 0) for x in (key, write_key, value))
    factor = jnp.eye(key.shape[-1], dtype=key.dtype) - a[..., :, None] * k[..., None, :]
    factor, term = _affine_scan(factor, a[..., :, None] * v[..., None, :], dot)
    if initial_memory is not None:
        term = term + dot("...ij,...jk->...ik", factor, initial_memory[None])
    return dot("bthd,tbhde->bthe", query, term), term[-1]
