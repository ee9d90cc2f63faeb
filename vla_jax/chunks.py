"""Tokens in chunks: cutting and joining, what segments mean to a chunk, running sums, blocks.

Equation numbers are those of ``docs/derivation.md``. An array of tokens in chunks is chunk-major,
``[N, B, H, C, D]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.types import Array, DTypeLike

# Tokens of a chunk; and chunks that step one inverse before it is derived again from the penalty,
# which is also how many are worked on side by side where they need not all be.
DEFAULT_CHUNK_SIZE = 32
SUPER_CHUNK = 16


class Segments(NamedTuple):
    """What segment ids mean to the tokens of each chunk, equation (16). All ``[N, B, 1, ...]``."""

    same: Array  # [..., C, C]  the two tokens are of one segment
    cont: Array  # [..., C, 1]  the token is of the segment that runs at the chunk's start
    last: Array  # [..., C, 1]  the token is of the segment that runs at the chunk's end
    keep: Array  # [..., 1, 1]  one segment spans the whole chunk and what precedes it


def segments_of(segment_ids: Array | None, num_chunks: int, chunk: int) -> Segments | None:
    """What ids ``[B, T]`` mean to the chunks; None without them."""
    if segment_ids is None:
        return None
    batch, length = segment_ids.shape
    ids = jnp.pad(segment_ids, ((0, 0), (0, num_chunks * chunk - length)), mode="edge")
    ids = ids.reshape(batch, num_chunks, chunk).swapaxes(0, 1)[:, :, None, :]
    running = jnp.concatenate([ids[:1, ..., :1], ids[:-1, ..., -1:]])
    cont = ids == running
    return Segments(
        same=ids[..., :, None] == ids[..., None, :],
        cont=cont[..., None],
        last=(ids == ids[..., -1:])[..., None],
        keep=cont[..., -1:, None],
    )


def per_group(segments: Segments | None) -> Segments | None:
    """The segments with an axis for the group, to mask arrays made with queries."""
    if segments is None:
        return None
    return Segments(*(x[:, :, :, None] for x in segments))


def where(condition: Array | None, x: Array, otherwise: Array | float = 0) -> Array:
    """``jnp.where``; a condition of None holds everywhere."""
    return x if condition is None else jnp.where(condition, x, otherwise)


def kept(keep: Array | None, x: Array) -> Array:
    """What a chunk leaves of the state: all for None, all or nothing, or a factor if numbers."""
    if keep is None or keep.dtype == jnp.bool_:
        return where(keep, x)
    return keep * x


def lower(x: Array, segments: Segments | None, offset: int = 0) -> Array:
    """Keeps ``[t, s]`` with ``s <= t + offset`` and both tokens of one segment."""
    x = jnp.tril(x, offset)
    return x if segments is None else jnp.where(segments.same, x, 0)


def upper(x: Array, segments: Segments | None, offset: int = 0) -> Array:
    """Keeps ``[t, s]`` with ``s >= t + offset`` and both tokens of one segment."""
    x = jnp.triu(x, offset)
    return x if segments is None else jnp.where(segments.same, x, 0)


def split(x: Array, num_chunks: int, chunk: int, dtype) -> Array:
    """``[B, T, *heads, D]`` to ``[N, B, *heads, C, D]``, zeros after the end."""
    return by_chunk(padded(x, num_chunks, chunk).astype(dtype))


def join(x: Array, length: int) -> Array:
    """Inverse of ``split``."""
    x = by_sequence(x)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def padded(x: Array, *shape: int) -> Array:
    """``[B, T, ...]`` to ``[B, *shape, ...]``, zeros after the end."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, math.prod(shape) - x.shape[1])
    return jnp.pad(x, pad).reshape(x.shape[0], *shape, *x.shape[2:])


def by_chunk(x: Array) -> Array:
    """``[B, N, C, *heads, D]`` to ``[N, B, *heads, C, D]``."""
    return jnp.moveaxis(jnp.swapaxes(x, 0, 1), 2, -2)


