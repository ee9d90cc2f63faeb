"""The recurrence with weights and decay, token by token: the reference, and one decoding step.

Everything here is differentiable by JAX in any mode and to any order. Each token is solved by
Cholesky from its own penalty: with ``λ₀`` outside of the decay there is no inverse to step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import numerics, reference
from vla_jax.decay import compensated, effective
from vla_jax.types import Array, VLAState

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _time_major(dtype: Any, *arrays: Array) -> tuple[Array, ...]:
    return tuple(jnp.moveaxis(x.astype(dtype), 1, 0) for x in arrays)


def _ungrouped(x: Array) -> Array:
    """``[T, B, H, G, D]`` to ``[B, T, Hq, D]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _solve(penalty: Array, lambda0: Array, rhs: Array) -> Array:
    """``(λ₀ I + penalty)⁻¹ rhs`` for ``[B, H, G, D]``, by Cholesky.

    A linear solve to JAX, which so differentiates it to any order inside of a scan too: there, the
    rule of ``numerics.known_inverse`` holds for the first derivative only.
    """
    matrix = numerics.regularised(penalty, lambda0)
    inverse, _ = numerics.penalty_inverses(penalty, lambda0)
    return jax.lax.custom_linear_solve(
        lambda x: _dot("bhij,bhgj->bhgi", matrix, x), rhs,
        lambda _, x: _dot("bhij,bhgj->bhgi", inverse, x), symmetric=True,
    )  # fmt: skip


def _next_penalty(
    penalty: Array, rest: Array, u: Array, weight: Array, log_decay: Array
) -> tuple[Array, Array]:
    """``γ P + β u uᵀ`` and what rounding keeps out of it, from gates ``[B, H]``."""
    outer = weight[..., None, None] * u[..., :, None] * u[..., None, :]
    return compensated(penalty, log_decay[..., None, None], outer, rest)


