"""A small pre-norm decoder whose layers differ in the token mixer alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vla_jax.nnx import VariationalLinearAttention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and the options of its mixer.

    Attributes:
      mixer: a name in ``MIXERS``.
      vocab_size, max_length: rows of the token and of the position embedding.
      d_model, num_heads, num_layers, ffn_dim: the usual.
      implementation, direction, lambda0: options of ``"vla"``, as in the layer.

    Raises:
      ValueError: naming what does not fit.
    """

    mixer: str = "vla"
    vocab_size: int = 128
    max_length: int = 25
    d_model: int = 128
    num_heads: int = 4
    num_layers: int = 2
    ffn_dim: int = 256
    implementation: str | None = None
    direction: str = "learned"
    lambda0: float = 0.1

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got {self.mixer!r}")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads = {self.num_heads}, got {self.d_model}"
            )


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        heads = (config.num_heads, config.d_model // config.num_heads)
        self.qkv = nnx.LinearGeneral(config.d_model, (3, *heads), rngs=rngs)
        self.out = nnx.LinearGeneral(heads, config.d_model, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, d_model]`` to the same."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


def _vla(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    options: dict[str, Any] = {
        "implementation": config.implementation,
        "direction": config.direction,
        "lambda0": config.lambda0,
    }
    return VariationalLinearAttention(config.num_heads, config.d_model, **options, rngs=rngs)


# [B, T, d_model] to [B, T, d_model]; everything else in the model is shared.
MIXERS: dict[str, Callable[[ModelConfig, nnx.Rngs], nnx.Module]] = {
    "vla": _vla,
    "softmax": SoftmaxAttention,
}


class Block(nnx.Module):
    """Mixer and feed-forward network, each behind a layer norm and around a residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.mixer_norm = nnx.LayerNorm(config.d_model, rngs=rngs)
        self.mixer = MIXERS[config.mixer](config, rngs)
        self.ffn_norm = nnx.LayerNorm(config.d_model, rngs=rngs)
        self.ffn_in = nnx.Linear(config.d_model, config.ffn_dim, rngs=rngs)
        self.ffn_out = nnx.Linear(config.ffn_dim, config.d_model, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, d_model]`` to the same."""
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.ffn_out(jax.nn.gelu(self.ffn_in(self.ffn_norm(x))))


class Model(nnx.Module):
    """A language model whose output embedding is its input embedding."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocab_size, config.d_model, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(
            config.max_length, config.d_model, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.d_model, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Token ids ``[B, T]`` to logits ``[B, T, vocab_size]``."""
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))
