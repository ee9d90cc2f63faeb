"""From arguments to what is computed: the static plan, every check of the arrays, the mask.

A primitive takes one bundle of arrays (``bundles``) and one ``Plan`` of all that is static.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import bundles, implementations, numerics, validation
from vla_jax.bundles import AXES, STATE, Attention, Bundle, Delta, Solve, Step
from vla_jax.types import INVERSES, READOUTS, WRITE_GAINS, Array, DTypeLike, VLAState


@dataclasses.dataclass(frozen=True)
class Variant:
    """The options of the recurrence that change its result (``docs/derivation.md``, variants).

    With ``inverse="read"`` there is no write gain, which is None then, and no ratio.
    """

    write_gain: str | None = "unit"
    readout: str = "ratio"
    eps: float = 1e-6
    inverse: str = "write"


# The initial penalty where none is given: the published one, and MesaNet's.
LAMBDA0 = {"write": 0.1, "read": 1.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call: who computes, in which arithmetic and steps, and what."""

    implementation: str
    policy: numerics.Policy
    chunk_size: int | None = None
    variant: Variant = Variant()
    normalize_key: bool = False  # by the delta rule itself, which gets them as they are


def make(
    bundle: Bundle,
    implementation: Any,
    chunk_size: Any,
    precision: Any,
    variant: Variant = Variant(),
) -> Plan:
    """The plan for checked arrays.

    Raises:
      ValueError, TypeError: if an option has no such value.
      NotImplementedError: if the named implementation cannot serve these arrays here.
    """
    if chunk_size is not None:
        validation.positive("chunk_size", chunk_size, integer=True)
    deciding = (getattr(bundle, name) for name in bundles.ARITHMETIC[type(bundle)])
    policy = numerics.policy(*deciding, precision=precision)
    chosen = implementations.choose(
        implementation, bundle, chunk_size, variant.inverse, policy.requested
    )
    return Plan(chosen, policy, chunk_size, variant)


def variant(write_gain: Any, readout: Any, eps: Any, inverse: Any, dtype: DTypeLike) -> Variant:
    """The checked variant, None replaced by the default; ``eps`` is to be positive in ``dtype``.

    Raises:
      ValueError, TypeError: naming the option that has no such value.
    """
    validation.choice("inverse", inverse, INVERSES)
    validation.floor("eps", eps, dtype)
    if inverse == "read":
        for name, value, only in (("write_gain", write_gain, None), ("readout", readout, "none")):
            if value is not None and not (isinstance(value, str) and value == only):
                raise ValueError(
                    f"{name} must be {only!r} or left out with inverse='read', which has none; "
                    f"got {value!r}"
                )
        return Variant(None, "none", float(eps), inverse)
    write_gain = "unit" if write_gain is None else write_gain
    readout = "ratio" if readout is None else readout
    validation.choice("write_gain", write_gain, WRITE_GAINS)
    validation.choice("readout", readout, READOUTS)
    return Variant(write_gain, readout, float(eps), inverse)


# --- checks ------------------------------------------------------------------------------------


