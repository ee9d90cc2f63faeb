"""Variational Linear Attention as a Flax NNX layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from vla_jax import layer, numerics, self_attention, validation
from vla_jax.layer import FeatureMap, Initializer, LayerConfig, LayerState
from vla_jax.presets import FROM_PRESET
from vla_jax.types import (
    Array,
    DTypeLike,
    Implementation,
    Inverse,
    PrecisionLike,
    Readout,
    WriteGain,
)

__all__ = ["LayerState", "SelfAttention", "VariationalLinearAttention"]

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})
_AXIS_NAMES = ("out_sharding", "sharding", "sharding_names")  # as flax has called them


class VariationalLinearAttention(nnx.Module):
    """Causal self-attention with a recurrent memory, linear in the sequence length.

    Parameters (``q_proj.kernel`` and so on) have the names and shapes that
    ``vla_jax.layer.parameters`` lists, the same as in ``vla_jax.linen``.

    Args:
      num_heads, in_features: see ``vla_jax.layer.LayerConfig``, which documents every option.
      logical_axes: with True or a mapping every parameter carries logical axis names
        (``out_sharding``), for ``nnx.get_partition_spec`` under ``nnx.logical_axis_rules``. Created
        with such rules and a mesh (``jax.set_mesh``) in force, it is sharded at once, the way Flax
        does it; without a mesh the names are only metadata.
      rngs: the ``params`` stream initialises the parameters.

    Raises:
      ValueError, TypeError: naming the option that is wrong.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_features: int | None = None,
        lambda0: Any = None,
        learn_lambda0: bool = False,
        direction: Literal["learned", "key"] = "learned",
        write_gain: WriteGain | None = None,
        readout: Readout | None = None,
        inverse: Inverse = "write",
        beta: bool = False,
        decay: bool = False,
        feature_map: FeatureMap = numerics.feature_map,
        short_conv: int | None = None,
        output_norm: Literal["layer", "rms_per_head"] | None = "layer",
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = layer.default_kernel_init,
        bias_init: Initializer = layer.default_bias_init,
        implementation: Implementation | None = None,
        check_invariants: bool = False,
        logical_axes: bool | Mapping[str, str | None] = False,
        rngs: nnx.Rngs,
    ):
        config = LayerConfig(**layer.options(locals()))
        validation.instance("rngs", rngs, nnx.Rngs)
        self.config = config.without_initializers()
        declare(self, config, rngs, _metadata if config.logical_axes else None)

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        initial_state: LayerState | None = None,
        return_state: bool = False,
        axis_name: str | None = None,
    ) -> Any:
        """Applies the layer to ``x [B, T, in_features]``; see ``vla_jax.layer.apply``."""
        return layer.apply(
            self.config,
            declared(self),
            x,
            mask=mask,
            segment_ids=segment_ids,
            initial_state=initial_state,
            return_state=return_state,
            axis_name=axis_name,
        )

    def init_state(self, batch_size: int) -> LayerState:
        """The state of ``batch_size`` fresh sequences, for ``step`` and ``initial_state``."""
        return layer.init_state(self.config, batch_size)

    def step(self, x_t: Array, state: LayerState) -> tuple[Array, LayerState]:
        """One token, ``x_t [B, in_features]``: ``(out [B, out_features], state)``."""
        return layer.step(self.config, declared(self), x_t, state)


