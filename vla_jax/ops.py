"""``vla_attention`` over whole sequences, ``vla_step`` for decoding, and the state they share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from vla_jax import bundles, chunks, decay, meshes, numerics, primitives, validation
from vla_jax import plan as planning
from vla_jax.bundles import AXES, Attention, Delta, Solve, Step
from vla_jax.plan import Plan
from vla_jax.reference import gated, published
from vla_jax.types import (
    Array,
    ArrayLike,
    DTypeLike,
    Implementation,
    Inverse,
    PrecisionLike,
    Readout,
    VLAState,
    WriteGain,
)


def init_state(
    batch_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
) -> VLAState:
    """The state of a fresh sequence: all zeros.

    Args:
      batch_size, num_heads, key_dim, value_dim: B, H (key/value heads), D and E.
      dtype: float32, or float64 to decode float64 inputs.

    Raises:
      TypeError, ValueError: if a size is not a positive integer, or the dtype neither of the two.
    """
    sizes = (batch_size, num_heads, key_dim, value_dim)
    for name, size in zip(("batch_size", "num_heads", "key_dim", "value_dim"), sizes, strict=True):
        validation.size(name, size)
    if validation.floating_dtype("dtype", dtype) not in (jnp.float32, jnp.float64):
        raise ValueError(f"dtype must be float32 or float64, got {jnp.dtype(dtype)}")
    known = planning.Sizes(B=batch_size, H=num_heads, D=key_dim, E=value_dim)
    return _with_empty_cache(VLAState(**planning.initial_fields(None, known, dtype)))


def _with_empty_cache(state: VLAState) -> VLAState:
    per_head = state.key_sum[..., 0]
    return state.replace(  # an array each: one that two fields share cannot be donated
        inverse=jnp.zeros_like(state.penalty),
        inverse_lambda0=jnp.zeros_like(per_head),
        inverse_age=jnp.zeros_like(per_head),
        penalty_rest=jnp.zeros_like(state.penalty),
    )


@primitives.first_order_only
@meshes.explicit(AXES["out"])
def vla_attention(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None = None,
    *,
    beta: Array | None = None,
    log_decay: Array | None = None,
    inverse: Inverse = "write",
    lambda0: ArrayLike | None = None,
    initial_state: VLAState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    write_gain: WriteGain | None = None,
    readout: Readout | None = None,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Array | tuple[Array, VLAState]:
    """Variational Linear Attention, causal, in time linear in T.

    For every head and token, with ``k̂ = k / ‖k‖``::

        M ← M + u uᵀ,  A = (λ₀ I + M)⁻¹           the penalty and its inverse
        α̂ = A k̂ / ‖A k̂‖                           the write direction
        S ← S + (v − S k̂) α̂ᵀ,  z ← z + k          the memory and the key sum
        o = S q / max(z·q, eps)                   the read-out

    Equations (1) to (5) of ``docs/derivation.md``. With weights ``β`` and a decay
    ``γ = exp(log_decay)`` all of the state is multiplied by ``γ``, then the token is added::

        M ← γ M + β u uᵀ,  z ← γ z + β k          λ₀ does not decay
        S ← γ S + (v − γ S k̂) β α̂ᵀ                inverse="write"
        S ← γ S + β v k̂ᵀ,  o = S A q              inverse="read"

    With the inverse at the read and ``u = k̂`` this is ridge regression with forgetting, which
    MesaNet (von Oswald et al., 2025) approximates. Computed in chunks, a NaN or infinity in a token
    can reach every token of its row, those before it and of other segments too; a masked token's
    reaches none.

    Args:
      query: ``[B, T, Hq, D]``, feature-mapped (``vla_jax.feature_map``), not normalised. Hq is a
        multiple of H; query head ``h`` reads the state of head ``h // (Hq / H)``. For the ratio,
        queries and keys that are not positive give any value: ``z·q`` has no sign to rely on.
      key: ``[B, T, H, D]``, feature-mapped, not normalised (the unit key is formed inside, in
        float32, from any normal numbers: XLA takes smaller ones, below 1.2e-38, for zero; the
        kernels of ``"pallas"`` and ``"triton"`` want lengths from 1e-30 to 1e30). A zero key writes
        nothing. For the ratio, ``z`` and ``z·q`` must not overflow.
      value: ``[B, T, H, E]``.
      direction: ``[B, T, H, D]``, the penalty directions ``u``, used as given (the published layer
        gives them length ``1/√D``). None means ``k̂ / √D``, with ``inverse="read"`` ``k̂``.
      beta: ``[B, T, H]``, the weight of each token, not negative. None means 1.
      log_decay: ``[B, T, H]``, the logarithm of what each token leaves of the state before it, not
        positive and finite; below -1e30 it counts as that. None means 0. The values of both are
        looked at in NumPy arrays only; those of a wrong sign give results without meaning.
      inverse: whether ``A`` is applied at the ``"write"``, to the key, or at the ``"read"``, to the
        query. A state belongs to the kind that made it, which it does not record.
      lambda0: scalar or ``[H]``, positive; differentiable. None means 0.1, with ``inverse="read"``
        1. What float32 makes of a tiny one: ``docs/derivation.md``, section 2. With gates it wants
        to be .01 times the longest ``β ‖u‖²`` or more: ``vla_jax.diagnostics.solve_report`` shows
        which tokens have not converged.
      initial_state: the state to continue from; it belongs to the first segment.
      segment_ids: ``[B, T]`` integers that do not decrease: the state restarts from zero where the
        id changes. Those of masked tokens do not count, whatever they are: such a token belongs to
        the segment of the last token before it that is not masked, and before the first one to the
        first one's. Under ``jit`` the order is not checked.
      mask: ``[B, T]`` booleans, False for padding: the token writes nothing and its output is 0.
      write_gain: the scale of the write key: ``"unit"`` α / ‖α‖, ``"projection"`` α / (α·k̂), which
        stores exactly, ``"rls"`` α itself: recursive least squares when ``direction`` is k̂. None
        means ``"unit"``; with ``inverse="read"`` there is none.
      readout: ``"ratio"``, or ``"none"`` for ``S q``. None means ``"ratio"``, with
        ``inverse="read"`` ``"none"``, which has no other.
      eps: positive floor of the ratio's denominator.
      chunk_size: tokens of a chunk of ``"xla"`` and ``"associative"``; changes speed and memory,
        of the result no more than its rounding. ``"reference"`` has no chunks, and the GPU kernels
        refuse it.
      implementation: ``"reference"`` (token by token, any kind of differentiation; it steps an
        inverse, which in float32 wants a λ₀ from about 1e-4 ``‖u‖²`` on), ``"xla"`` (chunkwise, on
        every device), ``"associative"`` (chunkwise, associative scan over chunks), ``"pallas"``
        (GPU kernels; in their interpreter where the environment says
        ``VLA_JAX_PALLAS_INTERPRET=1``), ``"triton"`` (the single-launch kernel through jax-triton,
        for few tokens). None means ``"pallas"`` where the arrays are on GPUs that it serves,
        otherwise ``"xla"``.
      precision: of the matrix products, as in ``jax.lax``; by default float32-accurate for float32
        inputs; for 16-bit inputs tf32 in the solve and the inputs' dtype in the memory, always
        accumulated in float32. ``"reference"`` computes in its dtype always.
      return_state: whether to return the state after the last token as well.

    Returns:
      ``out [B, T, Hq, E]`` in the dtype of ``query``, or ``(out, state)``; the state is float32
      (float64 with float64 inputs) and that of the last segment.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if the named implementation cannot serve here, and for forward-mode or
        second-order differentiation of any but ``"reference"``.
    """
    validation.flag("return_state", return_state)
    plan, inputs, mask = planning.attention(
        query, key, value, direction, beta=beta, log_decay=log_decay, inverse=inverse,
        lambda0=lambda0, initial_state=initial_state,
        segment_ids=segment_ids, mask=mask, write_gain=write_gain, readout=readout, eps=eps,
        chunk_size=chunk_size, implementation=implementation, precision=precision,
    )  # fmt: skip
    out, state = _attention(plan, inputs, mask)
    return (out, state) if return_state else out


def solved(plan: Plan, inputs: Attention) -> tuple[Delta, Array]:
    """What is left once the solve is done, a delta rule; and the final penalty.

    With the inverse at the write, equations (1) to (3), the write key is made from the solution. At
    the read the solution takes the query's place, and a write corrects nothing.
    """
    unit_key = numerics.normalize(inputs.key.astype(plan.policy.accumulator))
    at_read = plan.variant.inverse == "read"
    # The delta rule's and the solve's own dtypes, or those of the arguments.
    narrow = primitives.normalizes(plan)
    dtype = inputs.key.dtype if narrow else unit_key.dtype
    direction = inputs.direction
    if direction is None:
        direction = numerics.penalty_direction(unit_key, plan.variant.inverse).astype(dtype)
    solution, penalty = primitives.run(
        plan,
        Solve(
            inputs.query.astype(dtype) if at_read else unit_key,
            direction,
            inputs.lambda0,
            inputs.penalty,
            inputs.segment_ids,
            inputs.beta,
            inputs.log_decay,
        ),
    )
    if at_read:
        query, key, write_key = solution.astype(dtype), jnp.zeros(unit_key.shape, dtype), unit_key
    else:
        query, key = inputs.query, inputs.key if narrow else unit_key
        write_key = numerics.apply_write_gain(solution, unit_key, plan.variant.write_gain)
    delta = Delta(
        query,
        key,
        numerics.weighted(write_key, inputs.beta),
        inputs.value,
        inputs.memory,
        inputs.segment_ids,
        inputs.log_decay,
    )
    # Inside jax.shard_map the zeros vary over nothing, and their cotangent over all that others do.
    return numerics.varying_alike(delta), penalty


def weigh(plan: Plan, inputs: Attention, out: Array) -> tuple[Array, Array]:
    """``out`` over ``z·q``, equation (5), in the dtype of ``query``; and the final key sum."""

    @jax.checkpoint  # the sums of every token are cheaper to make twice than to keep
    def weights(query, key, key_sum, log_decay):
        if log_decay is None:
            key_sums, key_sum = chunks.causal_sum(key, key_sum, inputs.segment_ids, plan.policy)
        else:
            # A closed-form backward, or what JAX differentiates in any mode.
            sums = decay.plain_sum if plan.implementation == "reference" else decay.causal_sum
            key_sums = sums(key, log_decay, key_sum, inputs.segment_ids, plan.policy)
            key_sum = key_sums[:, -1]
        grouped = numerics.grouped(query, key.shape[2]).astype(key_sums.dtype)
        weight = jnp.sum(grouped * key_sums[:, :, :, None], axis=-1)
        return weight.reshape(query.shape[:3]), key_sum

    key = inputs.key
    if inputs.beta is not None:
        key = numerics.weighted(key.astype(plan.policy.accumulator), inputs.beta)
    weight, key_sum = weights(inputs.query, key, inputs.key_sum, inputs.log_decay)
    if plan.variant.readout == "ratio":
        out = out / jnp.maximum(weight, plan.variant.eps)[..., None]
    return out.astype(inputs.query.dtype), key_sum


@functools.partial(jax.jit, static_argnums=0)
def _attention(plan, inputs, mask):
    """The recurrence on checked arrays: by its own rule, or composed of the two primitives."""
    inputs, mask = numerics.varying_alike((inputs, mask))
    inputs = planning.masked(inputs, mask)
    inputs = inputs._replace(penalty=numerics.symmetrize(inputs.penalty))
    if primitives.serves(plan, Attention) and not uses_gates(plan, inputs):
        out, *state = primitives.run(plan, inputs)
        return out.astype(inputs.query.dtype), _with_empty_cache(VLAState(*state))
    delta, penalty = solved(plan, inputs)
    if primitives.normalizes(plan):
        plan = dataclasses.replace(plan, normalize_key=True)
    out, memory = primitives.run(plan, delta)
    out, key_sum = weigh(plan, inputs, out)
    return out, _with_empty_cache(VLAState(memory, penalty, key_sum))


def uses_gates(plan: Plan, inputs: Attention | Step) -> bool:
    """Whether the recurrence is more than the published one."""
    return plan.variant.inverse == "read" or bool(bundles.gates(inputs))


# --- decoding ----------------------------------------------------------------------------------


@meshes.explicit("B Hq E")
@numerics.broadcasts
def vla_step(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    state: VLAState,
    *,
    beta: Array | None = None,
    log_decay: Array | None = None,
    inverse: Inverse = "write",
    lambda0: ArrayLike | None = None,
    write_gain: WriteGain | None = None,
    readout: Readout | None = None,
    eps: float = 1e-6,
    implementation: Literal["xla", "pallas"] | None = None,
) -> tuple[Array, VLAState]:
    """One token of ``vla_attention``: for decoding, in time and memory that do not grow.

    The inverse of the penalty is carried in the state and updated by the Sherman–Morrison formula;
    it is derived from the exact penalty when the state has none for this ``lambda0`` (the first
    step after ``vla_attention`` or ``init_state``), and compared with it every
    ``numerics.REDERIVE_EVERY`` steps, so rounding does not accumulate. Any kind of differentiation
    works, and the gradient reaches ``state.penalty`` exactly.

    Args:
      query: ``[B, Hq, D]``; key, direction: ``[B, H, D]``; value: ``[B, H, E]``: as in
        ``vla_attention`` without the time axis. ``direction=None`` means ``k̂ / √D``.
      state: what the previous step, ``vla_attention`` or ``init_state`` returned.
      beta, log_decay: ``[B, H]``, as in ``vla_attention`` without the time axis. A step with either
        of them, or with ``inverse="read"``, solves from the penalty by Cholesky, in O(D³) a head,
        and clears the carried inverse.
      inverse, lambda0, write_gain, readout, eps: as in ``vla_attention``.
      implementation: ``"xla"`` (what None means) or ``"pallas"``, a GPU kernel that reads and
        writes the state once; its derivatives are those of ``"xla"``.

    Returns:
      ``(out [B, Hq, E] in the dtype of query, the new state)``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if the kernel was named and cannot serve these arrays here.
    """
    plan, inputs = planning.step(
        query, key, value, direction, state, beta=beta, log_decay=log_decay, inverse=inverse,
        lambda0=lambda0, write_gain=write_gain,
        readout=readout, eps=eps, implementation=implementation,
    )  # fmt: skip
    return _step(plan, inputs)


@functools.partial(jax.jit, static_argnums=0)
def _step(plan, inputs):
    inputs = numerics.varying_alike(inputs)
    if uses_gates(plan, inputs):
        return gated.step(plan.variant, inputs)
    plain = functools.partial(_plain_step, plan.variant)
    if not primitives.serves(plan, Step):
        return plain(inputs)

    # The kernel is the value; every derivative is that of the same step in jax.numpy.
    step = jax.custom_jvp(functools.partial(primitives.run, plan))
    step.defjvp(numerics.broadcasts(lambda xs, tangents: jax.jvp(plain, xs, tangents)))
    return step(inputs)


def _plain_step(variant, inputs):
    query, key, value, direction, lambda0, state, *_ = inputs
    dtype = state.memory.dtype
    grouped = numerics.grouped(query[:, None], key.shape[1])[:, 0].astype(dtype)
    key, value = key.astype(dtype), value.astype(dtype)
    unit_key = numerics.normalize(key)
    u = numerics.penalty_direction(unit_key) if direction is None else direction.astype(dtype)

    before = numerics.symmetrize(state.penalty)
    outer = u[..., :, None] * u[..., None, :]
    rest = state.penalty_rest
    if rest is None:
        penalty = before + outer
    else:
        penalty, rest = numerics.compensated_sum(before, outer, rest.astype(dtype))
    inverse, cache = _next_inverse(*jax.lax.stop_gradient((state, penalty, u, lambda0)))
    matrix = numerics.regularised(penalty, lambda0)
    solution = numerics.known_solve(matrix, inverse, unit_key[:, :, None])[:, :, 0]
    out, memory, key_sum = published.write_and_read(
        variant, state, solution, grouped, key, unit_key, value
    )
    out = out.reshape(*query.shape[:2], -1).astype(query.dtype)
    return out, VLAState(memory, penalty, key_sum, **cache, penalty_rest=rest)


def _next_inverse(
    state: VLAState, penalty: Array, u: Array, lambda0: Array
) -> tuple[Array, dict[str, Array | None]]:
    """The inverse for ``penalty``, which ``u`` is part of already, and the cache that goes on."""
    if state.inverse is None or state.inverse_lambda0 is None or state.inverse_age is None:
        return numerics.penalty_inverse(penalty, lambda0), {}
    cached, age = state.inverse.astype(penalty.dtype), state.inverse_age
    updated = published.sherman_morrison(cached, u)
    # The update divides by 1 + uᵀ A u: what is lost where that is large does not come back.
    weight = 1 + jnp.einsum("bhi,bhij,bhj->bh", u, cached, u, precision=jax.lax.Precision.HIGHEST)
    resolved = (weight > 0.5) & (weight * numerics.RESOLVED_ULPS * jnp.finfo(weight.dtype).eps < 1)
    absent = (state.inverse_lambda0 != lambda0) | ~resolved
    due = jnp.any(absent | (age >= numerics.REDERIVE_EVERY))

    def derive():
        matrix = numerics.regularised(penalty, lambda0)
        derived, seen = numerics.penalty_inverses(penalty, lambda0)
        better = absent | (2 * _misfit(matrix, derived) < _misfit(matrix, updated))
        # An inverse with directions that the penalty does not resolve is no start for updates.
        holds = ~better | jnp.all(derived == seen, axis=(-2, -1))
        return jnp.where(better[..., None, None], derived, updated), jnp.where(holds, lambda0, 0)

    kept = jnp.broadcast_to(lambda0, age.shape)
    inverse, holds_for = jax.lax.cond(due, derive, lambda: (updated, kept))
    cache: dict[str, Array | None] = {
        "inverse": inverse,
        "inverse_lambda0": holds_for,
        "inverse_age": jnp.where(due, 1, age + 1).astype(penalty.dtype),
    }
    return inverse, cache


def _misfit(matrix: Array, inverse: Array) -> Array:
    """Largest entry of ``I − M M⁻¹`` per head: infinite where it is not a number."""
    product = jnp.einsum("bhij,bhjk->bhik", matrix, inverse, precision=jax.lax.Precision.HIGHEST)
    misfit = jnp.max(jnp.abs(product - jnp.eye(matrix.shape[-1])), axis=(-2, -1))
    return jnp.where(jnp.isnan(misfit), jnp.inf, misfit)
