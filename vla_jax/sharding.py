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

from vla_jax import numerics, ops, primitives, reference
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

    Exact, forward and backward. A head sends at most ``D (2 D + E + 1)`` numbers, whatever T is,
    ``⌈log₂(P − 1)⌉ + 1`` times; no token leaves its device. Other mesh axes may shard batch and
    heads.

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
    arrays, static = _checked(
        query, key, value, direction, lambda0, initial_state, segment_ids, mask,
        write_gain=write_gain, readout=readout, eps=eps, chunk_size=chunk_size,
        implementation=implementation, precision=precision,
    )  # fmt: skip
    out, state = _attention(*arrays, axis_name=axis_name, return_state=return_state, **static)
    return (out, state) if return_state else out


def _checked(*arrays: Any, implementation: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    if implementation == "triton":
        raise NotImplementedError(
            "implementation='triton' has no parts to run over several devices; use None, "
            "'pallas' or 'xla'"
        )
    return ops.checked(*arrays, implementation=implementation, **options)


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
    if direction is None:
        unit_key = numerics.normalize(key.astype(policy.accumulator))
        direction = unit_key / jnp.sqrt(jnp.asarray(key.shape[-1], unit_key.dtype))
    if mask is not None:
        query, key, value, direction = (
            jnp.where(mask[..., None, None], x, 0) for x in (query, key, value, direction)
        )

    joins = keep = None
    if segment_ids is not None:
        joins, keep = continues(segment_ids, axis_name)

    # The penalty and, beside it, the key sum: [B, H, D, D + 1].
    last_u, last_key = (_last_segment(x, segment_ids) for x in (direction, key))
    sums = policy.dot("bthd,bthe->bhde", last_u, direction)
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

    unit_key, write_key, penalty = ops.write_keys(
        key, direction, lambda0, before, segment_ids, config=config, write_gain=write_gain
    )

    # The memory is affine in the one that reaches this device, and so are the read-outs: from
    # zero, with the values, it is `gain`; from the identity, without values, `carry`. Side by side
    # the two are one sweep of wider values, which takes as many steps as one of them.
    value_dim, dim = value.shape[-1], key.shape[-1]
    identity = jnp.broadcast_to(
        jnp.eye(dim, dtype=policy.accumulator), (*state.memory.shape[:-1], dim)
    )
    nothing = jnp.zeros((*value.shape[:-1], dim), value.dtype)
    zero = jnp.zeros_like(state.memory)
    _, identity, zero, nothing = numerics.varying_alike((query, identity, zero, nothing))
    both, memory = primitives.delta(
        config, query, unit_key, write_key, _beside(value, nothing),
        _beside(zero, _kept(joins, identity)), segment_ids,
    )  # fmt: skip
    out, reach = both[..., :value_dim], both[..., value_dim:]
    gain, carry = memory[..., :value_dim], memory[..., value_dim:]

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

    out, key_sum = ops.weigh(
        out, query, key, key_sum, segment_ids, config=config, readout=readout, eps=eps
    )
    if not return_state:
        return out, None
    memory = follow(memory, (gain, carry))[0]
    memory, penalty, key_sum = from_last((memory, penalty, key_sum), axis_name)
    fresh = ops.init_state(*memory.shape[:3], memory.shape[-1], dtype=memory.dtype)
    return out, fresh.replace(memory=memory, penalty=penalty, key_sum=key_sum)


def _beside(*arrays: Array) -> Array:
    return jnp.concatenate(arrays, axis=-1)


def sharded_attention(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None = None,
    *,
    mesh: jax.sharding.Mesh,
    context_axis: str,
    data_axis: str | None = None,
    model_axis: str | None = None,
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
    """``vla_attention`` of whole arrays, run by ``context_parallel_attention`` over a mesh.

    Args:
      query, key, value, direction: the whole arrays, as in ``vla_attention``, placed anyhow.
      mesh: the devices; of any axis types. Where they are ``Explicit`` the arrays are resharded,
        and JAX differentiates only within ``jax.jit`` or ``jax.set_mesh``.
      context_axis, data_axis, model_axis: the mesh axes over which T, batch and heads are sharded,
        each another; they divide T, B, and both H and Hq. None leaves batch or heads whole.
      lambda0, initial_state, segment_ids, mask, write_gain, readout, eps, chunk_size,
        implementation, precision, return_state: as in ``context_parallel_attention``.

    Returns:
      As ``vla_attention``: ``out`` sharded like ``query``, the state over batch and heads alone.

    Raises:
      ValueError, TypeError: if an axis is not of the mesh, does not divide what it shards or is
        another one too, and otherwise as ``context_parallel_attention``.
    """
    static: dict[str, Any] = {
        "write_gain": write_gain, "readout": readout, "eps": eps, "chunk_size": chunk_size,
        "implementation": implementation, "precision": precision,
    }  # fmt: skip
    (query, key, value, direction, lambda0, state, segment_ids, mask), _ = _checked(
        query, key, value, direction, lambda0, initial_state, segment_ids, mask, **static
    )
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    axes = [axis for axis in (context_axis, data_axis, model_axis) if axis is not None]
    if any(axes.count(axis) > 1 for axis in axes):
        raise ValueError(f"context_axis, data_axis and model_axis must differ, got {axes}")
    check_divides(mesh, "context_axis", context_axis, T=key.shape[1])
    check_divides(mesh, "data_axis", data_axis, B=key.shape[0])
    check_divides(mesh, "model_axis", model_axis, H=key.shape[2], Hq=query.shape[2])

    def local(query, key, value, direction, lambda0, initial_state, segment_ids, mask):
        return context_parallel_attention(
            query, key, value, direction, axis_name=context_axis, lambda0=lambda0,
            initial_state=initial_state, segment_ids=segment_ids, mask=mask,
            return_state=return_state, **static,
        )  # fmt: skip

    tokens = jax.P(data_axis, context_axis)
    by_head = jax.P(data_axis, context_axis, model_axis)
    by_state = jax.P(data_axis, model_axis)
    start = None if initial_state is None else state
    arguments = (query, key, value, direction, lambda0, start, segment_ids, mask)
    specs = (by_head,) * 4 + (jax.P(model_axis), by_state, tokens, tokens)
    if jax.sharding.AxisType.Explicit in mesh.axis_types:  # where shard_map does not do it
        placements = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
        arguments = tuple(
            jax.tree.map(lambda x, to=to: jax.sharding.reshard(x, to), argument)
            for argument, to in zip(arguments, placements, strict=True)
        )
    return jax.shard_map(
        local, mesh=mesh, in_specs=specs,
        out_specs=(by_head, by_state) if return_state else by_head,
    )(*arguments)  # fmt: skip


def check_divides(mesh: jax.sharding.Mesh, name: str, axis: str | None, **sizes: int) -> None:
    """Raises TypeError or ValueError unless ``mesh`` has ``axis``, and it divides every size."""
    if axis is None and name != "context_axis":
        return
    if not isinstance(axis, str):
        raise TypeError(f"{name} must be a string, got {type(axis).__name__}")
    if axis not in mesh.shape:
        raise ValueError(f"{name} must be one of the mesh axes {mesh.axis_names}, got {axis!r}")
    for letter, size in sizes.items():
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{letter} = {size} is not divisible by the {mesh.shape[axis]} devices of mesh "
                f"axis {axis!r}: pad it and pass mask=, or use another mesh"
            )


# --- the short convolution of the layers -------------------------------------------------------


def reaching_tokens(
    tail: Array,
    count: Array,
    initial: Array,
    segment_ids: Array | None,
    axis_name: str,
    *,
    complete: bool,
) -> Array:
    """The last tokens that a causal convolution still sees where this device's tokens begin.

    Args:
      tail: ``[B, width - 1, channels]``, the last tokens present of this device's last segment,
        oldest first, zeros before them.
      count: ``[B]``, how many of this device's tokens those are, at most ``width - 1``.
      initial: what reaches the first device, shaped like ``tail``.
      segment_ids: this device's.
      axis_name: the mesh axis.
      complete: whether no device can have fewer tokens than the convolution sees: then one
        exchange with the neighbour is enough.

    Returns:
      What reaches this device, zeros where its first segment begins here.
    """
    span = tail.shape[1]
    joins = keep = None
    if segment_ids is not None:
        joins, keep = continues(segment_ids, axis_name)
    initial, tail, count = numerics.varying_alike((initial, tail, count))

    def append(earlier, then):
        later, count, kept = then
        at = jnp.arange(span) + count[:, None]
        at = jnp.where(at < span, at, at - count[:, None] + span)
        both = jnp.concatenate([_kept(kept, earlier), later], axis=1)
        return jnp.take_along_axis(both, at[..., None], axis=1)

    def combine(first, then):
        _, count, kept = then
        before = _kept(kept, first[1])
        both = None if kept is None else first[2] & kept
        return append(first[0], then), jnp.minimum(before + count, span), both

    element = (tail, count, keep)
    reached = exclusive_scan(
        combine, lambda x, then: (append(x, then), *then[1:]), element, initial, axis_name,
        complete=complete,
    )  # fmt: skip
    return _kept(joins, reached)
