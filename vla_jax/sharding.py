"""One sequence over several devices: what each needs of those before it, and nothing else.

A shard of the sequence acts on the state that reaches it as an affine map, and composing such maps
is associative. Per head, a shard passes on ``Σ u uᵀ`` and ``Σ k`` (``D × (D + 1)`` numbers), then
the map of the memory, ``S ← F S + G`` (``D × (D + E)`` numbers): whatever its length. An exclusive
scan over the devices takes ``⌈log₂(P − 1)⌉ + 1`` exchanges with one other device each. The
equations are in ``docs/multi_device.md``.

Batch and heads need nothing from here: shard the inputs of ``vla_attention`` and jit it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import chunkwise, numerics, ops, primitives, reference, validation
from vla_jax.types import (
    Array,
    ArrayLike,
    Implementation,
    PrecisionLike,
    Readout,
    VLAState,
    WriteGain,
)

# --- collectives -------------------------------------------------------------------------------


def axis_size(axis_name: str) -> int:
    """The devices of a mesh axis.

    Raises:
      TypeError: if ``axis_name`` is not a string.
      ValueError: outside of ``jax.shard_map`` over such an axis.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a string, got {type(axis_name).__name__}")
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name = {axis_name!r} is no mesh axis here: call this inside jax.shard_map over "
            "a mesh that has it, or use vla_jax.sharding.sharded_attention"
        ) from error


def from_left(tree: Any, axis_name: str, shift: int = 1) -> Any:
    """Each device's ``tree`` from the device ``shift`` before it; zeros where there is none."""
    pairs = [(i, i + shift) for i in range(axis_size(axis_name) - shift)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)


def from_last(tree: Any, axis_name: str) -> Any:
    """The last device's ``tree`` on all devices, and known to be the same on all."""
    last = jax.lax.axis_index(axis_name) == axis_size(axis_name) - 1
    return jax.lax.psum(jax.tree.map(lambda x: jnp.where(last, x, 0), tree), axis_name)


def exclusive_scan(
    combine: Callable[[Any, Any], Any], apply: Callable[[Any, Any], Any], element: Any,
    initial: Any, axis_name: str, complete: bool = False,
) -> Any:  # fmt: skip
    """What reaches each device when ``initial`` has passed through the devices before it.

    Args:
      combine: ``(first, then) -> element`` of both, associative. What it makes of ``first`` all
        zeros is not used.
      apply: ``(state, element) -> element`` that yields the state after ``element`` whatever it is
        combined with from the left; its first leaf is that state.
      element: this device's.
      initial: the state that reaches the first device.
      axis_name: the mesh axis.
      complete: whether each element is known to yield its state whatever reaches it.

    Returns:
      The state that reaches this device: the shape of ``initial``.
    """
    index, size = jax.lax.axis_index(axis_name), axis_size(axis_name)
    element = _select(index == 0, apply(initial, element), element)
    shift = 1
    while shift < size - 1 and not complete:  # the last device's own element is not needed
        combined = combine(from_left(element, axis_name, shift), element)
        element = _select(index >= shift, combined, element)
        shift *= 2
    return _select(index == 0, initial, from_left(element[0], axis_name))


def _select(condition: Array, chosen: Any, otherwise: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), chosen, otherwise)


# --- segments over devices ---------------------------------------------------------------------


def continues(segment_ids: Array | None, axis_name: str) -> tuple[Array, Array] | None:
    """Whether the segment that reaches this device goes on in its first token, and to its last.

    Two ``[B]`` of booleans; None without segments, where both are true.
    """
    if segment_ids is None:
        return None
    first, last = segment_ids[:, 0], segment_ids[:, -1]
    joins = (jax.lax.axis_index(axis_name) == 0) | (from_left(last, axis_name) == first)
    return joins, joins & (first == last)


def _kept(condition: Array | None, x: Array) -> Array:
    """``x [B, ...]`` where ``condition [B]`` holds, otherwise zero."""
    if condition is None:
        return x
    return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _last_segment(x: Array, segment_ids: Array | None) -> Array:
    """``x [B, T, ...]``, zero at tokens that are not of the last segment."""
    if segment_ids is None:
        return x
    last = segment_ids == segment_ids[:, -1:]
    return jnp.where(last.reshape(*last.shape, *[1] * (x.ndim - 2)), x, 0)


# --- attention ---------------------------------------------------------------------------------


