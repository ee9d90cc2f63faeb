"""The arrays that a primitive takes and gives, by name, and the axes of each.

A bundle is a tuple of arrays in which an absent one is None. The same type holds the cotangents.
Code between a public function and a kernel passes bundles on and names no array it does not use.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from vla_jax.types import Array, VLAState

# The axes of every array that goes into a primitive or comes out of one (letters: ``types``).
AXES = {
    "rhs": "B T H D",
    "query": "B T Hq D",
    "key": "B T H D",
    "write_key": "B T H D",
    "value": "B T H E",
    "direction": "B T H D",
    "lambda0": "H",
    "memory": "B H D E",
    "penalty": "B H D D",
    "key_sum": "B H D",
    "segment_ids": "B T",
    "mask": "B T",
    "solution": "B T H D",
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


class Delta(NamedTuple):
    """Arrays of ``delta_rule``; also their cotangents. The memory is wide."""

    query: Array
    key: Array
    write_key: Array
    value: Array
    memory: Array
    segment_ids: Array | None = None


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


class Step(NamedTuple):
    """Arrays of ``vla_step``: those of ``Attention`` without the time axis, and a whole state."""

    query: Array
    key: Array
    value: Array
    direction: Array | None
    lambda0: Array
    state: VLAState


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


def tokens(bundle: Bundle) -> dict[str, Array]:
    """The floating-point arrays of the bundle that have a time axis, without those absent."""
    fields = bundle._asdict().items()
    return {name: x for name, x in fields if x is not None and "T H" in AXES[name]}
