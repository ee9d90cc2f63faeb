"""``penalty_solve`` in chunks: equations (6) to (9), and (22) to (26) backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Solve, SolveOutputs
from vla_jax.chunks import (
    Blocks,
    Scans,
    Segments,
    lower,
    masks,
    segments_of,
    split,
    upper,
    where,
)
from vla_jax.chunkwise import unresolved
from vla_jax.plan import Plan
from vla_jax.types import Array


class Solved(NamedTuple):
    """What the backward keeps of the forward: to apply every ``A`` again, none is derived again."""

    solution: Array  # [B, T, H, D]
    w: Array  # W of equation (8), [span, blocks, B, H, C, D]
    inverse: Array  # A where each super-chunk starts, [blocks, B, H, D, D]
    lost: unresolved.Lost


def _apply(
    inverse: Array, r: Array, w: Array, segments: Segments | None, lam: Array, dot: Callable
) -> tuple[Array, Array]:
    """Equations (9) and (8): ``A r`` of every token of a chunk, and ``A`` after the chunk."""
    cont, last, keep = masks(segments)
    overlap = lower(dot("...td,...sd->...ts", r, w), segments)
    solution = where(cont, dot("...td,...de->...te", r, inverse), r / lam)
    solution = solution - dot("...ts,...sd->...td", overlap, w)
    w = where(last, w)
    fresh = jnp.eye(r.shape[-1], dtype=r.dtype) / lam
    return where(keep, inverse, fresh) - dot("...td,...te->...de", w, w), solution


def forward(plan: Plan, inputs: Solve, *, scans: Scans) -> tuple[SolveOutputs, Solved]:
    """Equations (6) to (9).

    The tokens are cut in super-chunks of ``SUPER_CHUNK`` chunks. The penalty at their starts is a
    prefix sum; from there on all super-chunks run side by side, each stepping its own inverse.
    """
    dtype, dot = plan.policy.accumulator, plan.policy.dot
    rhs, direction, lambda0, segment_ids = (
        inputs.rhs, inputs.direction, inputs.lambda0, inputs.segment_ids
    )  # fmt: skip
    cut = Blocks.of(rhs.shape[1], plan.chunk_size)
    lam = lambda0[:, None, None]

    # The penalty where each super-chunk starts.
    size = cut.span * cut.chunk
    u = split(direction, cut.blocks, size, dtype)
    _, last, keep = masks(segments_of(segment_ids, cut.blocks, size))
    gram = dot("...td,...te->...de", where(last, u), u)
    starts, penalty = scans.running_sum(gram, keep, inputs.penalty)
    matrix = numerics.regularised(starts, lambda0)
    half = numerics.inverse_cholesky(matrix)
    inverse = numerics.squared(half)

    def step(inverse, chunks, segments, _):
        r, u = chunks
        cont = None if segments is None else segments.cont
        au = where(cont, dot("...td,...de->...te", u, inverse), u / lam)
        gram = dot("...td,...sd->...ts", u, au)
        gram = gram if segments is None else jnp.where(segments.same, gram, 0)
        gram = gram + jnp.eye(cut.chunk, dtype=dtype)
        factor = numerics.inverse_cholesky(gram)
        w = dot("...ts,...sd->...td", factor, au)
        lost = numerics.unresolved(factor, gram)
        after, solution = _apply(inverse, r, w, segments, lam, dot)
        return after, [solution], (w, lost)

    _, (solution,), (w, lost) = cut.scan(
        step, inverse, (rhs, direction), [rhs.shape[2:]], segment_ids,
        dtype=dtype, side_by_side=True,
    )  # fmt: skip

    lost = jnp.any(lost, axis=0) | numerics.unresolved(half, matrix, numerics.NOISE_ULPS)
    finite = jnp.isfinite(jnp.sum(jnp.abs(u), axis=(-2, -1)) + jnp.sum(starts, axis=(-2, -1)))
    lost = unresolved.find(cut, lost & finite, starts)  # not where the input is not finite
    solution = unresolved.solve(lost, solution, rhs, "all", inputs)
    return SolveOutputs(solution, penalty), Solved(solution, w, inverse, lost)


def backward(
    plan: Plan,
    inputs: Solve,
    solved: Solved,
    cotangents: SolveOutputs,
    *,
    scans: Scans,
) -> Solve:
    """Equations (22) to (26).

    The cotangent of ``rhs`` is the same solve once more; the one of ``direction`` is linear
    attention without decay, run backwards.
    """
    dot = plan.policy.dot
    length = inputs.direction.shape[1]
    lam = inputs.lambda0[:, None, None]

    def step(inverse, chunks, segments, w):
        after, d_rhs = _apply(inverse, *chunks, w, segments, lam, dot)
        return after, [d_rhs], None

    _, (d_rhs,), _ = Blocks.of(length, plan.chunk_size).scan(
        step, solved.inverse, [cotangents.solution], [inputs.rhs.shape[2:]], inputs.segment_ids,
        solved.w, dtype=plan.policy.accumulator, side_by_side=True,
    )  # fmt: skip
    d_rhs = unresolved.solve(solved.lost, d_rhs, cotangents.solution, "all", inputs)
    later = -(cotangents.penalty + jnp.swapaxes(cotangents.penalty, -1, -2))
    d_u, start, d_lambda0 = _pull(plan, inputs, solved.solution, d_rhs, later, scans)
    d_u = unresolved.pull(
        solved.lost, d_u, (solved.solution, inputs.rhs), (d_rhs, cotangents.solution), later, inputs
    )
    return Solve(d_rhs, -d_u, -d_lambda0, -start / 2)


def _pull(
    plan: Plan, inputs: Solve, alpha: Array, beta: Array, later: Array, scans: Scans
) -> tuple[Array, Array, Array]:
    """Equations (23) to (26) but for signs: ``d_u``, the sum before the start, ``d_lambda0``."""
    dot, direction = plan.policy.dot, inputs.direction

    def step(later, tokens, segments, _):
        u, alpha, beta = tokens
        cont, last, keep = masks(segments)
        outer = dot("...td,...te->...de", where(cont, beta), alpha)
        outer = outer + jnp.swapaxes(outer, -1, -2)
        sums, later = scans.running_sum(outer, keep, later, reverse=True)
        d_u = where(last, dot("...td,...de->...te", u, sums))
        for x, y in ((alpha, beta), (beta, alpha)):
            overlap = upper(dot("...td,...sd->...ts", u, x), segments)
            d_u = d_u + dot("...ts,...sd->...td", overlap, y)
        return later, [d_u], jnp.sum(alpha * beta, axis=(0, 1, 3, 4))

    cut = Blocks.of(direction.shape[1], plan.chunk_size, scans.span)
    start, (d_u,), d_lambda0 = cut.scan(
        step, later, (direction, alpha, beta), [direction.shape[2:]], inputs.segment_ids,
        dtype=plan.policy.accumulator, reverse=True,
    )  # fmt: skip
    return d_u, start, jnp.sum(d_lambda0, axis=0)
