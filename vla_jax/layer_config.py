"""The options of the layer, checked, and the parameters that they call for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import functions, implementations, numerics, validation
from vla_jax import plan as planning
from vla_jax.types import (
    Array,
    DTypeLike,
    Implementation,
    Inverse,
    PrecisionLike,
    Readout,
    WriteGain,
)

DIRECTIONS = ("learned", "key")
LOGICAL_AXES = ("embed", "heads", "kv_heads", "head_dim")
OUTPUT_NORMS = ("layer", "rms_per_head", None)

Initializer = Callable[..., Array]
FeatureMap = Callable[[Array], Array]
Parameters = Mapping[str, Mapping[str, Array]]

_lecun_normal = jax.nn.initializers.lecun_normal()


def default_kernel_init(key: Array, shape: Any, dtype: DTypeLike = None) -> Array:
    """LeCun's normal initialiser, under a name by which a configuration can be pickled."""
    return _lecun_normal(key, shape, dtype)


default_bias_init: Initializer = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Every option of the layer; the Flax layers take the same ones.

    Attributes:
      num_heads: query heads Hq.
      in_features: size of the last axis of the input.
      num_kv_heads: key/value heads H, a divisor of ``num_heads``; None for ``num_heads``.
      head_dim: D; None for ``in_features / num_heads``.
      value_dim: E; None for ``head_dim``.
      out_features: size of the last axis of the output; None for ``in_features``.
      lambda0: the initial penalty, a positive number or one for each key/value head; None for 0.1,
        with ``inverse="read"`` 1.
      learn_lambda0: whether ``lambda0`` is a parameter (its logarithm, one for each key/value head,
        so it stays positive), which then starts from ``lambda0``.
      direction: ``"learned"``, a map of the raw key, or ``"key"``, the unit key itself; scaled to
        length ``1/√D``, with ``inverse="read"`` to 1, beside which ``lambda0`` counts.
      write_gain, readout, inverse: as in ``vla_jax.vla_attention``.
      beta: whether each token has a learned weight ``β = sigmoid(W x + b)``, one a key/value head.
      decay: whether the state decays, ``log γ = −exp(r) softplus(W x + b)``, one a key/value head;
        ``r`` starts so that heads forget over 10 to 1000 tokens, evenly spread in the logarithm.
      feature_map: of queries and keys, ``[B, T, heads, D]`` to the same: a function that has no
        parameters and treats each token alone (of a masked one it sees ones). The published one,
        ``vla_jax.feature_map``, is positive, as the ratio needs: it divides by ``z·q``, which
        features of both signs, such as those of ``jax.nn.silu``, let come to nearly 0.
      short_conv: width of a causal depthwise convolution of the projected query, key and value, or
        None. It sees neither padding nor other segments.
      output_norm: ``"layer"`` normalises the concatenated heads, ``"rms_per_head"`` each head by
        its root mean square, None nothing. The ratio read-out fades with t: keep a norm with it.
      norm_eps: added to the variance (the mean square) by the output norm.
      use_bias: whether the projections and the layer norm have a bias (``u_proj`` never has).
      dtype: of the computation; None for the common dtype of input and parameters. The state, every
        normalisation and every factorisation are float32 whatever it is (float64 with float64).
      param_dtype: of the parameters.
      precision: of the matrix products, as in ``jax.lax``.
      kernel_init, bias_init: initialisers. A kernel with several axes is drawn as the matrix
        ``[in, out]`` that it is (``u_proj``: one matrix a head), so fans are right.
      implementation: as in ``vla_jax.vla_attention``; ``"triton"`` has no gates. ``"pallas"`` is
        also how ``step`` runs. It has no chunks, so every other name means the same ``jax.numpy``
        there.
      check_invariants: whether to assert that the unit key and the unit write direction have unit
        length or are exactly zero (``vla_jax.checks``). Costs a second solve. Under jit the
        function must be wrapped in ``chex.chexify``; without the wrapper chex refuses to trace.
      logical_axes: whether the Flax layers annotate the parameters with logical axis names for
        partitioning: ``"embed"``, ``"heads"``, ``"kv_heads"``, ``"head_dim"``; or a mapping from
        some of these to names of your own (None: no name). Rules that lack ``"kv_heads"``, as
        common sets of them do, leave key, value and direction whole on every device.

    Raises:
      ValueError, TypeError: naming the option that is wrong.
      NotImplementedError: if ``implementation="triton"`` is to have gates or the inverse at the
        read.
    """

    num_heads: int
    in_features: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    out_features: int | None = None
    lambda0: float | tuple[float, ...] | None = None
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
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    implementation: Implementation | None = None
    check_invariants: bool = False
    logical_axes: bool | Mapping[str, str | None] | tuple[tuple[str, str | None], ...] = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "in_features"):
            validation.size(name, getattr(self, name))
        if self.head_dim is None and self.in_features % self.num_heads:
            raise ValueError(
                f"in_features = {self.in_features} is not a multiple of num_heads = "
                f"{self.num_heads}: give head_dim"
            )
        self._default("num_kv_heads", self.num_heads)
        self._default("head_dim", self.in_features // self.num_heads)
        self._default("value_dim", self.head_dim)
        self._default("out_features", self.in_features)
        for name in ("num_kv_heads", "head_dim", "value_dim", "out_features"):
            validation.size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads = {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.short_conv is not None:
            validation.size("short_conv", self.short_conv)
        validation.choice("direction", self.direction, DIRECTIONS)
        variant = planning.variant(self.write_gain, self.readout, 1e-6, self.inverse, jnp.float32)
        self._default("write_gain", variant.write_gain)
        self._default("readout", variant.readout)
        self._default("lambda0", planning.LAMBDA0[self.inverse])
        validation.choice("output_norm", self.output_norm, OUTPUT_NORMS)
        validation.floor("norm_eps", self.norm_eps, jnp.float32)
        for name in ("beta", "decay", "learn_lambda0", "use_bias", "check_invariants"):
            validation.flag(name, getattr(self, name))
        object.__setattr__(self, "logical_axes", _logical_axes(self.logical_axes))
        for name in ("feature_map", "kernel_init", "bias_init"):
            _check_function(name, getattr(self, name))
        if self.dtype is not None:
            validation.floating_dtype("dtype", self.dtype)
        validation.floating_dtype("param_dtype", self.param_dtype)
        if self.implementation is not None:
            validation.choice("implementation", self.implementation, implementations.NAMES)
        if self.implementation == "triton":
            asked = [f"{name}=True" for name in ("beta", "decay") if getattr(self, name)]
            asked += ["inverse='read'"] if self.inverse == "read" else []
            if asked:
                raise NotImplementedError(
                    f"implementation='triton' has no {' and no '.join(asked)}: leave it out"
                )
        validation.lambda0(self.lambda0, self.num_kv_heads, jnp.float32)
        # Hashable, so that a configuration can be a static argument.
        values = np.asarray(self.lambda0, np.float64)
        hashable = tuple(values.tolist()) if values.ndim else values.item()
        object.__setattr__(self, "lambda0", hashable)
        object.__setattr__(self, "precision", numerics.precision_of(self.precision))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerConfig:
        # Frozen; and the copy of a jitted function, such as jax.nn.silu, is unequal to it.
        return self

    def __getstate__(self) -> dict[str, Any]:
        return functions.by_name(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(functions.from_names(state))

    def without_initializers(self) -> LayerConfig:
        """The same with the default initialisers: what a layer keeps that has its parameters.

        Layers are then alike, and can be pickled, whatever function drew their parameters.
        """
        return dataclasses.replace(
            self, kernel_init=default_kernel_init, bias_init=default_bias_init
        )

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def channels(self) -> int:
        """Projected query, key and value together: the channels of the short convolution."""
        return self.num_heads * self.head_dim + self.num_kv_heads * (self.head_dim + self.value_dim)


def _logical_axes(value: Any) -> bool | tuple[tuple[str, str | None], ...]:
    """The option, a mapping as pairs in order: a configuration can be hashed.

    Raises:
      TypeError, ValueError: if it is neither a bool nor a mapping of ``LOGICAL_AXES`` to names.
    """
    if not isinstance(value, Mapping | tuple):
        validation.flag("logical_axes", value)
        return bool(value)
    named = dict(value)
    for axis, name in named.items():
        validation.choice("an axis in logical_axes", axis, LOGICAL_AXES)
        if not isinstance(name, str | None):
            raise TypeError(f"logical_axes[{axis!r}] must be a str or None, got {name!r}")
    return tuple(sorted(named.items())) or True


def _check_function(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` can be called and be part of a static argument."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")
    if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} must be a function without arrays of its own, which would be neither "
            f"trained nor traced: got {type(value).__name__}"
        )
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, got {type(value).__name__}") from error


OPTIONS = tuple(field.name for field in dataclasses.fields(LayerConfig))


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given names that are options of ``LayerConfig``."""
    return {name: given[name] for name in OPTIONS if name in given}