class Sizes(dict[str, int]):
    """What each axis letter stands for in one call, learned from the arrays checked so far."""

    def __init__(self, *, time: bool = True, **known: int):
        super().__init__(known)
        self._absent = () if time else ("T",)

    def axes(self, name: str) -> list[str]:
        """The axis letters of the array called ``name`` in ``AXES``."""
        return [axis for axis in AXES[name].split() if axis not in self._absent]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that these sizes give the array called ``name``."""
        return tuple(self[axis] for axis in self.axes(name))

    def check(self, name: str, x: Any, *, label: str | None = None) -> Array:
        """``x`` as a floating-point array with the axes of ``name``, whose sizes are learned.

        Raises:
          TypeError, ValueError: naming ``label`` (by default ``name``), found and wanted.
        """
        axes = self.axes(name)
        x = validation.array(
            label or name, x, [self.get(axis) for axis in axes], f"[{', '.join(axes)}]"
        )
        self.update(zip(axes, x.shape, strict=True))
        if {"Hq", "H"} & set(axes) and {"Hq", "H"} <= set(self):
            validation.query_heads(self["Hq"], self["H"])
        return x


def tokens_of(sizes: Sizes, **arrays: Any) -> list[Any]:
    """Arrays by name, in their order, checked against each other, which fixes every size.

    None stays None.

    Raises:
      TypeError, ValueError: naming an argument: the one that two others contradict, or the later.
    """
    claims = {}
    for name, x in arrays.items():
        axes, shape = sizes.axes(name), getattr(x, "shape", ())
        claims[name] = set(zip(axes, shape, strict=True)) if len(axes) == len(shape) else set()

    def outvoted(name: str) -> bool:
        others = collections.Counter(c for n, of in claims.items() if n != name for c in of)
        settled = {axis: size for (axis, size), votes in others.items() if votes > 1}
        return any(settled.get(axis, size) != size for axis, size in claims[name])

    checked = {
        name: None if arrays[name] is None else sizes.check(name, arrays[name])
        for name in sorted(arrays, key=outvoted)
    }
    return [checked[name] for name in arrays]


def state_of(state: Any, name: str, sizes: Sizes, dtype: DTypeLike) -> VLAState:
    """A state with its fields in ``dtype``; those of its cache may be None.

    Raises:
      TypeError, ValueError: naming the field that is no floating-point array of its shape.
    """
    validation.instance(name, state, VLAState)
    return VLAState(
        **{
            field: sizes.check(field, x, label=f"{name}.{field}").astype(dtype)
            for field, x in vars(state).items()
            if x is not None or field in STATE
        }
    )


def initial_fields(state: Any, sizes: Sizes, dtype: DTypeLike) -> dict[str, Array]:
    """Memory, penalty and key sum to start from: zeros for None, the penalty whole.

    What decoding kept in ``penalty_rest`` is a part of the penalty.

    Raises:
      TypeError, ValueError: as ``state_of``, naming ``initial_state``.
    """
    if state is None:
        return {field: jnp.zeros(sizes.shape(field), dtype) for field in STATE}
    if not isinstance(state, VLAState):
        raise TypeError(f"initial_state must be a VLAState or None, got {type(state).__name__}")
    state = state_of(state, "initial_state", sizes, dtype)
    initial = {field: getattr(state, field) for field in STATE}
    if state.penalty_rest is not None:
        initial["penalty"] = initial["penalty"] + state.penalty_rest
    return initial


def initial(name: str, x: Any, sizes: Sizes, dtype: DTypeLike) -> Array:
    """The state array called ``name`` to start from, in ``dtype``; zeros for None."""
    if x is None:
        return jnp.zeros(sizes.shape(name), dtype)
    return sizes.check(name, x, label=f"initial_{name}").astype(dtype)


def gate(name: str, x: Any, sizes: Sizes, mask: Any = None) -> Array | None:
    """``weight``, ``beta`` or ``log_decay``, of any floating-point dtype; None stays so.

    Values are looked at where that costs no copy from a device: in NumPy arrays.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    if x is None:
        return None
    checked = sizes.check(name, x)
    if isinstance(x, np.ndarray):
        validation.gate_values(name, x, mask)
    return checked


def penalty_solve(
    rhs: Any, direction: Any, *, lambda0: Any, weight: Any, log_decay: Any, initial_penalty: Any,
    segment_ids: Any, **options: Any,
) -> tuple[Plan, Solve]:  # fmt: skip
    """The plan and arrays of ``vla_jax.penalty_solve``, which lists the arguments and errors."""
    sizes = Sizes()
    rhs, direction = sizes.check("rhs", rhs), sizes.check("direction", direction)
    validation.query_heads(sizes["Hq"], sizes["H"], "rhs", "direction")
    dtype = numerics.accumulator_dtype(rhs.dtype, direction.dtype)
    bundle = Solve(
        rhs,
        direction,
        validation.lambda0(lambda0, sizes["H"], dtype),
        initial("penalty", initial_penalty, sizes, dtype),
        validation.segments(segment_ids, None, sizes["B"], sizes["T"])[0],
        gate("weight", weight, sizes),
        gate("log_decay", log_decay, sizes),
    )
    return make(bundle, **options), bundle


def delta_rule(
    query: Any, key: Any, write_key: Any, value: Any, *, log_decay: Any, initial_memory: Any,
    segment_ids: Any, **options: Any,
) -> tuple[Plan, Delta]:  # fmt: skip
    """The plan and arrays of ``vla_jax.delta_rule``, which lists the arguments and errors."""
    sizes = Sizes()
    query, key, write_key, value = tokens_of(
        sizes, query=query, key=key, write_key=write_key, value=value
    )
    dtype = numerics.accumulator_dtype(*(x.dtype for x in (query, key, write_key, value)))
    bundle = Delta(
        query,
        key,
        write_key,
        value,
        initial("memory", initial_memory, sizes, dtype),
        validation.segments(segment_ids, None, sizes["B"], sizes["T"])[0],
        gate("log_decay", log_decay, sizes),
    )
    return make(bundle, **options), bundle