class SelfAttention(nnx.Module):
    """Causal self-attention, called as ``flax.nnx.MultiHeadAttention`` is, with this memory.

    In a decoder-only model the class takes the place of Flax's; what it cannot serve it refuses by
    name: attention to other inputs, masks that are not causal, local windows, dropout of attention
    weights. Parameters have the names and shapes of ``VariationalLinearAttention``.

    The layer has no positions of its own. In a model whose attention applies RoPE they go with that
    attention; the short convolution of the presets "recall" and "language" then supplies the order
    of near tokens (``vla_jax.presets``, which says what each preset was measured on).

    Args:
      num_heads, in_features, qkv_features, out_features: as in Flax: ``head_dim`` is
        ``qkv_features / num_heads``, and both default to ``in_features``.
      decode: whether a call goes on from the cache, see ``init_cache``.
      preset: ``"recall"``, ``"published"`` or ``"language"``: what the options are that have the
        value ``"preset"``.
      num_kv_heads, value_dim, lambda0, learn_lambda0, direction, write_gain, readout, inverse,
        beta, decay, feature_map, short_conv, output_norm, norm_eps, implementation,
        check_invariants: see ``vla_jax.layer.LayerConfig``.
      dtype, param_dtype, precision, use_bias: as in Flax.
      kernel_init, bias_init: initialisers, with ``nnx.with_partitioning`` or without. Its names are
        those of Flax's kernels ``[in_features, heads, head_dim]`` and biases; the parameters that
        Flax's attention does not have take theirs from them.
      out_kernel_init, out_bias_init: those of the output projection, if others.
      kernel_metadata, bias_metadata, out_kernel_metadata, out_bias_metadata: for ``nnx.Param``;
        axis names in them are treated likewise.
      dropout_rate, normalize_qk: 0 and False.
      deterministic, broadcast_dropout, keep_rngs: accepted; without dropout they change nothing.
      rngs: the ``params`` stream initialises the parameters.

    Raises:
      ValueError, TypeError: naming the argument that is wrong.
      NotImplementedError: for a ``dropout_rate`` that is not 0, or ``normalize_qk``.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        decode: bool | None = False,
        preset: Literal["published", "recall", "language"] = "recall",
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        lambda0: Any = None,
        learn_lambda0: bool = False,
        direction: Literal["learned", "key", "preset"] = FROM_PRESET,
        write_gain: WriteGain | None = None,
        readout: Readout | Literal["preset"] | None = FROM_PRESET,
        inverse: Inverse | Literal["preset"] = FROM_PRESET,
        beta: bool | Literal["preset"] = FROM_PRESET,
        decay: bool | Literal["preset"] = FROM_PRESET,
        feature_map: FeatureMap = numerics.feature_map,
        short_conv: int | Literal["preset"] | None = FROM_PRESET,
        output_norm: Literal["layer", "rms_per_head", "preset"] | None = FROM_PRESET,
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = layer.default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = layer.default_bias_init,
        out_bias_init: Initializer | None = None,
        implementation: Implementation | None = None,
        check_invariants: bool = False,
        deterministic: bool | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        normalize_qk: bool = False,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        boxes = self_attention.Boxes(nnx.VariableMetadata, lambda box: box.raw_value)
        given = locals() | {
            "kernel_init": boxes.opening(kernel_init),
            "bias_init": boxes.opening(bias_init),
        }
        config = self_attention.configure(given, in_features)
        validation.instance("rngs", rngs, nnx.Rngs)
        self.config = config.without_initializers()
        self.decode = decode
        self.deterministic = deterministic
        groups = self_attention.parameters(
            config, boxes.opening(out_kernel_init), boxes.opening(out_bias_init)
        )
        metadata = {
            ("kernel", False): kernel_metadata,
            ("kernel", True): out_kernel_metadata or kernel_metadata,
            ("bias", False): bias_metadata,
            ("bias", True): out_bias_metadata or bias_metadata,
        }
        for group, members in groups.items():
            values = {}
            for name, p in members.items():
                value, box = boxes.drawn(p.init, rngs.params(), config.param_dtype)
                extra = metadata.get((name, group == "o_proj"), _NO_METADATA)
                if box is not None:
                    named = _named(group, name, p, box.metadata)
                    value = dataclasses.replace(box, raw_value=value, metadata=named)
                values[name] = nnx.Param(value, **_named(group, name, p, extra))
            setattr(self, group, nnx.Dict(values))
        self.cache: nnx.Dict | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        segment_pos: Array | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
    ) -> Array:
        """The layer on ``inputs_q [B, T, in_features]``, to ``[B, T, out_features]``.

        Args:
          inputs_q: the tokens.
          inputs_k, inputs_v: None, or the very array that ``inputs_q`` is.
          mask: ``[B or 1, 1, T, T]`` or ``[T, T]``, booleans or 0 and 1: the causal mask, with
            padding and other documents hidden or not, as ``vla_jax.packing.from_attention_mask``
            describes: checked where its values can be looked at, which under jit they cannot. None
            is the causal mask, too. Padding writes nothing, and its output is 0.
          segment_ids: ``[B, T]``, the documents of packed rows, 1, 2, … and 0 for padding behind
            them, in the place of a mask and without its T² numbers.
          segment_pos: ``[B, T]``, the positions of tokens in their documents, from 0, and −1 for
            padding, in the place of both. In decoding a call whose first position is 0 forgets
            what that row has read.
          deterministic, rngs: accepted; there is no dropout.
          sow_weights: False.
          decode: in the place of the attribute: whether to go on from the cache. A call takes one
            token, as in Flax, or several, such as a whole prompt; a mask is then of these alone,
            ``[B or 1, 1, T, T]``, where Flax's is of the whole cache.
          is_causal: whether ``mask`` lacks the causal mask, which is then combined with it.

        Raises:
          ValueError, TypeError: for a bad argument, which the message names.
          NotImplementedError: if the implementation that was chosen cannot serve here.
        """
        decode = self.decode if decode is None else decode
        if decode is not None:
            validation.flag("decode", decode)
        if decode and self.cache is None:
            raise ValueError("decode=True needs a cache: call init_cache(inputs.shape) first")
        cache = {name: x[...] for name, x in self.cache.items()} if decode else None
        out, state = self_attention.attend(
            self.config,
            declared(self),
            inputs_q,
            inputs_k,
            inputs_v,
            mask=mask,
            segment_ids=segment_ids,
            segment_pos=segment_pos,
            is_causal=is_causal,
            sow_weights=sow_weights,
            state=None if cache is None else self_attention.state_of(cache),
        )
        if state is not None:
            for name, x in self_attention.cache_of(state).items():
                self.cache[name][...] = x
        return out

    def init_cache(self, input_shape: Any, dtype: DTypeLike = None) -> None:
        """Makes the cache of fresh sequences, ``nnx.Cache`` variables under ``cache``.

        Args:
          input_shape: ``[B, T, in_features]``, of which B counts: the cache has one size whatever
            the length.
          dtype: accepted; the state is float32 (float64 in a float64 layer) whatever it is.
        """
        fresh = self_attention.fresh_cache(self.config, input_shape)
        self.cache = nnx.Dict({name: nnx.Cache(x) for name, x in fresh.items()})

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """Class method used by ``nnx.view``.

        Args:
          deterministic: sets the attribute, which changes nothing.
          decode: sets the attribute; without a cache yet, one is made.
          batch_size: B of a cache that is made.
          max_length: accepted; the cache has one size whatever the length.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
            if self.cache is None:
                validation.size("batch_size", batch_size)
                self.init_cache((batch_size, 1, self.config.in_features))


