"""Variational Linear Attention as a Flax Linen layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen

from vla_jax import functions, layer, numerics, self_attention, validation
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A Python value that no transformation traces."""

    value: bool | str

    def __bool__(self) -> bool:
        return bool(self.value)


_STATIC = {"return_state", "axis_name", "decode", "is_causal", "sow_weights"}


def _shown(option: Any) -> Any:
    return option.value if isinstance(option, _Constant) else option


class _Layer(linen.Module):
    """What both layers need of pickles and of ``linen.remat`` and ``linen.jit``."""

    @linen.nowrap
    def __getstate__(self) -> dict[str, Any]:
        return functions.by_name(self.__dict__)

    @linen.nowrap
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(functions.from_names(state))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps what is no array out of the sight of ``linen.remat`` and ``linen.jit``.

        They make a subclass whose call traces every keyword argument, ``return_state`` too.
        """
        super().__init_subclass__(**kwargs)
        if (call := cls.__dict__.get("__call__")) is not None:

            @functools.wraps(call)
            def hiding(self, *args, **options):
                for name in _STATIC & options.keys():
                    if isinstance(options[name], bool | str):
                        options[name] = _Constant(options[name])
                return call(self, *args, **options)

            cls.__call__ = hiding  # type: ignore[method-assign]


class VariationalLinearAttention(_Layer):
    """Causal self-attention with a recurrent memory, linear in the sequence length.

    Parameters (``q_proj/kernel`` and so on) have the names and shapes that
    ``vla_jax.layer.parameters`` lists, the same as in ``vla_jax.nnx``.

    Attributes:
      num_heads, in_features: see ``vla_jax.layer.LayerConfig``, which documents every option.
      logical_axes: with True or a mapping ``init`` returns the parameters boxed with logical axis
        names (``linen.with_logical_partitioning``), for ``linen.get_partition_spec`` and
        ``linen.logical_axis_rules``; ``linen.unbox`` removes the boxes. Using the layer needs
        neither a mesh nor rules, with or without boxes.

    Raises:
      ValueError, TypeError: at construction, naming the option that is wrong.
    """

    num_heads: int
    in_features: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    out_features: int | None = None
    lambda0: Any = None
    learn_lambda0: bool = False
    direction: Literal["learned", "key"] = "learned"
    write_gain: WriteGain | None = None
    readout: Readout | None = None
    inverse: Inverse = "write"
    beta: bool = False
    decay: bool = False
    feature_map: FeatureMap = numerics.feature_map
    short_conv: int | None = None
    output_norm: Literal["layer", "rms_per_head"] | None = "layer"
    norm_eps: float = 1e-5
    use_bias: bool = True
    dtype: DTypeLike = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = layer.default_kernel_init
    bias_init: Initializer = layer.default_bias_init
    implementation: Implementation | None = None
    check_invariants: bool = False
    logical_axes: bool | Mapping[str, str | None] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config  # noqa: B018  validates the options

    @property
    def config(self) -> LayerConfig:
        """The options, validated."""
        return LayerConfig(**{name: getattr(self, name) for name in layer.OPTIONS})

    def setup(self) -> None:
        """Declares the parameters."""
        config = self.config

        def init(group, name, p, key):
            draw = p.init
            if config.logical_axes:
                draw = linen.with_logical_partitioning(draw, p.axes)
            return draw(key, config.param_dtype)

        self._parameters = _declare(self, layer.parameters(config), init)

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
            self._parameters,
            x,
            mask=mask,
            segment_ids=segment_ids,
            initial_state=initial_state,
            return_state=_shown(return_state),
            axis_name=_shown(axis_name),
        )

    @linen.nowrap
    def init_state(self, batch_size: int) -> LayerState:
        """The state of ``batch_size`` fresh sequences; needs no parameters and no ``apply``."""
        return layer.init_state(self.config, batch_size)

    def step(self, x_t: Array, state: LayerState) -> tuple[Array, LayerState]:
        """One token, ``x_t [B, in_features]``: ``(out [B, out_features], state)``.

        Call it through ``layer.apply(variables, x_t, state, method="step")``.
        """
        return layer.step(self.config, self._parameters, x_t, state)


class SelfAttention(_Layer):
    """Causal self-attention, called as ``linen.MultiHeadDotProductAttention`` is, with this memory.

    In a decoder-only model the class takes the place of Flax's (``linen.SelfAttention`` too); what
    it cannot serve it refuses by name: attention to other inputs, masks that are not causal, local
    windows, dropout of attention weights. Parameters have the names and shapes of
    ``VariationalLinearAttention``.

    The layer has no positions of its own. In a model whose attention applies RoPE they go with that
    attention; the short convolution of the presets "recall" and "language" then supplies the order
    of near tokens (``vla_jax.presets``, which says what each preset was measured on).

    Attributes:
      num_heads, qkv_features, out_features: as in Flax: ``head_dim`` is ``qkv_features /
        num_heads``, and both default to the size of the last axis of the input.
      decode: whether a call goes on from the collection "cache", which ``init`` makes.
      preset: ``"recall"``, ``"published"`` or ``"language"``: what the options are that have the
        value ``"preset"``.
      num_kv_heads, value_dim, lambda0, learn_lambda0, direction, write_gain, readout, inverse,
        beta, decay, feature_map, short_conv, output_norm, norm_eps, implementation,
        check_invariants: see ``vla_jax.layer.LayerConfig``.
      dtype, param_dtype, precision, use_bias: as in Flax.
      kernel_init, bias_init: initialisers, with ``linen.with_partitioning`` (or
        ``with_logical_partitioning``) or without. Its names are those of Flax's kernels
        ``[in_features, heads, head_dim]`` and biases; the parameters that Flax's attention does not
        have take theirs from them.
      out_kernel_init, out_bias_init: those of the output projection, if others.
      dropout_rate, normalize_qk: 0 and False.
      deterministic, broadcast_dropout: accepted; without dropout they change nothing.

    Raises:
      ValueError, TypeError: in ``init`` and ``apply``, naming the argument that is wrong.
      NotImplementedError: for a ``dropout_rate`` that is not 0, or ``normalize_qk``.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    decode: bool = False
    preset: Literal["published", "recall", "language"] = "recall"
    num_kv_heads: int | None = None
    value_dim: int | None = None
    lambda0: Any = None
    learn_lambda0: bool = False
    direction: Literal["learned", "key", "preset"] = FROM_PRESET
    write_gain: WriteGain | None = None
    readout: Readout | Literal["preset"] | None = FROM_PRESET
    inverse: Inverse | Literal["preset"] = FROM_PRESET
    beta: bool | Literal["preset"] = FROM_PRESET
    decay: bool | Literal["preset"] = FROM_PRESET
    feature_map: FeatureMap = numerics.feature_map
    short_conv: int | Literal["preset"] | None = FROM_PRESET
    output_norm: Literal["layer", "rms_per_head", "preset"] | None = FROM_PRESET
    norm_eps: float = 1e-5
    use_bias: bool = True
    dtype: DTypeLike = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = layer.default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = layer.default_bias_init
    out_bias_init: Initializer | None = None
    implementation: Implementation | None = None
    check_invariants: bool = False
    deterministic: bool | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    normalize_qk: bool = False

    @linen.compact
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
        dropout_rng: Any = None,
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
          deterministic, dropout_rng: accepted; there is no dropout.
          sow_weights: False.
          decode: in the place of the attribute: whether to go on from the collection "cache", which
            must be mutable. As in Flax ``init``, or the first call without one, makes it for
            inputs of this batch, without reading them into it. A call takes one token, as in Flax,
            or several, such as a whole prompt; a mask is then of these alone, ``[B or 1, 1, T,
            T]``, where Flax's is of the whole cache.
          is_causal: whether ``mask`` lacks the causal mask, which is then combined with it.

        Raises:
          ValueError, TypeError: for a bad argument, which the message names.
          NotImplementedError: if the implementation that was chosen cannot serve here.
        """
        inputs_q = validation.array("inputs_q", inputs_q, (None,) * 3, "[B, T, in_features]")
        boxes = self_attention.Boxes(linen.Partitioned, lambda box: box.value)
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        given |= {name: boxes.opening(given[name]) for name in ("kernel_init", "bias_init")}
        config = self_attention.configure(given, inputs_q.shape[-1])
        own = (boxes.opening(x) for x in (self.out_kernel_init, self.out_bias_init))

        def init(group, name, p, key):
            value, box = boxes.drawn(p.init, key, config.param_dtype)
            if box is None:
                return value
            names = self_attention.axis_names(group, name, p, box.names)
            return box.replace(value=value, names=names)

        params = _declare(self, self_attention.parameters(config, *own), init)
        decode = self.decode if decode is None else _shown(decode)
        validation.flag("decode", decode)
        cache, started = {}, False
        if decode:
            started = self.has_variable("cache", "memory")
            fresh = self_attention.fresh_cache(config, inputs_q.shape)
            cache = {name: self.variable("cache", name, lambda x=x: x) for name, x in fresh.items()}
        state = {name: variable.value for name, variable in cache.items()}
        out, after = self_attention.attend(
            config,
            params,
            inputs_q,
            inputs_k,
            inputs_v,
            mask=mask,
            segment_ids=segment_ids,
            segment_pos=segment_pos,
            is_causal=_shown(is_causal),
            sow_weights=_shown(sow_weights),
            state=self_attention.state_of(state) if started else None,
        )
        if after is not None:
            for name, x in self_attention.cache_of(after).items():
                cache[name].value = x
        return out


def _declare(
    module: linen.Module,
    groups: dict[str, dict[str, layer.Parameter]],
    init: Callable[[str, str, layer.Parameter, Array], Any],
) -> layer.Parameters:
    """Draws these parameters as ``module``'s, one dictionary a group, each by ``init``."""

    def init_group(rng, group, members):
        keys = jax.random.split(rng, len(members))
        return {
            name: init(group, name, p, key)
            for key, (name, p) in zip(keys, members.items(), strict=True)
        }

    return {
        group: module.param(group, init_group, group, members) for group, members in groups.items()
    }
