"""Causal self-attention with the calls of Flax's attention layers, as plain functions.

``nnx.SelfAttention`` and ``linen.SelfAttention`` are views of this module, as the other layers are
of ``layer``: what their arguments mean is defined here, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import layer, packing, presets, validation
from vla_jax.layer import LayerConfig, LayerState, Parameter
from vla_jax.types import Array, VLAState

_STATE = tuple(field.name for field in dataclasses.fields(VLAState))


# --- construction ------------------------------------------------------------------------------


def configure(given: Mapping[str, Any], in_features: int) -> LayerConfig:
    """The configuration that the arguments of a drop-in, by name, stand for.

    Raises:
      ValueError, TypeError: naming the argument that is wrong.
      NotImplementedError: for dropout of the attention weights, which this layer does not have.
    """
    if given["decode"] is not None:
        validation.flag("decode", given["decode"])
    rate = given["dropout_rate"]
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise TypeError(f"dropout_rate must be a number, got {type(rate).__name__}")
    if rate != 0:
        raise NotImplementedError(
            f"dropout_rate must be 0, got {rate}: there are no attention weights to drop; apply "
            "Flax's Dropout to the output of the layer"
        )
    validation.flag("normalize_qk", given["normalize_qk"])
    if given["normalize_qk"]:
        raise NotImplementedError(
            "normalize_qk must be False: keys are normalised anyway, and a query is divided out by "
            "an output norm"
        )
    validation.size("num_heads", given["num_heads"])
    validation.size("in_features", in_features)
    features = in_features if given["qkv_features"] is None else given["qkv_features"]
    validation.size("qkv_features", features)
    if features % given["num_heads"]:
        raise ValueError(
            f"qkv_features = {features} must be a multiple of num_heads = {given['num_heads']}"
        )
    chosen = layer.options(given) | {
        "in_features": in_features,
        "head_dim": features // given["num_heads"],
    }
    return LayerConfig(**presets.options(given["preset"], **chosen))


def parameters(
    config: LayerConfig, out_kernel_init: Any, out_bias_init: Any
) -> dict[str, dict[str, Parameter]]:
    """``layer.parameters``, of which ``o_proj`` is drawn by initialisers of its own, if given."""
    own = {"kernel_init": out_kernel_init, "bias_init": out_bias_init}
    own = {name: init for name, init in own.items() if init is not None}
    groups = layer.parameters(config)
    output = layer.parameters(dataclasses.replace(config, **own))["o_proj"]
    return groups | {"o_proj": output}


class Boxes:
    """Opens the boxes in which an initialiser returns its array, one parameter at a time.

    Args:
      kind: the class of the boxes, which say how a parameter is partitioned.
      content: the array of a box.
    """

    def __init__(self, kind: type, content: Callable[[Any], Array]):
        self._kind, self._content = kind, content
        self._found: list[Any] = []

    def opening(self, init: Any) -> Any:
        """``init`` that returns plain arrays; what is no function as it is."""
        if not callable(init):
            return init

        def opened(*args: Any) -> Any:
            value = init(*args)
            if isinstance(value, self._kind):
                self._found.append(value)
                return self._content(value)
            return value

        return opened

    def drawn(self, init: Callable[..., Array], *args: Any) -> tuple[Array, Any]:
        """What ``init`` returns, and the box that it came in, or None."""
        self._found.clear()
        value = init(*args)
        return value, self._found[-1] if self._found else None


def axis_names(group: str, name: str, parameter: Parameter, names: Any) -> tuple[Any, ...]:
    """The axis names of a parameter where ``names`` are given for the kernel or bias of a group.

    Those for kernels name ``(in_features, heads, head_dim)``, those for biases ``(heads,
    head_dim)``; the parameters that Flax's attention does not have take from them what their axes
    are. Those of ``o_proj`` are taken as they stand. Axes behind the last name have none.

    Raises:
      ValueError: if there are more names than axes.
    """
    own = group == "o_proj"
    names = tuple(names)
    kinds = ("embed", "heads", "head_dim") if name == "kernel" else ("heads", "head_dim")
    wanted = len(parameter.axes) if own else len(kinds)
    if len(names) > wanted:
        raise ValueError(
            f"the partitioning of {'out_' if own else ''}{name}_init must name at most {wanted} "
            f"axes, got {names}"
        )
    names += (None,) * (wanted - len(names))
    if own:
        return names
    named = dict(zip(kinds, names, strict=True)) | {None: None}
    named["kv_heads"] = named["heads"]
    return tuple(named[axis] for axis in parameter.axes)


# --- the cache ---------------------------------------------------------------------------------


def cache_of(state: LayerState) -> dict[str, Array]:
    """A state by the names of its arrays."""
    arrays = {name: getattr(state.vla, name) for name in _STATE} | {"conv": state.conv}
    return {name: x for name, x in arrays.items() if x is not None}


def state_of(cache: Mapping[str, Array]) -> LayerState:
    """Inverse of ``cache_of``."""
    arrays = dict(cache)
    conv = arrays.pop("conv", None)
    return LayerState(VLAState(**arrays), conv)


def fresh_cache(config: LayerConfig, input_shape: Any) -> dict[str, Array]:
    """The cache before the first token of inputs of this shape, ``[B, T, in_features]``."""
    shape = tuple(input_shape)
    if len(shape) != 3:
        raise ValueError(f"input_shape must be [B, T, in_features], got {list(shape)}")
    return cache_of(layer.init_state(config, shape[0]))


# --- the call ----------------------------------------------------------------------------------


def attend(
    config: LayerConfig,
    params: layer.Parameters,
    inputs_q: Any,
    inputs_k: Any,
    inputs_v: Any,
    *,
    mask: Any,
    segment_ids: Any,
    segment_pos: Any,
    is_causal: bool,
    sow_weights: bool,
    state: LayerState | None,
) -> tuple[Array, LayerState | None]:
    """``(out, state)`` of ``inputs_q [B, T, in_features]``, from a state, if one is given.

    Args:
      config, params: as in ``layer.apply``.
      inputs_q: the tokens.
      inputs_k, inputs_v: None, or the same array.
      mask: ``[B or 1, 1, T, T]``, as in ``packing.from_attention_mask``.
      segment_ids: as in ``packing.from_packed_ids``, in the place of ``mask``.
      segment_pos: as in ``packing.from_positions``, in the place of both.
      is_causal: whether the causal mask is still to be combined with ``mask``.
      sow_weights: False.
      state: of the tokens before, or None where there are none and no state is wanted.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if ``config.implementation`` cannot serve here, or attention weights are
        to be sown.
    """
    validation.flag("sow_weights", sow_weights)
    if sow_weights:
        raise NotImplementedError("sow_weights must be False: there are no attention weights")
    for name, other in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
        if other is not None and other is not inputs_q:
            raise ValueError(
                f"{name} must be None or the very array that inputs_q is: this is self-attention. "
                "Where a transformation (remat, jit) traces both, leave it out; a mask is given by "
                "name, mask=…"
            )
    x = validation.array(
        "inputs_q", inputs_q, (None, None, config.in_features), "[B, T, in_features]"
    )
    batch, length, _ = x.shape
    if state is not None and state.memory.shape[0] != batch:
        raise ValueError(
            f"inputs_q must have the batch of the cache, {state.memory.shape[0]}, got {batch}"
        )
    if state is not None and getattr(mask, "ndim", 0) == 4 and mask.shape[3] != length:
        raise ValueError(
            f"mask must have shape [B or 1, 1, T, T] with T = {length}, got {list(mask.shape)}: in "
            "decoding it is of the tokens of this call. No memory can hide what it has read: mask "
            "padding in the call that reads it"
        )
    present, ids = _tokens(mask, segment_ids, segment_pos, is_causal, batch, length)
    if state is not None and segment_pos is not None:  # a document that starts with this call
        state = _restarted(state, segment_pos[:, 0] == 0)
    if state is not None and length == 1 and present is None:
        out, state = layer.step(config, params, x[:, 0], state)
        return out[:, None], state
    if state is None:
        return layer.apply(config, params, x, mask=present, segment_ids=ids), None
    return layer.apply(
        config,
        params,
        x,
        mask=present,
        segment_ids=ids,
        initial_state=state,
        return_state=True,
    )


def _restarted(state: LayerState, starts: Any) -> LayerState:
    """The state, a fresh one, all zeros, in the rows ``starts [B]``."""
    return jax.tree.map(
        lambda x: jnp.where(starts.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x),
        state,
    )


def _tokens(
    mask: Any, segment_ids: Any, segment_pos: Any, is_causal: bool, batch: int, length: int
) -> tuple[Array | None, Array | None]:
    """``mask`` and ``segment_ids [B, T]`` as ``layer.apply`` takes them."""
    given = {"mask": mask, "segment_ids": segment_ids, "segment_pos": segment_pos}
    given = {name: x for name, x in given.items() if x is not None}
    if len(given) > 1:
        raise ValueError(f"only one may be given of {', '.join(given)}: each tells the same")
    if not given:
        return None, None
    if segment_ids is not None:
        ids, present = packing.from_packed_ids(segment_ids)
    elif segment_pos is not None:
        ids, present = packing.from_positions(segment_pos)
    else:
        validation.flag("is_causal", is_causal)
        if is_causal and getattr(mask, "ndim", 0) >= 2:
            mask = np.tril(mask) if validation.is_concrete(mask) else jnp.tril(mask)
        ids, present = packing.from_attention_mask(mask)
    (name,) = given
    if ids.shape != (batch, length) and (mask is None or ids.shape != (1, length)):
        want = "[B or 1, 1, T, T]" if name == "mask" else "[B, T]"
        raise ValueError(
            f"{name} must have shape {want} with B = {batch}, T = {length}, "
            f"got {list(given[name].shape)}"
        )
    return jnp.broadcast_to(present, (batch, length)), jnp.broadcast_to(ids, (batch, length))