# --- parameters --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Shape, logical axis names and initialiser ``(key, dtype) -> array`` of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[[Array, DTypeLike], Array]


def _parameter(
    name: str, init: Initializer, rows: tuple[int, ...], columns: tuple[int, ...], axes: Any
) -> Parameter:
    """A parameter of shape ``rows + columns``, drawn as one matrix (without rows, one vector)."""
    shape = rows + columns
    drawn = (math.prod(rows), math.prod(columns)) if rows else (math.prod(columns),)

    def draw(key, dtype):
        value = init(key, drawn, dtype)
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{name} must return an array, got {type(value).__name__}: "
                "use logical_axes=True to annotate parameters for partitioning"
            )
        if value.shape != drawn:
            raise ValueError(
                f"{name} must return the shape that it is given, {list(drawn)}, "
                f"got {list(value.shape)}"
            )
        return value.reshape(shape)

    return Parameter(shape, axes, draw)


def parameters(config: LayerConfig) -> dict[str, dict[str, Parameter]]:
    """The parameters of the layer: ``{group: {name: Parameter}}``.

    ========== ======================================================== ==========================
    group      parameters                                               present
    ========== ======================================================== ==========================
    q_proj     kernel ``[in, Hq, D]``, bias ``[Hq, D]``                  always (bias: use_bias)
    k_proj     kernel ``[in, H, D]``, bias ``[H, D]``                    always
    v_proj     kernel ``[in, H, E]``, bias ``[H, E]``                    always
    u_proj     kernel ``[H, D, D]``                                     direction="learned"
    q_conv     kernel ``[width, Hq, D]``; k_conv and v_conv alike        short_conv
    norm       scale ``[Hq, E]``, bias ``[Hq, E]``                       output_norm (bias: "layer")
    o_proj     kernel ``[Hq, E, out]``, bias ``[out]``                   always
    penalty    log_lambda0 ``[H]``                                      learn_lambda0
    beta_proj  kernel ``[in, H]``, bias ``[H]``                          beta
    decay_proj kernel ``[in, H]``, bias ``[H]``, log_rate ``[H]``         decay
    ========== ======================================================== ==========================
    """
    c = config
    embed, dim = ("embed",), "head_dim"
    query = ((c.num_heads, c.head_dim), ("heads", dim))
    key = ((c.num_kv_heads, c.head_dim), ("kv_heads", dim))
    value = ((c.num_kv_heads, c.value_dim), ("kv_heads", dim))
    out = ((c.num_heads, c.value_dim), ("heads", dim))

    def kernel(rows, columns):
        return _parameter("kernel_init", c.kernel_init, rows[0], columns[0], rows[1] + columns[1])

    def vector(init, columns, name="bias_init"):
        return _parameter(name, init, (), *columns)

    def dense(rows, columns):
        group = {"kernel": kernel(rows, columns)}
        return group | ({"bias": vector(c.bias_init, columns)} if c.use_bias else {})

    source, target = ((c.in_features,), embed), ((c.out_features,), embed)
    groups = {name: dense(source, to) for name, to in zip(QKV, (query, key, value), strict=True)}
    if c.direction == "learned":
        one = _parameter("kernel_init", c.kernel_init, (c.head_dim,), (c.head_dim,), (None, dim))
        groups["u_proj"] = {
            "kernel": Parameter(
                (c.num_kv_heads, *one.shape),
                ("kv_heads", *one.axes),
                lambda rng, dtype: jnp.stack(
                    [one.init(r, dtype) for r in jax.random.split(rng, c.num_kv_heads)]
                ),
            )
        }
    if c.short_conv is not None:
        width = ((c.short_conv,), (None,))
        for name, to in zip(CONVS, (query, key, value), strict=True):
            groups[name] = {"kernel": kernel(width, to)}
    if c.output_norm is not None:
        groups["norm"] = {"scale": vector(jax.nn.initializers.ones, out)}
        if c.output_norm == "layer" and c.use_bias:
            groups["norm"]["bias"] = vector(c.bias_init, out)
    groups["o_proj"] = dense(out, target)
    per_head = ((c.num_kv_heads,), ("kv_heads",))
    for name in ("beta", "decay"):
        if getattr(c, name):
            groups[f"{name}_proj"] = {
                "kernel": kernel(source, per_head),
                "bias": vector(c.bias_init, per_head),
            }
    if c.decay:
        groups["decay_proj"]["log_rate"] = Parameter(
            *per_head, lambda _, dtype: jnp.asarray(_initial_log_rates(c.num_kv_heads), dtype)
        )
    if c.learn_lambda0:
        log = np.log(np.broadcast_to(np.asarray(c.lambda0, np.float64), (c.num_kv_heads,)))
        groups["penalty"] = {
            "log_lambda0": Parameter(
                (c.num_kv_heads,), ("kv_heads",), lambda _, dtype: jnp.asarray(log, dtype)
            )
        }
    own = dict(c.logical_axes) if isinstance(c.logical_axes, tuple) else {}
    return {
        group: {
            name: dataclasses.replace(p, axes=tuple(own.get(axis, axis) for axis in p.axes))
            for name, p in members.items()
        }
        for group, members in groups.items()
    }


QKV = ("q_proj", "k_proj", "v_proj")
CONVS = ("q_conv", "k_conv", "v_conv")


def _initial_log_rates(num_heads: int) -> np.ndarray:
    """``r`` with ``exp(r) softplus(0) = 1 / τ``, ``τ`` from 10 to 1000 tokens over the heads."""
    exponents = 1 + 2 * (np.arange(num_heads) + 0.5) / num_heads
    return -np.log(10**exponents * math.log(2))


def init_parameters(config: LayerConfig, rng: Array) -> dict[str, dict[str, Array]]:
    """Draws the parameters that ``parameters`` lists, without any framework."""
    groups = parameters(config)
    keys = iter(jax.random.split(rng, sum(map(len, groups.values()))))
    return {
        group: {name: p.init(next(keys), config.param_dtype) for name, p in members.items()}
        for group, members in groups.items()
    }