def unit_delta_rule(
    query: Any, key: Any, value: Any, beta: Array | None, **options: Any
) -> tuple[Plan, Delta]:
    """``delta_rule`` with unit keys and the write key ``β k̂``, by kernels from the keys given.

    Elsewhere the unit keys are wide: in 16 bits one could be longer than 1, and ``β = 2`` diverge.
    """
    dtype = numerics.accumulator_dtype(query.dtype, key.dtype, value.dtype)
    unit_key = numerics.normalize(key.astype(dtype))
    write_key = numerics.weighted(unit_key, beta)
    plan, bundle = delta_rule(query, key, write_key, value, **options)
    normalizes = getattr(implementations.module(plan.implementation), "normalizes", None)
    if normalizes is not None and normalizes(bundle, plan.policy.requested):
        return dataclasses.replace(plan, normalize_key=True), bundle
    return delta_rule(query, unit_key, write_key, value, **options)


def attention(
    query: Any, key: Any, value: Any, direction: Any, *, beta: Any, log_decay: Any, inverse: Any,
    lambda0: Any, initial_state: Any, segment_ids: Any, mask: Any, write_gain: Any, readout: Any,
    eps: Any, axis_name: str | None = None, **options: Any,
) -> tuple[Plan, Attention, Array | None]:  # fmt: skip
    """The plan, arrays and mask of ``vla_jax.vla_attention``, which lists arguments and errors."""
    sizes = Sizes()
    query, key, value, direction = tokens_of(
        sizes, query=query, key=key, value=value, direction=direction
    )
    dtype = numerics.accumulator_dtype(query.dtype, key.dtype, value.dtype)
    chosen = variant(write_gain, readout, eps, inverse, dtype)
    given = mask
    segment_ids, mask = validation.segments(segment_ids, mask, sizes["B"], sizes["T"], axis_name)
    bundle = Attention(
        query,
        key,
        value,
        direction,
        validation.lambda0(LAMBDA0[inverse] if lambda0 is None else lambda0, sizes["H"], dtype),
        **initial_fields(initial_state, sizes, dtype),
        segment_ids=segment_ids,
        beta=gate("beta", beta, sizes, given),
        log_decay=gate("log_decay", log_decay, sizes, given),
    )
    return make(bundle, **options, variant=chosen), bundle, mask


def step(
    query: Any, key: Any, value: Any, direction: Any, state: Any, *, beta: Any, log_decay: Any,
    inverse: Any, lambda0: Any, write_gain: Any, readout: Any, eps: Any, implementation: Any,
) -> tuple[Plan, Step]:  # fmt: skip
    """The plan and arrays of ``vla_jax.vla_step``, which lists the arguments and errors."""
    sizes = Sizes(time=False)
    query, key, value, direction = tokens_of(
        sizes, query=query, key=key, value=value, direction=direction
    )
    if not isinstance(state, VLAState):
        raise TypeError(
            f"state must be a VLAState, got {type(state).__name__}; init_state makes a fresh one"
        )
    dtypes = [getattr(x, "dtype", jnp.float32) for x in (query, key, value, state.memory)]
    dtype = numerics.accumulator_dtype(*dtypes)
    chosen = variant(write_gain, readout, eps, inverse, dtype)
    inputs = Step(
        query,
        key,
        value,
        direction,
        validation.lambda0(LAMBDA0[inverse] if lambda0 is None else lambda0, sizes["H"], dtype),
        state_of(state, "state", sizes, dtype),
        gate("beta", beta, sizes),
        gate("log_decay", log_decay, sizes),
    )
    name = implementations.choose_step(implementation, inputs, inverse)
    return Plan(name, numerics.policy(query, key, value), variant=chosen), inputs


# --- masks and axes ----------------------------------------------------------------------------


def masked(bundle: Bundle, mask: Array | None) -> Any:
    """The bundle with tokens and gates zero where ``mask [B, T]`` is False.

    Such a token writes nothing (β = 0), and nothing decays (log γ = 0).
    """
    if mask is None:
        return bundle
    tokens = bundles.tokens(bundle) | bundles.gates(bundle)
    return bundle._replace(**{name: numerics.masked(x, mask) for name, x in tokens.items()})


def partition_specs(**mesh_axes: str | None) -> dict[str, jax.P]:
    """How each array in ``AXES`` is sharded where ``B``, ``T`` or ``H`` is over a mesh axis."""
    mesh_axes.setdefault("Hq", mesh_axes.get("H"))
    return {
        name: jax.P(*(mesh_axes.get(axis) for axis in axes.split())) for name, axes in AXES.items()
    }
