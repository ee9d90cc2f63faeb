"""Kernels of ``delta_rule``; ``delta_rule.py`` beside this launches them and says what for.

A program is one chunk, or super-chunk, of one head (grid axis 0 is ``B·H``, or ``B·Hq``), and often
a block of its columns. No two programs write one place: no atomics, equal bits in every run.

Registers below are what a thread holds of the float32 tiles that live through a kernel's loop:
their sizes over the threads, 32 a warp, at D = E = 128 of the table; the compiler adds its own.
Shared memory is the compiler's too: the operands of a product pass through it, in a pipelined loop
once a stage; bytes below are those of the operands in bfloat16. No kernel allocates any itself.

Hazards. Threads of a program that pass tiles on through device memory (``solve``) need
``backend.barrier`` between write and read, and again before the next write; the interpreter, which
runs a program in sequence, cannot show one that is missing. Sides of a product are powers of two,
at least 16. Run on an H200 with jax 0.11.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax.pallas.triton import backend
from vla_jax.types import Array

BLOCK = 16  # rows of the blocks whose inverse is found by substitution


class Shape(NamedTuple):
    """Static sizes of one call; length and dimensions padded."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    chunk: int

    @property
    def streams(self) -> int:
        """Heads of the whole batch."""
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return self.length // self.chunk


class Config(NamedTuple):
    """Static choices of one call."""

    normalize: bool
    ratio: bool
    eps: float
    work: Any  # dtype of the operands of products and of what is kept between kernels
    mode: str  # how they multiply
    solve_mode: str  # how the products inside the triangular inverse do, on float32


# --- pieces of kernels ---------------------------------------------------------------------------


def _where(mask: Array | None, x: Array) -> Array:
    """Rows of ``x`` where ``mask`` holds; zeros elsewhere."""
    if mask is None:
        return x
    return jnp.where(mask[:, None] if x.ndim == 2 else mask, x, jnp.zeros_like(x))


def _slabs(size: int, width: int) -> list:
    width = min(size, width)
    return [pl.ds(i, width) for i in range(0, size, width)]


class _Segments:
    """The segment ids of one chunk; every mask is None where there are none."""

    def __init__(self, ref, batch, start, chunk):
        self.ref, self.batch, self.start, self.chunk = ref, batch, start, chunk

    def ids(self, low=0, size=None):
        return self.ref[self.batch, pl.ds(self.start + low, size or self.chunk)]

    def _running(self):
        return self.ref[self.batch, jnp.maximum(self.start - 1, 0)]

    def _end(self):
        return self.ref[self.batch, self.start + self.chunk - 1]

    def cont(self, low=0, size=None):
        """The tokens of the segment that runs at the chunk's start."""
        return None if self.ref is None else self.ids(low, size) == self._running()

    def last(self, low=0, size=None):
        """The tokens of the segment that runs at the chunk's end."""
        return None if self.ref is None else self.ids(low, size) == self._end()

    def keep(self, x):
        """``x``, or zero if a segment ends in the chunk."""
        return x if self.ref is None else jnp.where(self._end() == self._running(), x, 0)

    def lower(self, x, rows=0, columns=0, *, strict=False):
        """Entries of ``x`` on and below the diagonal, of two tokens of one segment."""
        row, column = backend.iota(x.shape, 0) + rows, backend.iota(x.shape, 1) + columns
        keep = row > column if strict else row >= column
        if self.ref is not None:
            ids = self.ids(rows, x.shape[0]), self.ids(columns, x.shape[1])
            keep &= ids[0][:, None] == ids[1][None, :]
        return jnp.where(keep, x, jnp.zeros_like(x))


# --- solve ---------------------------------------------------------------------------------------


def _substitute(load: Callable, count: int, unroll: bool) -> list[Array]:
    """The rows of ``(I + N)⁻¹`` for ``count`` blocks at once, each ``[count, BLOCK]``.

    ``load`` reads rows or entries of N, zero on and above the diagonal. Unrolled, a thread owns
    columns and goes down the rows: no exchange between threads. Rolled is for the interpreter.
    """
    if not unroll:
        index = backend.iota((count, BLOCK, BLOCK), 1)
        identity = (index == backend.iota(index.shape, 2)).astype(jnp.float32)

        def step(i, x):
            row = identity - jnp.sum(load(i, slice(None))[:, :, None] * x, axis=1, keepdims=True)
            return jnp.where(index == i, row, x)

        x = backend.loop(BLOCK, step, jnp.zeros_like(identity))
        return [x[:, i] for i in range(BLOCK)]
    column = backend.iota((count, BLOCK), 1)
    rows: list[Array] = []
    for i in range(BLOCK):
        if i % 4 == 0:
            backend.barrier()  # keeps the compiler from loading all entries first
        x = (column == i).astype(jnp.float32)
        for j in range(i):
            x -= load(i, j)[:, None] * rows[j]
        rows.append(x)
    return rows


