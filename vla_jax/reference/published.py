"""The recurrence as it is printed: a one-token step and a ``lax.scan`` over it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import (
    Attention,
    AttentionOutputs,
    Delta,
    DeltaOutputs,
    Solve,
    SolveOutputs,
)
from vla_jax.plan import Plan, Variant
from vla_jax.types import Array, VLAState

_HIGHEST = jax.lax.Precision.HIGHEST


def _dot(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, precision=_HIGHEST)


def sherman_morrison(inverse: Array, direction: Array) -> Array:
    """``(M + u uᵀ)⁻¹`` from ``M⁻¹`` ``[..., D, D]`` and ``u`` ``[..., D]``: equation (1)."""
    w = _dot("...ij,...j->...i", inverse, direction)
    gain = 1 + jnp.sum(direction * w, axis=-1, keepdims=True)
    scaled = w * jax.lax.rsqrt(jnp.abs(gain))  # w wᵀ alone overflows where λ₀ is tiny
    return inverse - jnp.sign(gain)[..., None] * scaled[..., :, None] * scaled[..., None, :]


def delta_step(
    memory: Array, query: Array, key: Array, write_key: Array, value: Array
) -> tuple[Array, Array]:
    """One step of the generalised delta rule: equations (4) and (5) without the ratio.

    Args:
      memory: ``[B, H, D, E]``.
      query: ``[B, H, G, D]``; key, write_key: ``[B, H, D]``; value: ``[B, H, E]``.

    Returns:
      The read-out ``[B, H, G, E]`` after the write, and the new memory.
    """
    residual = value - _dot("bhde,bhd->bhe", memory, key)
    memory = memory + write_key[..., :, None] * residual[..., None, :]
    return _dot("bhgd,bhde->bhge", query, memory), memory


def write_and_read(
    variant: Variant,
    state: VLAState,
    solution: Array,
    query: Array,
    key: Array,
    unit_key: Array,
    value: Array,
    weight: Array | float = 1,
) -> tuple[Array, Array, Array]:
    """Equations (3) to (5): the write along ``α = solution`` and the read-out of one token.

    ``weight [B, H, 1]`` is that of the token.

    Returns ``(out [B, H, G, E], memory, key_sum)``.
    """
    write_key = weight * numerics.apply_write_gain(solution, unit_key, variant.write_gain)
    out, memory = delta_step(state.memory, query, unit_key, write_key, value)
    key_sum = state.key_sum + weight * key
    if variant.readout == "ratio":
        weight = _dot("bhgd,bhd->bhg", query, key_sum)
        out = out / jnp.maximum(weight, variant.eps)[..., None]
    return out, memory, key_sum


def _segment_starts(segment_ids: Array | None, length: int) -> Array:
    """``[T, B]`` (or ``[T, 1]``) booleans: true where a token opens a segment of its own."""
    if segment_ids is None:
        return jnp.zeros((length, 1), bool)
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0))).T


def _reset(start: Array, fresh: Array, carried: Array) -> Array:
    return jnp.where(jnp.expand_dims(start, tuple(range(1, carried.ndim))), fresh, carried)


def _fresh_inverse(lambda0: Array, dim: int) -> Array:
    return jnp.eye(dim, dtype=lambda0.dtype) / lambda0[:, None, None]


def _time_major(x: Array, dtype) -> Array:
    return jnp.moveaxis(x.astype(dtype), 1, 0)


def penalty_solve(plan: Plan, inputs: Solve) -> tuple[SolveOutputs, None]:
    """``α_t = (λ₀ I + M₀ + Σ_{s≤t} u_s u_sᵀ)⁻¹ r_t`` token by token, equations (1) and (2)."""
    del plan  # one arithmetic, no chunks
    rhs, direction, lambda0, initial_penalty, segment_ids, *_ = inputs
    dtype, dim = initial_penalty.dtype, rhs.shape[-1]
    fresh = _fresh_inverse(lambda0, dim)

    def step(carry, token):
        *penalty_and_rest, inverse = carry
        r, u, start = token
        penalty, rest = (_reset(start, 0, x) for x in penalty_and_rest)
        outer = u[..., :, None] * u[..., None, :]
        penalty, rest = numerics.compensated_sum(penalty, outer, rest)
        inverse = sherman_morrison(_reset(start, fresh, inverse), u)
        return (penalty, rest, inverse), _dot("bhij,bhj->bhi", inverse, r)

    inverse = numerics.penalty_inverse(initial_penalty, lambda0)
    tokens = (
        _time_major(rhs, dtype),
        _time_major(direction, dtype),
        _segment_starts(segment_ids, rhs.shape[1]),
    )
    carry = (initial_penalty, jnp.zeros_like(initial_penalty), inverse)
    (penalty, _, _), solution = jax.lax.scan(step, carry, tokens)
    return SolveOutputs(jnp.moveaxis(solution, 0, 1), penalty), None


def delta_rule(plan: Plan, inputs: Delta) -> tuple[DeltaOutputs, None]:
    """``S_t = S_{t-1} + (v_t − S_{t-1} k_t) a_tᵀ``, ``o_t = S_t q_t`` token by token."""
    del plan
    query, key, write_key, value, initial_memory, segment_ids, _ = inputs
    dtype = initial_memory.dtype

    def step(memory, token):
        q, k, a, v, start = token
        out, memory = delta_step(_reset(start, 0, memory), q, k, a, v)
        return memory, out

    wide = numerics.grouped(query, key.shape[2]), key, write_key, value
    tokens = (
        *(_time_major(x, dtype) for x in wide),
        _segment_starts(segment_ids, query.shape[1]),
    )
    memory, out = jax.lax.scan(step, initial_memory, tokens)
    out = jnp.moveaxis(out, 0, 1).reshape(*query.shape[:3], value.shape[-1])
    return DeltaOutputs(out, memory), None


def attention(
    plan: Plan,
    inputs: Attention,
    *,
    refresh_every: int | None = None,
    refresh_eps: float = 1e-3,
) -> tuple[AttentionOutputs, None]:
    """The whole recurrence, equations (1) to (5), token by token, in the dtype of the state.

    Args:
      plan: its variant counts.
      inputs: the arrays.
      refresh_every: if given, ``refresh_eps * I`` is added to the inverse after every so many
        tokens, as the published reference code does. It reproduces published numbers and breaks
        ``A = M⁻¹``; nothing else in this package does it.
      refresh_eps: what is added.
    """
    query, key = inputs.query, inputs.key
    lambda0, penalty = inputs.lambda0, inputs.penalty
    dtype, dim = inputs.memory.dtype, query.shape[-1]
    identity = jnp.eye(dim, dtype=dtype)
    fresh = _fresh_inverse(lambda0, dim)

    def step(carry, token):
        state, inverse, index = carry
        q, k, v, u, start = token
        state = jax.tree.map(lambda x: _reset(start, 0, x), state)
        unit_key = numerics.normalize(k)
        if u is None:
            u = numerics.penalty_direction(unit_key)
        inverse = sherman_morrison(_reset(start, fresh, inverse), u)
        outer = u[..., :, None] * u[..., None, :]
        penalty, rest = numerics.compensated_sum(state.penalty, outer, state.penalty_rest)
        if refresh_every is not None:
            due = (index + 1) % refresh_every == 0
            inverse = inverse + jnp.where(due, refresh_eps, 0).astype(dtype) * identity
        solution = _dot("bhij,bhj->bhi", inverse, unit_key)
        out, memory, key_sum = write_and_read(plan.variant, state, solution, q, k, unit_key, v)
        state = VLAState(memory, penalty, key_sum, penalty_rest=rest)
        return (state, inverse, index + 1), out

    tokens = (
        _time_major(numerics.grouped(query, key.shape[2]), dtype),
        _time_major(key, dtype),
        _time_major(inputs.value, dtype),
        None if inputs.direction is None else _time_major(inputs.direction, dtype),
        _segment_starts(inputs.segment_ids, query.shape[1]),
    )
    rest = jnp.zeros_like(penalty)
    state = VLAState(inputs.memory, penalty, inputs.key_sum, penalty_rest=rest)
    inverse = numerics.penalty_inverse(penalty, lambda0)
    (state, _, _), out = jax.lax.scan(step, (state, inverse, jnp.int32(0)), tokens)
    out = jnp.moveaxis(out, 0, 1).reshape(*query.shape[:3], inputs.value.shape[-1])
    return AttentionOutputs(out, state.memory, state.penalty, state.key_sum), None
