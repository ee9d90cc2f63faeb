"""What the recurrence does inside: state norms, step Jacobians, conditioning, drift.

Pure functions of arrays, for notebooks and tests; none is needed to run the model. ``c`` is the
alignment ``k̂·α̂`` of the unit key and the unit write direction throughout.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import meshes, numerics, primitives, validation
from vla_jax import plan as planning
from vla_jax.chunkwise import gated_solve
from vla_jax.chunkwise.gated_solve import Report as SolveReport
from vla_jax.types import (
    Array,
    ArrayLike,
    Implementation,
    PrecisionLike,
    VLAState,
    WriteGain,
)

_HIGHEST = jax.lax.Precision.HIGHEST


# --- one step: J = I − k̂ α̂ᵀ, by which S is multiplied from the right ----------------------------


@meshes.explicit("...")
@numerics.broadcasts
def alignment(unit_key: Array, gain: Array) -> Array:
    """``c = k̂·α̂`` over the last axis: ``[..., D]``, ``[..., D]`` to ``[...]``.

    ``c`` is at least ``2√κ / (1 + κ)`` for ``α = A k̂`` with a positive definite ``A`` of condition
    number ``κ``, and 1 when ``α̂ = k̂``.
    """
    unit_key, gain = _pair(unit_key, gain)
    return jnp.sum(unit_key * gain, axis=-1)


@meshes.explicit("...")
@numerics.broadcasts
def step_jacobian_norm(unit_key: Array, gain: Array) -> Array:
    """Spectral norm of ``I − k̂ α̂ᵀ`` by singular value decomposition.

    Args:
      unit_key, gain: ``[..., D]``; any two vectors.

    Returns:
      ``[...]``, the largest singular value. ``closed_form_norm`` of their alignment is the same for
      unit vectors and D >= 2; a zero ``gain`` gives 1.
    """
    return jnp.linalg.norm(_jacobian(unit_key, gain), ord=2, axis=(-2, -1))


@meshes.explicit("...")
@numerics.broadcasts
def step_jacobian_radius(unit_key: Array, gain: Array) -> Array:
    """Spectral radius of ``I − k̂ α̂ᵀ`` by its eigenvalues.

    Args:
      unit_key, gain: ``[..., D]``; any two vectors.

    Returns:
      ``[...]``, the largest modulus of an eigenvalue; ``closed_form_radius`` of their alignment is
      the same for D >= 2. The eigenvalues of a matrix that is not symmetric are computed where JAX
      supports it: on the CPU and, lately, on NVIDIA GPUs.
    """
    return jnp.max(jnp.abs(jnp.linalg.eigvals(_jacobian(unit_key, gain))), axis=-1)


def closed_form_norm(c: ArrayLike) -> Array:
    """Spectral norm of one step from the alignment: ``(√(5 − 4c) + 1) / 2``, for D >= 2.

    The singular values of ``I − k̂ α̂ᵀ`` with unit vectors are 1 (D − 2 times) and
    ``(√(5 − 4c) ± 1) / 2``: the norm is 1 only for ``c = 1``, below 1.618 for ``c > 0``.
    """
    return (jnp.sqrt(5 - 4 * jnp.asarray(c)) + 1) / 2


def closed_form_radius(c: ArrayLike) -> Array:
    """Spectral radius of one step from the alignment: ``max(1, |1 − c|)``, for D >= 2.

    The eigenvalues are 1 (D − 1 times) and ``1 − c``; for ``c`` in ``[0, 2]`` the radius is 1.
    """
    return jnp.maximum(1, jnp.abs(1 - jnp.asarray(c)))


def _pair(unit_key: Any, gain: Any) -> tuple[Array, Array]:
    unit_key, gain = jnp.asarray(unit_key), jnp.asarray(gain)
    if unit_key.shape != gain.shape or not unit_key.ndim:
        raise ValueError(
            "unit_key and gain must have one shape [..., D], got "
            f"{list(unit_key.shape)} and {list(gain.shape)}"
        )
    dtype = numerics.accumulator_dtype(unit_key.dtype, gain.dtype)
    return unit_key.astype(dtype), gain.astype(dtype)


def _jacobian(unit_key: Any, gain: Any) -> Array:
    unit_key, gain = _pair(unit_key, gain)
    identity = jnp.eye(unit_key.shape[-1], dtype=unit_key.dtype)
    return identity - unit_key[..., :, None] * gain[..., None, :]


# --- the penalty -------------------------------------------------------------------------------


def _regularised(penalty: Array, lambda0: ArrayLike) -> Array:
    """``M = λ₀ I + penalty`` from ``[B, H, D, D]`` and a scalar or ``[H]``."""
    penalty = validation.array("penalty", penalty, (None,) * 4, "[B, H, D, D]")
    dim, dtype = penalty.shape[-1], numerics.accumulator_dtype(penalty.dtype)
    weight = validation.lambda0(lambda0, penalty.shape[1], dtype)[:, None, None]
    return numerics.symmetrize(penalty.astype(dtype)) + weight * jnp.eye(dim, dtype=dtype)


@meshes.explicit("B H")
@numerics.broadcasts
def penalty_condition_number(penalty: Array, *, lambda0: ArrayLike = 0.1) -> Array:
    """Condition number of ``M = λ₀ I + Σ u uᵀ``, the amplification of rounding in the solve.

    Args:
      penalty: ``[B, H, D, D]``, ``VLAState.penalty`` (without the ``lambda0`` term).
      lambda0: scalar or ``[H]``.

    Returns:
      ``[B, H]``, at most ``(λ₀ + T / D) / λ₀`` for directions of length ``1/√D``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    eigenvalues = jnp.linalg.eigvalsh(_regularised(penalty, lambda0))
    return eigenvalues[..., -1] / eigenvalues[..., 0]


