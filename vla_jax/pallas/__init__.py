"""``implementation="pallas"``: kernels written in Pallas, a family of them for each back end.

A family is a module with ``RULES``, as an implementation is, ``unsupported(bundle, precision,
inverse)``, and ``NORMALIZES``: whether its delta rule can scale keys to unit length itself. It is
imported when it is asked for: Pallas's back ends come and go with versions of JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

from vla_jax.bundles import OPERATIONS, Attention, Delta, Solve, Step
from vla_jax.implementations import Rule
from vla_jax.pallas.common import export_checks

__all__ = ["export_checks"]

# With gates: the recurrence is composed of a solve and a delta rule that take 16-bit arrays as they
# are and normalise keys themselves.
NORMALIZES = True

# The first that serves is taken.
FAMILIES = {"mosaic": "vla_jax.pallas.mosaic", "triton": "vla_jax.pallas.triton"}


def unsupported(bundle: Any, chunk_size: int | None) -> str | None:
    """Why no kernels can serve these arrays here, with every family's reason; None if some can."""
    return unsupported_gates(bundle, chunk_size, None, "write")


def unsupported_gates(
    bundle: Any, chunk_size: int | None, precision: Any, inverse: str
) -> str | None:
    """As ``unsupported``, of arrays that may have gates or the inverse at the read."""
    if chunk_size is not None:
        return f"chunk_size must be None: tiles come from tables of parameters; got {chunk_size}"
    return _choose(bundle, precision, inverse)[1]


def normalizes(bundle: Any, precision: Any) -> bool:
    """Whether the family that serves these arrays takes keys that are not normalised."""
    family = _choose(bundle, precision)[0]
    return family is not None and family.NORMALIZES


def _choose(bundle: Any, precision: Any, inverse: str = "write") -> tuple[Any, str | None]:
    """The family that serves, or why none does."""
    reasons = []
    for name, module in FAMILIES.items():
        try:
            family = importlib.import_module(module)
        except ImportError as error:
            if not (error.name or "").startswith("jax.experimental.pallas"):
                raise
            reasons.append(f"{name}: this version of JAX has no {error.name}")
            continue
        reason = family.unsupported(bundle, precision, inverse)
        if reason is None:
            return family, None
        reasons.append(f"{name}: {reason}")
    return None, "; ".join(reasons)


def _rule(plan: Any, bundle: Any) -> Rule:
    family, reason = _choose(bundle, plan.policy.requested)
    if family is None:
        raise NotImplementedError(
            f"no Pallas kernels can serve {OPERATIONS[type(bundle)]}: {reason}"
        )
    return family.RULES[type(bundle)]


def _forward(plan, inputs):
    return _rule(plan, inputs).forward(plan, inputs)


def _backward(plan, inputs, saved, cotangents):
    return _rule(plan, inputs).backward(plan, inputs, saved, cotangents)


RULES: dict[type, Rule] = {kind: Rule(_forward, _backward) for kind in (Solve, Delta, Attention)}
RULES[Step] = Rule(_forward)
