"""What the kernels over chunks of tokens share: sizes, masks of a square, decays, pieces.

A decay inside of a chunk is the exponential of a difference of ``total``: log2 of the decay since
the chunk's start, in which a token counts no less than ``FLOOR``, so that resets need no masks.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from vla_jax.pallas.mosaic.backend import Machine
from vla_jax.types import Array

C = 64  # tokens of a chunk
FLOOR = -160.0  # log2 of the least decay of a token; 2 to this is zero in float32
RESET = -111.0  # a log decay from here on is below FLOOR: it forgets everything
LOG2E = math.log2(math.e)
F32, BF16 = jnp.float32, jnp.bfloat16


def places(m: Machine) -> tuple[Array, Array]:
    """The row and the column of every entry of a square, as vectors that are spread.

    Behind a barrier, so that loops do not carry masks of a square in registers.
    """
    square = (C, C)
    row, column = lax.optimization_barrier((m.index(C, "rows"), m.index(C, "columns")))
    return m.down(row, square), m.across(column, square)


def lower(m: Machine, x: Array, totals=None) -> Array:
    """``Γ ∘ x`` with t along rows and s along columns; ``totals`` along both, None: no decay."""
    row, column = places(m)
    if totals is None:
        return jnp.where(row >= column, x, 0.0)
    exponent = m.down(totals[0], x.shape) - m.across(totals[1], x.shape)
    return x * jnp.exp2(jnp.where(row >= column, exponent, -jnp.inf))


def upper(m: Machine, x: Array, totals=None) -> Array:
    """``Γᵀ ∘ x``: the tokens of columns (t) come after those of rows (s)."""
    row, column = places(m)
    if totals is None:
        return jnp.where(column >= row, x, 0.0)
    exponent = m.across(totals[1], x.shape) - m.down(totals[0], x.shape)
    return x * jnp.exp2(jnp.where(column >= row, exponent, -jnp.inf))


def below(m: Machine, x: Array) -> Array:
    """What is below the diagonal."""
    row, column = places(m)
    return jnp.where(row > column, x, 0.0)


def rem(index: Array, size: int) -> Array:
    """``index % size``."""
    return lax.rem(index, index.dtype.type(size))


def split(index: Array, *sizes: int) -> tuple[Array, ...]:
    """``index`` as digits, the last size the fastest."""
    digits: list[Array] = []
    for size in reversed(sizes[1:]):
        digits.append(rem(index, size))
        index = lax.div(index, index.dtype.type(size))
    return (index, *reversed(digits))


def segment_starts(segment_ids: Array) -> Array:
    """Which tokens start a segment that is not the first, ``[B, T, 1]``."""
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(change, ((0, 0), (1, 0)))[:, :, None]


def padded(x: Array | None, pad: int) -> Array | None:
    """``[B, T, …]`` with ``pad`` zeros after the last token."""
    if x is None or not pad:
        return x
    return jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))


def log_decays(
    log_decay: Array | None, segment_ids: Array | None, heads: int, pad: int
) -> Array | None:
    """``[B, H, T]`` float32, padded, with the starts of segments as resets; None without both."""
    if segment_ids is not None:
        if log_decay is None:
            log_decay = jnp.zeros((*segment_ids.shape, heads), F32)
        log_decay = jnp.where(segment_starts(segment_ids), RESET, log_decay.astype(F32))
    if log_decay is None:
        return None
    return jnp.swapaxes(padded(log_decay.astype(F32), pad), 1, 2)


FILL = 132  # programs of a sweep that fill the device
MIN_PIECES = 4  # fewer do not pay for the two further sweeps that cutting a sequence costs
MIN_SPAN = 16  # fewest chunks of a piece


def pieces_of(programs: int, chunks: int) -> int:
    """In how many pieces a sequence is cut: one, unless programs are far too few."""
    count = min(FILL // programs, chunks // MIN_SPAN)
    return 1 << (count.bit_length() - 1) if count >= MIN_PIECES else 1
