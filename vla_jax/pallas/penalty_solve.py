"""Kernels of ``penalty_solve``, forward and backward (``docs/derivation.md``, sections 3 and 4).

The sequence is cut in super-chunks that run side by side. Five kernels a solve:

    gram      Σ u uᵀ over each super-chunk
    prefix    its running sum: the penalty M where each super-chunk starts
    invert    A = M⁻¹ there, in place, by symmetric Gauss-Jordan elimination over blocks of 16
    factor    W, 16 tokens at a time, with A_t = A − Σ_{s≤t} w_s w_sᵀ: all that is sequential
    apply     the solutions A_t r_t, all chunks side by side

The backward applies the same ``A`` and ``W``, which the forward keeps, to the cotangent, and then
runs ``gram``, ``prefix`` and ``du`` from the end: linear attention without decay, backwards.

Inside this file arrays are padded: ``D`` to a power of two and ``T`` to whole groups, with zeros,
which are tokens that change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax import numerics
from vla_jax.pallas import backend
from vla_jax.types import Array

BLOCK = 16  # tokens of a block of the sweep, and rows of a block of the elimination
GROUP = 64  # T is padded to a multiple of it


class _Shape(NamedTuple):
    """Static sizes of one call."""

    batch: int
    length: int  # padded
    heads: int
    dim: int  # padded
    true_dim: int
    supers: int
    super_chunk: int
    chunk: int  # tokens of a program of apply

    @property
    def streams(self) -> int:
        return self.batch * self.heads

    def locate(self):
        """In a kernel: batch, head, first token and number of groups of its super-chunk."""
        stream, index = pl.program_id(0), pl.program_id(1)
        start = index * self.super_chunk
        count = jnp.minimum((self.length - start) // GROUP, self.super_chunk // GROUP)
        return stream // self.heads, stream % self.heads, start, count


def super_chunk_length(length: int, streams: int, params: Mapping[str, Any]) -> int:
    """Tokens of a super-chunk: as many as give the table's ``fill`` of programs.

    Long ones amortise the inverse at their start, short ones give more programs; with few heads the
    sequence itself is split until the device is full.
    """
    chunk = params["max_super_chunk"]
    while chunk > params["min_super_chunk"] and streams * -(-length // chunk) < params["fill"]:
        chunk //= 2
    unit = max(GROUP, params["apply_chunk"])
    return max(unit, min(chunk, -(-length // unit) * unit))


# --- pieces of kernels -------------------------------------------------------------------------


def _half_inverse(matrix: Array, floor) -> Array:
    """``L⁻¹`` of a symmetric positive definite block, ``L Lᵀ = matrix``, by Gauss elimination.

    In place: left of the pivot the tile holds ``L⁻¹`` so far, right of it what is still to be
    eliminated. Two pivots at a time: a kernel waits here for one sum over the tile after another.
    ``floor`` is a lower bound of the pivots in exact arithmetic: it keeps a matrix that rounding
    has made indefinite from giving NaN.
    """
    n = matrix.shape[0]
    rows, cols, index = (backend.iota(s, a) for s, a in (((n, n), 0), ((n, n), 1), ((n, 1), 0)))
    identity = (rows == cols).astype(jnp.float32)

    def eliminate(pair, matrix):
        i = 2 * pair
        j = i + 1

        def pick(x, where, axis):
            return jnp.sum(jnp.where(where, x, 0), axis=axis, keepdims=True)

        column0, column1 = pick(matrix, cols == i, 1), pick(matrix, cols == j, 1)
        pivot, beside = pick(column0, index == i, 0), pick(column0, index == j, 0)
        pivot1 = pick(column1, index == j, 0)
        matrix = jnp.where((cols == i) | (cols == j), identity, matrix)
        row0, row1 = pick(matrix, rows == i, 0), pick(matrix, rows == j, 0)

        scale = jax.lax.rsqrt(jnp.maximum(pivot, floor))
        square = scale * scale
        ratio = beside * square
        column1 -= column0 * ratio
        row1 -= ratio * row0
        scale1 = jax.lax.rsqrt(jnp.maximum(pivot1 - ratio * beside, floor))
        below0 = jnp.where(index > i, column0 * square, 0)
        below1 = jnp.where(index > j, column1 * (scale1 * scale1), 0)
        matrix -= jnp.where(index == i, 1 - scale, below0) * row0
        return matrix - jnp.where(index == j, 1 - scale1, below1) * row1

    matrix = backend.unrolled_loop(n // 2, eliminate, matrix)
    return jnp.where(rows >= cols, matrix, 0)


def _row_dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=1, keepdims=True)


def _tile(ref, batch, start, size, head, columns=None) -> Array:
    """``[size, D]`` tokens of one head."""
    columns = slice(None) if columns is None else columns
    return ref[batch, pl.ds(start, size), head, columns]


def _where(condition: Array, terms: tuple[Array, ...]) -> tuple[Array, ...]:
    """The terms where the condition holds, else zeros."""
    return tuple(jnp.where(condition, x, jnp.zeros_like(x)) for x in terms)


def _running(seg_ref, batch, start):
    """The segment that runs where ``start`` begins: that of the token before."""
    return seg_ref[batch, jnp.maximum(start - 1, 0)]


def _unit(x: Array) -> Array:
    x = x.astype(jnp.float32)
    peak, norm = backend.unit_scale(x)
    return x * peak * norm


# --- gram --------------------------------------------------------------------------------------


def _gram_kernel(*refs, shape, terms, directions, reverse, segments, mode, width):
    """``Σ xᵀ y`` of the super-chunk; columns of one block of ``width``.

    ``x`` and ``y`` are given as sums of ``terms`` arrays each, or are one and the same. Sums over
    the tokens of the segment at the super-chunk's end or, with ``reverse``, at its start.
    """
    *inputs, out_ref = refs
    seg_ref = inputs.pop() if segments else None
    x_refs, y_refs = inputs[:terms], inputs[-terms:]
    batch, head, start, count = shape.locate()
    columns = pl.ds(pl.program_id(2) * width, width)
    if seg_ref is not None:
        end = start + count * GROUP
        wanted = _running(seg_ref, batch, start) if reverse else seg_ref[batch, end - 1]

    def step(i, total):
        where = batch, start + i * GROUP, GROUP, head
        x = tuple(_tile(ref, *where) for ref in x_refs)
        y = tuple(_tile(ref, *where, columns) for ref in y_refs)
        if directions:  # of unit keys
            full = x[0].astype(jnp.float32)
            peak, norm = backend.unit_scale(full)
            norm = norm * shape.true_dim**-0.5
            x, y = (full * peak * norm,), (y[0].astype(jnp.float32) * peak * norm,)
        if seg_ref is not None:
            seg = seg_ref[batch, pl.ds(start + i * GROUP, GROUP)]
            x = _where((seg == wanted)[:, None], x)
        return total + backend.dot(x, y, mode=mode, trans_a=True)

    out_ref[pl.program_id(0), pl.program_id(1), :, columns] = backend.loop(
        count, step, jnp.zeros((shape.dim, width), jnp.float32)
    )


def _gram(shape, x, y, segment_ids, *, directions=False, reverse=False, mode, params):
    """``x``, ``y``: tuples of as many terms; ``y`` None if it is ``x``."""
    width = min(shape.dim, params["gram_width"])
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [*x, *(y or ()), *segments]
    out = jax.ShapeDtypeStruct((shape.streams, shape.supers, shape.dim, shape.dim), jnp.float32)
    return backend.call(
        functools.partial(
            _gram_kernel,
            shape=shape,
            terms=len(x),
            directions=directions,
            reverse=reverse,
            segments=bool(segments),
            mode=mode,
            width=width,
        ),
        grid=(shape.streams, shape.supers, shape.dim // width),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(out)[0],
        out_shape=out,
        num_warps=params["gram_warps"],
        num_stages=params["gram_stages"],
        name="vla_penalty_gram_backward" if reverse else "vla_penalty_gram",
    )(*inputs)


# --- prefix ------------------------------------------------------------------------------------

_AHEAD = 4  # super-chunks loaded before the first of them is used


def _prefix_kernel(*refs, shape, rows, reverse, segments):
    """``x ← keep·x + term`` over super-chunks: ``x`` before each (with λ₀ I), and the last one.

    With ``reverse``, from the end, and the terms are those of ``gram`` plus their transposes.
    """
    lam_ref, initial_ref, gram_ref, *seg_ref, start_ref, final_ref = refs
    stream = pl.program_id(0)
    where = pl.ds(pl.program_id(1) * rows, rows)
    size = rows, shape.dim
    diagonal = backend.iota(size, 0) + pl.program_id(1) * rows == backend.iota(size, 1)
    ridge = jnp.where(diagonal, lam_ref[stream], 0)
    last = shape.supers - 1

    def step(i, x):
        indices = [jnp.minimum(i * _AHEAD + j, last) for j in range(_AHEAD)]
        indices = [last - n if reverse else n for n in indices]
        terms = [gram_ref[stream, n, where, :] for n in indices]
        if reverse:
            flipped = [gram_ref[stream, n, :, where] for n in indices]
            terms = [x + y.T for x, y in zip(terms, flipped, strict=True)]
        for j, (n, term) in enumerate(zip(indices, terms, strict=True)):
            valid = i * _AHEAD + j <= last

            @pl.when(valid)
            def _(n=n, x=x):
                start_ref[stream, n, where, :] = x + ridge

            kept = x
            if segments:
                batch, start = stream // shape.heads, n * shape.super_chunk
                end = jnp.minimum(start + shape.super_chunk, shape.length)
                keep = seg_ref[0][batch, end - 1] == _running(seg_ref[0], batch, start)
                kept = jnp.where(keep, x, 0)
            x = jnp.where(valid, kept + term, x)
        return x

    x = backend.loop(-(-shape.supers // _AHEAD), step, initial_ref[stream, where, :])
    final_ref[stream, where, :] = x


def _prefix(shape, gram, lambda0, initial, segment_ids, *, reverse=False):
    rows = max(1, min(shape.dim, 1024 // shape.dim))
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [lambda0, initial, gram, *segments]
    outs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (gram, initial)]
    return backend.call(
        functools.partial(
            _prefix_kernel, shape=shape, rows=rows, reverse=reverse, segments=bool(segments)
        ),
        grid=(shape.streams, shape.dim // rows),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*outs),
        out_shape=outs,
        num_warps=4,
        num_stages=1,
        name="vla_penalty_prefix",
    )(*inputs)


# --- invert ------------------------------------------------------------------------------------


def _invert_kernel(lam_ref, _, out_ref, z_ref, *, shape, rows):
    """``M ← M⁻¹`` in place: the sweep operator, one block of pivots ``P`` after another.

    With ``D = M[P, P]``, a step makes ``M[P, :]`` into ``D⁻¹ M[P, :]``, ``M[P, P]`` into ``−D⁻¹``
    and subtracts ``M[:, P] D⁻¹ M[P, :]`` elsewhere. All three are one product of ``L⁻¹ R``,
    ``L Lᵀ = D``, with itself, where ``R`` is ``M[P, :]`` with ``−I`` in place of ``D``, subtracted
    from ``M`` with zeros in the rows and columns of ``P``. The last step leaves ``−M⁻¹``.
    """
    at = pl.program_id(0), pl.program_id(1)
    dim = shape.dim
    lam = lam_ref[at[0]]
    resident = rows == dim  # the matrix stays in registers; only panels pass through memory
    dot = functools.partial(backend.dot, mode="tf32x3")

    def inside(p, size, axis, start=0):
        index = backend.iota(size, axis) + start - p * BLOCK
        return (index >= 0) & (index < BLOCK)

    def step(p, matrix):
        pivot = pl.ds(p * BLOCK, BLOCK)
        if resident:
            backend.store(out_ref, at, matrix, mask=inside(p, (dim, dim), 0))
            backend.barrier()
        half = _half_inverse(out_ref[*at, pivot, pivot], lam)
        size = BLOCK, dim
        panel = jnp.where(inside(p, size, 1), 0, out_ref[*at, pivot, :])
        diagonal = backend.iota(size, 1) - p * BLOCK == backend.iota(size, 0)
        z = dot(half, jnp.where(diagonal, -1, panel))
        if resident:
            matrix = jnp.where(inside(p, (dim, dim), 0) | inside(p, (dim, dim), 1), 0, matrix)
            return matrix - dot(z, z, trans_a=True)
        z_ref[*at] = z
        backend.barrier()
        for start in range(0, dim, rows):
            tile, size = pl.ds(start, rows), (rows, dim)
            block = out_ref[*at, tile, :]
            block = jnp.where(inside(p, size, 0, start) | inside(p, size, 1), 0, block)
            out_ref[*at, tile, :] = block - dot(z_ref[*at, :, tile], z, trans_a=True)
        backend.barrier()
        return matrix

    if resident:
        out_ref[*at] = -backend.loop(dim // BLOCK, step, out_ref[*at])
        return
    backend.loop(dim // BLOCK, step, jnp.float32(0))
    for start in range(0, dim, rows):
        tile = pl.ds(start, rows)
        out_ref[*at, tile, :] = -out_ref[*at, tile, :]


def _invert(shape, lambda0, penalty, *, params):
    z = jax.ShapeDtypeStruct((*penalty.shape[:2], BLOCK, shape.dim), jnp.float32)
    return backend.call(
        functools.partial(_invert_kernel, shape=shape, rows=min(shape.dim, params["invert_rows"])),
        grid=(shape.streams, shape.supers),
        in_specs=backend.whole(lambda0, penalty),
        out_specs=backend.whole(penalty, z),
        out_shape=[jax.ShapeDtypeStruct(penalty.shape, jnp.float32), z],
        input_output_aliases={1: 0},
        num_warps=params["invert_warps"],
        num_stages=1,
        name="vla_penalty_invert",
    )(lambda0, penalty)[0]


# --- factor ------------------------------------------------------------------------------------


def _factor_kernel(*refs, shape, has_direction, segments, resident, width, mode):
    """``W`` of one super-chunk, with ``A_t = A − Σ_{s≤t} w_s w_sᵀ``, from ``A`` at its start.

    16 tokens at a time: ``W = L⁻¹ U A`` with ``L Lᵀ = I + U A Uᵀ``. ``A`` where each chunk starts
    is written too. Up to the table's size ``A`` is in registers, in parts of ``width`` rows; a
    larger one is stepped in memory, where the super-chunk's first one was.
    """
    refs = list(refs)
    lam_ref = refs.pop(0)
    seg_ref = refs.pop(0) if segments else None
    u_ref, _, a_ref, w_ref, chunks_ref = refs
    batch, head, start, groups = shape.locate()
    at = pl.program_id(0), pl.program_id(1)
    row, col = backend.iota((BLOCK, BLOCK), 0), backend.iota((BLOCK, BLOCK), 1)
    identity = (row == col).astype(jnp.float32)
    inverse_lam = 1 / lam_ref[at[0]]
    dot = functools.partial(backend.dot, mode=mode)
    starts = range(0, shape.dim, width)
    parts = [pl.ds(i, width) for i in starts]

    def block(token, carry):
        scale = None
        if not has_direction:  # the unit key over √D
            peak, norm = backend.unit_scale(
                _tile(u_ref, batch, token, BLOCK, head).astype(jnp.float32)
            )
            scale = peak, norm * shape.true_dim**-0.5

        def direction(columns=None):
            x = _tile(u_ref, batch, token, BLOCK, head, columns).astype(jnp.float32)
            return x if scale is None else x * scale[0] * scale[1]

        def add(i, total):
            k = pl.ds(i * width, width)
            return total + dot(direction(k), a_ref[*at, k, :])

        if resident:
            au = sum(dot(direction(k), a) for k, a in zip(parts, carry, strict=True))
        else:
            zero = jnp.zeros((BLOCK, shape.dim), jnp.float32)
            au = backend.loop(len(parts), add, zero)
        u = direction()
        in_last = keep = None
        if seg_ref is None:
            gram = dot(u, au, trans_b=True)
        else:
            seg = seg_ref[batch, pl.ds(token, BLOCK)]
            running, last = _running(seg_ref, batch, token), seg_ref[batch, token + BLOCK - 1]
            in_last, keep = (seg == last)[:, None], last == running
            au = jnp.where((seg == running)[:, None], au, u * inverse_lam)
            gram = jnp.where(seg[:, None] == seg[None, :], dot(u, au, trans_b=True), 0)
        w = dot(_half_inverse(gram + identity, 1.0), au)
        w_ref[batch, pl.ds(token, BLOCK), head, :] = w
        if in_last is not None:
            w = jnp.where(in_last, w, 0)

        def stepped(a, first_row, left):
            if keep is not None:
                diagonal = backend.iota(a.shape, 0) + first_row == backend.iota(a.shape, 1)
                a = jnp.where(keep, a, jnp.where(diagonal, inverse_lam, 0))
            return a - dot(left, w, trans_a=True)

        if resident and len(parts) == 1:
            return (stepped(carry[0], 0, w),)
        backend.barrier()

        def left(columns):
            x = _tile(w_ref, batch, token, BLOCK, head, columns)
            return x if in_last is None else jnp.where(in_last, x, 0)

        if resident:
            return tuple(map(stepped, carry, starts, map(left, parts)))

        def step(i, carry):
            k = pl.ds(i * width, width)
            a_ref[*at, k, :] = stepped(a_ref[*at, k, :], i * width, left(k))
            return carry

        backend.loop(len(parts), step, np.int32(0))
        backend.barrier()
        return carry

    def chunk(i, carry):
        first = start + i * shape.chunk
        for n, k in enumerate(parts):
            a = carry[n] if resident else a_ref[*at, k, :]
            chunks_ref[at[0], first // shape.chunk, k, :] = a
        return backend.loop(
            shape.chunk // BLOCK, lambda p, carry: block(first + p * BLOCK, carry), carry
        )

    carry = tuple(a_ref[*at, k, :] for k in parts) if resident else ()
    backend.loop(groups * GROUP // shape.chunk, chunk, carry)


def _factor(shape, u, lambda0, starts, segment_ids, *, has_direction, mode, params):
    """``W [B, T, H, D]`` and ``A`` where chunks start ``[B·H, chunks, D, D]``, float32."""
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [lambda0, *segments, u, starts]
    struct = jax.ShapeDtypeStruct
    outs = [
        struct(starts.shape, jnp.float32),
        struct((shape.batch, shape.length, shape.heads, shape.dim), jnp.float32),
        struct((shape.streams, shape.length // shape.chunk, *starts.shape[2:]), jnp.float32),
    ]
    return backend.call(
        functools.partial(
            _factor_kernel,
            shape=shape,
            has_direction=has_direction,
            segments=bool(segments),
            resident=shape.dim <= params["resident_dim"],
            width=min(shape.dim, params["factor_width"]),
            mode=mode,
        ),
        grid=(shape.streams, shape.supers),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*outs),
        out_shape=outs,
        input_output_aliases={len(inputs) - 1: 0},
        num_warps=params["factor_warps"],
        num_stages=1,
        name="vla_penalty_factor",
    )(*inputs)[1:]


# --- apply -------------------------------------------------------------------------------------


class _Apply(NamedTuple):
    """Static choices of the apply kernel."""

    backward: bool
    has_direction: bool
    normalize_rhs: bool
    write_gain: str | None
    segments: bool
    has_d_normalized: bool
    has_d_raw: bool
    terms: tuple  # dtypes of the arrays whose sum is the solution, or backward b, for the backward
    mode: str
    width: int


def _apply_kernel(*refs, shape, config):
    """``x_t = A_t r_t`` over one chunk: ``A`` at its start, minus attention over the rows of W.

    Forward: the right-hand side is the (normalised) key and what is written is the write key, its
    gain and the write key before rounding. Backward: the right-hand side is the cotangent of the
    solution, formed here from that of the write key; written are ``b = β / gain`` and, with a
    direction, the cotangent of the key.
    """
    backward, gain_kind, chunk = config.backward, config.write_gain, shape.chunk
    refs = list(refs)
    lam_ref = refs.pop(0)
    seg_ref = refs.pop(0) if config.segments else None
    needs_key = not backward or config.normalize_rhs or gain_kind == "projection"
    key_ref = refs.pop(0) if needs_key else None
    if backward:
        d_solution_ref = refs.pop(0)
        gain_ref = refs.pop(0) if gain_kind else None
        d_normalized_ref = refs.pop(0) if config.has_d_normalized else None
        d_raw_ref = refs.pop(0) if config.has_d_raw else None
        solution_refs = [refs.pop(0) for _ in config.terms]
    w_ref, a_ref, *outs = refs

    dot = functools.partial(backend.dot, mode=config.mode)
    stream, index = pl.program_id(0), pl.program_id(1)
    batch, head, token = stream // shape.heads, stream % shape.heads, index * chunk
    here = pl.ds(token, chunk)

    def load(ref, columns=None):
        return _tile(ref, batch, token, chunk, head, columns).astype(jnp.float32)

    def store(ref, x):
        ref[batch, here, head, :] = x.astype(ref.dtype)

    def store_terms(refs, x):
        for ref in refs:
            store(ref, x)
            x = x - x.astype(ref.dtype).astype(jnp.float32)

    peak = norm = None
    if config.normalize_rhs:
        peak, norm = backend.unit_scale(load(key_ref))

    def key(columns=None):
        x = load(key_ref, columns)
        return x * peak * norm if config.normalize_rhs else x

    def solution(columns=None):
        return sum(load(ref, columns) for ref in solution_refs)

    gain = overlap = None
    if backward and gain_kind:
        gain = gain_ref[batch, here, head][:, None]
        overlap = _row_dot(load(d_solution_ref), solution())

    def rhs(columns=None):
        if not backward:
            return key(columns)
        x = load(d_solution_ref, columns)
        if gain_kind == "unit":
            x = x - overlap * solution(columns)
        elif gain_kind == "projection":
            x = x - overlap * key(columns)
        return x * gain if gain_kind else x

    parts = [pl.ds(i, config.width) for i in range(0, shape.dim, config.width)]
    x = sum(dot(rhs(k), a_ref[stream, index, :, k], trans_b=True) for k in parts)  # A is symmetric
    r, w = rhs(), load(w_ref)
    visible = backend.iota((chunk, chunk), 0) >= backend.iota((chunk, chunk), 1)
    if seg_ref is not None:
        seg = seg_ref[batch, here]
        cont = seg == _running(seg_ref, batch, token)
        x = jnp.where(cont[:, None], x, r * (1 / lam_ref[stream]))
        visible &= seg[:, None] == seg[None, :]
    x -= dot(jnp.where(visible, dot(r, w, trans_b=True), 0), w)

    if not backward:
        out_ref, *outs = outs
        if gain_kind is not None:
            if gain_kind == "unit":
                scale, norm = backend.unit_scale(x)
                gain = scale * norm
            elif gain_kind == "projection":
                inner = _row_dot(x, r)
                gain = jnp.where(inner > 0, 1 / jnp.where(inner > 0, inner, 1), 0)
            else:
                gain = jnp.ones((chunk, 1), jnp.float32)
            x = x * gain
            outs.pop(0)[batch, here, head] = jnp.sum(gain, axis=1)
        if out_ref.dtype == config.terms[0]:
            outs = [out_ref, *outs]
        else:
            store(out_ref, x)
        store_terms(outs, x)
        return

    overlap_ref, *outs = outs
    b = x
    if gain_kind:
        b = x * jnp.where(gain > 0, 1 / jnp.where(gain > 0, gain, 1), 0)
    overlap_ref[stream, index] = jnp.sum(jnp.sum(b * solution(), axis=1))
    if config.has_direction:
        if gain_kind == "projection":
            x -= overlap * solution()
        if config.has_d_normalized:
            x += load(d_normalized_ref)
        if config.normalize_rhs:
            unit = key()
            x = (x - _row_dot(x, unit) * unit) * norm * peak
        if config.has_d_raw:
            x += load(d_raw_ref)
        store(outs.pop(0), x)
    store_terms(outs, b)


def _apply(shape, config, lambda0, segment_ids, tokens, w, starts, dtype, *, params):
    """``(out, gain?, *terms)``, or backward ``(parts of −dλ₀, d_rhs?, *terms of b)``."""
    struct = jax.ShapeDtypeStruct
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    chunks = shape.length // shape.chunk
    if config.backward:
        outs = [struct((shape.streams, chunks), jnp.float32)]
        outs += [struct(size, dtype)] if config.has_direction else []
    else:
        outs = [struct(size, dtype)]
        outs += [] if config.write_gain is None else [struct(size[:3], jnp.float32)]
    shared = not config.backward and dtype == config.terms[0]  # the output is the first term
    outs += [struct(size, d) for d in config.terms[shared:]]
    inputs = [x for x in (lambda0, segment_ids, *tokens, w, starts) if x is not None]
    return backend.call(
        functools.partial(_apply_kernel, shape=shape, config=config),
        grid=(shape.streams, chunks),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*outs),
        out_shape=outs,
        num_warps=params["apply_backward_warps" if config.backward else "apply_warps"],
        num_stages=1,
        name="vla_penalty_apply_backward" if config.backward else "vla_penalty_apply",
    )(*inputs)


# --- du ----------------------------------------------------------------------------------------


def _du_kernel(*refs, shape, tokens, terms, segments, directions, mode, width):
    """``du_t = −Σ_{s≥t} [b_s (a_s·u_t) + a_s (b_s·u_t)]``, columns of one block of ``width``."""
    u_ref, *refs = refs
    a_refs, b_refs, (state_ref, *refs) = refs[:terms], refs[terms : 2 * terms], refs[2 * terms :]
    seg_ref = refs.pop(0) if segments else None
    (out_ref,) = refs
    batch, head, start, groups = shape.locate()
    at = pl.program_id(0), pl.program_id(1)
    columns = pl.ds(pl.program_id(2) * width, width)
    row, col = backend.iota((tokens, tokens), 0), backend.iota((tokens, tokens), 1)
    dot = functools.partial(backend.dot, mode=mode)

    count = groups * (GROUP // tokens)

    def step(i, state):
        token = start + (count - 1 - i) * tokens
        where = batch, token, tokens, head
        u = _tile(u_ref, *where)
        a, b = (tuple(_tile(ref, *where) for ref in refs) for refs in (a_refs, b_refs))
        a_part, b_part = a, b
        if width < shape.dim:
            a_part, b_part = (
                tuple(_tile(ref, *where, columns) for ref in refs) for refs in (a_refs, b_refs)
            )
        if directions:
            u = _unit(u) * shape.true_dim**-0.5
        later = row <= col
        du = dot(u, state)
        a_cont, b_cont = a, b
        if seg_ref is not None:
            seg = seg_ref[batch, pl.ds(token, tokens)]
            last = seg_ref[batch, token + tokens - 1]
            running = _running(seg_ref, batch, token)
            later &= seg[:, None] == seg[None, :]
            du = jnp.where((seg == last)[:, None], du, 0)
            state = jnp.where(last == running, state, 0)
            cont = (seg == running)[:, None]
            a_cont, b_cont = _where(cont, a), _where(cont, b)
        for x, part in ((a, b_part), (b, a_part)):
            du += dot(jnp.where(later, dot(u, x, trans_b=True), 0), part)
        state += dot(a_cont, b_part, trans_a=True)
        state += dot(b_cont, a_part, trans_a=True)
        out_ref[batch, pl.ds(token, tokens), head, columns] = (-du).astype(out_ref.dtype)
        return state

    backend.loop(count, step, state_ref[*at, :, columns])


def _du(shape, u, a, b, states, segment_ids, dtype, *, directions, mode, params):
    width = min(shape.dim, params["du_width"])
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [u, *a, *b, states, *segments]
    out = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.heads, shape.dim), dtype)
    return backend.call(
        functools.partial(
            _du_kernel,
            shape=shape,
            tokens=params["du_tokens"],
            terms=len(a),
            segments=bool(segments),
            directions=directions,
            mode=mode,
            width=width,
        ),
        grid=(shape.streams, shape.supers, shape.dim // width),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(out)[0],
        out_shape=out,
        num_warps=params["du_warps"],
        num_stages=params["du_stages"],
        name="vla_penalty_du",
    )(*inputs)


# --- the primitive -----------------------------------------------------------------------------


def _prepare(tokens, lambda0, segment_ids, params):
    """Padded arrays, the static sizes and the parameters of one call."""
    reference = tokens[0]
    batch, length, heads, dim = reference.shape
    backend.require("penalty_solve", tuple(x.dtype for x in tokens if x is not None), (dim,))
    params = backend.parameters("penalty_solve", dim, params)
    padded_dim = backend.power_of_two(dim)
    chunk = params["apply_chunk"]
    unit = max(GROUP, chunk)
    padded = -(-length // unit) * unit
    span = super_chunk_length(padded, batch * heads, params)
    shape = _Shape(batch, padded, heads, padded_dim, dim, -(-padded // span), span, chunk)
    tokens = [_padded(x, shape) for x in tokens]
    lambda0 = jnp.broadcast_to(lambda0.astype(jnp.float32), (batch, heads)).reshape(-1)
    if segment_ids is not None:
        segment_ids = jnp.pad(
            segment_ids.astype(jnp.int32), ((0, 0), (0, padded - length)), mode="edge"
        )
    return tokens, lambda0, segment_ids, shape, params


def _padded(x: Array | None, shape: _Shape) -> Array | None:
    """``[B, T, H]`` or ``[B, T, H, D]`` with zeros up to the sizes that the kernels see."""
    if x is None:
        return None
    sizes = (shape.batch, shape.length, shape.heads, shape.dim)[: x.ndim]
    return jnp.pad(x, [(0, size - n) for size, n in zip(sizes, x.shape, strict=True)])


def _square(x: Array, shape: _Shape) -> Array:
    """``[B, H, D, D]`` as ``[B·H, Dp, Dp]`` float32."""
    extra = shape.dim - shape.true_dim
    x = x.astype(jnp.float32).reshape(shape.streams, *x.shape[2:])
    return jnp.pad(x, ((0, 0), (0, extra), (0, extra))) if extra else x


def _unsquare(x: Array, shape: _Shape) -> Array:
    x = x[:, : shape.true_dim, : shape.true_dim]
    return x.reshape(shape.batch, shape.heads, *x.shape[1:])


def _factors(shape, rhs, direction, lambda0, initial, segment_ids, precision, params):
    """``W``, ``A`` at the start of every chunk, and the penalty after the last token."""
    u, has_direction = (rhs, False) if direction is None else (direction, True)
    mode = backend.dot_mode(u.dtype, precision, wide=not has_direction)
    gram = _gram(
        shape, (u,), None, segment_ids, directions=not has_direction, mode=mode, params=params
    )
    starts, penalty = _prefix(shape, gram, lambda0, initial, segment_ids)
    starts = _invert(shape, lambda0, starts, params=params)
    w, starts = _factor(
        shape,
        u,
        lambda0,
        starts,
        segment_ids,
        has_direction=has_direction,
        mode=backend.dot_mode(u.dtype, precision, wide=True),
        params=params,
    )
    return w, starts, penalty


def _terms(dtype, precision) -> tuple:
    """Dtypes of the arrays whose sum a solution is for the backward: float32, or 16 bits of it."""
    mode = backend.dot_mode(dtype, precision, wide=True)
    if dtype == jnp.float32 or mode != "tf32":
        return (jnp.float32,)
    return jnp.bfloat16, jnp.bfloat16


def _applied(shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params):
    """The choices of the apply kernel that forward and backward share."""
    return _Apply(
        backward=False,
        has_direction=direction is not None,
        normalize_rhs=normalize_rhs,
        write_gain=write_gain,
        segments=segment_ids is not None,
        has_d_normalized=False,
        has_d_raw=False,
        terms=_terms(dtype, precision),
        mode=backend.dot_mode(dtype, precision, wide=True),
        width=min(shape.dim, params["apply_width"]),
    )


def _check(direction, normalize_rhs, write_gain):
    if direction is None and not normalize_rhs:
        raise ValueError("direction=None needs normalize_rhs=True: it is made from the unit key")
    if write_gain is not None and write_gain not in ("unit", "projection", "rls"):
        raise ValueError(f"unknown write_gain {write_gain!r}")


def forward(
    rhs: Array,
    direction: Array | None,
    lambda0: Array,
    initial_penalty: Array,
    segment_ids: Array | None,
    *,
    normalize_rhs: bool = False,
    write_gain: str | None = None,
    precision=None,
    params: Mapping[str, Any] | None = None,
) -> tuple[Array, Array | None, Array, tuple]:
    """Solves for every token: ``(solution, gain, penalty, kept)``.

    Args:
      rhs: ``[B, T, H, D]``, the right-hand sides; raw keys with ``normalize_rhs``.
      direction: ``[B, T, H, D]``, or None for the unit key over ``√D`` (``normalize_rhs`` only).
      lambda0: ``[B, H]`` (``[H]`` is broadcast).
      initial_penalty: ``[B, H, D, D]``, symmetric, without ``λ₀ I``.
      segment_ids: int32 ``[B, T]`` that does not decrease, or None.
      normalize_rhs: whether to scale the right-hand sides to unit length first.
      write_gain: None: the solution is ``α``. Otherwise ``a = gain·α``, see ``apply_write_gain``.
      precision: ``jax.lax`` precision; ``HIGHEST`` forces products accurate to float32.
      params: entries that override the parameter table.

    Returns:
      The solution ``[B, T, H, D]`` in the dtype of ``rhs``; the gain ``[B, T, H]`` float32, None
      without ``write_gain``; the last penalty ``[B, H, D, D]`` float32; and what ``backward`` needs
      of it all, padded: ``W``, ``A`` where chunks start ``[B, H, chunks, D, D]``, both float32, and
      the solution before rounding, float32 or as the sum of two bfloat16 arrays.
    """
    _check(direction, normalize_rhs, write_gain)
    length, dtype = rhs.shape[1], rhs.dtype
    (rhs, direction), lambda0, segment_ids, shape, params = _prepare(
        [rhs, direction], lambda0, segment_ids, params
    )
    w, starts, penalty = _factors(
        shape,
        rhs,
        direction,
        lambda0,
        _square(initial_penalty, shape),
        segment_ids,
        precision,
        params,
    )
    config = _applied(
        shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params
    )
    solution, *terms = _apply(
        shape, config, lambda0, segment_ids, [rhs], w, starts, dtype, params=params
    )
    gain = None if write_gain is None else terms.pop(0)[:, :length]
    terms = (solution, *terms) if dtype == config.terms[0] else tuple(terms)
    kept = w, starts.reshape(shape.batch, shape.heads, *starts.shape[1:]), terms
    solution = solution[:, :length, :, : shape.true_dim]
    return solution, gain, _unsquare(penalty, shape), kept


def rest(kept: tuple, rhs: Array) -> Array | None:
    """What rounding to bfloat16 took from the solution, ``[B, T, H, D]``; None where none is kept.

    Args:
      kept: as ``forward`` returned it.
      rhs: as it was given to ``forward``.
    """
    *_, terms = kept
    if rhs.dtype != jnp.bfloat16 or len(terms) < 2:
        return None
    return terms[1][:, : rhs.shape[1], :, : rhs.shape[-1]]


def backward(
    rhs: Array,
    direction: Array | None,
    lambda0: Array,
    segment_ids: Array | None,
    gain: Array | None,
    kept: tuple,
    d_solution: Array,
    d_penalty: Array,
    *,
    normalize_rhs: bool = False,
    write_gain: str | None = None,
    precision=None,
    params: Mapping[str, Any] | None = None,
    d_normalized_rhs: Array | None = None,
    d_raw_rhs: Array | None = None,
) -> tuple[Array, Array | None, Array, Array]:
    """Cotangents of ``rhs, direction, lambda0, initial_penalty`` from those of ``forward``.

    ``gain`` and ``kept`` are those of ``forward``, called with the same parameters.
    ``d_normalized_rhs`` and ``d_raw_rhs`` are further cotangents of the normalised and of the given
    right-hand side; they are added before and after the normalisation's backward. The cotangent of
    ``direction`` is None if it was, and then part of that of ``rhs``.

    Solutions and ``b`` stay in float32 here, and multiply in float32 or as two bfloat16 terms: with
    an ill-conditioned penalty ``u`` is nearly orthogonal to both, and rounding them would leave
    nothing of the cotangent of ``u``.
    """
    _check(direction, normalize_rhs, write_gain)
    length, dtype = rhs.shape[1], rhs.dtype
    w, starts, solution = kept
    tokens = [rhs, direction, d_solution, d_normalized_rhs, d_raw_rhs, gain]
    tokens, lambda0, segment_ids, shape, params = _prepare(tokens, lambda0, segment_ids, params)
    rhs, direction, d_solution, d_normalized, d_raw, gain = tokens
    starts = starts.reshape(shape.streams, *starts.shape[2:])
    fused = direction is not None
    config = _applied(
        shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params
    )._replace(
        backward=True,
        has_d_normalized=fused and d_normalized is not None,
        has_d_raw=fused and d_raw is not None,
        width=min(shape.dim, params["apply_backward_width"]),
    )
    operands = [
        rhs if normalize_rhs or write_gain == "projection" else None,
        d_solution,
        gain if write_gain else None,
        d_normalized if fused else None,
        d_raw if fused else None,
        *solution,
    ]
    overlap, *b = _apply(
        shape, config, lambda0, segment_ids, operands, w, starts, dtype, params=params
    )
    d_rhs = b.pop(0) if fused else None
    d_lambda0 = -overlap.reshape(shape.batch, shape.heads, -1).sum(-1)

    mode = "bf16x3" if len(b) == 2 else config.mode
    outer = _gram(shape, solution, tuple(b), segment_ids, reverse=True, mode=mode, params=params)
    x = _square(d_penalty, shape)
    ridge = jnp.zeros_like(lambda0)
    states, start = _prefix(shape, outer, ridge, -(x + x.swapaxes(1, 2)), segment_ids, reverse=True)
    d_u = _du(
        shape,
        direction if fused else rhs,
        solution,
        b,
        states,
        segment_ids,
        direction.dtype if fused else jnp.float32,
        directions=not fused,
        mode=mode,
        params=params,
    )
    cut = slice(None), slice(length), slice(None), slice(shape.true_dim)
    if fused:
        d_rhs, d_direction = d_rhs[cut], d_u[cut]
    else:
        d_rhs, d_direction = _key_cotangent(shape, config, tokens, solution, b, d_u)[cut], None
    return d_rhs, d_direction, d_lambda0, _unsquare(start, shape) / -2


def _key_cotangent(shape, config, tokens, solution, b, d_u) -> Array:
    """The cotangent of the raw key where the direction is made from it too."""
    dtype = tokens[0].dtype
    rhs, _, d_solution, d_normalized, d_raw, gain = (
        None if x is None else x.astype(jnp.float32) for x in tokens
    )
    solution, b = (sum(x.astype(jnp.float32) for x in terms) for terms in (solution, b))
    x = b * (1 if gain is None else gain[..., None])
    x += d_u * shape.true_dim**-0.5
    if config.write_gain == "projection":
        x -= jnp.sum(d_solution * solution, axis=-1, keepdims=True) * solution
    if d_normalized is not None:
        x += d_normalized
    inverse = numerics.inverse_norm(rhs)
    unit = rhs * inverse
    x = (x - jnp.sum(x * unit, axis=-1, keepdims=True) * unit) * inverse
    return (x if d_raw is None else x + d_raw).astype(dtype)