def penalty_solve(
    rhs: Array,
    direction: Array,
    weight: Array | None,
    log_decay: Array | None,
    lambda0: Array,
    initial_penalty: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """``x_t = (λ₀ I + P_t)⁻¹ rhs_t``, ``P_t = γ_t P_{t-1} + β_t u_t u_tᵀ``, token by token.

    Args:
      rhs: ``[B, T, Hq, D]``, Hq a multiple of H.
      direction: ``[B, T, H, D]``.
      weight, log_decay: ``[B, T, H]``, None for 1 and 0.
      lambda0: ``[H]``.
      initial_penalty: ``[B, H, D, D]``, symmetric; its dtype is that of the computation.
      segment_ids: ``[B, T]`` or None.

    Returns:
      ``(solution [B, T, Hq, D], the last penalty)``.
    """
    dtype = initial_penalty.dtype
    weight = jnp.ones(direction.shape[:3]) if weight is None else weight

    def step(carry, token):
        r, u, weight, log_decay = token
        penalty, rest = _next_penalty(*carry, u, weight, log_decay[..., 0])
        return (penalty, rest), _solve(penalty, lambda0, r)

    tokens = numerics.grouped(rhs, direction.shape[2]), direction, weight
    decay = effective(log_decay, direction, segment_ids, dtype)
    carry = initial_penalty, jnp.zeros_like(initial_penalty)
    (penalty, _), solution = jax.lax.scan(step, carry, _time_major(dtype, *tokens, decay))
    return _ungrouped(solution), penalty


def delta_rule(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    log_decay: Array,
    initial_memory: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """``S_t = γ_t S_{t-1} + (v_t − γ_t S_{t-1} k_t) a_tᵀ``, ``o_t = S_t q_t``, token by token."""
    dtype = initial_memory.dtype

    def step(memory, token):
        *token, log_decay = token
        out, memory = reference.delta_step(jnp.exp(log_decay)[..., None] * memory, *token)
        return memory, out

    tokens = numerics.grouped(query, key.shape[2]), key, write_key, value
    decay = effective(log_decay, key, segment_ids, dtype)
    memory, out = jax.lax.scan(step, initial_memory, _time_major(dtype, *tokens, decay))
    return _ungrouped(out), memory


def _step(
    query, key, value, direction, beta, log_decay, lambda0, state, *, variant, inverse
):  # fmt: skip
    """One token, wide; query ``[B, H, G, D]``, a state whose rest is an array."""
    unit_key = numerics.normalize(key)
    if direction is None:
        direction = unit_key if inverse == "read" else numerics.penalty_direction(unit_key)
    penalty, rest = _next_penalty(state.penalty, state.penalty_rest, direction, beta, log_decay)
    decay, beta = jnp.exp(log_decay)[..., None], beta[..., None]
    memory, key_sum = decay[..., None] * state.memory, decay * state.key_sum + beta * key
    if inverse == "read":
        query = _solve(penalty, lambda0, query)
        out, memory = reference.delta_step(
            memory, query, jnp.zeros_like(key), beta * unit_key, value
        )
    else:
        solution = _solve(penalty, lambda0, unit_key[:, :, None])[:, :, 0]
        write_key = beta * numerics.apply_write_gain(solution, unit_key, variant.write_gain)
        out, memory = reference.delta_step(memory, query, unit_key, write_key, value)
        if variant.readout == "ratio":
            total = _dot("bhgd,bhd->bhg", query, key_sum)
            out = out / jnp.maximum(total, variant.eps)[..., None]
    return out, VLAState(memory, penalty, key_sum, penalty_rest=rest)


def attention(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    beta: Array | None,
    log_decay: Array | None,
    lambda0: Array,
    initial_state: VLAState,
    segment_ids: Array | None,
    *,
    variant: Any,
    inverse: str,
) -> tuple[Array, VLAState]:
    """The whole recurrence with gates, token by token.

    Args:
      query, key, value, direction: as in ``reference.attention``; with ``inverse="read"``
        ``direction=None`` means ``k̂``.
      beta, log_decay: ``[B, T, H]``, None for 1 and 0; at an absent token 0 and 0.
      lambda0: ``[H]``.
      initial_state: in the accumulator's dtype, which is also the dtype of the computation.
      segment_ids: ``[B, T]`` or None.
      variant: ``plan.Variant``.
      inverse: ``"write"`` or ``"read"``.

    Returns:
      ``(out [B, T, Hq, E], state)`` in the accumulator's dtype.
    """
    dtype = initial_state.memory.dtype
    beta = jnp.ones(key.shape[:3]) if beta is None else beta
    decay = effective(log_decay, key, segment_ids, dtype)[..., 0]

    def step(state, token):
        *token, direction = token
        out, state = _step(
            *token[:3], direction, *token[3:], lambda0, state, variant=variant, inverse=inverse
        )
        return state, out

    tokens = _time_major(dtype, numerics.grouped(query, key.shape[2]), key, value, beta, decay)
    directions = None if direction is None else _time_major(dtype, direction)[0]
    fields = initial_state.memory, initial_state.penalty, initial_state.key_sum
    state = VLAState(*fields, penalty_rest=jnp.zeros_like(initial_state.penalty))
    state, out = jax.lax.scan(step, state, (*tokens, directions))
    return _ungrouped(out), VLAState(state.memory, state.penalty, state.key_sum)


def decode(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    beta: Array | None,
    log_decay: Array | None,
    lambda0: Array,
    state: VLAState,
    *,
    variant: Any,
    inverse: str,
) -> tuple[Array, VLAState]:
    """One token of ``attention`` for decoding, on checked arrays; the state is wide.

    What the state caches of an inverse is cleared: a step without gates would trust it.

    Args:
      query: ``[B, Hq, D]``; key, direction: ``[B, H, D]``; value: ``[B, H, E]``.
      beta, log_decay: ``[B, H]``, None for 1 and 0.
      lambda0: ``[H]``.
      state: whose ``penalty_rest`` is used and kept where it is not None.
      variant, inverse: as in ``attention``.

    Returns:
      ``(out [B, Hq, E] in the dtype of query, the new state)``.
    """
    dtype = state.memory.dtype
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    u = None if direction is None else direction.astype(dtype)
    beta = jnp.ones(key.shape[:2]) if beta is None else beta
    log_decay = effective(
        None if log_decay is None else log_decay[:, None], k[:, None], None, dtype
    )
    penalty = numerics.symmetrize(state.penalty)
    rest = state.penalty_rest
    before = VLAState(
        state.memory, penalty, state.key_sum,
        penalty_rest=jnp.zeros_like(penalty) if rest is None else rest.astype(dtype),
    )  # fmt: skip
    gates = beta.astype(dtype), log_decay[:, 0, :, 0]
    q = q.reshape(*k.shape[:2], -1, k.shape[-1])
    out, after = _step(q, k, v, u, *gates, lambda0, before, variant=variant, inverse=inverse)
    caches = {
        name: None if x is None else jnp.zeros_like(x)
        for name in ("inverse", "inverse_lambda0", "inverse_age")
        for x in (getattr(state, name),)
    }
    rest = None if rest is None else after.penalty_rest
    after = VLAState(after.memory, after.penalty, after.key_sum, **caches, penalty_rest=rest)
    return out.reshape(*query.shape[:2], -1).astype(query.dtype), after
