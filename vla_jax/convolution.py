"""The short causal convolution of the layers, with masks, segments, a cache, and over devices."""

from __future__ import annotations

import jax.numpy as jnp

from vla_jax import numerics, sharding
from vla_jax.types import Array


def convolve(
    tokens: Array,
    kernel: Array,
    cache: Array,
    mask: Array | None,
    segment_ids: Array | None,
    axis_name: str | None = None,
) -> tuple[Array, Array]:
    """Causal depthwise convolution: ``tokens [B, T, channels]``, ``kernel [width, channels]``.

    A masked token is absent: valid tokens are moved together (a stable sort of the mask), convolved
    and moved back. Tokens of other segments are not seen; ``cache`` belongs to the first segment.
    Returns the result, wide, and the last ``width - 1`` valid tokens of the last segment.

    With ``axis_name`` the tokens are a device's part of the sequence; ``cache`` is the whole's, and
    so is what is returned of it.
    """
    batch, length, _ = tokens.shape
    width = kernel.shape[0]
    if axis_name is not None:
        tokens, cache = numerics.varying_alike((tokens, cache))
        _, tail = convolve(tokens, kernel, jnp.zeros_like(cache), mask, segment_ids)
        present = jnp.ones((batch, length), bool) if mask is None else mask
        if segment_ids is not None:
            present = present & (segment_ids == segment_ids[:, -1:])
        cache = _reaching_tokens(
            tail,
            jnp.minimum(jnp.sum(present, axis=1), width - 1),
            cache,
            segment_ids,
            axis_name,
            complete=mask is None and length >= width - 1,
        )
        out, cache = convolve(tokens, kernel, cache, mask, segment_ids)
        return out, sharding.from_last(cache, axis_name)
    count, ids = jnp.full((batch, 1), length), segment_ids
    if mask is not None:
        count = jnp.sum(mask, axis=1, keepdims=True)
        order = jnp.argsort(~mask, axis=1, stable=True)
        tokens = jnp.take_along_axis(tokens, order[..., None], axis=1)
        ids = None if ids is None else jnp.take_along_axis(ids, order, axis=1)
    dtype = numerics.accumulator_dtype(tokens.dtype, cache.dtype)
    history = jnp.concatenate([cache.astype(dtype), tokens.astype(dtype)], axis=1)
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (width - 1, 0)))
        ids = ids.at[:, : width - 1].set(segment_ids[:, :1])
    kernel = kernel.astype(dtype)
    out = jnp.zeros_like(tokens, dtype)
    for tap in range(width):
        seen = history[:, tap : tap + length]
        if ids is not None:
            same = ids[:, tap : tap + length] == ids[:, width - 1 :]
            seen = jnp.where(same[..., None], seen, 0)
        out = out + kernel[tap] * seen
    last = count + jnp.arange(width - 1)
    cache = jnp.take_along_axis(history, last[..., None], axis=1)
    if ids is not None:
        same = jnp.take_along_axis(ids, last, axis=1) == segment_ids[:, -1:]
        cache = jnp.where(same[..., None], cache, 0)
    if mask is not None:
        out = jnp.take_along_axis(out, jnp.argsort(order, axis=1)[..., None], axis=1)
    return out, cache


def _reaching_tokens(
    tail: Array,
    count: Array,
    initial: Array,
    segment_ids: Array | None,
    axis_name: str,
    *,
    complete: bool,
) -> Array:
    """The last tokens that a causal convolution still sees where this device's tokens begin.

    Args:
      tail: ``[B, width - 1, channels]``, the last tokens present of this device's last segment,
        oldest first, zeros before them.
      count: ``[B]``, how many of this device's tokens those are, at most ``width - 1``.
      initial: what reaches the first device, shaped like ``tail``.
      segment_ids: this device's.
      axis_name: the mesh axis.
      complete: whether no device can have fewer tokens than the convolution sees: then one
        exchange with the neighbour is enough.

    Returns:
      What reaches this device, zeros where its first segment begins here.
    """
    span = tail.shape[1]
    joins = keep = None
    if segment_ids is not None:
        joins, keep = sharding.continues(segment_ids, axis_name)
    initial, tail, count = numerics.varying_alike((initial, tail, count))

    def append(earlier, then):
        later, count, kept = then
        at = jnp.arange(span) + count[:, None]
        at = jnp.where(at < span, at, at - count[:, None] + span)
        both = jnp.concatenate([sharding.kept(kept, earlier), later], axis=1)
        return jnp.take_along_axis(both, at[..., None], axis=1)

    def combine(first, then):
        _, count, kept = then
        before = sharding.kept(kept, first[1])
        both = None if kept is None else first[2] & kept
        return append(first[0], then), jnp.minimum(before + count, span), both

    element = (tail, count, keep)
    reached = sharding.exclusive_scan(
        combine, lambda x, then: (append(x, then), *then[1:]), element, initial, axis_name,
        complete=complete,
    )  # fmt: skip
    return sharding.kept(joins, reached)
