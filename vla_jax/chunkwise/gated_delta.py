"""``delta_rule`` with decay in matrix products over chunks, forward and closed-form backward.

Equations (33) to (36) of ``docs/derivation.md``. Segments are decays of nothing (see
``decay.effective``): there are no other masks. Arrays are as in ``chunkwise``, chunk-major and with
the key dimension of the memory first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Delta, DeltaOutputs
from vla_jax.chunks import Blocks, Scans
from vla_jax.decay import Decay, crossing, effective
from vla_jax.plan import Plan
from vla_jax.types import Array


class Swept(NamedTuple):
    """What the backward keeps of the forward, each with a leading axis for the block."""

    starts: Array  # the memory at chunk starts, [N, B, H, D, E]
    inverse: Array  # Tm of equation (34), [N, B, H, C, C]


class _Chunks(NamedTuple):
    """The tokens of a block in chunks, and what forward and backward both need of them."""

    q: Array  # [N, B, H, G, C, D]
    k: Array
    a: Array
    v: Array
    decay: Decay

    @classmethod
    def of(cls, q: Array, k: Array, a: Array, v: Array, log_decay: Array) -> _Chunks:
        return cls(q.reshape(*k.shape[:3], -1, *k.shape[3:]), k, a, v, Decay.of(log_decay))


def _per_group(x: Array) -> Array:
    """``[N, B, H, ...]`` to ``[N, B, H, 1, ...]``."""
    return x[:, :, :, None]


def _ungrouped(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _tokens(plan: Plan, inputs: Delta) -> tuple[Array, ...]:
    """What a block is cut from: query, key, write key, value and the decay with the segments."""
    tokens = inputs.query, inputs.key, inputs.write_key, inputs.value
    dtype = plan.policy.accumulator
    return *tokens, effective(inputs.log_decay, inputs.key, inputs.segment_ids, dtype)


def forward(plan: Plan, inputs: Delta, *, scans: Scans) -> tuple[DeltaOutputs, Swept]:
    """Equation (34)."""
    policy = plan.policy

    def step(memory, tokens, *_):
        out, memory, swept = _block_forward(_Chunks.of(*tokens), memory, policy, scans)
        return memory, [out], swept

    heads, value_dim = inputs.query.shape[2], inputs.value.shape[-1]
    memory, (out,), swept = Blocks.of(inputs.key.shape[1], plan.chunk_size, scans.span).scan(
        step, inputs.memory, _tokens(plan, inputs), [(heads, value_dim)], None,
        dtype=policy.accumulator,
    )  # fmt: skip
    return DeltaOutputs(out, memory), swept


def _block_forward(
    c: _Chunks, memory: Array, policy: numerics.Policy, scans: Scans
) -> tuple[Array, Array, Swept]:
    dot, decay = policy.dot_operand, c.decay
    triangle = policy.dot("...td,...sd->...ts", c.k, c.a) * decay.before
    identity = jnp.eye(triangle.shape[-1], dtype=policy.accumulator)
    inverse = numerics.triangular_inverse(triangle + identity)
    t_key, t_value = (
        policy.dot("...ts,...sd->...td", inverse, x) for x in (decay.since * c.k, c.v)
    )
    starts, residual, memory = scans.sweep(
        decay.until * c.a, t_key, t_value, None, decay.total, memory, policy
    )
    scores = dot("nbhgtd,nbhsd->nbhgts", c.q, c.a) * _per_group(decay.within)
    out = _per_group(decay.since) * dot("nbhgtd,nbhde->nbhgte", c.q, starts)
    out = out + dot("nbhgts,nbhse->nbhgte", scores, residual)
    return _ungrouped(out), memory, Swept(starts, inverse)


def backward(
    plan: Plan,
    inputs: Delta,
    saved: Swept,
    cotangents: DeltaOutputs,
    *,
    scans: Scans,
) -> Delta:
    """Equations (35) and (36): a bundle of the inputs' type, wide; that of the decay direct."""
    policy = plan.policy
    tokens = _tokens(plan, inputs)

    def step(later, tokens, _, swept):
        *tokens, d_out = tokens
        gradients, later = _block_backward(_Chunks.of(*tokens), swept, d_out, later, policy, scans)
        return later, gradients, None

    d_memory, gradients, _ = Blocks.of(inputs.key.shape[1], plan.chunk_size, scans.span).scan(
        step, cotangents.memory, (*tokens, cotangents.out), [x.shape[2:] for x in tokens], None,
        saved, dtype=policy.accumulator, reverse=True,
    )  # fmt: skip
    *gradients, d_log_decay = gradients
    d_log_decay = None if inputs.log_decay is None else d_log_decay[..., 0]
    names = "query", "key", "write_key", "value"
    return inputs._replace(
        **dict(zip(names, gradients, strict=True)),
        memory=d_memory, segment_ids=None, log_decay=d_log_decay,
    )  # fmt: skip


def _block_backward(
    c: _Chunks, swept: Swept, d_o: Array, d_memory: Array, policy: numerics.Policy, scans: Scans
) -> tuple[list[Array], Array]:
    dot, decay = policy.dot_operand, c.decay
    d_o = d_o.reshape(*c.q.shape[:-1], -1)
    within, since = _per_group(decay.within), _per_group(decay.since)

    starts, inverse = swept
    k_since, a_until = decay.since * c.k, decay.until * c.a
    t_key, t_value = (policy.dot("...ts,...sd->...td", inverse, x) for x in (k_since, c.v))
    residual = t_value - dot("...td,...de->...te", t_key, starts)
    q_a = dot("nbhgtd,nbhsd->nbhgts", c.q, c.a)
    pull = dot("nbhgts,nbhgte->nbhse", q_a * within, d_o)
    read = dot("nbhgtd,nbhgte->nbhde", since * c.q, d_o)

    # R, the cotangent of the memory after each chunk: the sweep of the forward, transposed.
    later, d_residual, d_initial = scans.sweep(
        t_key, a_until, -pull, read, decay.total, d_memory, policy, reverse=True
    )
    d_residual = -policy.dot("...ts,...te->...se", inverse, d_residual)

    o_e = dot("nbhgte,nbhse->nbhgts", d_o, residual)
    e_e = dot("...te,...se->...ts", d_residual, residual)
    o_s = dot("nbhgte,nbhde->nbhgtd", d_o, starts)
    e_s = dot("...te,...de->...td", d_residual, starts)
    e_r = dot("...te,...de->...td", residual, later)
    d_scores, d_triangle = o_e * within, e_e * decay.before
    d_q = since * o_s + dot("nbhgts,nbhsd->nbhgtd", d_scores, c.a)
    d_a = decay.until * e_r + dot("nbhgts,nbhgtd->nbhsd", d_scores, c.q)
    d_a = d_a - dot("...ts,...td->...sd", d_triangle, c.k)
    d_k = -(decay.since * e_s + dot("...ts,...sd->...td", d_triangle, c.a))

    k_a = policy.dot("...td,...sd->...ts", c.k, c.a)
    d_log_decay = crossing(
        decay.before * (jnp.sum(q_a * o_e, axis=3) - k_a * e_e),
        decay.since * (jnp.sum(c.q * o_s, axis=(3, -1)) - jnp.sum(c.k * e_s, axis=-1))[..., None],
        decay.until * jnp.sum(c.a * e_r, axis=-1, keepdims=True),
        decay.total * jnp.sum(later * starts, axis=(-2, -1), keepdims=True),
    )
    return [_ungrouped(d_q), d_k, d_a, d_residual, d_log_decay], d_initial
