"""``penalty_solve`` and ``delta_rule``, and how every primitive is differentiated: once.

An implementation supplies a forward and a closed-form backward (``implementations.Rule``); the one
custom derivative rule that joins them is here. The reference needs none: JAX differentiates it.

What the rule keeps for the backward beside the inputs is named for ``jax.checkpoint`` policies:
``"vla_solution"`` (of the solve) and ``"vla_memory"`` (of the delta rule).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from vla_jax import implementations, meshes, numerics
from vla_jax import plan as planning
from vla_jax.bundles import AXES, Delta, Solve
from vla_jax.types import Array, ArrayLike, Implementation, PrecisionLike

_SAVED = {Solve: "vla_solution", Delta: "vla_memory"}


@jax.custom_jvp
def once(*arrays: Any) -> Any:
    """Identity that refuses to be differentiated."""
    return arrays


@once.defjvp
def _once_jvp(primals, tangents):
    raise NotImplementedError(
        "second-order differentiation needs implementation='reference': "
        "the other implementations have a closed-form first derivative only"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(plan, inputs):
    return _forward(plan, inputs)[0]


@numerics.broadcasts
def _forward(plan, inputs):
    (inputs,) = once(inputs)
    outputs, saved = (
        implementations.module(plan.implementation).RULES[type(inputs)].forward(plan, inputs)
    )
    return outputs, (inputs, named(saved, inputs))


def named(saved: Any, inputs: Any) -> Any:
    """What a primitive's forward has saved, under its name for ``jax.checkpoint`` policies."""
    name = _SAVED.get(type(inputs))
    return saved if name is None else checkpoint_name(saved, name)


@numerics.broadcasts
def _backward(plan, residuals, cotangents):
    (inputs, saved), cotangents = once(residuals, cotangents)
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    return (narrow(rule.backward(plan, inputs, saved, cotangents), inputs),)


def narrow(gradients: Any, inputs: Any) -> Any:
    """The cotangents of a bundle in the dtypes of its arrays; ``segment_ids`` has none."""
    given = {
        name: getattr(gradients, name).astype(x.dtype)
        for name, x in inputs._asdict().items()
        if x is not None and name != "segment_ids"
    }
    return gradients._replace(**given, segment_ids=None)


_differentiable.defvjp(_forward, _backward)


def serves(plan: planning.Plan, primitive: type) -> bool:
    """Whether the implementation has a rule for the primitive itself."""
    return primitive in implementations.module(plan.implementation).RULES


def normalizes(plan: planning.Plan) -> bool:
    """Whether the parts of a recurrence with gates take 16-bit arrays, and keys as given."""
    return getattr(implementations.module(plan.implementation), "NORMALIZES", False)


def run(plan: planning.Plan, inputs: Any) -> Any:
    """The outputs of one primitive, differentiable, on checked arrays; wide where the state is."""
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    if rule.backward is None:
        return rule.forward(plan, inputs)[0]
    return _differentiable(plan, inputs)


def first_order_only(function):
    """Gives ``function`` the error for forward-mode differentiation that names the remedy."""

    @functools.wraps(function)
    @numerics.broadcasts
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if "forward-mode" in str(error):
                raise NotImplementedError(
                    "forward-mode differentiation (jvp, jacfwd, hessian) needs "
                    "implementation='reference': the other implementations have a closed-form "
                    "reverse-mode derivative only"
                ) from error
            raise

    return wrapped


@functools.partial(jax.jit, static_argnums=0)
def _jitted(plan, inputs):
    inputs = numerics.varying_alike(inputs)
    if isinstance(inputs, Solve):
        inputs = inputs._replace(penalty=numerics.symmetrize(inputs.penalty))
    outputs = run(plan, inputs)
    first, *rest = outputs
    return type(outputs)(first.astype(inputs[0].dtype), *rest)


