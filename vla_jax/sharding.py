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

from vla_jax import bundles, decay, implementations, numerics, ops, primitives, validation
from vla_jax import plan as planning
from vla_jax.bundles import Attention, Delta
from vla_jax.plan import Plan
from vla_jax.types import (
    Array,
    ArrayLike,
    DTypeLike,
    Implementation,
    Inverse,
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


def from_left(tree: Any, axis_name: str, shift: int = 1, *, reverse: bool = False) -> Any:
    """Each device's ``tree`` from the device ``shift`` before it; zeros where there is none.

    ``reverse`` counts the devices from the last one.
    """
    pairs = [(i, i + shift) for i in range(axis_size(axis_name) - shift)]
    pairs = [pair[::-1] for pair in pairs] if reverse else pairs
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)


def from_last(tree: Any, axis_name: str) -> Any:
    """The last device's ``tree`` on all devices, and known to be the same on all."""
    last = jax.lax.axis_index(axis_name) == axis_size(axis_name) - 1
    return jax.lax.psum(jax.tree.map(lambda x: jnp.where(last, x, 0), tree), axis_name)


def exclusive_scan(
    combine: Callable[[Any, Any], Any], apply: Callable[[Any, Any], Any], element: Any,
    initial: Any, axis_name: str, complete: bool = False, reverse: bool = False,
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
      reverse: from the last device to the first.

    Returns:
      The state that reaches this device: the shape of ``initial``.
    """
    index, size = jax.lax.axis_index(axis_name), axis_size(axis_name)
    index = size - 1 - index if reverse else index
    element = _select(index == 0, apply(initial, element), element)
    shift = 1
    while shift < size - 1 and not complete:  # the last device's own element is not needed
        combined = combine(from_left(element, axis_name, shift, reverse=reverse), element)
        element = _select(index >= shift, combined, element)
        shift *= 2
    return _select(index == 0, initial, from_left(element[0], axis_name, reverse=reverse))


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


def kept(keep: Array | None, x: Array) -> Array:
    """What is left of ``x [B, ...]``: all for None, all or nothing, or a factor if numbers.

    ``keep`` has the first axes of ``x``.
    """
    if keep is None:
        return x
    keep = keep.reshape(*keep.shape, *[1] * (x.ndim - keep.ndim))
    return jnp.where(keep, x, 0) if keep.dtype == jnp.bool_ else keep * x


def _passing(
    inputs: Attention, axis_name: str, dtype: DTypeLike
) -> tuple[Array | None, Array | None, Callable[[Array], Array]]:
    """What this device's tokens leave of a state, and of their own shares in it.

    Returns:
      Whether the segment that reaches this device goes on here, ``[B]``; what is left of its state
      behind the last token, ``[B]`` booleans or, with decay, numbers ``[B, H]``; and a function
      that weighs ``x [B, T, H, D]`` by β and by what is left of each token there. None is all.
    """
    segment_ids = inputs.segment_ids
    joins = keep = None
    if segment_ids is not None:
        joins, keep = continues(segment_ids, axis_name)
    if inputs.log_decay is None:

        def until(x):
            x = x if inputs.beta is None else numerics.weighted(x.astype(dtype), inputs.beta)
            return _last_segment(x, segment_ids)

        return joins, keep, until
    log_decay = decay.effective(inputs.log_decay, inputs.key, segment_ids, dtype)
    behind = jnp.flip(jnp.cumsum(jnp.flip(log_decay, 1), 1), 1)  # of the token and those after it
    total = jnp.exp(behind[:, 0, :, 0])
    left = jnp.exp(jnp.pad(behind[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))))
    keep = total if joins is None else jnp.where(joins[:, None], total, 0)
    return joins, keep, lambda x: left * numerics.weighted(x.astype(dtype), inputs.beta)


def _last_segment(x: Array, segment_ids: Array | None) -> Array:
    """``x [B, T, ...]``, zero at tokens that are not of the last segment."""
    if segment_ids is None:
        return x
    last = segment_ids == segment_ids[:, -1:]
    return jnp.where(last.reshape(*last.shape, *[1] * (x.ndim - 2)), x, 0)


# --- the memory --------------------------------------------------------------------------------


def _carry(plan: Plan, axis_name: str, inputs: Delta | Attention) -> Any:
    """The outputs of a primitive whose tokens are this device's and whose memory is the whole's.

    What this device does to a memory is found first; then the memory that reaches it, over the
    devices; and from there the primitive runs as on one device. Backward the same happens from the
    end of the sequence to its start, to the cotangent of the memory.
    """
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    if rule.backward is None:
        return rule.forward(plan, _reached(plan, axis_name, inputs)[0])[0]
    return _carried(plan, axis_name, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _carried(plan, axis_name, inputs):
    return _carried_forward(plan, axis_name, inputs)[0]


def _carried_forward(plan, axis_name, inputs):
    (inputs,) = primitives.once(inputs)
    inputs, factor = _reached(plan, axis_name, inputs)
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    outputs, saved = rule.forward(plan, inputs)
    return outputs, (inputs, factor, primitives.named(saved, inputs))


def _carried_backward(plan, axis_name, residuals, cotangents):
    (inputs, factor, saved), cotangents = primitives.once(residuals, cotangents)
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    pull = functools.partial(rule.backward, plan, inputs, saved)
    if axis_size(axis_name) > 1:
        # All but the memory's cotangent is left out of this call by the compiler.
        own = kept(_joins(inputs, axis_name), pull(cotangents).memory)
        transposed = None if factor is None else jnp.swapaxes(factor, -1, -2)
        later = _scan_maps(plan, axis_name, own, transposed, jnp.zeros_like(own), reverse=True)
        cotangents = cotangents._replace(memory=cotangents.memory + later)
    gradients = pull(cotangents)
    first = jax.lax.axis_index(axis_name) == 0
    gradients = gradients._replace(memory=jnp.where(first, gradients.memory, 0))
    return (primitives.narrow(gradients, inputs),)


_carried.defvjp(_carried_forward, _carried_backward)


def _joins(inputs: Delta | Attention, axis_name: str) -> Array | None:
    both = continues(inputs.segment_ids, axis_name)
    return None if both is None else both[0]


def _reached(plan: Plan, axis_name: str, inputs: Any) -> tuple[Any, Array | None]:
    """The bundle with the memory that reaches this device, and the factor of this device's map."""
    size = axis_size(axis_name)
    if size == 1:
        return inputs, None
    rule = implementations.module(plan.implementation).RULES[type(inputs)]
    joins, memory = _joins(inputs, axis_name), inputs.memory
    # The first device starts from the whole's memory, so that its term is the state behind it.
    start = jnp.where(jax.lax.axis_index(axis_name) == 0, memory, 0)
    term = rule.forward(plan, inputs._replace(memory=start))[0].memory
    factor = None
    if size > 2:  # of two devices none is between others
        dim = memory.shape[-2]
        identity = jnp.broadcast_to(jnp.eye(dim, dtype=memory.dtype), (*memory.shape[:-1], dim))
        value = jnp.zeros_like(inputs.value, shape=(*inputs.value.shape[:-1], dim))
        _, identity, value = numerics.varying_alike((memory, identity, value))
        factor = rule.forward(plan, inputs._replace(value=value, memory=identity))[0].memory
        factor = kept(joins, factor)
    memory = _scan_maps(plan, axis_name, term, factor, memory)
    return inputs._replace(memory=kept(joins, memory)), factor


def _scan_maps(
    plan: Plan, axis_name: str, term: Array, factor: Array | None, initial: Array,
    reverse: bool = False,
) -> Array:  # fmt: skip
    """What reaches this device by the maps ``S ↦ factor S + term`` of those before it.

    The term of the first device is the state behind it; ``factor`` None is for two devices.
    """
    product = functools.partial(plan.policy.dot, "bhij,bhjk->bhik")

    def compose(first, then):
        return numerics.compose(first[::-1], then[::-1], product)[::-1]

    return exclusive_scan(
        compose, lambda _, then: (then[0], None if factor is None else jnp.zeros_like(factor)),
        (term, factor), initial, axis_name, reverse=reverse,
    )  # fmt: skip


# --- attention ---------------------------------------------------------------------------------


@primitives.first_order_only
def context_parallel_attention(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None = None,
    *,
    axis_name: str,
    beta: Array | None = None,
    log_decay: Array | None = None,
    inverse: Inverse = "write",
    lambda0: ArrayLike | None = None,
    initial_state: VLAState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    write_gain: WriteGain | None = None,
    readout: Readout | None = None,
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
      beta, log_decay: this device's.
      lambda0: as in ``vla_attention``, the same on all devices of the axis.
      initial_state: that of the whole sequence, the same on all devices of the axis.
      segment_ids, mask: this device's; a segment may run over any number of devices.
      inverse, write_gain, readout, eps, chunk_size, precision: as in ``vla_attention``.
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
    validation.flag("return_state", return_state)
    plan, inputs, mask = _checked(
        query, key, value, direction, beta=beta, log_decay=log_decay, lambda0=lambda0,
        initial_state=initial_state, inverse=inverse,
        segment_ids=segment_ids, mask=mask, write_gain=write_gain, readout=readout, eps=eps,
        chunk_size=chunk_size, implementation=implementation, precision=precision,
        axis_name=axis_name,
    )  # fmt: skip
    out, state = _attention(plan, axis_name, return_state, inputs, mask)
    return (out, state) if return_state else out


def _checked(*arrays: Any, implementation: Any, **options: Any) -> tuple[Any, Any, Any]:
    gated = options["inverse"] == "read" or any(options[n] is not None for n in bundles.GATES[1:])
    if gated and implementation in (None, "pallas"):
        if implementation is not None:
            raise NotImplementedError(
                "implementation='pallas' has no gates over several devices; use None or 'xla'"
            )
        implementation = "xla"
    if implementation == "triton":
        raise NotImplementedError(
            "implementation='triton' has no parts to run over several devices; use None, "
            "'pallas' or 'xla'"
        )
    return planning.attention(*arrays, implementation=implementation, **options)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attention(plan, axis_name, return_state, inputs, mask):
    """The composition, on checked arrays."""
    inputs, mask = numerics.varying_alike((inputs, mask))
    policy = plan.policy
    inputs = planning.masked(inputs, mask)
    direction = inputs.direction
    if direction is None:
        unit_key = numerics.normalize(inputs.key.astype(policy.accumulator))
        direction = numerics.penalty_direction(unit_key, plan.variant.inverse)

    # The penalty and, beside it, the key sum: [B, H, D, D + 1].
    joins, keep, until = _passing(inputs, axis_name, policy.accumulator)
    last_u, last_key = until(direction), until(inputs.key)
    sums = _products(policy, last_u, direction)
    sums = _beside(sums, jnp.sum(last_key, axis=1, dtype=policy.accumulator)[..., None])
    initial = _beside(numerics.symmetrize(inputs.penalty), inputs.key_sum[..., None])

    def add(first, then):
        both = None if keep is None else kept(then[1], first[1])
        return kept(then[1], first[0]) + then[0], both

    sums = exclusive_scan(
        add, lambda x, then: (kept(then[1], x) + then[0], then[1]), (sums, keep), initial,
        axis_name,
    )  # fmt: skip
    sums = kept(joins, sums)
    reached = inputs._replace(penalty=sums[..., :-1], key_sum=sums[..., -1])

    if primitives.serves(plan, Attention) and not ops.uses_gates(plan, inputs):
        out, memory, penalty, key_sum = _carry(plan, axis_name, reached)
        out = out.astype(inputs.query.dtype)
    else:
        delta, penalty = ops.solved(plan, reached)
        out, memory = _carry(plan, axis_name, delta)
        out, key_sum = ops.weigh(plan, reached, out)
    if not return_state:
        return out, None
    memory, penalty, key_sum = from_last((memory, penalty, key_sum), axis_name)
    fresh = ops.init_state(*memory.shape[:3], memory.shape[-1], dtype=memory.dtype)
    return out, fresh.replace(memory=memory, penalty=penalty, key_sum=key_sum)


def _products(policy: numerics.Policy, x: Array, y: Array) -> Array:
    """``Σ_t x_t y_tᵀ``, wide; 16-bit arrays are multiplied as they are, which is exact."""
    if x.dtype == y.dtype and x.dtype.itemsize == 2:
        return jnp.einsum("bthd,bthe->bhde", x, y, preferred_element_type=policy.accumulator)
    return policy.dot("bthd,bthe->bhde", x, y)


def _beside(*arrays: Array) -> Array:
    return jnp.concatenate(arrays, axis=-1)


@numerics.broadcasts
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
    beta: Array | None = None,
    log_decay: Array | None = None,
    inverse: Inverse = "write",
    lambda0: ArrayLike | None = None,
    initial_state: VLAState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    write_gain: WriteGain | None = None,
    readout: Readout | None = None,
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
      beta, log_decay, inverse, lambda0, initial_state, segment_ids, mask, write_gain, readout,
        eps, chunk_size, implementation, precision, return_state: as in
        ``context_parallel_attention``.

    Returns:
      As ``vla_attention``: ``out`` sharded like ``query``, the state over batch and heads alone.

    Raises:
      ValueError, TypeError: if an axis is not of the mesh, does not divide what it shards or is
        another one too, and otherwise as ``context_parallel_attention``.
    """
    static: dict[str, Any] = {
        "inverse": inverse, "write_gain": write_gain, "readout": readout, "eps": eps,
        "chunk_size": chunk_size, "implementation": implementation, "precision": precision,
    }  # fmt: skip
    validation.flag("return_state", return_state)
    _, inputs, mask = _checked(
        query, key, value, direction, beta=beta, log_decay=log_decay, lambda0=lambda0,
        initial_state=initial_state, segment_ids=segment_ids, mask=mask, **static,
    )  # fmt: skip
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    axes = [axis for axis in (context_axis, data_axis, model_axis) if axis is not None]
    if any(axes.count(axis) > 1 for axis in axes):
        raise ValueError(f"context_axis, data_axis and model_axis must differ, got {axes}")
    batch, length, query_heads, _ = inputs.query.shape
    check_divides(mesh, "context_axis", context_axis, T=length)
    check_divides(mesh, "data_axis", data_axis, B=batch)
    check_divides(mesh, "model_axis", model_axis, H=inputs.key.shape[2], Hq=query_heads)

    def local(inputs, mask):
        state = VLAState(inputs.memory, inputs.penalty, inputs.key_sum)
        return context_parallel_attention(
            inputs.query, inputs.key, inputs.value, inputs.direction, axis_name=context_axis,
            beta=inputs.beta, log_decay=inputs.log_decay,
            lambda0=inputs.lambda0, initial_state=state, segment_ids=inputs.segment_ids, mask=mask,
            return_state=return_state, **static,
        )  # fmt: skip

    specs = planning.partition_specs(B=data_axis, T=context_axis, H=model_axis)
    given = {name: specs[name] for name, x in inputs._asdict().items() if x is not None}
    in_specs = inputs._replace(**given), None if mask is None else specs["mask"]
    arguments = inputs, mask
    if jax.sharding.AxisType.Explicit in mesh.axis_types:  # where shard_map does not do it
        arguments = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec)),
            arguments, in_specs,
        )  # fmt: skip
    out_specs = (specs["out"], jax.P(data_axis, model_axis)) if return_state else specs["out"]
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*arguments)


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
