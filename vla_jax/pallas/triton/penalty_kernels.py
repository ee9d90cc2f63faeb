"""Kernels of ``penalty_solve``; ``penalty_solve.py`` beside this launches them and says what for.

A program is one super-chunk, or chunk, of one head (grid axis 0 is ``B·H``), and no two programs
write one place: no atomics, equal bits in every run.

Registers below are what a thread holds of the float32 tiles that live through a kernel's loop:
their sizes over the threads, 32 a warp, at D = 128 of the table; the compiler adds its own. Shared
memory is the compiler's too: the operands of a product pass through it, in a pipelined loop once a
stage; bytes below are those of the operands. No kernel allocates any itself.

Hazards. Threads that pass tiles on through device memory (``invert``, ``factor``) need
``backend.barrier`` between write and read, and again before the next write; the interpreter, which
runs a program in sequence, cannot show one that is missing. Sides of a product are powers of two,
at least 16. Run on an H200 with jax 0.11.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax.pallas.triton import backend
from vla_jax.types import Array

BLOCK = 16  # tokens of a block of the sweep, and rows of a block of the elimination
GROUP = 64  # T is padded to a multiple of it


class Shape(NamedTuple):
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
        """Heads of the whole batch."""
        return self.batch * self.heads

    def locate(self):
        """In a kernel: batch, head, first token and number of groups of its super-chunk."""
        stream, index = pl.program_id(0), pl.program_id(1)
        start = index * self.super_chunk
        count = jnp.minimum((self.length - start) // GROUP, self.super_chunk // GROUP)
        return stream // self.heads, stream % self.heads, start, count


# --- pieces of kernels ---------------------------------------------------------------------------


def half_inverse(matrix: Array, floor) -> Array:
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


# --- gram ----------------------------------------------------------------------------------------


def gram(*refs, shape, terms, directions, reverse, segments, mode, width):
    """``Σ xᵀ y`` of the super-chunk; columns of one block of ``width``.

    Grid: (heads, super-chunks, D / width). Registers: the sum ``[D, width]``, 64 numbers a thread.
    Shared memory: 64 tokens of ``x`` and of ``width`` columns of ``y``, 24 KiB a stage in bfloat16.

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


# --- prefix --------------------------------------------------------------------------------------

_AHEAD = 4  # super-chunks loaded before the first of them is used


def prefix(*refs, shape, rows, reverse, segments):
    """``x ← keep·x + term`` over super-chunks: ``x`` before each (with λ₀ I), and the last one.

    Grid: (heads, D / rows). Registers: ``rows`` rows of ``x`` and of the terms of four
    super-chunks, 40 numbers a thread. No products; the transposes of ``reverse`` go through shared
    memory.

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


# --- invert --------------------------------------------------------------------------------------


def invert(lam_ref, _, out_ref, z_ref, *, shape, rows):
    """``M ← M⁻¹`` in place: the sweep operator, one block of pivots ``P`` after another.

    With ``D = M[P, P]``, a step makes ``M[P, :]`` into ``D⁻¹ M[P, :]``, ``M[P, P]`` into ``−D⁻¹``
    and subtracts ``M[:, P] D⁻¹ M[P, :]`` elsewhere. All three are one product of ``L⁻¹ R``,
    ``L Lᵀ = D``, with itself, where ``R`` is ``M[P, :]`` with ``−I`` in place of ``D``, subtracted
    from ``M`` with zeros in the rows and columns of ``P``. The last step leaves ``−M⁻¹``.

    Grid: (heads, super-chunks). Registers: ``M`` where all its rows are taken at once, 128 numbers
    a thread; else ``rows`` of them at a time. Shared memory: ``z [16, D]``, 8 KiB, once a side.
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
        half = half_inverse(out_ref[*at, pivot, pivot], lam)
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


# --- factor --------------------------------------------------------------------------------------


def factor(*refs, shape, has_direction, segments, resident, width, mode):
    """``W`` of one super-chunk, with ``A_t = A − Σ_{s≤t} w_s w_sᵀ``, from ``A`` at its start.

    16 tokens at a time: ``W = L⁻¹ U A`` with ``L Lᵀ = I + U A Uᵀ``. ``A`` where each chunk starts
    is written too. Up to the table's size ``A`` is in registers, in parts of ``width`` rows; a
    larger one is stepped in memory, where the super-chunk's first one was.

    Grid: (heads, super-chunks). Registers: ``A [D, D]``, 128 numbers a thread (one warp at D = 64,
    four at D = 128). Shared memory: ``u``, ``W [16, D]``, 8 KiB each, and ``width`` rows of ``A``.
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
        w = dot(half_inverse(gram + identity, 1.0), au)
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


# --- apply ---------------------------------------------------------------------------------------


class Apply(NamedTuple):
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
    width: int  # columns of A taken at a time


def apply(*refs, shape, config):
    """``x_t = A_t r_t`` over one chunk: ``A`` at its start, minus attention over the rows of W.

    Forward: the right-hand side is the (normalised) key and what is written is the write key, its
    gain and the write key before rounding. Backward: the right-hand side is the cotangent of the
    solution, formed here from that of the write key; written are ``b = β / gain`` and, with a
    direction, the cotangent of the key.

    Grid: (heads, chunks). Registers: ``x`` and the right-hand side ``[chunk, D]``, 64 numbers a
    thread each forward. Shared memory: ``A [D, width]``, 64 KiB, and ``W [chunk, D]``, 32 KiB.
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


# --- du ------------------------------------------------------------------------------------------


def du(*refs, shape, tokens, terms, segments, directions, mode, width):
    """``du_t = −Σ_{s≥t} [b_s (a_s·u_t) + a_s (b_s·u_t)]``, columns of one block of ``width``.

    From the super-chunk's end, ``tokens`` at a time. Grid: (heads, super-chunks, D / width).
    Registers: the sum of what comes later, ``[D, width]``, 64 numbers a thread. Shared memory:
    ``tokens`` of ``u``, and of every term of ``a`` and ``b``: 40 KiB a stage in bfloat16.
    """
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
