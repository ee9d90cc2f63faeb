"""The recurrence with weights and decay, token by token: the reference, and one decoding step.

Everything here is differentiable by JAX in any mode and to any order. Each token is solved by
Cholesky from its own penalty: with ``λ₀`` outside of the decay there is no inverse to step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Delta, DeltaOutputs, Solve, SolveOutputs, Step
from vla_jax.decay import RESET, compensated, effective
from vla_jax.plan import Plan, Variant
from vla_jax.reference import published
from vla_jax.types import Array, VLAState

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _time_major(dtype: Any, *arrays: Array) -> tuple[Array, ...]:
    return tuple(jnp.moveaxis(x.astype(dtype), 1, 0) for x in arrays)


def _ungrouped(x: Array) -> Array:
    """``[T, B, H, G, D]`` to ``[B, T, Hq, D]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _solve(penalty: Array, lambda0: Array, rhs: Array) -> Array:
    """``(λ₀ I + penalty)⁻¹ rhs`` for ``[B, H, G, D]``, by Cholesky."""
    inverse, _ = numerics.penalty_inverses(penalty, lambda0)
    return numerics.known_solve(numerics.regularised(penalty, lambda0), inverse, rhs)


def _next_penalty(
    penalty: Array, rest: Array, u: Array, weight: Array, log_decay: Array
) -> tuple[Array, Array]:
    """``γ P + β u uᵀ`` and what rounding keeps out of it, from gates ``[B, H]``."""
    outer = weight[..., None, None] * u[..., :, None] * u[..., None, :]
    return compensated(penalty, log_decay[..., None, None], outer, rest)


def penalty_solve(plan: Plan, inputs: Solve) -> tuple[SolveOutputs, None]:
    """``x_t = (λ₀ I + P_t)⁻¹ rhs_t``, ``P_t = γ_t P_{t-1} + β_t u_t u_tᵀ``, token by token."""
    del plan  # one arithmetic, no chunks
    direction, penalty = inputs.direction, inputs.penalty
    weight = jnp.ones(direction.shape[:3]) if inputs.weight is None else inputs.weight

    def step(carry, token):
        r, u, weight, log_decay = token
        penalty, rest = _next_penalty(*carry, u, weight, log_decay[..., 0])
        return (penalty, rest), _solve(penalty, inputs.lambda0, r)

    tokens = numerics.grouped(inputs.rhs, direction.shape[2]), direction, weight
    decay = effective(inputs.log_decay, direction, inputs.segment_ids, penalty.dtype)
    carry = penalty, jnp.zeros_like(penalty)
    (penalty, _), solution = jax.lax.scan(step, carry, _time_major(penalty.dtype, *tokens, decay))
    return SolveOutputs(_ungrouped(solution), penalty), None


def delta_rule(plan: Plan, inputs: Delta) -> tuple[DeltaOutputs, None]:
    """``S_t = γ_t S_{t-1} + (v_t − γ_t S_{t-1} k_t) a_tᵀ``, ``o_t = S_t q_t``, token by token."""
    del plan
    key, dtype = inputs.key, inputs.memory.dtype

    def step(memory, token):
        *token, log_decay = token
        out, memory = published.delta_step(jnp.exp(log_decay)[..., None] * memory, *token)
        return memory, out

    tokens = numerics.grouped(inputs.query, key.shape[2]), key, inputs.write_key, inputs.value
    decay = effective(inputs.log_decay, key, inputs.segment_ids, dtype)
    memory, out = jax.lax.scan(step, inputs.memory, _time_major(dtype, *tokens, decay))
    return DeltaOutputs(_ungrouped(out), memory), None


def step(variant: Variant, inputs: Step) -> tuple[Array, VLAState]:
    """One decoding step with gates, or with the inverse at the read; the state is wide.

    Each step solves by Cholesky. What the state caches of an inverse is cleared: a step without
    gates would trust it.
    """
    query, key, value, direction, lambda0, state, beta, log_decay = inputs
    dtype, per_head = state.memory.dtype, key.shape[:2]
    grouped = numerics.grouped(query[:, None], key.shape[1])[:, 0].astype(dtype)
    key, value = key.astype(dtype), value.astype(dtype)
    beta = jnp.ones(per_head, dtype) if beta is None else beta.astype(dtype)
    log_decay = jnp.zeros(per_head, dtype) if log_decay is None else log_decay.astype(dtype)
    log_decay = jnp.maximum(log_decay, RESET)
    unit_key = numerics.normalize(key)
    if direction is None:
        direction = numerics.penalty_direction(unit_key, variant.inverse)
    penalty = numerics.symmetrize(state.penalty)
    rest = jnp.zeros_like(penalty) if state.penalty_rest is None else state.penalty_rest
    penalty, rest = _next_penalty(
        penalty, rest.astype(dtype), direction.astype(dtype), beta, log_decay
    )
    decay, beta = jnp.exp(log_decay)[..., None], beta[..., None]
    memory, key_sum = decay[..., None] * state.memory, decay * state.key_sum
    if variant.inverse == "read":
        solved = _solve(penalty, lambda0, grouped)
        nothing = jnp.zeros_like(key)
        out, memory = published.delta_step(memory, solved, nothing, beta * unit_key, value)
        key_sum = key_sum + beta * key
    else:
        before = VLAState(memory, penalty, key_sum)
        solution = _solve(penalty, lambda0, unit_key[:, :, None])[:, :, 0]
        out, memory, key_sum = published.write_and_read(
            variant, before, solution, grouped, key, unit_key, value, beta
        )
    cleared = {
        name: None if x is None else jnp.zeros_like(x)
        for name, x in vars(state).items()
        if name in ("inverse", "inverse_lambda0", "inverse_age")
    }
    rest = None if state.penalty_rest is None else rest
    after = VLAState(memory, penalty, key_sum, **cleared, penalty_rest=rest)
    return out.reshape(*query.shape[:2], -1).astype(query.dtype), after
