"""``delta_rule`` in chunks: equations (10) to (13), and (17) to (21) backwards."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Delta, DeltaOutputs
from vla_jax.chunks import (
    Blocks,
    Scans,
    Segments,
    lower,
    masks,
    per_group,
    where,
)
from vla_jax.plan import Plan
from vla_jax.types import Array


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


def forward(plan: Plan, inputs: Delta, *, scans: Scans) -> tuple[DeltaOutputs, Swept]:
    """Equations (10) to (13)."""

    def step(memory, tokens, segments, _):
        out, memory, swept = _block_forward(
            _Chunks.of(*tokens, segments), memory, plan.policy, scans
        )
        return memory, [out], swept

    cut = Blocks.of(inputs.key.shape[1], plan.chunk_size, scans.span)
    memory, (out,), swept = cut.scan(
        step, inputs.memory, (inputs.query, inputs.key, inputs.write_key, inputs.value),
        [(inputs.query.shape[2], inputs.value.shape[-1])], inputs.segment_ids,
        dtype=plan.policy.accumulator,
    )  # fmt: skip
    return DeltaOutputs(out, memory), swept


def _block_forward(
    c: _Chunks, memory: Array, policy: numerics.Policy, scans: Scans
) -> tuple[Array, Array, Swept]:
    dot = policy.dot_operand
    triangle = lower(policy.dot("...td,...sd->...ts", c.k, c.a), c.segments, -1)
    identity = jnp.eye(triangle.shape[-1], dtype=policy.accumulator)
    inverse = numerics.triangular_inverse(triangle + identity)
    t_key, t_value = (policy.dot("...ts,...sd->...td", inverse, x) for x in (c.k_cont, c.v))
    starts, residual, memory = scans.sweep(c.a_last, t_key, t_value, None, c.keep, memory, policy)
    grouped = per_group(c.segments)
    scores = lower(dot("nbhgtd,nbhsd->nbhgts", c.q, c.a), grouped)
    carried = dot("nbhgtd,nbhde->nbhgte", c.q, starts)
    out = where(None if grouped is None else grouped.cont, carried)
    out = out + dot("nbhgts,nbhse->nbhgte", scores, residual)
    return _ungrouped(out), memory, Swept(starts, inverse)


def backward(
    plan: Plan,
    inputs: Delta,
    swept: Swept,
    cotangents: DeltaOutputs,
    *,
    scans: Scans,
) -> Delta:
    """Equations (17) to (21)."""
    tokens = inputs.query, inputs.key, inputs.write_key, inputs.value

    def step(d_memory, tokens, segments, swept):
        *tokens, d_out = tokens
        gradients, d_memory = _block_backward(
            _Chunks.of(*tokens, segments), swept, d_out, d_memory, plan.policy, scans
        )
        return d_memory, gradients, None

    cut = Blocks.of(inputs.key.shape[1], plan.chunk_size, scans.span)
    d_memory, gradients, _ = cut.scan(
        step, cotangents.memory, (*tokens, cotangents.out), [x.shape[2:] for x in tokens],
        inputs.segment_ids, swept, dtype=plan.policy.accumulator, reverse=True,
    )  # fmt: skip
    d_query, d_key, d_write_key, d_value = gradients
    return Delta(d_query, d_key, d_write_key, d_value, d_memory)


def _block_backward(
    c: _Chunks, swept: Swept, d_o: Array, d_memory: Array, policy: numerics.Policy, scans: Scans
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
    later, d_residual, d_initial = scans.sweep(
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
