"""The mixers of ``vla_jax.baselines`` as Flax NNX layers on the scaffold of the VLA layer.

Projections, short convolution, output norm and output projection are those of ``vla_jax.layer``,
with the same names, shapes and initial values, so that two layers differ in the mixer alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from vla_jax import baselines, implementations, layer, meshes, numerics, validation
from vla_jax.baselines import BaselineState
from vla_jax.layer import LayerConfig
from vla_jax.nnx import declare, declared
from vla_jax.types import Array, Arrays, DTypeLike, Implementation, PrecisionLike, Readout


@dataclasses.dataclass(frozen=True)
class _Mixer:
    """What distinguishes a baseline.

    Attributes:
      function: in ``vla_jax.baselines``.
      feature_map: of queries and keys.
      unit_query: whether the queries are normalised (where the keys are, and there is no ratio).
      gates: ``{argument of the function: axes}`` of what is computed from the layer's input.
      implementations: those that the function has; with none it takes no ``precision`` either.
    """

    function: Callable[..., Any]
    feature_map: Callable[[Array], Array]
    unit_query: bool = False
    gates: tuple[str, ...] = ()
    implementations: tuple[str, ...] = implementations.NAMES


_MESA = ("mesa", "gated_mesa")
_RATIO = ("linear", "identity", "published_deltanet")
_REFLECTING = ("deltanet", "deltanet_elu", "gated_deltanet")

# The feature maps are those of the papers: elu + 1 with the ratio, SiLU and unit length without.
_MIXERS: Mapping[str, _Mixer] = {
    "linear": _Mixer(baselines.linear_attention, numerics.feature_map),
    "identity": _Mixer(baselines.identity_attention, numerics.feature_map),
    # The features of DeltaNet, to tell what they do from what its beta does.
    "identity_silu": _Mixer(baselines.identity_attention, jax.nn.silu, True),
    "published_deltanet": _Mixer(
        baselines.published_deltanet, numerics.feature_map, gates=("gate",), implementations=()
    ),
    "deltanet": _Mixer(baselines.delta_net, jax.nn.silu, True, ("beta",)),
    # The features of VLA, to tell what they do from what the penalty does.
    "deltanet_elu": _Mixer(baselines.delta_net, numerics.feature_map, True, ("beta",)),
    "gated_deltanet": _Mixer(
        baselines.gated_delta_net,
        jax.nn.silu,
        True,
        ("beta", "log_decay"),
    ),
    "mesa": _Mixer(baselines.mesa_net, jax.nn.silu, True, ("beta",)),
    "gated_mesa": _Mixer(baselines.mesa_net, jax.nn.silu, True, ("beta", "log_decay")),
}

BASELINES = tuple(_MIXERS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BaselineLayerState(Arrays):
    """What a baseline layer carries: a pytree of arrays of constant size.

    Attributes:
      core: the state of the mixer.
      conv: the cache of the short convolution, as in ``vla_jax.layer.LayerState``.
    """

    core: BaselineState
    conv: Array | None = None


class _Scaffold(nnx.Module):
    """Parameters of the VLA layer's scaffold, and the way through it."""

    _state: type  # of what the layer carries from call to call

    def _create(self, config: LayerConfig, rngs: nnx.Rngs) -> None:
        validation.instance("rngs", rngs, nnx.Rngs)
        self.config = config.without_initializers()
        declare(self, config, rngs)

    def _enter(self, x: Any, mask: Any, segment_ids: Any, state: Any) -> Any:
        """Checks, then ``(x, mask, segment_ids, query, key, value, convolution cache)``."""
        config, params = self.config, declared(self)
        x, mask, segment_ids = layer.checked_tokens(config, params, x, mask, segment_ids)
        if state is None:
            conv = self._conv_state(x.shape[0])
        else:
            validation.instance("initial_state", state, self._state)
            conv = state.conv
            layer.check_conv(config, conv, "initial_state", x.shape[0])
        query, key, value, _, conv = layer.attention_inputs(
            config, params, x, conv, mask, segment_ids
        )
        return x, mask, segment_ids, query, key, value, conv

    def _step(self, x_t: Any, state: Any) -> Any:
        validation.instance("state", state, self._state)
        shape = (None, self.config.in_features)
        x_t = validation.array("x_t", x_t, shape, "[B, in_features]")
        out, state = self(x_t[:, None], initial_state=state, return_state=True)
        return out[:, 0], state

    def _leave(self, out: Array, mask: Array | None) -> Array:
        return layer.output(self.config, declared(self), out, mask)

    def _state_dtype(self) -> Any:
        config = self.config
        dtype = config.param_dtype if config.dtype is None else config.dtype
        return numerics.accumulator_dtype(dtype)

    def _conv_state(self, batch_size: int) -> Array | None:
        if self.config.short_conv is None:
            return None
        shape = (batch_size, self.config.short_conv - 1, self.config.channels)
        return jnp.zeros(shape, self._state_dtype())


