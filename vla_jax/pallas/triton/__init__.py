"""Kernels for NVIDIA GPUs from Ampere on, lowered through the Triton back end of Pallas.

One file a primitive for what is computed, in which launches, with which parameters; ``*_kernels``
beside the longer ones for the kernels; ``backend`` below them all.
"""

from __future__ import annotations

from typing import Any

from vla_jax import bundles
from vla_jax.bundles import Attention, Delta, DeltaOutputs, Solve, SolveOutputs, Step
from vla_jax.pallas import common
from vla_jax.pallas.triton import attention, decode, delta_rule, penalty_solve
from vla_jax.plan import Plan

NORMALIZES = False  # a delta rule takes keys as they are


def unsupported(bundle: Any, precision: Any = None, inverse: str = "write") -> str | None:
    """Why these kernels cannot serve these arrays here, or None."""
    del precision  # any is served
    reason = bundles.ungated(bundle, inverse)
    if reason is not None:
        return reason
    if isinstance(bundle, Step):
        return decode.unsupported(bundle)
    tokens = bundles.tokens(bundle).values()
    dim = max(x.shape[-1] for x in tokens)
    largest = min(max(delta_rule.TABLE), max(penalty_solve.TABLE))
    if dim > largest:
        return f"a head dimension of {dim} is above {largest}"
    return common.unserved(tokens)


def _solve_forward(plan: Plan, inputs: Solve):
    solved = penalty_solve.forward(inputs, _solve_options(plan))
    return SolveOutputs(solved.solution, solved.penalty), solved.kept


def _solve_backward(plan: Plan, inputs: Solve, kept, cotangents: SolveOutputs) -> Solve:
    given = penalty_solve.Cotangents(*cotangents)
    return penalty_solve.backward(inputs, None, kept, given, _solve_options(plan))


def _solve_options(plan: Plan) -> penalty_solve.Options:
    return penalty_solve.Options(precision=plan.policy.requested)


def _delta_forward(plan: Plan, inputs: Delta):
    swept = delta_rule.forward(inputs, _delta_options(plan), delta_rule.Extra())
    return DeltaOutputs(swept.out, swept.memory), swept.residuals


def _delta_backward(plan: Plan, inputs: Delta, residuals, cotangents: DeltaOutputs) -> Delta:
    given, extra = delta_rule.Cotangents(*cotangents), delta_rule.Extra()
    d = delta_rule.backward(inputs, residuals, given, _delta_options(plan), extra).inputs
    return d._replace(write_key=d.write_key.astype(inputs.write_key.dtype))


def _delta_options(plan: Plan) -> delta_rule.Options:
    return delta_rule.Options(precision=plan.policy.requested)


RULES = {
    Solve: common.rule(_solve_forward, _solve_backward),
    Delta: common.rule(_delta_forward, _delta_backward),
    Attention: common.rule(attention.forward, attention.backward),
    Step: common.rule(decode.forward),
}