@primitives.first_order_only
def context_parallel_attention(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None = None,
    *,
    axis_name: str,
    lambda0: ArrayLike = 0.1,
    initial_state: VLAState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    write_gain: WriteGain = "unit",
    readout: Readout = "ratio",
    eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Array | tuple[Array, VLAState]:
    """``vla_attention`` inside ``jax.shard_map`` with T sharded over the mesh axis ``axis_name``.

    Exact, forward and backward. A head exchanges ``D (2 D + E + 1)`` numbers ``⌈log₂(P − 1)⌉ + 1``
    times, whatever T is; no token leaves its device. Other mesh axes may shard batch and heads.

    Args:
      query, key, value, direction: this device's tokens, as in ``vla_attention``; the devices along
        the axis hold consecutive, equally long parts of the sequence.
      axis_name: the mesh axis.
      lambda0: as in ``vla_attention``, the same on all devices of the axis.
      initial_state: that of the whole sequence, the same on all devices of the axis.
      segment_ids, mask: this device's; a segment may run over any number of devices.
      write_gain, readout, eps, chunk_size, precision: as in ``vla_attention``.
      implementation: as in ``vla_attention``, but not ``"triton"``.
      return_state: whether to return the state after the whole sequence as well, the same on all
        devices of the axis (``out_specs`` without the axis).

    Returns:
      ``out [B, T, Hq, E]`` of this device's tokens, or ``(out, state)``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names, and outside of
        ``jax.shard_map`` over such an axis.
      NotImplementedError: as ``vla_attention``.
    """
    axis_size(axis_name)
    key = validation.array("key", key, (None,) * 4, "[B, T, H, D]")
    batch, length, heads, dim = key.shape
    query = validation.array("query", query, (batch, length, None, dim), "[B, T, Hq, D]")
    validation.query_heads(query, heads)
    value = validation.array("value", value, (batch, length, heads, None), "[B, T, H, E]")
    if direction is not None:
        direction = validation.array("direction", direction, key.shape, "[B, T, H, D]")
    ops.check_options(write_gain, readout, eps)
    if implementation == "triton":
        raise NotImplementedError(
            "implementation='triton' has no parts to run over several devices; use None, "
            "'pallas' or 'xla'"
        )
    config = primitives.configure(
        query, key, value, implementation=implementation, chunk_size=chunk_size, precision=precision
    )
    dtype = config.policy.accumulator
    out, state = _attention(
        query,
        key,
        value,
        direction,
        validation.lambda0(lambda0, heads, dtype),
        validation.state(
            initial_state, "initial_state", batch, heads, dim, value.shape[-1], dtype
        ),
        validation.segment_ids(segment_ids, batch, length),
        validation.mask(mask, batch, length),
        axis_name=axis_name,
        config=config,
        write_gain=write_gain,
        readout=readout,
        eps=float(eps),
        return_state=return_state,
    )
    return (out, state) if return_state else out


@functools.partial(
    jax.jit,
    static_argnames=("axis_name", "config", "write_gain", "readout", "eps", "return_state"),
)
def _attention(
    query, key, value, direction, lambda0, state, segment_ids, mask, *,
    axis_name, config, write_gain, readout, eps, return_state,
):  # fmt: skip
    """The composition, on validated arguments."""
    query, key, value, direction, lambda0, state, segment_ids, mask = numerics.varying_alike(
        (query, key, value, direction, lambda0, state, segment_ids, mask)
    )
    policy = config.policy
    if mask is not None:
        present = mask[..., None, None]
        query, key, value = (jnp.where(present, x, 0) for x in (query, key, value))
    unit_key, u = ops.unit_keys(key, direction, policy)
    if mask is not None:
        u = jnp.where(present, u, 0)

    joins = keep = None
    if segment_ids is not None:
        joins, keep = continues(segment_ids, axis_name)

    # The penalty and, beside it, the key sum: [B, H, D, D + 1].
    last_u, last_key = (_last_segment(x, segment_ids) for x in (u, key))
    sums = policy.dot("bthd,bthe->bhde", last_u, u)
    sums = _beside(sums, jnp.sum(last_key, axis=1, dtype=policy.accumulator)[..., None])
    initial = _beside(numerics.symmetrize(state.penalty), state.key_sum[..., None])

    def add(first, then):
        kept = None if keep is None else first[1] & then[1]
        return _kept(then[1], first[0]) + then[0], kept

    sums = exclusive_scan(
        add, lambda x, then: (_kept(then[1], x) + then[0], then[1]), (sums, keep), initial,
        axis_name,
    )  # fmt: skip
    sums = _kept(joins, sums)
    before, key_sum = sums[..., :-1], sums[..., -1]

    solution, penalty = primitives.solve(config, unit_key, u, lambda0, before, segment_ids)
    write_key = numerics.apply_write_gain(solution, unit_key, write_gain)

    # The memory is affine in the one that reaches this device. From zero it is `gain`, from the
    # identity and without values `carry`; and so are the read-outs.
    def run(values, memory):
        return primitives.delta(config, query, unit_key, write_key, values, memory, segment_ids)

    shape = (*state.memory.shape[:-1], key.shape[-1])
    identity = jnp.broadcast_to(jnp.eye(shape[-1], dtype=policy.accumulator), shape)
    # Made of inputs, so that they vary over the mesh as those do.
    zero, identity = jnp.zeros_like(state.memory), _kept(joins, identity + 0 * state.penalty)
    out, gain = run(value, zero)
    reach, carry = run(jnp.zeros_like(key), identity)

    def compose(first, then):
        (gain1, carry1), (gain2, carry2) = first, then
        both = policy.dot("bhij,bhjk->bhik", carry2, _beside(gain1, carry1))
        return both[..., : gain1.shape[-1]] + gain2, both[..., gain1.shape[-1] :]

    def follow(memory, then):
        return policy.dot("bhij,bhjk->bhik", then[1], memory) + then[0], then[1]

    memory = exclusive_scan(compose, follow, (gain, carry), state.memory, axis_name)
    grouped = reference.grouped(reach, key.shape[2])
    carried = policy.dot("bthgd,bhde->bthge", grouped, memory)
    out = out + carried.reshape(out.shape)

    key_sums, key_sum = chunkwise.causal_sum(key, key_sum, segment_ids, policy)
    if readout == "ratio":
        out = reference.ratio(out, query, key_sums, eps)
    out = out.astype(query.dtype)
    if not return_state:
        return out, None
    memory = follow(memory, (gain, carry))[0]
    state = from_last(VLAState(memory, penalty, key_sum), axis_name)
    return out, ops.with_empty_cache(state)


def _beside(*arrays: Array) -> Array:
    return jnp.concatenate(arrays, axis=-1)