def by_sequence(x: Array) -> Array:
    """Inverse of ``by_chunk``."""
    return jnp.swapaxes(jnp.moveaxis(x, -2, 2), 0, 1)


def masks(segments: Segments | None) -> tuple[Array | None, Array | None, Array | None]:
    """``cont``, ``last`` and ``keep``; None, which masks nothing, where there are no segments."""
    return (None,) * 3 if segments is None else (segments.cont, segments.last, segments.keep)


def ceil_div(length: int, size: int) -> int:
    """How many of ``size`` hold ``length``."""
    return -(-length // size)


def chunk_of(length: int, chunk_size: int | None = None) -> int:
    """Tokens of a chunk: at most the sequence, unless its length is a symbol of ``jax.export``."""
    size = chunk_size or DEFAULT_CHUNK_SIZE
    return size if jax.export.is_symbolic_dim(length) else min(size, length)


# --- scans over chunks -------------------------------------------------------------------------


def running_sum(
    terms: Array, keep: Array | None, initial: Array, *, reverse: bool = False
) -> tuple[Array, Array]:
    """``x ← keep·x + term`` over the leading axis: ``x`` before each term, and the last one."""

    def step(carry, inputs):
        term, kept = inputs
        return where(kept, carry) + term, carry

    final, starts = jax.lax.scan(step, initial, (terms, keep), reverse=reverse)
    return starts, final


def sweep(
    left: Array,
    right: Array,
    inner: Array,
    outer: Array | None,
    keep: Array | None,
    initial: Array,
    policy: numerics.Policy,
    *,
    reverse: bool = False,
) -> tuple[Array, Array, Array]:
    """``S ← keep·S + outer + leftᵀ (inner − right S)`` over chunks: equation (14), in sequence.

    Args:
      left, right: ``[N, B, H, C, D]``.
      inner: ``[N, B, H, C, E]``.
      outer: ``[N, B, H, D, E]`` or None.
      keep: ``[N, B, H or 1, 1, 1]``, see ``kept``.
      initial: ``[B, H, D, E]``.
      reverse: from the last chunk to the first.

    Returns:
      ``S`` before each chunk, ``[N, B, H, D, E]``; ``inner − right S``; ``S`` after the last chunk.
    """

    def step(state, inputs):
        left, right, inner, outer, keep = inputs
        inner = inner - policy.dot("...td,...de->...te", right, state)
        new = kept(keep, state) + policy.dot("...td,...te->...de", left, inner)
        return (new if outer is None else new + outer), (state, inner)

    chunks = left, right, inner, outer, keep
    final, (starts, inner) = jax.lax.scan(step, initial, chunks, reverse=reverse)
    return starts, inner, final


class Scans(NamedTuple):
    """How what is carried from chunk to chunk is found.

    Attributes:
      sweep, running_sum: functions with the signatures of those above.
      decayed_sum: one with that of ``decay.running_sum``.
      span: chunks of a super-chunk, of which one is worked on after the other; None for one of all.
    """

    sweep: Callable[..., tuple[Array, Array, Array]]
    running_sum: Callable[..., tuple[Array, Array]]
    decayed_sum: Callable[..., tuple[Array, tuple[Array, Array]]]
    span: int | None


def causal_sum(
    x: Array, initial: Array, segment_ids: Array | None, policy: numerics.Policy
) -> tuple[Array, Array]:
    """``z_t = z_0 + Σ_{s≤t} x_s`` within segments: ``([B, T, H, D], the last [B, H, D])``."""
    batch, length, *rest = x.shape
    chunk = chunk_of(length)
    n = ceil_div(length, chunk)
    # All heads in one product: as they lie, without a copy.
    x = padded(x.astype(policy.accumulator), n, chunk).reshape(batch, n, chunk, -1)
    before = jnp.broadcast_to(jnp.tri(chunk, dtype=x.dtype), (batch, n, chunk, chunk))
    cont = keep = None
    segments = segments_of(segment_ids, n, chunk)
    if segments is not None:
        same, cont = (y[:, :, 0].swapaxes(0, 1) for y in (segments.same, segments.cont))
        before, keep = jnp.where(same, before, 0), segments.keep[:, :, 0, 0]
    within = policy.dot("bnts,bnsf->bntf", before, x)
    last = within[:, :, -1].swapaxes(0, 1)
    starts, final = running_sum(last, keep, initial.reshape(batch, -1))
    within = within + where(cont, starts.swapaxes(0, 1)[:, :, None])
    return within.reshape(batch, -1, *rest)[:, :length], final.reshape(initial.shape)


# --- blocks -----------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Tokens in super-chunks, here "blocks", of at most ``span`` chunks, all of one size."""

    length: int
    chunk: int
    span: int
    blocks: int

    @classmethod
    def of(cls, length: int, chunk_size: int | None, span: int | None = SUPER_CHUNK) -> Blocks:
        """``span=None`` is one block of all chunks."""
        chunk = chunk_of(length, chunk_size)
        chunks = ceil_div(length, chunk)
        blocks = ceil_div(chunks, span or chunks)
        return cls(length, chunk, ceil_div(chunks, blocks), blocks)

    def scan(
        self,
        step: Callable,
        carry: Any,
        tokens: Sequence[Array],
        shapes: Sequence[tuple[int, ...]],
        segment_ids: Array | None,
        kept: Any = None,
        *,
        dtype: DTypeLike,
        side_by_side: bool = False,
        reverse: bool = False,
    ) -> tuple[Any, list[Array], Any]:
        """``jax.lax.scan`` over the blocks, or over the chunks of all blocks side by side.

        What ``step`` makes is small beside the sequence, and the next step makes it in the same
        memory.

        Args:
          step: ``(carry, chunks, segments, kept)`` to ``(carry, results, kept)``: of each of
            ``tokens`` all chunks of one block, or one chunk of each block, ``[N, B, *heads, C,
            D]``; their segments; their part of ``kept``; the same chunks of each result; and
            whatever else of them is to be kept.
          tokens: arrays ``[B, T, *heads, D]``.
          shapes: ``(*heads, D)`` of each result.
          reverse: from the end to the start.

        Returns:
          The last carry, the results ``[B, T, *heads, D]`` and what ``step`` kept, stacked.
        """
        cut = self.blocks, self.span, self.chunk
        axis, steps = (2, self.span) if side_by_side else (1, self.blocks)
        tokens = [padded(x, *cut) for x in tokens]
        # Every entry is written. What stands there before comes from the tokens, so that XLA makes
        # the array after them: it would make zeros first of all and keep them until here.
        anything = sum(x[(0,) * x.ndim].astype(dtype) for x in tokens)
        results = [jnp.full((tokens[0].shape[0], *cut, *shape), anything) for shape in shapes]
        _, carry, results = numerics.varying_alike((tokens, carry, results))
        segments = segments_of(segment_ids, self.blocks * self.span, self.chunk)
        if segments is not None:
            segments = Segments(*(x.reshape(*cut[:2], *x.shape[1:]) for x in segments))
            segments = jax.tree.map(lambda x: jnp.moveaxis(x, axis - 1, 0), segments)

        def body(state, inputs):
            carry, results = state
            i, segments, kept = inputs
            chunks = (jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False) for x in tokens)
            chunks = [by_chunk(x.astype(dtype)) for x in chunks]
            carry, chunks, kept = step(carry, chunks, segments, kept)
            results = [
                jax.lax.dynamic_update_index_in_dim(x, by_sequence(part), i, axis)
                for x, part in zip(results, chunks, strict=True)
            ]
            return (carry, results), kept

        inputs = jnp.arange(steps), segments, kept
        (carry, results), kept = jax.lax.scan(body, (carry, results), inputs, reverse=reverse)
        results = [x.reshape(x.shape[0], -1, *x.shape[4:])[:, : self.length] for x in results]
        return carry, results, kept
