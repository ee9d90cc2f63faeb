"""Packed rows: from the positions that other libraries keep to the ids that this one takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from vla_jax import validation
from vla_jax.types import Array


def from_positions(segment_pos: Array) -> tuple[Array, Array]:
    """``(segment_ids, mask)`` of rows that are given by the positions of their tokens.

    In use::

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
    positions = validation.as_array("segment_pos", segment_pos)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"segment_pos must be integers, got dtype {positions.dtype}")
    validation.check_shape("segment_pos", positions, (None, None), "[B, T]")
    if validation.is_concrete(segment_pos):
        least = np.min(np.asarray(segment_pos))
        if least < -1:
            raise ValueError(f"segment_pos must be -1 (padding) or more, got {least}")
    starts = (positions == 0).astype(jnp.int32)
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32), positions >= 0