@meshes.explicit("B H")
@numerics.broadcasts
def inverse_drift(inverse: Array, penalty: Array, *, lambda0: ArrayLike = 0.1) -> Array:
    """How far an inverse kept by rank-one updates has drifted from the inverse of the penalty.

    Args:
      inverse: ``[B, H, D, D]``, for instance ``VLAState.inverse`` after many steps.
      penalty: ``[B, H, D, D]``, without the ``lambda0`` term.
      lambda0: scalar or ``[H]``.

    Returns:
      ``[B, H]``: ``‖inverse − M⁻¹‖ / ‖M⁻¹‖`` (Frobenius), with ``M⁻¹`` computed directly in float32
      (float64 if an argument is float64, which is what shows a float32 drift of 1e-6).

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    inverse = validation.array("inverse", inverse, jnp.shape(penalty), "[B, H, D, D]")
    penalty = jnp.asarray(penalty).astype(
        numerics.accumulator_dtype(inverse.dtype, jnp.asarray(penalty).dtype)
    )
    direct = numerics.positive_definite_inverse(_regularised(penalty, lambda0))
    difference = inverse.astype(direct.dtype) - direct
    return jnp.linalg.norm(difference, axis=(-2, -1)) / jnp.linalg.norm(direct, axis=(-2, -1))


@meshes.explicit()
@numerics.broadcasts
def solve_report(
    rhs: Array,
    direction: Array,
    *,
    lambda0: ArrayLike,
    weight: Array | None = None,
    log_decay: Array | None = None,
    initial_penalty: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
) -> SolveReport:
    """How the conjugate gradients of ``penalty_solve`` with gates go, a token and query head.

    They end at a bound of steps whether or not they have converged, which takes a λ₀ below about
    ``.01 β ‖u‖²``. Runs the solve of ``"xla"`` once more.

    Args:
      rhs, direction, lambda0, weight, log_decay, initial_penalty, segment_ids, chunk_size,
        precision: as in ``vla_jax.penalty_solve``.

    Returns:
      ``SolveReport(residual, steps)``, ``[B, T, Hq]`` each: ``‖rhs − M x‖ / ‖rhs‖`` by the solver's
      own recursion, and its steps, 0 in float64, which is solved directly.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    plan, inputs = planning.penalty_solve(
        rhs, direction, lambda0=lambda0, weight=weight, log_decay=log_decay,
        initial_penalty=initial_penalty, segment_ids=segment_ids, chunk_size=chunk_size,
        implementation="xla", precision=precision,
    )  # fmt: skip
    return _solve_report(plan, inputs)


@functools.partial(jax.jit, static_argnums=0)
def _solve_report(plan, inputs):
    return gated_solve.report(plan, inputs)