class BaselineAttention(_Scaffold):
    """A baseline with the interface of ``vla_jax.nnx.VariationalLinearAttention``.

    Gates are maps of the layer's input: ``beta = sigmoid(W x + b)``, ``log_decay =
    −exp(r) softplus(W x + b)`` with a rate ``r`` for each head, and the published ``gate =
    sigmoid(W x + b)`` for each channel of the value. ``"mesa"`` and
    ``"gated_mesa"`` learn ``lambda0`` from 1.

    Args:
      kind: a name in ``BASELINES``.
      num_heads, in_features: as in ``vla_jax.layer.LayerConfig``, which documents every option.
      readout: None for the one of the kind: the ratio for ``"linear"``, ``"identity"`` and
        ``"published_deltanet"``, none for the others. ``"mesa"`` and ``"gated_mesa"`` have
        no other.
      allow_neg_eigval: of the DeltaNets, ``beta = 2 sigmoid(W x + b)``, so that a step can turn a
        direction of the memory round, which tracking of states needs (Grazzi et al., "Unlocking
        state-tracking in linear RNNs through negative eigenvalues", 2024).
      rngs: the ``params`` stream initialises the parameters.

    Raises:
      ValueError, TypeError: naming the option that is wrong.
    """

    _state = BaselineLayerState

    def __init__(
        self,
        kind: str,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_features: int | None = None,
        readout: Readout | None = None,
        allow_neg_eigval: bool = False,
        short_conv: int | None = None,
        output_norm: Literal["layer", "rms_per_head"] | None = "layer",
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        options = layer.options(locals())
        validation.choice("kind", kind, BASELINES)
        self.kind, self.allow_neg_eigval = kind, allow_neg_eigval
        validation.flag("allow_neg_eigval", allow_neg_eigval)
        if allow_neg_eigval and kind not in _REFLECTING:
            raise ValueError(
                f"allow_neg_eigval needs a kind in {', '.join(_REFLECTING)}, got {kind!r}"
            )
        if kind in _MESA and readout == "ratio":
            raise ValueError(f"readout must be 'none' for kind={kind!r}, got 'ratio'")
        if implementation is not None:
            if not (known := _MIXERS[kind].implementations):
                raise ValueError(
                    f"kind={kind!r} has no implementation to choose, got {implementation!r}"
                )
            validation.choice("implementation", implementation, known)
        if readout is None:
            options["readout"] = "ratio" if kind in _RATIO else "none"
        options |= {"direction": "key", "lambda0": 1.0, "learn_lambda0": kind in _MESA}
        options["feature_map"] = _MIXERS[kind].feature_map
        config = LayerConfig(**options)
        self._create(config, rngs)
        for name in _MIXERS[kind].gates:
            shape: tuple[int, ...] = (config.num_kv_heads,)
            if name == "gate":
                shape = (config.num_kv_heads, config.value_dim)
            kernel = config.kernel_init(
                rngs.params(), (config.in_features, math.prod(shape)), param_dtype
            )
            values = {
                "kernel": nnx.Param(kernel.reshape(config.in_features, *shape)),
                "bias": nnx.Param(jnp.zeros(shape, param_dtype)),
            }
            if name == "log_decay":
                # A memory of some 10 to 1000 tokens to begin with, spread over the heads.
                spread = jnp.linspace(0.0, 1.0, config.num_kv_heads)
                values["bias"] = nnx.Param((-2.0 - 5 * spread).astype(param_dtype))
                values["log_rate"] = nnx.Param(jnp.zeros(shape, param_dtype))
            setattr(self, name, nnx.Dict(values))

    def _gate(self, name: str, x: Array) -> Array:
        """A gate of ``x [B, T, in_features]``, wide."""
        group = {n: p[...].astype(self._state_dtype()) for n, p in getattr(self, name).items()}
        wide = x.astype(self._state_dtype())
        out = jnp.tensordot(wide, group["kernel"], 1, precision=self.config.precision)
        out = out + group["bias"]
        if name == "log_decay":
            return -jnp.exp(group["log_rate"]) * jax.nn.softplus(out)
        return jax.nn.sigmoid(out) * (2 if name == "beta" and self.allow_neg_eigval else 1)

    @meshes.explicit("B T -")
    @numerics.broadcasts
    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        initial_state: BaselineLayerState | None = None,
        return_state: bool = False,
    ) -> Any:
        """``[B, T, in_features]`` to ``[B, T, out_features]``, or to that and the state."""
        validation.flag("return_state", return_state)
        mixer, config = _MIXERS[self.kind], self.config
        x, mask, segment_ids, query, key, value, conv = self._enter(
            x, mask, segment_ids, initial_state
        )
        if initial_state is not None:
            validation.instance("initial_state.core", initial_state.core, BaselineState)
        options: dict[str, Any] = {n: self._gate(n, x) for n in mixer.gates}
        if mixer.unit_query:
            query = numerics.normalize(query.astype(self._state_dtype())).astype(query.dtype)
        if self.kind in _MESA:
            options["lambda0"] = layer.lambda0_of(config, declared(self), x.dtype)
        else:
            options["readout"] = config.readout
        if mixer.implementations:
            options |= {"implementation": config.implementation, "precision": config.precision}
        out, core = mixer.function(
            query, key, value, **options,
            initial_state=None if initial_state is None else initial_state.core,
            segment_ids=segment_ids, mask=mask, return_state=True,
        )  # fmt: skip
        out = self._leave(out, mask)
        return (out, BaselineLayerState(core, conv)) if return_state else out

    def init_state(self, batch_size: int) -> BaselineLayerState:
        """The state of ``batch_size`` fresh sequences, for ``step`` and ``initial_state``."""
        c, dtype = self.config, self._state_dtype()
        validation.size("batch_size", batch_size)
        heads = (batch_size, c.num_kv_heads)
        core = BaselineState(
            jnp.zeros((*heads, c.head_dim, c.value_dim), dtype),
            jnp.zeros((*heads, c.head_dim), dtype) if c.readout == "ratio" else None,
            jnp.zeros((*heads, c.head_dim, c.head_dim), dtype) if self.kind in _MESA else None,
        )
        return BaselineLayerState(core, self._conv_state(batch_size))

    @meshes.explicit("B -")
    @numerics.broadcasts
    def step(self, x_t: Array, state: BaselineLayerState) -> tuple[Array, BaselineLayerState]:
        """One token, ``x_t [B, in_features]``: ``(out [B, out_features], state)``."""
        return self._step(x_t, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache(Arrays):
    """What softmax attention keeps of a sequence, in room for ``W`` tokens.

    Attributes:
      key, value: ``[B, W, H, D]``, the tokens in order, then zeros.
      first: ``[B]`` int32, the first token of the segment that goes on.
      count: ``[B]`` int32, tokens written.
      conv: the cache of the short convolution, as in ``vla_jax.layer.LayerState``.
    """

    key: Array
    value: Array
    first: Array
    count: Array
    conv: Array | None = None


def _raw(x: Array) -> Array:
    """No feature map."""
    return x


class SoftmaxAttention(_Scaffold):
    """Causal softmax attention.

    Decoding keeps the keys and values of at most ``window`` tokens. More raise ValueError where
    their number is known (outside ``jit``); under ``jit``, where nothing can be raised, every
    output past the window is NaN.

    Args:
      num_heads, in_features: as in ``vla_jax.layer.LayerConfig``, which documents every option.
      window: tokens of a sequence that decoding can keep; None for a layer that does not decode.
      rngs: the ``params`` stream initialises the parameters.

    Raises:
      ValueError, TypeError: naming the option that is wrong.
    """

    _state = Cache

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_features: int | None = None,
        short_conv: int | None = None,
        output_norm: Literal["layer", "rms_per_head"] | None = "layer",
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        window: int | None = None,
        rngs: nnx.Rngs,
    ):
        options = layer.options(locals())
        if window is not None:
            validation.positive("window", window, integer=True)
        self.window = window
        config = LayerConfig(**options, direction="key", feature_map=_raw)
        self._create(config, rngs)

    @meshes.explicit("B T -")
    @numerics.broadcasts
    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        initial_state: Cache | None = None,
        return_state: bool = False,
    ) -> Any:
        """``[B, T, in_features]`` to ``[B, T, out_features]``, or to that and the state."""
        validation.flag("return_state", return_state)
        _, mask, segment_ids, query, key, value, conv = self._enter(
            x, mask, segment_ids, initial_state
        )
        batch, length = key.shape[:2]
        state = initial_state
        if state is not None:
            self._check_cache(state, batch)
        elif return_state:
            state = self.init_state(batch)
        if state is None:
            out = baselines.softmax_attention(query, key, value, segment_ids=segment_ids, mask=mask)
            return self._leave(out, mask)

        present = jnp.ones((batch, length), bool) if mask is None else mask
        ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
        # A token goes to the slot of its number in the sequence; an absent one nowhere.
        number = state.count[:, None] + jnp.cumsum(present, axis=1) - 1
        slot = jnp.where(present, number, self.window)
        row = jnp.arange(batch)[:, None]
        put = lambda cache, new: cache.at[row, slot].set(new, mode="drop")  # noqa: E731
        key, value = put(state.key, key), put(state.value, value)
        slots = jnp.arange(self.window)
        earlier = jnp.broadcast_to(ids[:, :1], (batch, self.window))
        segment = put(earlier, ids)
        seen = (slots <= number[..., None]) & (slots >= state.first[:, None, None])
        seen &= segment[:, None, :] == ids[..., None]
        out = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
        out = self._leave(out, mask)
        count = number[:, -1] + 1
        self._check(count)
        out = jnp.where(number[..., None] < self.window, out, jnp.nan)
        out = jnp.where(present[..., None], out, 0)
        if not return_state:
            return out
        goes_on = (segment == ids[:, -1:]) & (slots >= state.first[:, None])
        goes_on &= slots < count[:, None]
        first = jnp.where(jnp.any(goes_on, axis=1), jnp.argmax(goes_on, axis=1), count)
        return out, Cache(key, value, first.astype(jnp.int32), count.astype(jnp.int32), conv)

    def _check_window(self) -> None:
        if self.window is None:
            raise ValueError(
                "softmax attention needs window to decode: how many tokens of a sequence it can "
                "keep"
            )

    def _check_cache(self, state: Cache, batch: int) -> None:
        self._check_window()
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        for name in ("key", "value"):
            shape = (batch, self.window, heads, dim)
            validation.array(f"initial_state.{name}", getattr(state, name), shape, "[B, W, H, D]")
        for name in ("first", "count"):
            x = validation.as_array(f"initial_state.{name}", getattr(state, name))
            validation.check_shape(f"initial_state.{name}", x, (batch,), "[B]")

    def _check(self, count: Array) -> None:
        if not isinstance(count, jax.core.Tracer) and int(jnp.max(count)) > self.window:
            raise ValueError(
                f"softmax attention keeps window = {self.window} tokens of a sequence, "
                f"got {int(jnp.max(count))}: raise window, or use other mixers"
            )

    def init_state(self, batch_size: int) -> Cache:
        """The state of ``batch_size`` fresh sequences."""
        validation.size("batch_size", batch_size)
        self._check_window()
        config = self.config
        if config.head_dim != config.value_dim:
            raise ValueError(
                "softmax attention decodes with value_dim = head_dim only, got "
                f"{config.value_dim} and {config.head_dim}"
            )
        dtype = config.param_dtype if config.dtype is None else config.dtype
        shape = (batch_size, self.window, config.num_kv_heads, config.head_dim)
        key, value = (jnp.zeros(shape, dtype) for _ in range(2))  # two, so that both can be donated
        first, count = (jnp.zeros(batch_size, jnp.int32) for _ in range(2))
        return Cache(key, value, first, count, self._conv_state(batch_size))

    @meshes.explicit("B -")
    @numerics.broadcasts
    def step(self, x_t: Array, state: Cache) -> tuple[Array, Cache]:
        """One token, ``[B, in_features]``: ``(out, state)``."""
        return self._step(x_t, state)
