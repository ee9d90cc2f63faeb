"""Both primitives in matrix products over chunks of tokens, forward and closed-form backward.

Equation numbers are those of ``docs/derivation.md``. Nothing of size T×T or T×D×D is ever made, no
factorisation is differentiated or made twice, and what the backward keeps is the inputs, what
``Solved`` and ``Swept`` hold.

Here an array of tokens is chunk-major, ``[N, B, H, C, D]`` (see ``chunks``), and the memory is
``Sᵀ`` (``[B, H, D, E]``), so a state acts from the left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.chunks import (
    SUPER_CHUNK,
    Blocks,
    RunningSum,
    Segments,
    lower,
    masks,
    per_group,
    running_sum,
    segments_of,
    split,
    upper,
    where,
)
from vla_jax.types import Array

# --- penalty_solve -----------------------------------------------------------------------------


class _Lost(NamedTuple):
    """The tokens ``start ≤ t < stop`` that rounding has won, none if ``stop = 0``."""

    start: Array
    stop: Array
    penalty: Array  # [B, H, D, D]  before the first of them


class Solved(NamedTuple):
    """What the backward keeps of the forward: to apply every ``A`` again, none is derived again."""

    solution: Array  # [B, T, H, D]
    w: Array  # W of equation (8), [span, blocks, B, H, C, D]
    inverse: Array  # A where each super-chunk starts, [blocks, B, H, D, D]
    lost: _Lost


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


def penalty_solve_forward(
    rhs: Array,
    direction: Array,
    lambda0: Array,
    initial_penalty: Array,
    segment_ids: Array | None,
    *,
    policy: numerics.Policy,
    chunk_size: int | None = None,
    running_sum: RunningSum = running_sum,
) -> tuple[Array, Array, Solved]:
    """Equations (6) to (9): ``(solution [B, T, H, D], penalty [B, H, D, D], for the backward)``.

    The tokens are cut in super-chunks of ``SUPER_CHUNK`` chunks. The penalty at their starts is a
    prefix sum; from there on all super-chunks run side by side, each stepping its own inverse.
    """
    dtype, dot = policy.accumulator, policy.dot
    cut = Blocks.of(rhs.shape[1], chunk_size)
    lam = lambda0[:, None, None]

    # The penalty where each super-chunk starts.
    size = cut.span * cut.chunk
    u = split(direction, cut.blocks, size, dtype)
    _, last, keep = masks(segments_of(segment_ids, cut.blocks, size))
    gram = dot("...td,...te->...de", where(last, u), u)
    starts, penalty = running_sum(gram, keep, initial_penalty)
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
    lost = jnp.any(lost & finite, axis=(1, 2))  # [N]; not where the input is not finite
    first, behind = jnp.argmax(lost), jnp.argmax(lost[::-1])
    stop = jnp.where(jnp.any(lost), jnp.minimum((cut.blocks - behind) * size, cut.length), 0)
    lost = _Lost(first * size, stop, starts[first])
    solution = _solve_again(lost, solution, rhs, "all", direction, lambda0, segment_ids)
    return solution, penalty, Solved(solution, w, inverse, lost)


def _solve_again(
    lost: _Lost,
    solution: Array,
    rhs: Array,
    part: str,
    direction: Array,
    lambda0: Array,
    segment_ids: Array | None,
) -> Array:
    """Solves the lost tokens from the penalty of each: slow, and right in every digit that is left.

    An inverse that is stepped, by equations (6) to (9) or by the Sherman–Morrison formula, keeps
    the error of its largest entry, ``1/λ₀`` until every direction has been seen. A loop without
    iterations costs nothing, also under ``jax.vmap``, which would run both branches of a condition.

    Args:
      solution: ``[B, T, H, D]``, to take over where no token is lost.
      rhs: ``[B, T, H, D]``.
      part: whether to solve for ``"all"`` of it or for what the directions read so far ``"span"``.
        The rest is orthogonal to these but for its rounding.
    """
    chosen = ("all", "span").index(part)

    def body(t, carry):
        penalty, solution = carry
        u, r = direction[:, t].astype(penalty.dtype), rhs[:, t]
        penalty = where(_joins(segment_ids, t - 1, t), penalty) + u[..., :, None] * u[..., None, :]
        inverse = numerics.penalty_inverses(penalty, lambda0)[chosen]
        solved = jnp.einsum("bhij,bhj->bhi", inverse, r, precision=jax.lax.Precision.HIGHEST)
        return penalty, solution.at[:, t].set(solved)

    return jax.lax.fori_loop(lost.start, lost.stop, body, (lost.penalty, solution))[1]


def _joins(segment_ids: Array | None, first: Array, then: Array) -> Array | None:
    """Whether two tokens are of one segment, or one of them is none: for ``where``."""
    if segment_ids is None:
        return None
    first, then = jnp.maximum(first, 0), jnp.minimum(then, segment_ids.shape[1] - 1)
    return (segment_ids[:, first] == segment_ids[:, then])[:, None, None, None]


def penalty_solve_backward(
    rhs: Array,
    direction: Array,
    lambda0: Array,
    initial_penalty: Array,
    segment_ids: Array | None,
    solved: Solved,
    d_solution: Array,
    d_penalty: Array,
    *,
    policy: numerics.Policy,
    chunk_size: int | None = None,
    running_sum: RunningSum = running_sum,
    span: int | None = SUPER_CHUNK,
) -> tuple[Array, Array, Array, Array]:
    """Equations (22) to (26): cotangents of ``rhs, direction, lambda0, initial_penalty``.

    The cotangent of ``rhs`` is the same solve once more; the one of ``direction`` is linear
    attention without decay, run backwards.
    """
    dtype, dot = policy.accumulator, policy.dot
    solution, w, inverse, lost = solved
    length = direction.shape[1]

    def step(inverse, chunks, segments, w):
        after, d_rhs = _apply(inverse, *chunks, w, segments, lambda0[:, None, None], dot)
        return after, [d_rhs], None

    _, (d_rhs,), _ = Blocks.of(length, chunk_size).scan(
        step, inverse, [d_solution], [rhs.shape[2:]], segment_ids, w,
        dtype=dtype, side_by_side=True,
    )  # fmt: skip
    d_rhs = _solve_again(lost, d_rhs, d_solution, "all", direction, lambda0, segment_ids)
    later = -(d_penalty + jnp.swapaxes(d_penalty, -1, -2))
    d_u, start, d_lambda0 = _pull(
        direction, solution, d_rhs, later, segment_ids, policy,
        Blocks.of(length, chunk_size, span), running_sum,
    )  # fmt: skip
    d_u = _pull_again(
        lost, d_u, direction, (solution, rhs), (d_rhs, d_solution), later, lambda0, segment_ids
    )
    return d_rhs, -d_u, -d_lambda0, -start / 2


def _pull(
    direction: Array,
    alpha: Array,
    beta: Array,
    later: Array,
    segment_ids: Array | None,
    policy: numerics.Policy,
    cut: Blocks,
    running_sum: RunningSum,
) -> tuple[Array, Array, Array]:
    """Equations (23) to (26) but for signs: ``d_u``, the sum before the start, ``d_lambda0``."""
    dot = policy.dot

    def step(later, tokens, segments, _):
        u, alpha, beta = tokens
        cont, last, keep = masks(segments)
        outer = dot("...td,...te->...de", where(cont, beta), alpha)
        outer = outer + jnp.swapaxes(outer, -1, -2)
        sums, later = running_sum(outer, keep, later, reverse=True)
        d_u = where(last, dot("...td,...de->...te", u, sums))
        for x, y in ((alpha, beta), (beta, alpha)):
            overlap = upper(dot("...td,...sd->...ts", u, x), segments)
            d_u = d_u + dot("...ts,...sd->...td", overlap, y)
        return later, [d_u], jnp.sum(alpha * beta, axis=(0, 1, 3, 4))

    start, (d_u,), d_lambda0 = cut.scan(
        step, later, (direction, alpha, beta), [direction.shape[2:]], segment_ids,
        dtype=policy.accumulator, reverse=True,
    )  # fmt: skip
    return d_u, start, jnp.sum(d_lambda0, axis=0)


def _pull_again(
    lost: _Lost,
    d_u: Array,
    direction: Array,
    forward: tuple[Array, Array],
    backward: tuple[Array, Array],
    later: Array,
    lambda0: Array,
    segment_ids: Array | None,
) -> Array:
    """Equation (23) without its sign, token by token if any token is lost, otherwise ``d_u``.

    The factor that meets ``u_s`` is the one in the span of the directions, so that the rounding of
    the other part, as large as ``1/λ₀``, does not.

    Args:
      forward, backward: ``α`` and ``β``, each with the right-hand side that it solves for.
      later: the sum of equation (23) after the last token.
    """
    length = direction.shape[1]

    def again(_, d_u):
        (alpha, beta), (alpha_span, beta_span) = zip(
            *(
                (x, _solve_again(lost, x, rhs, "span", direction, lambda0, segment_ids))
                for x, rhs in (forward, backward)
            ),
            strict=True,
        )

        def body(i, carry):
            later, d_u = carry
            t = length - 1 - i
            u, a, b, a_span, b_span = (
                x[:, t].astype(later.dtype) for x in (direction, alpha, beta, alpha_span, beta_span)
            )
            pairs = b[..., :, None] * a_span[..., None, :] + a[..., :, None] * b_span[..., None, :]
            later = where(_joins(segment_ids, t, t + 1), later) + pairs
            pulled = jnp.einsum("bhij,bhj->bhi", later, u, precision=jax.lax.Precision.HIGHEST)
            return later, d_u.at[:, t].set(pulled)

        return jax.lax.fori_loop(0, length, body, (later, d_u))[1]

    return jax.lax.fori_loop(0, (lost.stop > 0).astype(int), again, d_u)


# --- delta_rule --------------------------------------------------------------------------------


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
    """``S ← keep·S + outer + leftᵀ (inner − right S)`` over chunks: equation (14), in sequence.

    Args:
      left, right: ``[N, B, H, C, D]``.
      inner: ``[N, B, H, C, E]``.
      outer: ``[N, B, H, D, E]`` or None.
      keep: ``[N, B, 1, 1, 1]`` booleans or None.
      initial: ``[B, H, D, E]``.
      reverse: from the last chunk to the first.

    Returns:
      ``S`` before each chunk, ``[N, B, H, D, E]``; ``inner − right S``; ``S`` after the last chunk.
    """

    def step(state, inputs):
        left, right, inner, outer, kept = inputs
        inner = inner - policy.dot("...td,...de->...te", right, state)
        new = where(kept, state) + policy.dot("...td,...te->...de", left, inner)
        return (new if outer is None else new + outer), (state, inner)

    chunks = left, right, inner, outer, keep
    final, (starts, inner) = jax.lax.scan(step, initial, chunks, reverse=reverse)
    return starts, inner, final


Sweep = Callable[..., tuple[Array, Array, Array]]


class Swept(NamedTuple):
    """What the backward keeps of the forward, each with a leading axis for the block."""

    starts: Array  # the memory at chunk starts, [N, B, H, D, E]
    inverse: Array  # (I + strict_tril(K Âᵀ))⁻¹, equation (10), [N, B, H, C, C]


class _Chunks(NamedTuple):
    """The tokens of a block in chunks, and what forward and backward both need of them."""

    q: Array  # [N, B, H, G, C, D]
    k: Array
    a: Array
    v: Array
    k_cont: Array  # key, zero where the state at the chunk's start does not reach
    a_last: Array  # write key, zero where the segment ends inside the chunk
    segments: Segments | None
    keep: Array | None

    @classmethod
    def of(cls, q: Array, k: Array, a: Array, v: Array, segments: Segments | None) -> _Chunks:
        cont, last, keep = masks(segments)
        q = _grouped(q, k.shape[2])
        return cls(q, k, a, v, where(cont, k), where(last, a), segments, keep)


def _grouped(x: Array, heads: int) -> Array:
    """``[N, B, Hq, C, D]`` to ``[N, B, H, G, C, D]``."""
    return x.reshape(*x.shape[:2], heads, -1, *x.shape[3:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def delta_rule_forward(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    initial_memory: Array,
    segment_ids: Array | None,
    *,
    policy: numerics.Policy,
    chunk_size: int | None = None,
    sweep: Sweep = sweep,
    span: int | None = SUPER_CHUNK,
) -> tuple[Array, Array, Swept]:
    """Equations (10) to (13): ``(out [B, T, Hq, E], memory [B, H, D, E], for the backward)``."""

    def step(memory, tokens, segments, _):
        out, memory, swept = _delta_block_forward(
            _Chunks.of(*tokens, segments), memory, policy, sweep
        )
        return memory, [out], swept

    memory, (out,), swept = Blocks.of(key.shape[1], chunk_size, span).scan(
        step, initial_memory, (query, key, write_key, value),
        [(query.shape[2], value.shape[-1])], segment_ids, dtype=policy.accumulator,
    )  # fmt: skip
    return out, memory, swept


def _delta_block_forward(
    c: _Chunks, memory: Array, policy: numerics.Policy, sweep: Sweep
) -> tuple[Array, Array, Swept]:
    dot = policy.dot_operand
    triangle = lower(policy.dot("...td,...sd->...ts", c.k, c.a), c.segments, -1)
    identity = jnp.eye(triangle.shape[-1], dtype=policy.accumulator)
    inverse = numerics.triangular_inverse(triangle + identity)
    t_key, t_value = (policy.dot("...ts,...sd->...td", inverse, x) for x in (c.k_cont, c.v))
    starts, residual, memory = sweep(c.a_last, t_key, t_value, None, c.keep, memory, policy)
    grouped = per_group(c.segments)
    scores = lower(dot("nbhgtd,nbhsd->nbhgts", c.q, c.a), grouped)
    carried = dot("nbhgtd,nbhde->nbhgte", c.q, starts)
    out = where(None if grouped is None else grouped.cont, carried)
    out = out + dot("nbhgts,nbhse->nbhgte", scores, residual)
    return _ungrouped(out), memory, Swept(starts, inverse)


def delta_rule_backward(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    segment_ids: Array | None,
    swept: Swept,
    d_out: Array,
    d_memory: Array,
    *,
    policy: numerics.Policy,
    chunk_size: int | None = None,
    sweep: Sweep = sweep,
    span: int | None = SUPER_CHUNK,
) -> tuple[Array, Array, Array, Array, Array]:
    """Equations (17) to (21): cotangents of ``query, key, write_key, value, initial_memory``."""
    tokens = query, key, write_key, value

    def step(d_memory, tokens, segments, swept):
        *tokens, d_out = tokens
        gradients, d_memory = _delta_block_backward(
            _Chunks.of(*tokens, segments), swept, d_out, d_memory, policy, sweep
        )
        return d_memory, gradients, None

    d_initial, gradients, _ = Blocks.of(key.shape[1], chunk_size, span).scan(
        step, d_memory, (*tokens, d_out), [x.shape[2:] for x in tokens], segment_ids, swept,
        dtype=policy.accumulator, reverse=True,
    )  # fmt: skip
    d_query, d_key, d_write_key, d_value = gradients
    return d_query, d_key, d_write_key, d_value, d_initial


def _delta_block_backward(
    c: _Chunks, swept: Swept, d_o: Array, d_memory: Array, policy: numerics.Policy, sweep: Sweep
) -> tuple[tuple[Array, Array, Array, Array], Array]:
    dot = policy.dot_operand
    d_o = _grouped(d_o, c.k.shape[2])
    segments, grouped = c.segments, per_group(c.segments)
    cont, last, _ = masks(segments)
    cont_g, *_ = masks(grouped)

    starts, inverse = swept
    t_key, t_value = (policy.dot("...ts,...sd->...td", inverse, x) for x in (c.k_cont, c.v))
    residual = t_value - dot("...td,...de->...te", t_key, starts)
    scores = lower(dot("nbhgtd,nbhsd->nbhgts", c.q, c.a), grouped)
    pull = dot("nbhgts,nbhgte->nbhse", scores, d_o)
    read = dot("nbhgtd,nbhgte->nbhde", where(cont_g, c.q), d_o)

    # R, the cotangent of the memory after each chunk: the sweep of the forward, transposed.
    later, d_residual, d_initial = sweep(
        t_key, c.a_last, -pull, read, c.keep, d_memory, policy, reverse=True
    )
    d_residual = -policy.dot("...ts,...te->...se", inverse, d_residual)
    d_scores = lower(dot("nbhgte,nbhse->nbhgts", d_o, residual), grouped)
    d_q = where(cont_g, dot("nbhgte,nbhde->nbhgtd", d_o, starts))
    d_q = d_q + dot("nbhgts,nbhsd->nbhgtd", d_scores, c.a)
    d_triangle = lower(dot("...te,...se->...ts", d_residual, residual), segments, -1)
    d_a = where(last, dot("...te,...de->...td", residual, later))
    d_a = d_a + dot("nbhgts,nbhgtd->nbhsd", d_scores, c.q)
    d_a = d_a - dot("...ts,...td->...sd", d_triangle, c.k)
    d_k = where(cont, dot("...te,...de->...td", d_residual, starts))
    d_k = -(d_k + dot("...ts,...sd->...td", d_triangle, c.a))
    return (_ungrouped(d_q), d_k, d_a, d_residual), d_initial
