"""Packed rows and masks: from what other libraries keep to the ids and mask that this one takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import validation
from vla_jax.types import Array


def from_positions(segment_pos: Array) -> tuple[Array, Array]:
    """``(segment_ids, mask)`` of rows that are given by the positions of their tokens.

        segment_ids, mask = vla_jax.packing.from_positions(segment_pos)
        out = vla_jax.vla_attention(q, k, v, segment_ids=segment_ids, mask=mask)

    Args:
      segment_pos: ``[B, T]`` integers: a token's position in its document, which starts at 0, and
        −1 for padding, anywhere. A row may begin in the middle of a document. Only 0 and −1 are
        looked at.

    Returns:
      ``segment_ids [B, T]`` int32, 0 before the first start of a row, then the number of starts up
      to the token: never decreasing, and at padding the id before it. ``mask [B, T]``, False for
      padding.

    Raises:
      TypeError: if ``segment_pos`` is not an array of integers.
      ValueError: if it is not ``[B, T]``, or holds less than −1 (where its values can be looked
        at).
    """
    positions = _integers("segment_pos", segment_pos)
    if validation.is_concrete(segment_pos):
        least = np.min(np.asarray(segment_pos))
        if least < -1:
            raise ValueError(f"segment_pos must be -1 (padding) or more, got {least}")
    starts = (positions == 0).astype(jnp.int32)
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32), positions >= 0


def from_packed_ids(segment_ids: Array) -> tuple[Array, Array]:
    """``(segment_ids, mask)`` of rows that are packed the usual way: documents 1, 2, …, then zeros.

    Args:
      segment_ids: ``[B, T]`` integers, never decreasing but for zeros behind a positive id: those
        are padding, anywhere. Zeros at the start of a row are a document of their own, as in
        ``vla_jax.vla_attention``.

    Returns:
      ``segment_ids [B, T]`` int32, at padding the id before it, and ``mask [B, T]``, False for
      padding.

    Raises:
      TypeError: if ``segment_ids`` is not an array of integers.
      ValueError: if it is not ``[B, T]``, or decreases to another id than 0 (where its values can
        be looked at).
    """
    ids = _integers("segment_ids", segment_ids)
    if validation.is_concrete(segment_ids):
        values = np.asarray(segment_ids)
        highest = np.maximum.accumulate(values, axis=1)
        wrong = np.argwhere((values < highest) & ~((values == 0) & (highest > 0)))
        if wrong.size:
            b, t = wrong[0]
            raise ValueError(
                "segment_ids must not decrease along T but to 0 (padding), got "
                f"{values[b, t]} after {highest[b, t]} at batch {b}, position {t}"
            )
    reached = jax.lax.cummax(ids, axis=1)
    return reached.astype(jnp.int32), ~((ids == 0) & (reached > 0))


def from_attention_mask(mask: Array) -> tuple[Array, Array]:
    """``(segment_ids, mask)`` of a mask as Flax's attention takes it: which query sees which key.

    What can be turned: the causal mask, with tokens hidden (padding) and documents kept apart, the
    way ``make_causal_mask``, ``make_attention_mask`` and ``combine_masks`` make it. So each query
    sees, of the tokens from the start of its document to itself, all that are not padding. A token
    that does not see itself is padding: no query sees it. What it sees itself may be nothing, or
    what a token of the document before it would see, and makes no difference.

    A mask whose values can be looked at is checked, on the host. Under jit it cannot be: any other
    mask, such as a local window, then gives the result of some mask of this kind.

    Args:
      mask: ``[B or 1, 1, T, T]``, queries before keys, one for all heads, or ``[T, T]`` or
        ``[1, T, T]``, one for all: booleans, or numbers of which those that are not 0 mean True, as
        in Flax.

    Returns:
      ``segment_ids`` int32 and ``mask`` boolean, both ``[B or 1, T]``. The id is the position of
      the first token of the document; at padding the id before it, at the start of a row that of
      the first document.

    Raises:
      TypeError: if ``mask`` is not an array of booleans or numbers.
      ValueError: if it has another shape; where its values can be looked at, if it holds others
        than 0 and 1, such as an additive one, or is no such mask.
    """
    seen = validation.as_array("mask", mask)
    if not (seen.dtype == jnp.bool_ or jnp.issubdtype(seen.dtype, jnp.number)):
        raise TypeError(f"mask must be booleans or numbers, got dtype {seen.dtype}")
    if seen.ndim in (2, 3):  # broadcast, as Flax does: a third axis is that of the heads
        mask, seen = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (mask, seen))
    if seen.ndim != 4 or seen.shape[1] != 1 or seen.shape[2] != seen.shape[3]:
        raise ValueError(
            "mask must have shape [B or 1, 1, T, T] or [T, T], causal self-attention alike in all "
            f"heads, got {list(seen.shape)}"
        )
    if validation.is_concrete(mask):
        _check_mask(np.asarray(mask)[:, 0])
    ids, valid = _documents(seen[:, 0].astype(bool), jnp, jax.lax.cummax)
    return ids.astype(jnp.int32), valid


def _documents(seen: Any, xp: Any, cummax: Callable[..., Any]) -> tuple[Any, Any]:
    """Ids and mask ``[B, T]`` of ``seen [B, T, T]``, in NumPy or in JAX."""
    valid = xp.diagonal(seen, axis1=1, axis2=2)
    first = xp.argmax(seen, axis=2)
    start = xp.min(first, axis=1, keepdims=True, where=valid, initial=seen.shape[2])
    return cummax(xp.where(valid, first, start), axis=1), valid


def _check_mask(mask: np.ndarray) -> None:
    """Raises ValueError unless ``mask [B, T, T]`` is what ``from_attention_mask`` can turn."""
    other = mask[(mask != 0) & (mask != 1)]
    if other.size:
        raise ValueError(
            f"mask must hold booleans, or 0 (hidden) and 1 (seen), got {other[0]}: of an additive "
            "mask give mask == 0"
        )
    seen = mask != 0
    _refuse(np.triu(seen, 1), "must be causal: {} sees {}, which comes later")
    ids, valid = _documents(seen, np, np.maximum.accumulate)
    same = ids[:, :, None] == ids[:, None, :]
    expected = np.tril(same & valid[:, None, :])
    wrong = (seen != expected) & (valid | seen.any(2))[:, :, None]
    hidden = "{} hides {}, which is neither padding nor of another document: no such memory"
    _refuse(wrong & expected, f"must hide padding and other documents alone: {hidden}")
    _refuse(wrong & seen, "must hide padding and other documents: {} sees {}")


def _refuse(wrong: np.ndarray, message: str) -> None:
    if wrong.any():
        b, query, key = np.argwhere(wrong)[0]
        where = message.format(f"query {query}", f"key {key}")
        raise ValueError(
            f"mask {where} (batch {b}). Served are the causal mask, padding and packed documents, "
            "as make_causal_mask, make_attention_mask and combine_masks make them"
        )


def _integers(name: str, values: Any) -> Array:
    values = validation.as_array(name, values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {values.dtype}")
    validation.check_shape(name, values, (None, None), "[B, T]")
    return values