@meshes.explicit("B T Hq")
@numerics.broadcasts
def solve_residual(
    solution: Array,
    rhs: Array,
    direction: Array,
    *,
    lambda0: ArrayLike,
    weight: Array | None = None,
    log_decay: Array | None = None,
    initial_penalty: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """``‖rhs − M solution‖ / ‖rhs‖`` of any solution, however it was found.

    In float32 it rounds at about ``ε ‖M‖ ‖solution‖ / ‖rhs‖``.

    Args:
      solution: ``[B, T, Hq, D]``.
      rhs, direction, lambda0, weight, log_decay, initial_penalty, segment_ids, chunk_size,
        precision: as in ``vla_jax.penalty_solve``.

    Returns:
      ``[B, T, Hq]``, 0 for a ``rhs`` and a solution of zeros.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    plan, inputs = planning.penalty_solve(
        rhs, direction, lambda0=lambda0, weight=weight, log_decay=log_decay,
        initial_penalty=initial_penalty, segment_ids=segment_ids, chunk_size=chunk_size,
        implementation="xla", precision=precision,
    )  # fmt: skip
    solution = validation.array("solution", solution, inputs.rhs.shape, "[B, T, Hq, D]")
    return _solve_residual(plan, inputs, solution)


@functools.partial(jax.jit, static_argnums=0)
def _solve_residual(plan, inputs, solution):
    return gated_solve.residual(plan, inputs, solution)


# --- the memory --------------------------------------------------------------------------------


@meshes.explicit("B H")
@numerics.broadcasts
def lyapunov(state: VLAState, *, lambda0: ArrayLike = 0.1) -> Array:
    """``tr(S M Sᵀ)`` with ``M = λ₀ I + penalty``, the function that a step with zero value lowers.

    With ``M`` fixed, ``S ← S (I − k̂ α̂ᵀ)`` lowers it by exactly ``‖S k̂‖² (2 − c) / ‖A k̂‖``.

    Args:
      state: ``memory [B, H, D, E]`` (``Sᵀ``) and ``penalty [B, H, D, D]`` are used.
      lambda0: scalar or ``[H]``.

    Returns:
      ``[B, H]``, not negative.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    matrix = _regularised(state.penalty, lambda0)
    memory = validation.array("memory", state.memory, (*matrix.shape[:3], None), "[B, H, D, E]")
    return jnp.einsum("bhde,bhdf,bhfe->bh", memory, matrix, memory, precision=_HIGHEST)


@meshes.explicit("B T H")
@numerics.broadcasts
def state_norm(
    key: Array,
    value: Array,
    direction: Array | None = None,
    *,
    lambda0: ArrayLike | None = None,
    initial_state: VLAState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    write_gain: WriteGain | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Frobenius norm of the memory after every token.

    One pass over T that carries one memory ``[B, H, D, E]`` and keeps none: nothing of size
    ``T · D · E`` exists, so T = 10⁵ is no trouble.

    Args:
      key: ``[B, T, H, D]``; value: ``[B, T, H, E]``; direction: ``[B, T, H, D]`` or None for
        ``k̂ / √D``: as in ``vla_jax.vla_attention``, as are the others.

    Returns:
      ``‖S_t‖``, ``[B, T, H]``, float32 (float64 with float64 inputs).

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    sizes = planning.Sizes()
    key, value = sizes.check("key", key), sizes.check("value", value)
    if direction is not None:
        direction = sizes.check("direction", direction)
    segment_ids, mask = validation.segments(segment_ids, mask, sizes["B"], sizes["T"])
    dtype = numerics.accumulator_dtype(key.dtype, value.dtype)
    chosen = planning.variant(write_gain, None, 1e-6, "write", dtype)
    state = planning.initial_fields(initial_state, sizes, dtype)
    unit_key = numerics.normalize(key.astype(dtype))
    u = numerics.penalty_direction(unit_key) if direction is None else direction
    unit_key, value, u = (numerics.masked(x, mask) for x in (unit_key, value, u))
    solution, _ = primitives.penalty_solve(
        unit_key,
        u.astype(dtype),
        lambda0=planning.LAMBDA0["write"] if lambda0 is None else lambda0,
        initial_penalty=state["penalty"],
        segment_ids=segment_ids,
        implementation=implementation,
    )
    write_key = numerics.apply_write_gain(solution, unit_key, chosen.write_gain)
    restart = jnp.zeros(key.shape[:2], bool)
    if segment_ids is not None:
        restart = restart.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])
    return _norms(unit_key, write_key, value.astype(dtype), restart, state["memory"])


@functools.partial(jax.jit, inline=True)
def _norms(unit_key, write_key, value, restart, memory):
    def step(memory, token):
        k, a, v, start = token
        memory = jnp.where(start[:, None, None, None], 0, memory)
        residual = v - jnp.einsum("bhde,bhd->bhe", memory, k, precision=_HIGHEST)
        memory = memory + a[..., :, None] * residual[..., None, :]
        return memory, jnp.sqrt(jnp.sum(memory * memory, axis=(-2, -1)))

    tokens = (jnp.moveaxis(x, 1, 0) for x in (unit_key, write_key, value, restart))
    _, norms = jax.lax.scan(step, memory, tuple(tokens))
    return jnp.moveaxis(norms, 0, 1)
