"""Kernels of ``penalty_solve``, forward and backward (``docs/derivation.md``, sections 3 and 4).

The sequence is cut in super-chunks that run side by side. Five kernels a solve:

    gram      Σ u uᵀ over each super-chunk
    prefix    its running sum: the penalty M where each super-chunk starts
    invert    A = M⁻¹ there, in place, by symmetric Gauss-Jordan elimination over blocks of 16
    factor    W, 16 tokens at a time, with A_t = A − Σ_{s≤t} w_s w_sᵀ: all that is sequential
    apply     the solutions A_t r_t, 64 tokens at a time: linear attention over the rows of W

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
TINY = 2.0**-126  # the smallest normal float32
PROGRAMS = 2048  # programs that fill the device


class _Shape(NamedTuple):
    """Static sizes of one call."""

    batch: int
    length: int  # padded
    heads: int
    dim: int  # padded
    true_dim: int
    supers: int
    super_chunk: int

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
    """Tokens of a super-chunk: as many as still give ``PROGRAMS``, within the table's range.

    Long ones amortise the inverse at their start, short ones give more programs; with few heads the
    sequence itself is split until the device is full.
    """
    chunk = params["max_super_chunk"]
    while chunk > params["min_super_chunk"] and streams * -(-length // chunk) < PROGRAMS:
        chunk //= 2
    return max(GROUP, min(chunk, -(-length // GROUP) * GROUP))


# --- pieces of kernels -------------------------------------------------------------------------


def _half_inverse(matrix: Array, floor) -> Array:
    """``L⁻¹`` of a symmetric positive definite block, ``L Lᵀ = matrix``, by Gauss elimination.

    In place: left of the pivot the tile holds ``L⁻¹`` so far, right of it what is still to be
    eliminated. ``floor`` is a lower bound of the pivots in exact arithmetic: it keeps a matrix that
    rounding has made indefinite from giving NaN.
    """
    n = matrix.shape[0]
    rows, cols, index = (backend.iota(s, a) for s, a in (((n, n), 0), ((n, n), 1), ((n, 1), 0)))
    identity = (rows == cols).astype(jnp.float32)

    def eliminate(j, matrix):
        column = jnp.sum(jnp.where(cols == j, matrix, 0), axis=1, keepdims=True)
        pivot = jnp.sum(jnp.where(index == j, column, 0), axis=0, keepdims=True)
        scale = jax.lax.rsqrt(jnp.maximum(pivot, floor))
        matrix = jnp.where(cols == j, identity, matrix)
        row = jnp.sum(jnp.where(rows == j, matrix, 0), axis=0, keepdims=True)
        below = jnp.where(index > j, column * (scale * scale), 0)
        return matrix - jnp.where(index == j, 1 - scale, below) * row

    matrix = backend.unrolled_loop(n, eliminate, matrix)
    return jnp.where(rows >= cols, matrix, 0)


def _inverse_norm(x: Array) -> tuple[Array, Array]:
    """``(p, r)`` with ``x·p·r`` of unit length, or zero: ``p`` scales the largest entry to one."""
    peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    scale = 1 / jnp.maximum(peak, TINY)
    scaled = x * scale
    square = jnp.sum(scaled * scaled, axis=1, keepdims=True)
    present = peak > 0
    return scale, jnp.where(present, jax.lax.rsqrt(jnp.where(present, square, 1)), 0)


def _row_dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=1, keepdims=True)


def _tile(ref, batch, start, size, head, columns=None) -> Array:
    """``[size, D]`` tokens of one head."""
    columns = slice(None) if columns is None else columns
    return ref[batch, pl.ds(start, size), head, columns]


def _running(seg_ref, batch, start):
    """The segment that runs where ``start`` begins: that of the token before."""
    return seg_ref[batch, jnp.maximum(start - 1, 0)]


def _unit(x: Array) -> Array:
    x = x.astype(jnp.float32)
    peak, norm = _inverse_norm(x)
    return x * peak * norm


# --- gram --------------------------------------------------------------------------------------


def _gram_kernel(*refs, shape, directions, symmetric, segments, mode, width):
    """``Σ xᵀ y`` of the super-chunk, or ``Σ xᵀ y + yᵀ x``; columns of one block of ``width``.

    Sums over the tokens of the segment at the super-chunk's end (the penalty), or, for the
    symmetric form, of the segment at its start (it runs backwards).
    """
    *inputs, out_ref = refs
    seg_ref = inputs.pop() if segments else None
    x_ref, y_ref = inputs[0], inputs[-1]
    batch, head, start, count = shape.locate()
    columns = pl.ds(pl.program_id(2) * width, width)
    if seg_ref is not None:
        end = start + count * GROUP
        wanted = _running(seg_ref, batch, start) if symmetric else seg_ref[batch, end - 1]

    def step(i, total):
        where = batch, start + i * GROUP, GROUP, head
        x, y = _tile(x_ref, *where), _tile(y_ref, *where, columns)
        pairs = [(x, y)]
        if directions:  # of unit keys
            x = x.astype(jnp.float32)
            peak, norm = _inverse_norm(x)
            norm = norm * shape.true_dim**-0.5
            pairs = [(x * peak * norm, y.astype(jnp.float32) * peak * norm)]
        if symmetric:
            pairs.append((_tile(y_ref, *where), _tile(x_ref, *where, columns)))
        for x, y in pairs:
            if seg_ref is not None:
                seg = seg_ref[batch, pl.ds(start + i * GROUP, GROUP)]
                x = jnp.where((seg == wanted)[:, None], x, jnp.zeros_like(x))
            total += backend.dot(x, y, mode=mode, trans_a=True)
        return total

    out_ref[pl.program_id(0), pl.program_id(1), :, columns] = backend.loop(
        count, step, jnp.zeros((shape.dim, width), jnp.float32)
    )


def _gram(shape, tokens, segment_ids, *, directions=False, mode, params):
    width = min(shape.dim, params["gram_width"])
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [*tokens, *segments]
    out = jax.ShapeDtypeStruct((shape.streams, shape.supers, shape.dim, shape.dim), jnp.float32)
    return backend.call(
        functools.partial(
            _gram_kernel,
            shape=shape,
            directions=directions,
            symmetric=len(tokens) == 2,
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
        name="vla_penalty_gram",
    )(*inputs)


# --- prefix ------------------------------------------------------------------------------------

_AHEAD = 4  # super-chunks loaded before the first of them is used


def _prefix_kernel(*refs, shape, rows, reverse, segments):
    """``x ← keep·x + term`` over super-chunks: ``x`` before each (with λ₀ I), and the last one."""
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


# --- the inverse, from one block of tokens to the next ------------------------------------------


class _Inverse(NamedTuple):
    """``A`` of one super-chunk while a kernel goes through its tokens.

    Up to the table's size it is in registers, in parts of ``width`` rows; a larger one is worked on
    in place, in the kernel's own copy in memory.
    """

    start_ref: Any  # A where each super-chunk starts
    work_ref: Any  # the copy, or None: A stays in registers
    at: tuple
    dim: int
    width: int
    inverse_lam: Array
    dot: Any

    def parts(self):
        return [pl.ds(i, self.width) for i in range(0, self.dim, self.width)]

    def begin(self):
        """The loop's carry."""
        if self.work_ref is None:
            return tuple(self.start_ref[*self.at, part, :] for part in self.parts())
        for part in self.parts():
            self.work_ref[*self.at, part, :] = self.start_ref[*self.at, part, :]
        backend.barrier()
        return ()

    def times(self, carry, left):
        """``left A``; ``left(columns)`` loads columns of the left side."""
        if self.work_ref is None:
            return sum(self.dot(left(k), a) for k, a in zip(self.parts(), carry, strict=True))

        def add(i, total):
            k = pl.ds(i * self.width, self.width)
            return total + self.dot(left(k), self.work_ref[*self.at, k, :])

        tokens = left(pl.ds(0, self.width)).shape[0]
        zero = jnp.zeros((tokens, self.dim), jnp.float32)
        return backend.loop(self.dim // self.width, add, zero)

    def step(self, carry, w, columns_of_w, keep):
        """``A ← A − wᵀ w``, or of a new segment (``keep`` false) ``I/λ₀ − wᵀ w``."""

        def stepped(a, first_row, left):
            if keep is not None:
                diagonal = backend.iota(a.shape, 0) + first_row == backend.iota(a.shape, 1)
                a = jnp.where(keep, a, jnp.where(diagonal, self.inverse_lam, 0))
            return a - self.dot(left, w, trans_a=True)

        if self.work_ref is None:
            starts = range(0, self.dim, self.width)
            lefts = [w] if len(carry) == 1 else [columns_of_w(k) for k in self.parts()]
            return tuple(map(stepped, carry, starts, lefts))
        backend.barrier()

        def part(i, carry):
            k = pl.ds(i * self.width, self.width)
            a = self.work_ref[*self.at, k, :]
            self.work_ref[*self.at, k, :] = stepped(a, i * self.width, columns_of_w(k))
            return carry

        backend.loop(self.dim // self.width, part, np.int32(0))
        backend.barrier()
        return carry


def _inverse_options(shape, params, kernel):
    """(rows of a part, whether it is worked on in memory) for ``kernel``, factor or apply."""
    width = min(shape.dim, params[f"{kernel}_width"])
    return width, shape.dim > params["resident_dim"]


# --- factor ------------------------------------------------------------------------------------


def _factor_kernel(*refs, shape, has_direction, segments, in_memory, width, mode):
    """``W`` of one super-chunk, with ``A_t = A − Σ_{s≤t} w_s w_sᵀ``, from ``A`` at its start.

    16 tokens at a time: ``W = L⁻¹ U A`` with ``L Lᵀ = I + U A Uᵀ``.
    """
    refs = list(refs)
    lam_ref = refs.pop(0)
    seg_ref = refs.pop(0) if segments else None
    u_ref, start_ref, w_ref, *work = refs
    batch, head, start, groups = shape.locate()
    at = pl.program_id(0), pl.program_id(1)
    row, col = backend.iota((BLOCK, BLOCK), 0), backend.iota((BLOCK, BLOCK), 1)
    identity = (row == col).astype(jnp.float32)
    inverse_lam = 1 / lam_ref[at[0]]
    dot = functools.partial(backend.dot, mode=mode)
    matrix = _Inverse(
        start_ref, work[0] if in_memory else None, at, shape.dim, width, inverse_lam, dot
    )

    def block(p, carry):
        token = start + p * BLOCK
        scale = None
        if not has_direction:  # the unit key over √D
            peak, norm = _inverse_norm(_tile(u_ref, batch, token, BLOCK, head).astype(jnp.float32))
            scale = peak, norm * shape.true_dim**-0.5

        def direction(columns=None):
            x = _tile(u_ref, batch, token, BLOCK, head, columns).astype(jnp.float32)
            return x if scale is None else x * scale[0] * scale[1]

        au = matrix.times(carry, direction)
        u = direction()
        if seg_ref is None:
            gram = dot(u, au, trans_b=True)
        else:
            seg = seg_ref[batch, pl.ds(token, BLOCK)]
            running, last = _running(seg_ref, batch, token), seg_ref[batch, token + BLOCK - 1]
            au = jnp.where((seg == running)[:, None], au, u * inverse_lam)
            gram = jnp.where(seg[:, None] == seg[None, :], dot(u, au, trans_b=True), 0)
        w = dot(_half_inverse(gram + identity, 1.0), au)
        w_ref[batch, pl.ds(token, BLOCK), head, :] = w
        here = keep = None
        if seg_ref is not None:
            here, keep = (seg == last)[:, None], last == running
            w = jnp.where(here, w, 0)

        def columns_of_w(columns):
            x = _tile(w_ref, batch, token, BLOCK, head, columns)
            return x if here is None else jnp.where(here, x, 0)

        if len(carry) > 1:
            backend.barrier()
        return matrix.step(carry, w, columns_of_w, keep)

    backend.loop(groups * (GROUP // BLOCK), block, matrix.begin())


def _factor(shape, u, lambda0, starts, segment_ids, *, has_direction, mode, params):
    """``W [B, T, H, D]``, float32."""
    width, in_memory = _inverse_options(shape, params, "factor")
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [lambda0, *segments, u, starts]
    tokens = (shape.batch, shape.length, shape.heads, shape.dim)
    outs = [jax.ShapeDtypeStruct(tokens, jnp.float32)]
    if in_memory:
        outs.append(jax.ShapeDtypeStruct(starts.shape, jnp.float32))
    return backend.call(
        functools.partial(
            _factor_kernel,
            shape=shape,
            has_direction=has_direction,
            segments=bool(segments),
            in_memory=in_memory,
            width=width,
            mode=mode,
        ),
        grid=(shape.streams, shape.supers),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*outs),
        out_shape=outs,
        num_warps=params["factor_warps"],
        num_stages=1,
        name="vla_penalty_factor",
    )(*inputs)[0]


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
    keep_exact: bool
    mode: str
    chunk: int
    width: int
    in_memory: bool


def _apply_kernel(*refs, shape, config):
    """``x_t = A_t r_t`` over one super-chunk: linear attention with ``−w`` for keys and values.

    Forward: the right-hand side is the (normalised) key and what is written is the write key, its
    gain and, if its dtype is not float32, the write key once more before rounding. Backward: the
    right-hand side is the cotangent of the solution, formed here from that of the write key;
    written are ``b = β / gain`` and, with a direction, the cotangent of the key.
    """
    backward, gain_kind, chunk = config.backward, config.write_gain, config.chunk
    refs = list(refs)
    lam_ref = refs.pop(0)
    seg_ref = refs.pop(0) if config.segments else None
    needs_key = not backward or config.normalize_rhs or gain_kind == "projection"
    key_ref = refs.pop(0) if needs_key else None
    if backward:
        solution_ref, d_solution_ref = refs.pop(0), refs.pop(0)
        gain_ref = refs.pop(0) if gain_kind else None
        d_normalized_ref = refs.pop(0) if config.has_d_normalized else None
        d_raw_ref = refs.pop(0) if config.has_d_raw else None
    w_in_ref, start_ref, out_ref, *more = refs
    work_ref = more.pop() if config.in_memory else None

    dot = functools.partial(backend.dot, mode=config.mode)
    batch, head, start, groups = shape.locate()
    at = pl.program_id(0), pl.program_id(1)
    inverse_lam = 1 / lam_ref[at[0]]
    causal = backend.iota((chunk, chunk), 0) >= backend.iota((chunk, chunk), 1)
    matrix = _Inverse(start_ref, work_ref, at, shape.dim, config.width, inverse_lam, dot)

    def step(p, carry):
        """The next ``chunk`` tokens."""
        carry, total = carry
        token = start + p * chunk
        here = pl.ds(token, chunk)

        def load(ref, columns=None):
            return _tile(ref, batch, token, chunk, head, columns).astype(jnp.float32)

        peak = norm = None
        if config.normalize_rhs:
            peak, norm = _inverse_norm(load(key_ref))

        def key(columns=None):
            x = load(key_ref, columns)
            return x * peak * norm if config.normalize_rhs else x

        gain = overlap = None
        if backward and gain_kind:
            gain = gain_ref[batch, here, head][:, None]
            overlap = _row_dot(load(d_solution_ref), load(solution_ref))

        def rhs(columns=None):
            if not backward:
                return key(columns)
            x = load(d_solution_ref, columns)
            if gain_kind == "unit":
                x = x - overlap * load(solution_ref, columns)
            elif gain_kind == "projection":
                x = x - overlap * key(columns)
            return x * gain if gain_kind else x

        visible, in_last, keep = causal, None, None
        x = matrix.times(carry, rhs)
        r, w = rhs(), load(w_in_ref)
        if seg_ref is not None:
            seg = seg_ref[batch, here]
            running, last = _running(seg_ref, batch, token), seg_ref[batch, token + chunk - 1]
            x = jnp.where((seg == running)[:, None], x, r * inverse_lam)
            visible = causal & (seg[:, None] == seg[None, :])
            in_last, keep = (seg == last)[:, None], last == running
        x -= dot(jnp.where(visible, dot(r, w, trans_b=True), 0), w)

        def of_last(w):
            return w if in_last is None else jnp.where(in_last, w, 0)

        carry = matrix.step(carry, of_last(w), lambda k: of_last(load(w_in_ref, k)), keep)

        if not backward:
            if gain_kind is not None:
                if gain_kind == "unit":
                    scale, norm = _inverse_norm(x)
                    gain = scale * norm
                elif gain_kind == "projection":
                    inner = _row_dot(x, r)
                    gain = jnp.where(inner > 0, 1 / jnp.where(inner > 0, inner, 1), 0)
                else:
                    gain = jnp.ones((chunk, 1), jnp.float32)
                x = x * gain
                more[0][batch, here, head] = jnp.sum(gain, axis=1)
            out_ref[batch, here, head, :] = x.astype(out_ref.dtype)
            if config.keep_exact:
                more[-1][batch, here, head, :] = x
            return carry, total

        solution = load(solution_ref)
        b = x
        if gain_kind:
            b = x * jnp.where(gain > 0, 1 / jnp.where(gain > 0, gain, 1), 0)
        out_ref[batch, here, head, :] = b
        if config.has_direction:
            if gain_kind == "projection":
                x -= overlap * solution
            if config.has_d_normalized:
                x += load(d_normalized_ref)
            if config.normalize_rhs:
                unit = key()
                x = (x - _row_dot(x, unit) * unit) * norm * peak
            if config.has_d_raw:
                x += load(d_raw_ref)
            more[1][batch, here, head, :] = x.astype(more[1].dtype)
        return carry, total + jnp.sum(jnp.sum(b * solution, axis=1))

    _, total = backend.loop(groups * (GROUP // chunk), step, (matrix.begin(), jnp.float32(0)))
    if backward:
        more[0][*at] = total


def _apply(shape, config, lambda0, segment_ids, tokens, w, starts, dtype, *, params):
    """Runs the kernel: ``(out, gain?, exact?)``, or backward ``(b, parts of −dλ₀, d_rhs?)``."""
    struct = jax.ShapeDtypeStruct
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    if config.backward:
        outs = [struct(size, jnp.float32), struct((shape.streams, shape.supers), jnp.float32)]
        outs += [struct(size, dtype)] if config.has_direction else []
    else:
        outs = [struct(size, dtype)]
        outs += [] if config.write_gain is None else [struct(size[:3], jnp.float32)]
        outs += [struct(size, jnp.float32)] if config.keep_exact else []
    if config.in_memory:
        outs.append(struct(starts.shape, jnp.float32))
    inputs = [x for x in (lambda0, segment_ids, *tokens, w, starts) if x is not None]
    results = backend.call(
        functools.partial(_apply_kernel, shape=shape, config=config),
        grid=(shape.streams, shape.supers),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*outs),
        out_shape=outs,
        num_warps=params["apply_warps"],
        num_stages=params["apply_stages"],
        name="vla_penalty_apply_backward" if config.backward else "vla_penalty_apply",
    )(*inputs)
    return results[:-1] if config.in_memory else results


# --- du ----------------------------------------------------------------------------------------


def _du_kernel(*refs, shape, segments, directions, mode, width):
    """``du_t = −Σ_{s≥t} [b_s (a_s·u_t) + a_s (b_s·u_t)]``, columns of one block of ``width``."""
    u_ref, a_ref, b_ref, state_ref, *refs = refs
    seg_ref = refs.pop(0) if segments else None
    (out_ref,) = refs
    batch, head, start, count = shape.locate()
    at = pl.program_id(0), pl.program_id(1)
    columns = pl.ds(pl.program_id(2) * width, width)
    row, col = backend.iota((GROUP, GROUP), 0), backend.iota((GROUP, GROUP), 1)

    def step(i, state):
        token = start + (count - 1 - i) * GROUP
        where = batch, token, GROUP, head
        u, a, b = (_tile(ref, *where) for ref in (u_ref, a_ref, b_ref))
        a_part, b_part = (_tile(ref, *where, columns) for ref in (a_ref, b_ref))
        if directions:
            u = _unit(u) * shape.true_dim**-0.5
        later = row <= col
        du = backend.dot(u, state, mode=mode)
        a_cont, b_cont = a, b
        if seg_ref is not None:
            seg = seg_ref[batch, pl.ds(token, GROUP)]
            last = seg_ref[batch, token + GROUP - 1]
            running = _running(seg_ref, batch, token)
            later &= seg[:, None] == seg[None, :]
            du = jnp.where((seg == last)[:, None], du, 0)
            state = jnp.where(last == running, state, 0)
            cont = (seg == running)[:, None]
            a_cont, b_cont = (jnp.where(cont, x, jnp.zeros_like(x)) for x in (a, b))
        for x, part in ((a, b_part), (b, a_part)):
            score = jnp.where(later, backend.dot(u, x, mode=mode, trans_b=True), 0)
            du += backend.dot(score, part, mode=mode)
        state += backend.dot(a_cont, b_part, mode=mode, trans_a=True)
        state += backend.dot(b_cont, a_part, mode=mode, trans_a=True)
        out_ref[batch, pl.ds(token, GROUP), head, columns] = (-du).astype(out_ref.dtype)
        return state

    backend.loop(count, step, state_ref[*at, :, columns])


def _du(shape, u, a, b, states, segment_ids, dtype, *, directions, mode, params):
    width = min(shape.dim, params["du_width"])
    segments = [] if segment_ids is None else [segment_ids]
    inputs = [u, a, b, states, *segments]
    out = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.heads, shape.dim), dtype)
    return backend.call(
        functools.partial(
            _du_kernel,
            shape=shape,
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
    padded = -(-length // GROUP) * GROUP
    chunk = super_chunk_length(padded, batch * heads, params)
    shape = _Shape(batch, padded, heads, padded_dim, dim, -(-padded // chunk), chunk)

    def pad(x):
        if x is None or (padded == length and padded_dim == dim):
            return x
        return jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, padded_dim - dim)))

    lambda0 = jnp.broadcast_to(lambda0.astype(jnp.float32), (batch, heads)).reshape(-1)
    if segment_ids is not None:
        segment_ids = jnp.pad(
            segment_ids.astype(jnp.int32), ((0, 0), (0, padded - length)), mode="edge"
        )
    return [pad(x) for x in tokens], lambda0, segment_ids, shape, params


def _square(x: Array, shape: _Shape) -> Array:
    """``[B, H, D, D]`` as ``[B·H, Dp, Dp]`` float32."""
    extra = shape.dim - shape.true_dim
    x = x.astype(jnp.float32).reshape(shape.streams, *x.shape[2:])
    return jnp.pad(x, ((0, 0), (0, extra), (0, extra))) if extra else x


def _unsquare(x: Array, shape: _Shape) -> Array:
    x = x[:, : shape.true_dim, : shape.true_dim]
    return x.reshape(shape.batch, shape.heads, *x.shape[1:])


def _factors(shape, rhs, direction, lambda0, initial, segment_ids, precision, params):
    """``A`` at the start of every super-chunk, ``W``, and the penalty after the last token."""
    u, has_direction = (rhs, False) if direction is None else (direction, True)
    mode = backend.dot_mode(u.dtype, precision, wide=not has_direction)
    gram = _gram(shape, [u], segment_ids, directions=not has_direction, mode=mode, params=params)
    starts, penalty = _prefix(shape, gram, lambda0, initial, segment_ids)
    starts = _invert(shape, lambda0, starts, params=params)
    w = _factor(
        shape,
        u,
        lambda0,
        starts,
        segment_ids,
        has_direction=has_direction,
        mode=backend.dot_mode(u.dtype, precision, wide=True),
        params=params,
    )
    return (starts, w), penalty


def _applied(shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params):
    """The choices of the apply kernel that forward and backward share."""
    width, in_memory = _inverse_options(shape, params, "apply")
    return _Apply(
        backward=False,
        has_direction=direction is not None,
        normalize_rhs=normalize_rhs,
        write_gain=write_gain,
        segments=segment_ids is not None,
        has_d_normalized=False,
        has_d_raw=False,
        keep_exact=False,
        mode=backend.dot_mode(dtype, precision, wide=True),
        chunk=params["apply_chunk"],
        width=width,
        in_memory=in_memory,
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
) -> tuple[Array, Array | None, Array, tuple[Array, Array, Array]]:
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
      of it all, float32 and padded: ``A`` where super-chunks start ``[B, H, supers, D, D]``, ``W``
      and the solution before rounding.
    """
    _check(direction, normalize_rhs, write_gain)
    length, dtype = rhs.shape[1], rhs.dtype
    (rhs, direction), lambda0, segment_ids, shape, params = _prepare(
        [rhs, direction], lambda0, segment_ids, params
    )
    initial = _square(initial_penalty, shape)
    (starts, w), penalty = _factors(
        shape, rhs, direction, lambda0, initial, segment_ids, precision, params
    )
    config = _applied(
        shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params
    )._replace(keep_exact=dtype != jnp.float32)
    solution, *more = _apply(
        shape, config, lambda0, segment_ids, [rhs], w, starts, dtype, params=params
    )
    exact = more.pop() if config.keep_exact else solution
    gain = more[0][:, :length] if more else None
    kept = starts.reshape(shape.batch, shape.heads, *starts.shape[1:]), w, exact
    solution = solution[:, :length, :, : shape.true_dim]
    return solution, gain, _unsquare(penalty, shape), kept


def backward(
    rhs: Array,
    direction: Array | None,
    lambda0: Array,
    segment_ids: Array | None,
    gain: Array | None,
    kept: tuple[Array, Array, Array],
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
    starts, w, solution = kept
    tokens = [rhs, direction, d_solution, d_normalized_rhs, d_raw_rhs]
    tokens, lambda0, segment_ids, shape, params = _prepare(tokens, lambda0, segment_ids, params)
    rhs, direction, d_solution, d_normalized, d_raw = tokens
    starts = starts.reshape(shape.streams, *starts.shape[2:])
    fused = direction is not None
    if gain is not None:
        gain = jnp.pad(gain, ((0, 0), (0, shape.length - length), (0, 0)))
    config = _applied(
        shape, dtype, direction, segment_ids, normalize_rhs, write_gain, precision, params
    )._replace(
        backward=True,
        has_d_normalized=fused and d_normalized is not None,
        has_d_raw=fused and d_raw is not None,
    )
    operands = [
        rhs if normalize_rhs or write_gain == "projection" else None,
        solution,
        d_solution,
        gain if write_gain else None,
        d_normalized if fused else None,
        d_raw if fused else None,
    ]
    b, overlap, *d_rhs = _apply(
        shape, config, lambda0, segment_ids, operands, w, starts, dtype, params=params
    )
    d_lambda0 = -overlap.reshape(shape.batch, shape.heads, -1).sum(-1)

    mode = backend.dot_mode(dtype, precision, wide=True)
    mode = "bf16x3" if mode == "tf32" and dtype != jnp.float32 else mode
    x = _square(d_penalty, shape)
    outer = _gram(shape, [solution, b], segment_ids, mode=mode, params=params)
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
        d_rhs, d_direction = d_rhs[0][cut], d_u[cut]
    else:
        d_rhs, d_direction = (
            _key_cotangent(shape, config, tokens, solution, gain, b, d_u)[cut],
            None,
        )
    return d_rhs, d_direction, d_lambda0, _unsquare(start, shape) / -2


def _key_cotangent(shape, config, tokens, solution, gain, b, d_u) -> Array:
    """The cotangent of the raw key where the direction is made from it too."""
    dtype = tokens[0].dtype
    rhs, _, d_solution, d_normalized, d_raw = (
        None if x is None else x.astype(jnp.float32) for x in tokens
    )
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
