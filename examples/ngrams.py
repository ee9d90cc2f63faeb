"""What the last few tokens are, as an embedding: a table for each length, found by a hash.

Counts of short strings are most of what a small model of text has to learn. Looked up in tables
(Pagnoni et al., *Byte Latent Transformer*, 2024) they cost next to no arithmetic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from embedding import lookup
from flax import nnx

ABSENT = -1  # in place of a token before the sequence or the document began

_MULTIPLIER = 0x9E3779B1  # Knuth, TAOCP 3, 6.4: the golden ratio times 2³²; odd, so invertible


class NGrams(nnx.Module):
    """Embeddings of the last 2, 3, …, ``longest`` tokens.

    Args:
      longest: tokens of the longest string that has a table, at least 2.
      bits: each table has ``2 ** bits`` rows; strings whose hashes agree share one.
      width: of a row.
      features: of the result.
      dtype: of the computation; None for float32.
      rngs: as in Flax.
    """

    def __init__(
        self,
        longest: int,
        bits: int,
        width: int,
        features: int,
        *,
        dtype: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.longest, self.bits = longest, bits
        # Zeros: a string that was never seen adds nothing. The map after it is not zero.
        self.rows = nnx.Embed(
            (longest - 1) << bits,
            width,
            embedding_init=nnx.initializers.zeros,
            dtype=dtype,
            rngs=rngs,
        )
        self.out = nnx.Linear(
            (longest - 1) * width, features, use_bias=False, dtype=dtype, rngs=rngs
        )

    def init_history(self, batch_size: int) -> jax.Array:
        """The history of fresh sequences, ``[B, longest - 1]`` int32: the last tokens in order."""
        return jnp.full((batch_size, self.longest - 1), ABSENT, jnp.int32)

    def __call__(
        self,
        ids: jax.Array,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        history: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """``ids``, ``mask`` and ``segment_ids [B, T]`` to ``([B, T, features], history)``.

        An absent token is in no string, and its segment does not count; no string goes over the
        border of a segment, and the given history belongs to the first one.
        """
        batch, length = ids.shape
        past = self.longest - 1
        if history is None:
            history = self.init_history(batch)
        segments = jnp.zeros_like(ids) if segment_ids is None else segment_ids
        place = jnp.broadcast_to(jnp.arange(past, past + length), ids.shape)
        tokens, owners = ids, segments
        if mask is not None:  # present tokens are moved together
            place = past + jnp.cumsum(mask, axis=1) - 1
            row, slot = jnp.arange(batch)[:, None], jnp.where(mask, place - past, length)
            together = lambda x: jnp.zeros_like(x).at[row, slot].set(x, mode="drop")  # noqa: E731
            tokens, owners = together(ids), together(segments)
        tokens = jnp.concatenate([history, tokens], axis=1)
        first = jnp.broadcast_to(owners[:, :1], history.shape)  # that of the first present token
        owners = jnp.concatenate([first, owners], axis=1)

        def back(number, place):  # the token so many places earlier
            earlier = jnp.maximum(place - number, 0)
            token = jnp.take_along_axis(tokens, earlier, axis=1)
            here = jnp.take_along_axis(owners, earlier, axis=1) == segments
            return jnp.where(here, token, ABSENT)

        strings = jnp.stack([ids, *(back(n, place) for n in range(1, self.longest))], axis=-1)
        last = place[:, -1:] + 1 - jnp.arange(past, 0, -1)
        kept = jnp.take_along_axis(tokens, last, axis=1)
        here = jnp.take_along_axis(owners, last, axis=1)
        here = here == jnp.take_along_axis(owners, place[:, -1:], axis=1)
        return self._embed(strings), jnp.where(here, kept, ABSENT)

    def step(self, token: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One token of each sequence, ``[B]``: ``([B, features], history)``."""
        read = jnp.concatenate([history, token[:, None].astype(jnp.int32)], axis=1)
        return self._embed(read[:, ::-1]), read[:, 1:]

    def _embed(self, strings: jax.Array) -> jax.Array:
        """``[..., longest]`` tokens, the latest first, to ``[..., features]``."""
        tokens = strings.astype(jnp.uint32) + jnp.uint32(2)
        code, places = tokens[..., 0], []
        for i in range(1, self.longest):
            code = (code * jnp.uint32(_MULTIPLIER)) ^ (code >> 15)
            code = (code + tokens[..., i]) * jnp.uint32(_MULTIPLIER)
            places.append((code >> (32 - self.bits)) + jnp.uint32((i - 1) << self.bits))
        rows = lookup(self.rows, jnp.stack(places, axis=-1).astype(jnp.int32))
        return self.out(rows.reshape(*rows.shape[:-2], -1))
