"""From arguments to what is computed: the static plan, every check of the arrays, the mask.

A primitive takes one bundle of arrays (``bundles``) and one ``Plan`` of all that is static.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import bundles, implementations, numerics, validation
from vla_jax.bundles import AXES, STATE, Attention, Bundle, Delta, Solve, Step
from vla_jax.types import READOUTS, WRITE_GAINS, Array, DTypeLike, VLAState


@dataclasses.dataclass(frozen=True)
class Variant:
    """The options of the recurrence that change its result (``docs/derivation.md``, variants)."""

    write_gain: str = "unit"
    readout: str = "ratio"
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call: who computes, in which arithmetic and steps, and what."""

    implementation: str
    policy: numerics.Policy
    chunk_size: int | None = None
    variant: Variant = Variant()


def make(bundle: Bundle, implementation: Any, chunk_size: Any, precision: Any) -> Plan:
    """The plan for checked arrays.

    Raises:
      ValueError, TypeError: if an option has no such value.
      NotImplementedError: if the named implementation cannot serve these arrays here.
    """
    if chunk_size is not None:
        validation.positive("chunk_size", chunk_size, integer=True)
    deciding = (getattr(bundle, name) for name in bundles.ARITHMETIC[type(bundle)])
    policy = numerics.policy(*deciding, precision=precision)
    return Plan(implementations.choose(implementation, bundle, chunk_size), policy, chunk_size)


def variant(write_gain: Any, readout: Any, eps: Any, dtype: DTypeLike) -> Variant:
    """The checked variant; ``eps`` is to be positive in ``dtype``.

    Raises:
      ValueError, TypeError: naming the option that has no such value.
    """
    validation.choice("write_gain", write_gain, WRITE_GAINS)
    validation.choice("readout", readout, READOUTS)
    validation.floor("eps", eps, dtype)
    return Variant(write_gain, readout, float(eps))


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
        if "Hq" in axes:
            validation.query_heads(self["Hq"], self["H"])
        return x


def tokens_of(query: Any, key: Any, value: Any, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Query, key and value, checked against each other, which fixes every size.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    key = sizes.check("key", key)
    return sizes.check("query", query), key, sizes.check("value", value)


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


def penalty_solve(
    rhs: Any,
    direction: Any,
    *,
    lambda0: Any,
    initial_penalty: Any,
    segment_ids: Any,
    **options: Any,
) -> tuple[Plan, Solve]:
    """The plan and arrays of ``vla_jax.penalty_solve``, which lists the arguments and errors."""
    sizes = Sizes()
    rhs, direction = sizes.check("rhs", rhs), sizes.check("direction", direction)
    dtype = numerics.accumulator_dtype(rhs.dtype, direction.dtype)
    penalty = initial("penalty", initial_penalty, sizes, dtype)
    bundle = Solve(
        rhs,
        direction,
        validation.lambda0(lambda0, sizes["H"], dtype),
        penalty,
        validation.segment_ids(segment_ids, sizes["B"], sizes["T"]),
    )
    return make(bundle, **options), bundle


def delta_rule(
    query: Any, key: Any, write_key: Any, value: Any, *, initial_memory: Any, segment_ids: Any,
    **options: Any,
) -> tuple[Plan, Delta]:  # fmt: skip
    """The plan and arrays of ``vla_jax.delta_rule``, which lists the arguments and errors."""
    sizes = Sizes()
    query, key, value = tokens_of(query, key, value, sizes)
    write_key = sizes.check("write_key", write_key)
    dtype = numerics.accumulator_dtype(*(x.dtype for x in (query, key, write_key, value)))
    memory = initial("memory", initial_memory, sizes, dtype)
    ids = validation.segment_ids(segment_ids, sizes["B"], sizes["T"])
    bundle = Delta(query, key, write_key, value, memory, ids)
    return make(bundle, **options), bundle


def attention(
    query: Any, key: Any, value: Any, direction: Any, *, lambda0: Any, initial_state: Any,
    segment_ids: Any, mask: Any, write_gain: Any, readout: Any, eps: Any, **options: Any,
) -> tuple[Plan, Attention, Array | None]:  # fmt: skip
    """The plan, arrays and mask of ``vla_jax.vla_attention``, which lists arguments and errors."""
    sizes = Sizes()
    query, key, value = tokens_of(query, key, value, sizes)
    if direction is not None:
        direction = sizes.check("direction", direction)
    dtype = numerics.accumulator_dtype(query.dtype, key.dtype, value.dtype)
    bundle = Attention(
        query,
        key,
        value,
        direction,
        validation.lambda0(lambda0, sizes["H"], dtype),
        **initial_fields(initial_state, sizes, dtype),
        segment_ids=validation.segment_ids(segment_ids, sizes["B"], sizes["T"]),
    )
    mask = validation.mask(mask, sizes["B"], sizes["T"])
    plan = make(bundle, **options)
    return (
        dataclasses.replace(plan, variant=variant(write_gain, readout, eps, dtype)),
        bundle,
        mask,
    )


def step(
    query: Any, key: Any, value: Any, direction: Any, state: Any, *, lambda0: Any, write_gain: Any,
    readout: Any, eps: Any, implementation: Any,
) -> tuple[Plan, Step]:  # fmt: skip
    """The plan and arrays of ``vla_jax.vla_step``, which lists the arguments and errors."""
    sizes = Sizes(time=False)
    query, key, value = tokens_of(query, key, value, sizes)
    if direction is not None:
        direction = sizes.check("direction", direction)
    if not isinstance(state, VLAState):
        raise TypeError(
            f"state must be a VLAState, got {type(state).__name__}; init_state makes a fresh one"
        )
    dtypes = [getattr(x, "dtype", jnp.float32) for x in (query, key, value, state.memory)]
    dtype = numerics.accumulator_dtype(*dtypes)
    state = state_of(state, "state", sizes, dtype)
    inputs = Step(
        query, key, value, direction, validation.lambda0(lambda0, sizes["H"], dtype), state
    )
    chosen = implementations.choose_step(implementation, inputs)
    return (
        Plan(
            chosen,
            numerics.policy(query, key, value),
            variant=variant(write_gain, readout, eps, dtype),
        ),
        inputs,
    )


# --- masks and axes ----------------------------------------------------------------------------


def masked(bundle: Bundle, mask: Array | None) -> Any:
    """The bundle with its tokens zero where ``mask [B, T]`` is False: they write nothing."""
    if mask is None:
        return bundle
    tokens = bundles.tokens(bundle)
    return bundle._replace(**{name: numerics.masked(x, mask) for name, x in tokens.items()})


def partition_specs(**mesh_axes: str | None) -> dict[str, jax.P]:
    """How each array in ``AXES`` is sharded where ``B``, ``T`` or ``H`` is over a mesh axis."""
    mesh_axes.setdefault("Hq", mesh_axes.get("H"))
    return {
        name: jax.P(*(mesh_axes.get(axis) for axis in axes.split())) for name, axes in AXES.items()
    }
