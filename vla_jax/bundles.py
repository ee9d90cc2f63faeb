"""The arrays that a primitive takes and gives, by name, and the axes of each.

A bundle is a tuple of arrays in which an absent one is None. The same type holds the cotangents.
Code between a public function and a kernel passes bundles on and names no array it does not use.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from vla_jax.types import Array, VLAState

# The axes of every array that goes into a primitive or comes out of one (letters: ``types``).
AXES = {
    "rhs": "B T Hq D",
    "query": "B T Hq D",
    "key": "B T H D",
    "write_key": "B T H D",
    "value": "B T H E",
    "direction": "B T H D",
    "lambda0": "H",
    "memory": "B H D E",
    "penalty": "B H D D",
    "key_sum": "B H D",
    "weight": "B T H",
    "beta": "B T H",
    "log_decay": "B T H",
    "segment_ids": "B T",
    "mask": "B T",
    "solution": "B T Hq D",
    "out": "B T Hq E",
    # What a state caches for decoding.
    "inverse": "B H D D",
    "inverse_lambda0": "B H",
    "inverse_age": "B H",
    "penalty_rest": "B H D D",
}
STATE = ("memory", "penalty", "key_sum")  # what defines a state


class SolveOutputs(NamedTuple):
    """What ``penalty_solve`` returns; also their cotangents."""

    solution: Array
    penalty: Array


class DeltaOutputs(NamedTuple):
    """What ``delta_rule`` returns; also their cotangents."""

    out: Array
    memory: Array


class AttentionOutputs(NamedTuple):
    """What the whole recurrence returns; also their cotangents."""

    out: Array
    memory: Array
    penalty: Array
    key_sum: Array


class Solve(NamedTuple):
    """Arrays of ``penalty_solve``; also their cotangents. The penalty is symmetric and wide."""

    rhs: Array
    direction: Array
    lambda0: Array
    penalty: Array
    segment_ids: Array | None = None
    weight: Array | None = None
    log_decay: Array | None = None


class Delta(NamedTuple):
    """Arrays of ``delta_rule``; also their cotangents. The memory is wide."""

    query: Array
    key: Array
    write_key: Array
    value: Array
    memory: Array
    segment_ids: Array | None = None
    log_decay: Array | None = None


class Attention(NamedTuple):
    """Arrays of ``vla_attention``; also their cotangents. ``direction`` None is ``k̂ / √D``."""

    query: Array
    key: Array
    value: Array
    direction: Array | None
    lambda0: Array
    memory: Array
    penalty: Array
    key_sum: Array
    segment_ids: Array | None = None
    beta: Array | None = None
    log_decay: Array | None = None


class Step(NamedTuple):
    """Arrays of ``vla_step``: those of ``Attention`` without the time axis, and a whole state."""

    query: Array
    key: Array
    value: Array
    direction: Array | None
    lambda0: Array
    state: VLAState
    beta: Array | None = None
    log_decay: Array | None = None


Bundle: TypeAlias = Solve | Delta | Attention

# The public function of each bundle, and the arrays whose dtypes decide how products are computed.
OPERATIONS: dict[type, str] = {
    Solve: "penalty_solve",
    Delta: "delta_rule",
    Attention: "vla_attention",
    Step: "vla_step",
}
ARITHMETIC: dict[type, tuple[str, ...]] = {
    Solve: ("rhs", "direction"),
    Delta: ("query", "key", "write_key", "value"),
    Attention: ("query", "key", "value"),
}
GATES = ("weight", "beta", "log_decay")


def tokens(bundle: Bundle | Step) -> dict[str, Array]:
    """The arrays of the bundle that have a token's features, without those absent."""
    features = ("B T H D", "B T Hq D", "B T H E")
    fields = bundle._asdict().items()
    return {name: x for name, x in fields if x is not None and AXES.get(name) in features}


def gates(bundle: Bundle | Step) -> dict[str, Array]:
    """The weights and decays of the bundle, without those absent."""
    given = {name: getattr(bundle, name, None) for name in GATES}
    return {name: x for name, x in given.items() if x is not None}


def needs_gates(bundle: Bundle) -> bool:
    """Whether the bundle has gates, or several right-hand sides a head, which is their solver's."""
    return grouped(bundle) or bool(gates(bundle))


def ungated(bundle: Bundle | Step, inverse: str = "write") -> str | None:
    """Why kernels without gates cannot serve the bundle; None if they can."""
    given = list(gates(bundle))
    given += ["inverse='read'"] if inverse == "read" else []
    given += ["grouped right-hand sides"] if grouped(bundle) else []
    return f"its kernels have no {' and no '.join(given)}" if given else None


def grouped(bundle: Bundle | Step) -> bool:
    """Whether it is a solve with several right-hand sides a head."""
    return isinstance(bundle, Solve) and bundle.rhs.shape[2] != bundle.direction.shape[2]
