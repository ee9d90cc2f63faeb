"""Kernels for Hopper GPUs, through Pallas Mosaic GPU: the delta rule, and the solve with gates.

``chunks`` and ``backend`` are below the files of the primitives. The whole recurrence with gates is
composed of both outside; without gates ``triton`` has it in fewer launches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import bundles, numerics, partitioning
from vla_jax.bundles import Delta, DeltaOutputs, Solve, SolveOutputs, Step
from vla_jax.pallas import common
from vla_jax.pallas.mosaic import backend, delta_rule, penalty_solve
from vla_jax.plan import Plan
from vla_jax.types import Array

COMPUTE_CAPABILITY = "9.0"  # instructions of Hopper, which later GPUs do not have
DIMS = (64, 128)
WIDE = ("rhs", "write_key")  # what may be float32 too
NORMALIZES = True  # a delta rule takes keys as given and scales them


def unsupported(bundle: Any, precision: Any = None, inverse: str = "write") -> str | None:
    """Why these kernels cannot serve these arrays here, or None.

    Of ``Attention`` it is that with gates, or with the inverse at the read, by its parts.
    """
    if isinstance(bundle, Step):
        return "no kernels of vla_step"
    gated = bundles.needs_gates(bundle) or inverse == "read"
    if not (gated or isinstance(bundle, Delta)):
        return f"its {bundles.OPERATIONS[type(bundle)]} is the one with gates"
    for name, x in bundles.tokens(bundle).items():
        served = (jnp.bfloat16, jnp.float32) if name in WIDE else (jnp.bfloat16,)
        if x.dtype not in served:
            names = " and ".join(jnp.dtype(t).name for t in served)
            return f"{name} is {x.dtype.name}; {names} is served"
        if x.shape[-1] not in DIMS:
            return f"{name} has {x.shape[-1]} features; {DIMS[0]} and {DIMS[1]} are served"
    if precision is not None:
        return f"precision is {precision}; products are of 16-bit operands"
    return _unavailable()


def _unavailable() -> str | None:
    if common.interpret():
        return "Mosaic kernels are interpreted in their own tests only"
    if jax.__version_info__ < backend.FIRST_JAX:
        return f"Mosaic kernels need jax {'.'.join(map(str, backend.FIRST_JAX))}"
    reason = common.unavailable()
    if reason is None and common.gpu().compute_capability != COMPUTE_CAPABILITY:
        reason = f"compute capability {common.gpu().compute_capability} is not 9.0 (Hopper)"
    return reason


def _delta_options(inputs: Delta) -> dict[str, Any]:
    """What forward and backward both take, with the write key as one 16-bit array or two."""
    write_key, rest = inputs.write_key, None
    if write_key.dtype != jnp.bfloat16:
        write_key = write_key.astype(jnp.bfloat16)
        rest = (inputs.write_key - write_key).astype(jnp.bfloat16)
    return dict(
        query=inputs.query,
        key=inputs.key,
        write_key=write_key,
        value=inputs.value,
        write_rest=rest,
        log_decay=inputs.log_decay,
        segment_ids=inputs.segment_ids,
        interpret=common.interpret(),
    )


def _delta_forward(plan: Plan, inputs: Delta) -> tuple[DeltaOutputs, Any]:
    options = _delta_options(inputs)
    out, memory, residuals = delta_rule.forward(
        initial_memory=inputs.memory,
        normalize_key=plan.normalize_key,
        solve_rest=options["write_rest"] is not None,
        # Of several devices each would cut a sequence as its own batch and heads want it.
        pieces=1 if partitioning.several() else None,
        **options,
    )
    common.check_elements("delta_rule", (inputs, residuals))
    return DeltaOutputs(out, memory), residuals


def _delta_backward(plan: Plan, inputs: Delta, residuals: Any, cotangents: DeltaOutputs) -> Delta:
    d_query, d_key, d_write_key, d_value, d_memory, d_log_decay = delta_rule.backward(
        residuals,
        d_out=cotangents.out.astype(jnp.bfloat16),
        d_memory=cotangents.memory,
        write_dtype=inputs.write_key.dtype,
        **_delta_options(inputs),
    )
    if plan.normalize_key:
        d_key = _through_normalize(inputs.key, d_key)
    return inputs._replace(
        query=d_query,
        key=d_key,
        write_key=d_write_key,
        value=d_value,
        memory=d_memory,
        segment_ids=None,
        log_decay=d_log_decay,
    )


def _through_normalize(key: Array, d_unit_key: Array) -> Array:
    """The cotangent of a key from that of the unit key."""
    _, pull = jax.vjp(numerics.normalize, key.astype(jnp.float32))
    return pull(d_unit_key.astype(jnp.float32))[0].astype(key.dtype)


def _solve_options() -> dict[str, Any]:
    return dict(pieces=1 if partitioning.several() else None, interpret=common.interpret())


def _solve_forward(plan: Plan, inputs: Solve) -> tuple[SolveOutputs, Any]:
    solution, penalty, saved = penalty_solve.forward(inputs, **_solve_options())
    common.check_elements("penalty_solve", (inputs, saved))
    return SolveOutputs(solution, penalty), saved


def _solve_backward(plan: Plan, inputs: Solve, saved: Any, cotangents: SolveOutputs) -> Solve:
    return penalty_solve.backward(inputs, saved, *cotangents, **_solve_options())


RULES = {
    Solve: common.rule(_solve_forward, _solve_backward),
    Delta: common.rule(_delta_forward, _delta_backward),
}
