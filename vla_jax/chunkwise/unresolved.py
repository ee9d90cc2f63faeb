"""Tokens whose λ₀ float32 does not resolve beside the penalty: solved again, one by one.

An inverse that is stepped, by equations (6) to (9) or by the Sherman–Morrison formula, keeps the
error of its largest entry, ``1/λ₀`` until every direction has been seen. Where rounding has won, a
token's solution is made from its own penalty: slow, and right in every digit that is left. A loop
without iterations costs nothing, also under ``jax.vmap``, which would run both branches of a
condition.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Solve
from vla_jax.chunks import Blocks, where
from vla_jax.types import Array


class Lost(NamedTuple):
    """The tokens ``start ≤ t < stop`` that rounding has won, none if ``stop = 0``."""

    start: Array
    stop: Array
    penalty: Array  # [B, H, D, D]  before the first of them


def find(cut: Blocks, lost: Array, starts: Array) -> Lost:
    """The range of tokens that covers every lost super-chunk.

    Args:
      cut: the super-chunks.
      lost: ``[N, B, H]``, whether a super-chunk is.
      starts: ``[N, B, H, D, D]``, the penalty before each.
    """
    size = cut.span * cut.chunk
    lost = jnp.any(lost, axis=(1, 2))
    first, behind = jnp.argmax(lost), jnp.argmax(lost[::-1])
    stop = jnp.where(jnp.any(lost), jnp.minimum((cut.blocks - behind) * size, cut.length), 0)
    return Lost(first * size, stop, starts[first])


def solve(lost: Lost, solution: Array, rhs: Array, part: str, inputs: Solve) -> Array:
    """Solves the lost tokens from the penalty of each.

    Args:
      lost: which.
      solution: ``[B, T, H, D]``, to take over where no token is lost.
      rhs: ``[B, T, H, D]``, that of ``inputs`` or a cotangent.
      part: whether to solve for ``"all"`` of it or for what the directions read so far ``"span"``.
        The rest is orthogonal to these but for its rounding.
      inputs: direction, ``lambda0`` and segments are used.
    """
    chosen = ("all", "span").index(part)

    def body(t, carry):
        penalty, solution = carry
        u, r = inputs.direction[:, t].astype(penalty.dtype), rhs[:, t]
        penalty = where(_joins(inputs.segment_ids, t - 1, t), penalty)
        penalty = penalty + u[..., :, None] * u[..., None, :]
        inverse = numerics.penalty_inverses(penalty, inputs.lambda0)[chosen]
        solved = jnp.einsum("bhij,bhj->bhi", inverse, r, precision=jax.lax.Precision.HIGHEST)
        return penalty, solution.at[:, t].set(solved)

    return jax.lax.fori_loop(lost.start, lost.stop, body, (lost.penalty, solution))[1]


def _joins(segment_ids: Array | None, first: Array, then: Array) -> Array | None:
    """Whether two tokens are of one segment, or one of them is none: for ``where``."""
    if segment_ids is None:
        return None
    first, then = jnp.maximum(first, 0), jnp.minimum(then, segment_ids.shape[1] - 1)
    return (segment_ids[:, first] == segment_ids[:, then])[:, None, None, None]


def pull(
    lost: Lost,
    d_u: Array,
    forward: tuple[Array, Array],
    backward: tuple[Array, Array],
    later: Array,
    inputs: Solve,
) -> Array:
    """Equation (23) without its sign, token by token if any token is lost, otherwise ``d_u``.

    The factor that meets ``u_s`` is the one in the span of the directions, so that the rounding of
    the other part, as large as ``1/λ₀``, does not.

    Args:
      lost: which tokens.
      d_u: ``[B, T, H, D]``, to take over where none is lost.
      forward, backward: ``α`` and ``β``, each with the right-hand side that it solves for.
      later: the sum of equation (23) after the last token.
      inputs: those of the forward.
    """
    length = inputs.direction.shape[1]

    def again(_, d_u):
        (alpha, beta), (alpha_span, beta_span) = zip(
            *((x, solve(lost, x, rhs, "span", inputs)) for x, rhs in (forward, backward)),
            strict=True,
        )
        tokens = inputs.direction, alpha, beta, alpha_span, beta_span

        def body(i, carry):
            later, d_u = carry
            t = length - 1 - i
            u, a, b, a_span, b_span = (x[:, t].astype(later.dtype) for x in tokens)
            pairs = b[..., :, None] * a_span[..., None, :] + a[..., :, None] * b_span[..., None, :]
            later = where(_joins(inputs.segment_ids, t, t + 1), later) + pairs
            pulled = jnp.einsum("bhij,bhj->bhi", later, u, precision=jax.lax.Precision.HIGHEST)
            return later, d_u.at[:, t].set(pulled)

        return jax.lax.fori_loop(0, length, body, (later, d_u))[1]

    return jax.lax.fori_loop(0, (lost.stop > 0).astype(int), again, d_u)