def solve(r, *, s: Shape, c: Config, slab: int, unroll: bool):
    """``Tm`` of one chunk, ``Tm K`` (rows that the state at the start reaches) and ``Tm V``.

    Blocks of 16 rows by substitution, all of the chunk's at once; blocks of 32 and 64 from them:
    ``[[X, 0], [N, Y]]⁻¹ = [[X⁻¹, 0], [−Y⁻¹ N X⁻¹, Y⁻¹]]``.

    Grid: (heads, chunks). Registers: half a chunk of ``slab`` columns of ``Tm K`` or ``Tm V``, 64
    numbers a thread. Shared memory: a quarter of ``Tm`` and the same columns of K or V, 10 KiB.
    """
    stream, n = pl.program_id(0), pl.program_id(1)
    batch, head, start = stream // s.heads, stream % s.heads, n * s.chunk
    segments = _Segments(r.get("segments"), batch, start, s.chunk)
    keys, writes, inverse, half = r["key"], r["write_key"], r["inverse"], r["half"]
    dot = functools.partial(backend.dot, mode=c.mode)
    fine = functools.partial(backend.dot, mode=c.solve_mode)

    def norm(low, size):
        return r["norm"][stream, pl.ds(start + low, size)]

    def tokens(ref, low, size, columns=slice(None)):
        return ref[batch, pl.ds(start + low, size), head, columns].astype(c.work)

    def overlap(rows, columns, size):
        """``K Aᵀ`` of two blocks, strictly below the diagonal."""
        x = jnp.zeros((size, size), jnp.float32)
        for cut in _slabs(s.dim, slab):
            k, a = tokens(keys, rows, size, cut), tokens(writes, columns, size, cut)
            x += dot(k, a, trans_b=True)
            if "write_rest" in r:
                x += dot(k, tokens(r["write_rest"], columns, size, cut), trans_b=True)
        if c.normalize:
            x *= norm(rows, size)[:, None]
        return segments.lower(x, rows, columns, strict=True)

    if c.normalize or c.ratio:
        total = jnp.zeros((BLOCK, s.dim), jnp.float32)
        for low in range(0, s.chunk, BLOCK):
            k = keys[batch, pl.ds(start + low, BLOCK), head, :].astype(jnp.float32)
            if c.normalize:
                r["norm"][stream, pl.ds(start + low, BLOCK)] = backend.inverse_norm(k)
            if c.ratio:
                total += _where(segments.last(low, BLOCK), k)
        if c.ratio:
            r["key_sums"][stream, n, :] = jnp.sum(total, axis=0)
        backend.barrier()

    count = s.chunk // BLOCK
    for b in range(count):
        half[stream, n, b] = overlap(b * BLOCK, b * BLOCK, BLOCK)
    backend.barrier()
    rows = _substitute(lambda *index: half[stream, n, :, *index], count, unroll)
    backend.barrier()
    for i, x in enumerate(rows):
        half[stream, n, :, i, :] = x
    backend.barrier()

    size = BLOCK
    for b in range(count):
        cut = pl.ds(b * BLOCK, BLOCK)
        inverse[stream, n, cut, cut] = half[stream, n, b].astype(c.work)
    backend.barrier()
    while size < s.chunk:
        for b in range(0, s.chunk // size, 2):
            low, high = pl.ds(b * size, size), pl.ds((b + 1) * size, size)
            if size == BLOCK:
                first, second = half[stream, n, b], half[stream, n, b + 1]
            else:
                first, second = inverse[stream, n, low, low], inverse[stream, n, high, high]
            corner = fine(second, fine(overlap((b + 1) * size, b * size, size), first))
            inverse[stream, n, high, low] = (-corner).astype(c.work)
            inverse[stream, n, low, high] = jnp.zeros((size, size), c.work)
        size *= 2
        backend.barrier()

    size = max(s.chunk // 2, BLOCK)
    halves = [pl.ds(low, size) for low in range(0, s.chunk, size)]

    def multiply(name, ref, scale, width):
        for cut in _slabs(width, slab):
            operands = [tokens(ref, low, size, cut) for low in range(0, s.chunk, size)]
            for i, rows in enumerate(halves):
                x = jnp.zeros((size, cut.size), jnp.float32)
                for j, columns in enumerate(halves[: i + 1]):
                    block = inverse[stream, n, rows, columns]
                    if scale[j] is not None:
                        block = (block * scale[j][None, :]).astype(c.work)
                    x += dot(block, operands[j])
                r[name][stream, pl.ds(start + i * size, size), cut] = x.astype(c.work)
            backend.barrier()  # keeps registers low: the next loads stay behind

    scales = []
    for low in range(0, s.chunk, size):
        scale, reached = norm(low, size) if c.normalize else None, segments.cont(low, size)
        if reached is not None:
            scale = reached.astype(jnp.float32) if scale is None else _where(reached, scale)
        scales.append(scale)
    multiply("t_key", keys, scales, s.dim)
    multiply("t_value", r["value"], [None] * len(halves), s.value_dim)


# --- sweep ---------------------------------------------------------------------------------------


def sweep(r, *, s: Shape, c: Config, width: int, span: int, reverse: bool):
    """``S ← keep·S + outer + leftᵀ x``, ``x = inner − right S``, over the chunks of a super-chunk.

    ``left`` has tokens layout, the rest stream layout. Forward, rows of the last segment of a chunk
    reach its end; in reverse, rows of the first segment reach its start (and ``left`` is the key).
    Without an initial state the state starts as the identity. The key sum rides along.

    Grid: (heads, super-chunks, E / width). Registers: the state ``[D, width]``, 64 numbers a
    thread, and ``x [C, width]``, 32. Shared memory: a chunk of ``left``, of ``left_rest`` and of
    ``right``, 16 KiB each a stage, and the state once more as an operand, 16 KiB.
    """
    stream, index, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    batch, head, first = stream // s.heads, stream % s.heads, index * span
    count = jnp.minimum(s.chunks - first, span)
    columns = pl.ds(block * width, width)
    dot = functools.partial(backend.dot, mode=c.mode)

    if "initial" in r:
        state = r["initial"][stream, index, :, columns]
    else:
        shape = s.dim, width
        identity = backend.iota(shape, 0) == backend.iota(shape, 1) + block * width
        state = identity.astype(jnp.float32)
    sums = "key_sums" in r
    key_sum = r["initial_sum"][stream, index, :] if sums else np.float32(0)

    def step(i, carry):
        state, key_sum = carry
        n = first + (count - 1 - i if reverse else i)
        here = pl.ds(n * s.chunk, s.chunk)
        segments = _Segments(r.get("segments"), batch, n * s.chunk, s.chunk)
        left = r["left"][batch, here, head, :].astype(c.work)
        right = r["right"][stream, here, :]
        narrow = state.astype(c.work)
        if "starts" in r:
            r["starts"][stream, n, :, columns] = narrow
            if sums:
                r["sum_starts"][stream, n, :] = key_sum
        x = -dot(right, narrow)
        if "inner" in r:
            x += r["inner"][stream, here, columns].astype(jnp.float32)
        if "residual" in r:
            r["residual"][stream, here, columns] = x.astype(c.work)
        if "d_value" in r:
            r["d_value"][batch, here, head, columns] = (-x).astype(c.work)
        mask = segments.cont() if reverse else segments.last()
        if "norm" in r:
            x *= r["norm"][stream, here][:, None]
        x = _where(mask, x).astype(c.work)
        state = segments.keep(state) + dot(left, x, trans_a=True)
        if "left_rest" in r:
            state += dot(r["left_rest"][batch, here, head, :], x, trans_a=True)
        if "outer" in r:
            state += r["outer"][stream, n, :, columns].astype(jnp.float32)
        if sums:
            key_sum = segments.keep(key_sum) + r["key_sums"][stream, n, :]
        return state, key_sum

    state, key_sum = backend.loop(count, step, (state, key_sum))
    r["final"][stream, index, :, columns] = state
    if sums:
        r["final_sum"][stream, index, :] = key_sum


# --- read ----------------------------------------------------------------------------------------


def read(r, *, s: Shape, c: Config, width: int):
    """The output of one chunk of one query head, and the ratio's denominator ``z·q``.

    Grid: (query heads, chunks, E / width). Registers: the output ``[C, width]``, 64 numbers a
    thread, and the scores ``[C, C]``, 32. Shared memory: the chunk's q, a and k, 16 KiB each, the
    state's columns, 32 KiB, and the residual's, 16 KiB.
    """
    query_stream, n, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    stream, query_heads = query_stream // s.groups, s.heads * s.groups
    batch, head, start = stream // s.heads, stream % s.heads, n * s.chunk
    here, columns = pl.ds(start, s.chunk), pl.ds(block * width, width)
    segments = _Segments(r.get("segments"), batch, start, s.chunk)
    dot = functools.partial(backend.dot, mode=c.mode)

    q = r["query"][batch, here, query_stream % query_heads, :].astype(c.work)
    a = r["write_key"][batch, here, head, :].astype(c.work)
    scores = segments.lower(dot(q, a, trans_b=True)).astype(c.work)
    out = _where(segments.cont(), dot(q, r["starts"][stream, n, :, columns]))
    out += dot(scores, r["residual"][stream, here, columns])
    if c.ratio:
        k = r["key"][batch, here, head, :].astype(c.work)
        weight = jnp.sum(segments.lower(dot(q, k, trans_b=True)), axis=1)
        carried = q.astype(jnp.float32) * r["key_sums"][stream, n, :][None, :]
        weight += _where(segments.cont(), jnp.sum(carried, axis=1))
        r["weight"][query_stream, here] = weight
        out /= jnp.maximum(weight, c.eps)[:, None]
    out_ref = r["out"]
    out_ref[batch, here, query_stream % query_heads, columns] = out.astype(out_ref.dtype)


# --- backward ------------------------------------------------------------------------------------


def _query_cotangent(r, c: Config, query_stream, here, d_out):
    """The cotangent of ``S q`` from that of the output, as an operand."""
    if not c.ratio:
        return d_out.astype(c.work)
    weight = jnp.maximum(r["weight"][query_stream, here], c.eps)
    return (d_out.astype(jnp.float32) / weight[:, None]).astype(c.work)


def pull(r, *, s: Shape, c: Config, width: int, slab: int):
    """``Tmᵀ A``, ``−Tmᵀ tril(Q Aᵀ)ᵀ dO`` and ``Qᵀ dO`` of a chunk, summed over the group.

    Grid: (heads, chunks, E / width); the first block of columns writes what has none. Registers:
    ``Qᵀ dO [D, width]``, 128 numbers a thread, and ``pull [C, width]``, 64. Shared memory: ``slab``
    columns of q and of a, 8 KiB each, dO ``[C, width]``, 16 KiB, and ``Tm``, 8 KiB.
    """
    stream, n, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    batch, head, start = stream // s.heads, stream % s.heads, n * s.chunk
    here, columns = pl.ds(start, s.chunk), pl.ds(block * width, width)
    segments = _Segments(r.get("segments"), batch, start, s.chunk)
    cont = segments.cont()
    dot = functools.partial(backend.dot, mode=c.mode)
    slabs = _slabs(s.dim, slab)

    pull = jnp.zeros((s.chunk, width), jnp.float32)
    outer = [0.0] * len(slabs)
    total = jnp.zeros((s.dim,), jnp.float32)
    for g in range(s.groups):
        query_head, query_stream = head * s.groups + g, stream * s.groups + g
        d_o = r["d_out"][batch, here, query_head, columns]
        d_o = _query_cotangent(r, c, query_stream, here, d_o)
        scores = jnp.zeros((s.chunk, s.chunk), jnp.float32)
        for i, cut in enumerate(slabs):
            q = r["query"][batch, here, query_head, cut].astype(c.work)
            scores += dot(q, r["write_key"][batch, here, head, cut].astype(c.work), trans_b=True)
            outer[i] += dot(_where(cont, q), d_o, trans_a=True)
        pull += dot(segments.lower(scores).astype(c.work), d_o, trans_a=True)
        if c.ratio:
            overlap = jnp.zeros((s.chunk,), jnp.float32)
            for cut in _slabs(s.value_dim, slab):
                o, d_o = (r[x][batch, here, query_head, cut] for x in ("out", "d_out"))
                overlap += jnp.sum(o.astype(jnp.float32) * d_o.astype(jnp.float32), axis=1)
            weight = r["weight"][query_stream, here]
            d_weight = jnp.where(weight > c.eps, -overlap / jnp.maximum(weight, c.eps), 0)
            r["d_weight"][query_stream, here] = d_weight
            q = r["query"][batch, here, query_head, :].astype(jnp.float32)
            total += jnp.sum(_where(cont, q * d_weight[:, None]), axis=0)
    for cut, x in zip(slabs, outer, strict=True):
        r["outer"][stream, n, cut, columns] = x.astype(c.work)
    inverse = r["inverse"][stream, n]
    pull = dot(inverse, pull.astype(c.work), trans_a=True)
    r["pull"][stream, here, columns] = (-pull).astype(c.work)

    @pl.when(block == 0)
    def _():
        if c.ratio:
            r["d_key_sums"][stream, n, :] = total
        last = segments.last()
        for cut in slabs:
            a = _where(last, r["write_key"][batch, here, head, cut].astype(c.work))
            x = dot(inverse, a, trans_a=True)
            if "write_rest" in r:
                a = _where(last, r["write_rest"][batch, here, head, cut])
                x += dot(inverse, a, trans_a=True)
            r["t_write"][stream, here, cut] = x.astype(c.work)


def grads(r, *, s: Shape, c: Config, width: int, slab: int):
    """Cotangents of query, key and write key: one chunk, ``width`` columns.

    Grid: (heads, chunks, D / width). Registers: up to three sums ``[C, width]`` and a square
    ``[C, C]``, 32 numbers a thread each. Shared memory: the columns of q, k and a, 8 KiB each, and
    ``slab`` columns of dO, dE, E (16 KiB each) and of the states (16 KiB).
    """
    stream, n, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    batch, head, start = stream // s.heads, stream % s.heads, n * s.chunk
    here, columns = pl.ds(start, s.chunk), pl.ds(block * width, width)
    segments = _Segments(r.get("segments"), batch, start, s.chunk)
    cont, last = segments.cont(), segments.last()
    dot = functools.partial(backend.dot, mode=c.mode)
    cuts = _slabs(s.value_dim, slab)
    zeros = jnp.zeros((s.chunk, width), jnp.float32)
    square = jnp.zeros((s.chunk, s.chunk), jnp.float32)

    a = r["write_key"][batch, here, head, columns].astype(c.work)
    k = r["key"][batch, here, head, columns].astype(c.work)

    def put(name, x, head):
        r[name][batch, here, head, columns] = x.astype(r[name].dtype)

    # The queries first: what they need is no longer live when the keys' part begins.
    d_write = zeros
    if c.ratio:
        ones = segments.lower(jnp.ones_like(square))
        carried = jnp.broadcast_to(r["key_sums"][stream, n, columns][None, :], zeros.shape)
        ends = jnp.broadcast_to(r["d_key_sums"][stream, n, columns][None, :], zeros.shape)
        d_raw = _where(last, ends)
    for g in range(s.groups):
        query_head, query_stream = head * s.groups + g, stream * s.groups + g
        scores, d_query = square, zeros
        for cut in cuts:
            d_o = r["d_out"][batch, here, query_head, cut]
            d_o = _query_cotangent(r, c, query_stream, here, d_o)
            scores += dot(d_o, r["residual"][stream, here, cut], trans_b=True)
            d_query += dot(d_o, r["starts"][stream, n, columns, cut], trans_b=True)
        scores = segments.lower(scores).astype(c.work)
        d_query = _where(cont, d_query) + dot(scores, a)
        q = r["query"][batch, here, query_head, columns].astype(c.work)
        d_write += dot(scores, q, trans_a=True)
        if c.ratio:
            d_weight = r["d_weight"][query_stream, here][:, None]
            sums = dot(ones.astype(c.work), k) + _where(cont, carried)
            d_query += d_weight * sums
            d_raw += dot((d_weight * ones).astype(c.work), q, trans_a=True)
        put("d_query", d_query, query_head)
    if c.ratio:
        put("d_raw_key", d_raw, head)

    d_key, d_carried, triangle = zeros, zeros, square
    for cut in cuts:
        d_e = r["d_value"][batch, here, head, cut].astype(c.work)
        e = r["residual"][stream, here, cut]
        triangle += dot(d_e, e, trans_b=True)
        d_key += dot(d_e, r["starts"][stream, n, columns, cut], trans_b=True)
        d_carried += dot(e, r["ends"][stream, n, columns, cut], trans_b=True)
    triangle = segments.lower(triangle, strict=True)
    put("d_key", -(_where(cont, d_key) + dot(triangle.astype(c.work), a)), head)
    if c.normalize:
        triangle *= r["norm"][stream, here][:, None]
    d_write += _where(last, d_carried)
    put("d_write_key", d_write - dot(triangle.astype(c.work), k, trans_a=True), head)