def _named(
    group: str, name: str, parameter: layer.Parameter, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Metadata given for a kernel or bias, with the axis names of this parameter."""
    changed = dict(metadata)
    for key in _AXIS_NAMES:
        if (given := changed.get(key)) is not None:
            mesh = given.mesh if isinstance(given, NamedSharding) else None
            given = given if mesh is None else given.spec
            names = self_attention.axis_names(group, name, parameter, given)
            changed[key] = names if mesh is None else NamedSharding(mesh, PartitionSpec(*names))
    return changed


def declare(
    module: nnx.Module,
    config: LayerConfig,
    rngs: nnx.Rngs,
    metadata: Callable[[layer.Parameter], dict[str, Any]] | None = None,
) -> None:
    """Draws the parameters of ``config`` as attributes of ``module``, one ``nnx.Dict`` a group."""
    for group, members in layer.parameters(config).items():
        values = {
            name: nnx.Param(
                p.init(rngs.params(), config.param_dtype), **(metadata(p) if metadata else {})
            )
            for name, p in members.items()
        }
        setattr(module, group, nnx.Dict(values))


def declared(module: Any) -> layer.Parameters:
    """The parameters that ``declare`` made, as ``layer.apply`` takes them."""
    return {
        group: {name: getattr(module, group)[name][...] for name in members}
        for group, members in layer.parameters(module.config).items()
    }


def _metadata(parameter: layer.Parameter) -> dict[str, Any]:
    # Eager sharding needs a mesh and rules that map these names to it; flax raises without.
    mesh = jax.sharding.get_abstract_mesh()
    eager = nnx.using_eager_sharding() and not mesh.empty
    eager = eager and bool(linen.get_logical_axis_rules())
    return {"out_sharding": parameter.axes, "eager_sharding": eager}
