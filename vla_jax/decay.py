"""What decay means to the tokens of a chunk, and sums that decay.

``γ = exp(log_decay)`` multiplies a state before a token is added. Equation numbers are those of
``docs/derivation.md``. A decay between two tokens is the exponential of a masked sum: a difference
of two running sums would lose what comes after a token that forgets all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import chunks, numerics
from vla_jax.types import Array, DTypeLike

# Stands for a γ of nothing: its exponential is exactly 0, and sums of it stay finite in float32.
RESET = -1e30


def effective(
    log_decay: Array | None, tokens: Array, segment_ids: Array | None, dtype: DTypeLike
) -> Array:
    """``log_decay [B, T, H, 1]`` with the segments in it: a start keeps nothing of the past.

    The first token is no start: an initial state belongs to its segment.

    Args:
      log_decay: ``[B, T, H]``, None for no decay.
      tokens: ``[B, T, H, D]``.
      segment_ids: ``[B, T]`` or None.
      dtype: of the result.
    """
    if log_decay is None:
        log_decay = jnp.zeros(tokens.shape[:3])
    log_decay = jnp.maximum(log_decay.astype(dtype), RESET)
    if segment_ids is not None:
        start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        log_decay = jnp.where(start[..., None], RESET, log_decay)
    return log_decay[..., None]


class Decay(NamedTuple):
    """The decay inside of chunks, ``[N, B, H, ...]``: Γ, exp(g) and τ of equation (33)."""

    within: Array  # [..., C, C]  from the second token to the first, 0 where it comes later
    since: Array  # [..., C, 1]  since the chunk's start
    until: Array  # [..., C, 1]  to the chunk's end
    log_total: Array  # [..., 1, 1]  logarithm of the decay of the whole chunk

    @classmethod
    def of(cls, log_decay: Array) -> Decay:
        """From ``[N, B, H, C, 1]``."""
        after = jnp.tri(log_decay.shape[-2], k=-1, dtype=bool)
        within = jnp.tril(jnp.exp(jnp.cumsum(jnp.where(after, log_decay, 0), axis=-2)))
        since = jnp.cumsum(log_decay, axis=-2)
        until = jnp.swapaxes(within[..., -1:, :], -1, -2)
        return cls(within, jnp.exp(since), until, since[..., -1:, :])

    @property
    def total(self) -> Array:
        """``[..., 1, 1]``, the decay of the whole chunk."""
        return self.since[..., -1:, :]

    @property
    def before(self) -> Array:
        """``within`` without its diagonal."""
        return jnp.tril(self.within, -1)


def crossing(pairs: Array, from_start: Array, to_end: Array, through: Array) -> Array:
    """The derivative by ``log γ_t``: all that passes from before ``t`` to ``t`` or behind it.

    Equations (36) and (40). Every term has the factor ``γ_t``, so none cancels what is large.

    Args:
      pairs: ``[..., C, C]``, what reaches the first token from the second, strictly lower.
      from_start: ``[..., C, 1]``, what reaches a token from the chunk's start.
      to_end: ``[..., C, 1]``, what goes from a token to the chunk's end.
      through: ``[..., 1, 1]``, what goes from the chunk's start to its end.

    Returns:
      ``[..., C, 1]``.
    """
    axis = pairs.ndim - 2
    behind = jax.lax.cumsum(pairs, axis, reverse=True)
    inside = jnp.sum(jnp.tril(behind, -1), axis=-1, keepdims=True)
    ended = jnp.cumsum(to_end, axis=-2)[..., :-1, :]
    ended = jnp.concatenate([jnp.zeros_like(through), ended], axis=-2)
    return through + ended + inside + jax.lax.cumsum(from_start, axis, reverse=True)


# --- sums that decay ---------------------------------------------------------------------------


def compensated(total: Array, log_decay: Array, addend: Array, rest: Array) -> tuple[Array, Array]:
    """``γ (total + rest) + addend``, and what rounding keeps out of it.

    Where little decays, what it takes is one more small addend: many products by a γ next to 1
    would round as often as many sums. Where much does, the product is as exact as it can be.
    """
    decay, rest = jnp.exp(log_decay), jax.lax.stop_gradient(rest)
    slow = log_decay > -0.5
    lost = jnp.expm1(jnp.where(slow, log_decay, 0)) * total
    addend = addend + decay * rest + lost
    kept = jnp.where(slow, total, decay * total)
    result = kept + addend
    return result, jax.lax.stop_gradient(addend - (result - kept))


RunningSum = Callable[..., tuple[Array, tuple[Array, Array]]]


def running_sum(
    terms: Array, log_decay: Array, initial: tuple[Array, Array], *, reverse: bool = False
) -> tuple[Array, tuple[Array, Array]]:
    """``x ← γ x + term`` over the leading axis, compensated.

    Args:
      terms: ``[N, ...]``.
      log_decay: the logarithm of each γ, ``[N, ...]``.
      initial: ``x`` and what rounding has kept out of it.

    Returns:
      ``x`` before each term, ``[N, ...]``; and after the last one as ``initial``.
    """

    def step(carry, inputs):
        term, log_decay = inputs
        total, rest = carry
        return compensated(total, log_decay, term, rest), total

    final, starts = jax.lax.scan(step, initial, (terms, log_decay), reverse=reverse)
    return starts, final


# --- the key sum -------------------------------------------------------------------------------


def decayed_sums(
    x: Array, log_decay: Array, initial: Array, *, policy: numerics.Policy, reverse: bool = False
) -> Array:
    """``z_t = γ_t z_{t-1} + x_t`` for every token, equation (37).

    Args:
      x: ``[B, T, H, D]``.
      log_decay: ``[B, T, H, 1]``, see ``effective``.
      initial: ``[B, H, D]``.
      reverse: from the end to the start, ``z_t = γ_{t+1} z_{t+1} + x_t``: the transpose.

    Returns:
      ``[B, T, H, D]``, in the accumulator's dtype.
    """
    if reverse:
        log_decay = jnp.pad(log_decay[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
        x, log_decay = x[:, ::-1], log_decay[:, ::-1]

    def step(carry, tokens, *_):
        x, log_decay = tokens
        decay = Decay.of(log_decay)
        ends = policy.dot("...ts,...sd->...td", decay.within[..., -1:, :], x)
        starts, carry = running_sum(ends, decay.log_total, carry)
        within = policy.dot("...ts,...sd->...td", decay.within, x)
        return carry, [within + decay.since * starts], None

    initial = initial[:, :, None]
    _, (sums,), _ = chunks.Blocks.of(x.shape[1], None).scan(
        step, (initial, jnp.zeros_like(initial)), (x, log_decay), [x.shape[2:]], None,
        dtype=policy.accumulator,
    )  # fmt: skip
    return sums[:, ::-1] if reverse else sums


def plain_sum(
    x: Array,
    log_decay: Array | None,
    initial: Array,
    segment_ids: Array | None,
    policy: numerics.Policy,
) -> Array:
    """``z_t = γ_t z_{t-1} + x_t`` of every token, ``[B, T, H, D]``; the last one is the state.

    Args:
      x: ``[B, T, H, D]``.
      log_decay: ``[B, T, H]`` or None.
      initial: ``[B, H, D]``; the result has its dtype.
      segment_ids: ``[B, T]`` or None.
      policy: of the products.
    """
    log_decay = effective(log_decay, x, segment_ids, initial.dtype)
    return decayed_sums(x, log_decay, initial, policy=policy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def causal_sum(
    x: Array,
    log_decay: Array | None,
    initial: Array,
    segment_ids: Array | None,
    policy: numerics.Policy,
) -> Array:
    """``plain_sum`` with a closed-form backward."""
    return plain_sum(x, log_decay, initial, segment_ids, policy)


@numerics.broadcasts
def _causal_sum_forward(x, log_decay, initial, segment_ids, policy):
    sums = causal_sum(x, log_decay, initial, segment_ids, policy)
    return sums, (x, log_decay, initial, segment_ids, sums)


@numerics.broadcasts
def _causal_sum_backward(policy, saved, d_sums):
    x, log_decay, initial, segment_ids, sums = saved
    decay = effective(log_decay, x, segment_ids, initial.dtype)
    d_x = decayed_sums(d_sums, decay, jnp.zeros_like(initial), policy=policy, reverse=True)
    decay = jnp.exp(decay)
    before = jnp.concatenate([initial[:, None], sums[:, :-1]], axis=1)
    d_log_decay = None
    if log_decay is not None:
        d_log_decay = jnp.sum(decay * before * d_x, axis=-1).astype(log_decay.dtype)
    return d_x.astype(x.dtype), d_log_decay, decay[:, 0] * d_x[:, 0], None


causal_sum.defvjp(_causal_sum_forward, _causal_sum_backward)