@first_order_only
@meshes.explicit(AXES["solution"], AXES["penalty"])
def penalty_solve(
    rhs: Array,
    direction: Array,
    *,
    lambda0: ArrayLike,
    weight: Array | None = None,
    log_decay: Array | None = None,
    initial_penalty: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
) -> tuple[Array, Array]:
    """Causal regularised least squares: ``α_t = (λ₀ I + P_t)⁻¹ rhs_t``, ``P ← γ P + β u uᵀ``.

    Without weights and decay ``P_t`` is the sum of ``u uᵀ``, over ``initial_penalty``.

    With ``rhs`` the unit keys this is VLA's write direction before normalisation; with the queries
    in their place it is the exact solution that MesaNet approximates (von Oswald et al., 2025).
    Equations (1) and (2) of ``docs/derivation.md``.

    Args:
      rhs: ``[B, T, Hq, D]``, floating point; Hq a multiple of H, as the queries of ``delta_rule``.
      direction: ``[B, T, H, D]``, the ``u`` of the penalty, used as given.
      lambda0: scalar or ``[H]``, positive: the initial penalty, which does not decay. What float32
        makes of a tiny one: ``docs/derivation.md``, section 2.
      weight: ``[B, T, H]``, the ``β`` of each direction, not negative. None means 1.
      log_decay: ``[B, T, H]``, ``log γ``, not positive. None means 0. With weight, decay or grouped
        right-hand sides the solve is by conjugate gradients, whose residual
        ``vla_jax.diagnostics`` shows (float64 and ``"reference"``: by Cholesky).
      initial_penalty: ``[B, H, D, D]``, symmetric (only its symmetric part is used), without the
        ``lambda0`` term. It belongs to the first segment. Default zeros.
      segment_ids: ``[B, T]`` integers that do not decrease: where the id changes the penalty
        restarts from zero.
      chunk_size: tokens of a chunk of ``"xla"`` and ``"associative"``; changes speed and memory,
        of the result no more than its rounding. ``"reference"`` has no chunks, and the GPU kernels
        refuse it.
      implementation: ``None`` or one of ``"reference"``, ``"xla"``, ``"associative"``,
        ``"pallas"``, ``"triton"``, as in ``vla_attention``.
      precision: of the matrix products, as in ``jax.lax``; by default float32-accurate for float32
        inputs, tf32 (where the device has it) for 16-bit inputs. ``"reference"`` has no matrix
        products and computes in its dtype always.

    Returns:
      ``(solution, penalty)``: ``[B, T, Hq, D]`` in the dtype of ``rhs``; that of the last segment,
      without the ``lambda0`` term, ``[B, H, D, D]``, float32 (float64 with float64 inputs).

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if the named implementation cannot serve here, and for forward-mode or
        second-order differentiation of any but ``"reference"``.
    """
    return tuple(
        _jitted(
            *planning.penalty_solve(
                rhs, direction, lambda0=lambda0, weight=weight, log_decay=log_decay,
                initial_penalty=initial_penalty, segment_ids=segment_ids, chunk_size=chunk_size,
                implementation=implementation, precision=precision,
            )
        )
    )  # fmt: skip


@first_order_only
@meshes.explicit(AXES["out"], AXES["memory"])
def delta_rule(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    *,
    log_decay: Array | None = None,
    initial_memory: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
) -> tuple[Array, Array]:
    """The generalised delta rule: ``S ← γ S + (v_t − γ S k_t) a_tᵀ``, ``o_t = S q_t``.

    ``write_key = β key`` with unit keys is DeltaNet (Yang et al., 2024). Equations (4) and (5) of
    ``docs/derivation.md``, without the ratio.

    Args:
      query: ``[B, T, Hq, D]``, Hq a multiple of H: head ``h`` reads state ``h // (Hq / H)``.
      key: ``[B, T, H, D]``, used as given (not normalised).
      write_key: ``[B, T, H, D]``, the ``a`` above.
      value: ``[B, T, H, E]``.
      log_decay: ``[B, T, H]``, ``log γ`` of each token, not positive. None means no decay.
      initial_memory: ``[B, H, D, E]``, key dimension first; of the first segment. Default zeros.
      segment_ids: ``[B, T]`` integers that do not decrease: where the id changes the memory
        restarts from zero.
      chunk_size, implementation, precision: as in ``penalty_solve``.

    Returns:
      ``(out, memory)``: ``[B, T, Hq, E]`` in the dtype of ``query``, and the memory of the last
      segment, ``[B, H, D, E]``, float32 (float64 with float64 inputs).

    Raises:
      As ``penalty_solve``.
    """
    return tuple(
        _jitted(
            *planning.delta_rule(
                query, key, write_key, value, log_decay=log_decay, initial_memory=initial_memory,
                segment_ids=segment_ids, chunk_size=chunk_size, implementation=implementation,
                precision=precision,
            )
        )
    )  # fmt: skip


@first_order_only
def unit_delta_rule(
    query: Array, key: Array, value: Array, beta: Array | None, **options: Any
) -> tuple[Array, Array]:
    """``delta_rule`` with the unit keys of ``key`` and the write key ``β k̂``, β ``[B, T, H]``."""
    options = dict(chunk_size=None, implementation=None, precision=None) | options
    return tuple(_jitted(*planning.unit_delta_rule(query, key, value, beta, **options)))
