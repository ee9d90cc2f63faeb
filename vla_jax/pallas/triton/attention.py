"""The whole of ``vla_attention``: normalisation, solve, write gain, delta rule and ratio, fused.

No kernels of its own: those of ``penalty_solve`` take the raw keys and return the write keys, those
of ``delta_rule`` take the raw keys too and read out; the cotangents go the other way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from vla_jax.bundles import Attention, AttentionOutputs, Delta, Solve
from vla_jax.pallas.triton import delta_rule as delta
from vla_jax.pallas.triton import penalty_solve as solve
from vla_jax.plan import Plan
from vla_jax.types import Array


class Saved(NamedTuple):
    """What the backward needs of the forward beside its inputs."""

    write_key: Array
    gain: Array
    kept: solve.Kept
    residuals: delta.Residuals


def _solve(plan: Plan, inputs: Attention) -> tuple[Solve, solve.Options]:
    """What the solve gets, and its options."""
    bundle = Solve(inputs.key, inputs.direction, inputs.lambda0, inputs.penalty, inputs.segment_ids)
    return bundle, solve.Options(True, plan.variant.write_gain, plan.policy.requested)


def _delta(
    plan: Plan, inputs: Attention, write_key: Array, kept: solve.Kept
) -> tuple[Delta, delta.Options, delta.Extra]:
    """What the delta rule gets, its options, and the arrays beside."""
    variant = plan.variant
    bundle = Delta(
        inputs.query, inputs.key, write_key, inputs.value, inputs.memory, inputs.segment_ids
    )
    options = delta.Options(
        normalize_key=True,
        readout=variant.readout,
        eps=variant.eps,
        precision=plan.policy.requested,
        solve_rest=variant.write_gain == "rls",
    )
    return bundle, options, delta.Extra(inputs.key_sum, solve.rest(kept, inputs.key))


def _last_tokens(segment_ids: Array | None) -> tuple[Any, Any]:
    """Which tokens ``[B, T, 1, 1]`` are of the last segment, and where ``[B, 1, 1]`` it is all."""
    if segment_ids is None:
        return True, True
    last = segment_ids == segment_ids[:, -1:]
    return last[..., None, None], last[:, :1, None]


def forward(plan: Plan, inputs: Attention) -> tuple[AttentionOutputs, Saved]:
    """The outputs, and what ``backward`` needs. ``lambda0 [B, H]``."""
    solved = solve.forward(*_solve(plan, inputs))
    swept = delta.forward(*_delta(plan, inputs, solved.solution, solved.kept))
    key_sum = swept.key_sum
    if key_sum is None:  # nobody read it; the state has it all the same
        last, whole = _last_tokens(inputs.segment_ids)
        tokens = jnp.where(last, inputs.key, 0)
        key_sum = jnp.where(whole, inputs.key_sum, 0) + jnp.sum(tokens, axis=1, dtype=jnp.float32)
    outputs = AttentionOutputs(swept.out, swept.memory, solved.penalty, key_sum)
    return outputs, Saved(solved.solution, solved.gain, solved.kept, swept.residuals)


def backward(
    plan: Plan, inputs: Attention, saved: Saved, cotangents: AttentionOutputs
) -> Attention:
    """Cotangents of the inputs; that of ``lambda0`` is ``[B, H]``."""
    d_key_sum = cotangents.key_sum
    rhs, choices = _solve(plan, inputs)
    bundle, options, extra = _delta(plan, inputs, saved.write_key, saved.kept)
    pulled = delta.backward(
        bundle,
        saved.residuals,
        delta.Cotangents(cotangents.out, cotangents.memory, d_key_sum),
        options,
        extra,
    )
    d_raw_key, d_initial_sum = pulled.raw_key, pulled.key_sum
    if plan.variant.readout == "none":
        last, whole = _last_tokens(inputs.segment_ids)
        zeros = jnp.zeros(inputs.key.shape, jnp.float32)
        d_raw_key = jnp.where(last, d_key_sum[:, None], zeros)
        d_initial_sum = jnp.where(whole, d_key_sum, 0)
    given = solve.Cotangents(
        pulled.inputs.write_key, cotangents.penalty, pulled.inputs.key, d_raw_key
    )
    solved = solve.backward(rhs, saved.gain, saved.kept, given, choices)
    return Attention(
        query=pulled.inputs.query,
        key=solved.rhs,
        value=pulled.inputs.value,
        direction=solved.direction,
        lambda0=solved.lambda0,
        memory=pulled.inputs.memory,
        penalty=solved.penalty,
        key_sum=d_initial_sum,
    )
