"""A small pre-norm decoder whose layers differ in the token mixer alone.

A mixer maps ``[B, T, d_model]`` to the same and has the interface of
``vla_jax.nnx.VariationalLinearAttention``: a call with ``mask``, ``segment_ids``, ``initial_state``
and ``return_state``, and ``init_state`` and ``step`` for decoding. All mixers stand on one scaffold
(``vla_jax.baseline_layers``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from embedding import lookup
from flax import nnx
from ngrams import NGrams

from vla_jax.baseline_layers import BASELINES, BaselineAttention, SoftmaxAttention
from vla_jax.layer import LayerConfig
from vla_jax.nnx import VariationalLinearAttention
from vla_jax.plan import LAMBDA0
from vla_jax.types import Arrays


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and the options of its mixers.

    Attributes:
      mixer: a name in ``MIXERS``, of every layer that ``layers`` does not name.
      vocab_size: rows of the token embedding.
      max_length: rows of the position embedding: sequences are no longer. None for no positions,
        which leaves order to the mixers and length without a bound.
      d_model, num_heads, num_layers, ffn_dim: the usual.
      implementation, direction, lambda0, learn_lambda0: options of ``"vla"``, as in the layer.
      inverse, beta, decay: further ones. Of ``lambda0`` None is the layer's: 0.1, or 1 with
        ``inverse="read"``.
      layers: one name in ``MIXERS`` for each layer, such as ``("vla", "vla", "softmax")``; None for
        ``mixer`` in all of them.
      num_kv_heads, short_conv: of every mixer; None for the layer's default.
      write_gain, readout: further options of ``"vla"``; None for the mixer's default, which is the
        layer's, but for ``"vla_silu"`` (otherwise the same as ``"vla"``) no ratio.
      window: tokens that ``"softmax"`` can keep of a sequence when it decodes; None for
        ``max_length``. Past it, see ``SoftmaxAttention``.
      ngrams: tokens of the longest string with an embedding of its own, see ``NGrams``; None for
        none.
      ngram_bits, ngram_width: of its tables.
      dtype: of the computation, such as ``"bfloat16"``; None for float32. Parameters, logits and
        the state of all mixers but ``"softmax"`` are float32 whatever it is.
      output_norm: of every mixer: ``"layer"``, ``"rms_per_head"`` or ``"none"``.
      head_dim: of every mixer; None for ``d_model // num_heads``.
      embedding_std: standard deviation of the embeddings to begin with.
      allow_neg_eigval: whether ``beta`` of the DeltaNets goes up to 2.

    Raises:
      ValueError, NotImplementedError: naming what does not fit.
    """

    mixer: str = "vla"
    vocab_size: int = 128
    max_length: int | None = 25
    d_model: int = 128
    num_heads: int = 4
    num_layers: int = 2
    ffn_dim: int = 256
    implementation: str | None = None
    direction: str = "learned"
    lambda0: float | None = None
    layers: tuple[str, ...] | None = None
    num_kv_heads: int | None = None
    short_conv: int | None = None
    readout: str | None = None
    window: int | None = None
    ngrams: int | None = None
    ngram_bits: int = 14
    ngram_width: int = 64
    dtype: str | None = None
    write_gain: str | None = None
    output_norm: str = "layer"
    inverse: str = "write"
    beta: bool = False
    decay: bool = False
    learn_lambda0: bool = False
    head_dim: int | None = None
    embedding_std: float = 0.02
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
            if len(self.layers) != self.num_layers:
                raise ValueError(
                    f"layers must name num_layers = {self.num_layers} mixers, got {self.layers}"
                )
        for name, mixer in [("mixer", self.mixer), *(("layers", x) for x in self.layers or ())]:
            if mixer not in MIXERS:
                raise ValueError(f"{name} must be one of {', '.join(MIXERS)}, got {mixer!r}")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads = {self.num_heads}, got {self.d_model}"
            )
        for name in ("max_length", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ngrams is not None and self.ngrams < 2:
            raise ValueError(f"ngrams must be at least 2, got {self.ngrams}")
        if not 0 < self.embedding_std < math.inf:
            raise ValueError(f"embedding_std must be positive, got {self.embedding_std}")
        if not 1 <= self.ngram_bits <= 24:
            raise ValueError(f"ngram_bits must be from 1 to 24, got {self.ngram_bits}")
        vla = [mixer for mixer in dict.fromkeys(self.mixers) if mixer in _VLA]
        new = [name for name, default in _VLA_NEW.items() if getattr(self, name) != default]
        if new and not vla:
            raise ValueError(f"{new[0]} needs a layer of 'vla', got {', '.join(self.mixers)}")
        if self.lambda0 is None:
            object.__setattr__(self, "lambda0", LAMBDA0.get(self.inverse))
        for mixer in vla if new else ():  # it says what does not go together, and starts JAX
            LayerConfig(
                num_heads=self.num_heads, in_features=self.d_model, **_vla_options(mixer, self)
            )

    def settings(self) -> dict[str, Any]:
        """The fields, by which results are told apart.

        Those that came after the first kept results are absent where they have their default.
        """
        fields = dataclasses.asdict(self)
        return {n: x for n, x in fields.items() if n not in _NEW or x != _NEW[n]}

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        return self.layers or (self.mixer,) * self.num_layers

    @property
    def capacity(self) -> int | None:
        """Tokens of a sequence that the model can read, None without a bound."""
        bounds = [self.max_length]
        if "softmax" in self.mixers:
            bounds.append(self.window)
        return min((bound for bound in bounds if bound is not None), default=None)


def _scaffold(config: ModelConfig) -> dict[str, Any]:
    """What every mixer has."""
    return {
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "short_conv": config.short_conv,
        "output_norm": None if config.output_norm == "none" else config.output_norm,
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
    }


_VLA_NEW: dict[str, Any] = {
    "inverse": "write", "beta": False, "decay": False, "learn_lambda0": False,
}  # fmt: skip
_NEW = _VLA_NEW | {"head_dim": None, "embedding_std": 0.02, "allow_neg_eigval": False}

# Mixers that are VLA, and what they set.
_VLA: dict[str, dict[str, Any]] = {
    "vla": {},
    # The features of the delta rules without a ratio, to tell what they do from the penalty.
    "vla_silu": {"feature_map": jax.nn.silu, "readout": "none"},
}
_VLA_OPTIONS = (
    "implementation", "direction", "lambda0", "learn_lambda0", "inverse", "beta", "decay",
    "write_gain", "readout",
)  # fmt: skip


def _vla_options(mixer: str, config: ModelConfig) -> dict[str, Any]:
    asked = {name: getattr(config, name) for name in _VLA_OPTIONS}
    return _VLA[mixer] | _scaffold(config) | {n: x for n, x in asked.items() if x is not None}


def _vla(mixer: str, config: ModelConfig, rngs: nnx.Rngs) -> VariationalLinearAttention:
    options = _vla_options(mixer, config)
    return VariationalLinearAttention(config.num_heads, config.d_model, **options, rngs=rngs)


def _softmax(config: ModelConfig, rngs: nnx.Rngs) -> SoftmaxAttention:
    return SoftmaxAttention(
        config.num_heads,
        config.d_model,
        window=config.window or config.max_length,
        **_scaffold(config),
        rngs=rngs,
    )


def _baseline(kind: str, config: ModelConfig, rngs: nnx.Rngs) -> BaselineAttention:
    options = _scaffold(config)
    if config.allow_neg_eigval:
        options["allow_neg_eigval"] = True
    return BaselineAttention(kind, config.num_heads, config.d_model, **options, rngs=rngs)


# [B, T, d_model] to [B, T, d_model]; everything else in the model is shared.
MIXERS: dict[str, Callable[[ModelConfig, nnx.Rngs], Any]] = {
    **{mixer: functools.partial(_vla, mixer) for mixer in _VLA},
    "softmax": _softmax,
    **{kind: functools.partial(_baseline, kind) for kind in BASELINES},
}


class Block(nnx.Module):
    """Mixer and feed-forward network, each behind a layer norm and around a residual."""

    def __init__(self, config: ModelConfig, mixer: str, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        self.mixer_norm = nnx.LayerNorm(config.d_model, **options)
        self.mixer = MIXERS[mixer](config, rngs)
        self.ffn_norm = nnx.LayerNorm(config.d_model, **options)
        self.ffn_in = nnx.Linear(config.d_model, config.ffn_dim, **options)
        self.ffn_out = nnx.Linear(config.ffn_dim, config.d_model, **options)

    def __call__(self, x: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        """``[B, T, d_model]`` to the same, and the mixer's state where ``return_state`` asks."""
        mixed, state = self.mixer(self.mixer_norm(x), **options), None
        if options.get("return_state"):
            mixed, state = mixed
        return self._rest(x + mixed), state

    def step(self, x_t: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """One token, ``[B, d_model]``: ``(out, state)``."""
        mixed, state = self.mixer.step(self.mixer_norm(x_t), state)
        return self._rest(x_t + mixed), state

    def _rest(self, x: jax.Array) -> jax.Array:
        return x + self.ffn_out(jax.nn.gelu(self.ffn_in(self.ffn_norm(x))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelState(Arrays):
    """What the model keeps of sequences: a pytree whose arrays all have the batch axis first.

    Attributes:
      layers: the state of each mixer; of constant size for ``"vla"``.
      position: ``[B]`` int32, tokens read.
      history: the last tokens, as ``NGrams`` keeps them; None without it.
    """

    layers: tuple[Any, ...]
    position: jax.Array
    history: jax.Array | None = None


class Model(nnx.Module):
    """A language model whose output embedding is its input embedding."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        options: dict[str, Any] = {
            "embedding_init": nnx.initializers.normal(config.embedding_std),
            "dtype": config.dtype,
            "rngs": rngs,
        }
        self.tokens = nnx.Embed(config.vocab_size, config.d_model, **options)
        self.positions = (
            None
            if config.max_length is None
            else nnx.Embed(config.max_length, config.d_model, **options)
        )
        self.ngrams = (
            None
            if config.ngrams is None
            else NGrams(
                config.ngrams,
                config.ngram_bits,
                config.ngram_width,
                config.d_model,
                dtype=config.dtype,
                rngs=rngs,
            )
        )
        self.blocks = nnx.List([Block(config, mixer, rngs) for mixer in config.mixers])
        self.norm = nnx.LayerNorm(config.d_model, dtype=config.dtype, rngs=rngs)

    def __call__(
        self,
        ids: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        initial_state: ModelState | None = None,
        return_state: bool = False,
        axis_name: str | None = None,
        at: jax.Array | None = None,
    ) -> Any:
        """Token ids ``[B, T]`` to logits ``[B, T, vocab_size]``.

        Args:
          ids: the tokens.
          mask: ``[B, T]`` booleans, False for padding, anywhere: such a token is absent, and what
            is returned for it means nothing.
          segment_ids: ``[B, T]`` integers that do not decrease: documents packed in a row. They
            need a model without positions.
          initial_state: the state to go on from; it belongs to the first segment.
          return_state: whether to return ``(logits, state)``.
          axis_name: inside ``jax.shard_map``, the mesh axis over which T is sharded. Every mixer
            must be ``"vla"``; nothing but the tokens and segments can be given.
          at: ``[B, K]`` positions, the only ones for which logits (``[B, K, vocab_size]``) are
            computed; None for all.

        Raises:
          ValueError: for segments in a model with positions, past a window (see
            ``SoftmaxAttention``), and for what ``axis_name`` does not go with.
        """
        batch, length = ids.shape
        if axis_name is not None and (mask is not None or initial_state or return_state):
            raise ValueError("axis_name does not go with mask, initial_state and return_state")
        start = None if initial_state is None else initial_state.position
        x = lookup(self.tokens, ids)
        if self.positions is not None:
            if segment_ids is not None:
                raise ValueError("segment_ids need max_length=None in ModelConfig: no positions")
            numbers = self._numbers(length, mask, start)
            if axis_name is not None:
                numbers = numbers + jax.lax.axis_index(axis_name) * length
            x = x + lookup(self.positions, numbers)
        history = None
        if self.ngrams is not None:
            if axis_name is not None:
                raise ValueError("axis_name needs ngrams=None in ModelConfig")
            before = None if initial_state is None else initial_state.history
            strings, history = self.ngrams(ids, mask, segment_ids, before)
            x = x + strings
        states = []
        for i, block in enumerate(self.blocks):
            options: dict[str, Any] = {"segment_ids": segment_ids, "return_state": return_state}
            if initial_state is not None:
                options["initial_state"] = initial_state.layers[i]
            if axis_name is not None:
                options["axis_name"] = axis_name
            x, state = block(x, mask=mask, **options)
            states.append(state)
        if at is not None:
            x = jnp.take_along_axis(x, at[..., None], axis=1)
        logits = self._logits(x)
        if not return_state:
            return logits
        read = jnp.full(batch, length) if mask is None else jnp.sum(mask, axis=1)
        read = read.astype(jnp.int32) + (0 if start is None else start)
        return logits, ModelState(tuple(states), read, history)

    def _numbers(self, length: int, mask: jax.Array | None, start: jax.Array | None) -> jax.Array:
        numbers = jnp.arange(length)
        if mask is not None:
            numbers = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        return numbers if start is None else start[:, None] + numbers

    def _logits(self, x: jax.Array) -> jax.Array:
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)

    def init_state(self, batch_size: int) -> ModelState:
        """The state of ``batch_size`` fresh sequences."""
        layers = tuple(block.mixer.init_state(batch_size) for block in self.blocks)
        history = None if self.ngrams is None else self.ngrams.init_history(batch_size)
        return ModelState(layers, jnp.zeros(batch_size, jnp.int32), history)

    def step(self, token: jax.Array, state: ModelState) -> tuple[jax.Array, ModelState]:
        """One token id for each sequence, ``[B]``: ``(logits [B, vocab_size], state)``."""
        x = lookup(self.tokens, token)
        if self.positions is not None:
            x = x + lookup(self.positions, state.position)
        history = None
        if self.ngrams is not None:
            strings, history = self.ngrams.step(token, state.history)
            x = x + strings
        states = []
        for block, before in zip(self.blocks, state.layers, strict=True):
            x, after = block.step(x, before)
            states.append(after)
        return self._logits(x), ModelState(tuple(states), state.position + 1, history)


@functools.lru_cache(None)
def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model of ``config``, embeddings included."""
    shapes = nnx.state(nnx.eval_shape(lambda: Model(config, nnx.Rngs(0))), nnx.Param)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def state_floats(config: ModelConfig, length: int) -> int:
    """Numbers that a model keeps of one sequence of ``length`` tokens to go on from it.

    Of softmax attention, the keys and values of all tokens; of the others, the fields that define
    the state (the inverse that ``"vla"`` caches beside its penalty is derived, and not counted).
    """
    heads = config.num_kv_heads or config.num_heads
    dim = config.head_dim or config.d_model // config.num_heads
    sizes = {"vla": 2 * dim * dim + dim, "softmax": 2 * length * dim}
    sizes |= dict.fromkeys(("mesa", "gated_mesa"), 2 * dim * dim)
    sizes |= dict.fromkeys(
        ("deltanet", "deltanet_elu", "gated_deltanet", "identity_silu"), dim * dim
    )
    sizes["vla_silu"] = 2 * dim * dim + (dim if config.readout == "ratio" else 0)
    if config.readout == "none" or config.inverse == "read":
        sizes["vla"] = 2 * dim * dim
    conv = 0
    if config.short_conv is not None:
        conv = (config.short_conv - 1) * (config.num_heads + 2 * heads) * dim
    history = 0 if config.ngrams is None else config.ngrams - 1
    return (
        sum(heads * sizes.get(mixer, dim * dim + dim) + conv for mixer in config.mixers) + history
    )


def with_parameter_count(config: ModelConfig, count: int) -> ModelConfig:
    """``config`` with the feed-forward width for which it has nearly ``count`` parameters.

    Raises:
      ValueError: if the rest of the model alone has more.
    """
    unit = config.num_layers * (2 * config.d_model + 1)  # parameters of one more in every layer
    width = config.ffn_dim + round((count - parameter_count(config)) / unit)
    if width < 1:
        raise ValueError(f"count = {count} is less than mixer {config.mixer!r} needs")
    return dataclasses.replace(config, ffn_dim=width)
