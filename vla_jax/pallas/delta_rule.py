"""Kernels of ``delta_rule``, forward and backward (``docs/derivation.md``, sections 3 and 4).

The sequence is cut in chunks of C tokens. What can be done for each chunk by itself is, in kernels
that run over all chunks side by side; only the sweep of the state goes chunk by chunk:

    solve   Tm = (I + strict_tril(K Aᵀ))⁻¹, Tm K and Tm V                          parallel
    sweep   S ← S + Aᵀ E, E = Tm V − (Tm K) S; keeps E, and S at chunk starts      in sequence
    read    O = Q S + tril(Q Aᵀ) E, the ratio's denominator                        parallel

    pull    Tmᵀ A, Tmᵀ tril(Q Aᵀ)ᵀ dO and Qᵀ dO                                    parallel
    sweep   R ← R + Qᵀ dO − Kᵀ dE, dE = dV = Tmᵀ A R + …; keeps R at chunk ends    in sequence
    grads   dQ, dK, dA and the ratio's part of dK                                  parallel

(S and R here are transposed: key dimension first.) With too few heads to fill the device the sweep
itself is cut in super-chunks: their affine maps S ↦ F S + G are found side by side, composed by
``lax.associative_scan``, and then all super-chunks are swept side by side.

A key that is normalised here is never rounded in between: products take the key as given, and its
inverse length scales their rows or columns in float32.

Names: ``tokens`` layout is ``[B, T, H, D]`` as given; ``stream`` layout has one axis ``B·H`` first.
Inside this file D and E are padded with zeros to powers of two, and T to whole chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax.pallas import backend
from vla_jax.types import Array

NAME = "delta_rule"
BLOCK = 16  # rows of the blocks whose inverse is found by substitution

_PARAMS = dict(
    chunk=64,
    solve_slab=128,  # columns of a product at a time, where it can be cut
    solve_warps=2,
    sweep_width=64,  # columns of the state that one program carries
    sweep_warps=4,
    sweep_stages=2,
    read_width=128,  # columns of the output that one program writes
    read_warps=4,
    pull_width=128,
    pull_slab=64,
    pull_warps=4,
    grads_width=64,
    grads_slab=128,
    grads_warps=4,
    fill=512,  # programs of the sweep that fill the device
    min_span=16,  # fewest chunks of a super-chunk
    float32={},  # what differs where operands are float32
)
# Measured on an H200. Slower there: one or four warps for the solve, eight anywhere else, narrower
# tiles, a solve in two kernels.
backend.TABLE.update(
    {
        (None, NAME, 64): _PARAMS | dict(sweep_stages=3, float32=dict(sweep_stages=2)),
        (None, NAME, 128): _PARAMS,
        (None, NAME, 256): _PARAMS
        | dict(
            solve_slab=64,
            sweep_width=32,
            sweep_stages=1,
            grads_slab=64,
            float32=dict(chunk=32, read_width=64, pull_width=64),
        ),
    }
)


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs, padded."""

    inverse: Array  # Tm, [B·H, N, C, C]
    norm: Array | None  # 1 / ‖key‖, [B·H, T]
    residual: Array  # E, [B·H, T, E]
    starts: Array  # S at chunk starts, [B·H, N, D, E]
    out: Array | None  # [B, T, Hq, E], unpadded; for the ratio, like the rest below
    weight: Array | None  # z·q, [B·Hq, T]
    key_sums: Array | None  # z at chunk starts, [B·H, N, D]


class _Shape(NamedTuple):
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
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return self.length // self.chunk


class _Config(NamedTuple):
    """Static choices of one call."""

    normalize: bool
    ratio: bool
    eps: float
    work: Any  # dtype of the operands of products and of what is kept between kernels
    mode: str  # how they multiply
    solve_mode: str  # how the products inside the triangular inverse do, on float32


def super_chunks(streams: int, blocks: int, chunks: int, params: Mapping[str, Any]) -> int:
    """In how many super-chunks the sweep is cut: one, unless programs are far too few.

    Cutting costs two further sweeps (of F and of G), so it pays from eight super-chunks on.
    """
    count = min(params["fill"] // (streams * blocks), chunks // params["min_span"])
    return 1 << (count.bit_length() - 1) if count >= 8 else 1


# --- pieces of kernels -------------------------------------------------------------------------


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


def _launch(body: Callable, grid, inputs: dict, outputs: dict, *, warps, stages, name) -> dict:
    """Runs ``body`` with a dictionary of references: inputs that are not None, and outputs."""
    inputs = {n: x for n, x in inputs.items() if x is not None}
    shapes = {n: jax.ShapeDtypeStruct(*x) for n, x in outputs.items() if x is not None}

    def kernel(*refs):
        body(dict(zip([*inputs, *shapes], refs, strict=True)))

    values = backend.call(
        kernel,
        grid=grid,
        in_specs=backend.whole(*inputs.values()),
        out_specs=backend.whole(*shapes.values()),
        out_shape=list(shapes.values()),
        num_warps=warps,
        num_stages=stages,
        name=name,
    )(*inputs.values())
    return dict(zip(shapes, values, strict=True))


# --- solve -------------------------------------------------------------------------------------


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


def _solve_kernel(r, *, s: _Shape, c: _Config, slab: int, unroll: bool):
    """``Tm`` of one chunk, ``Tm K`` (rows that the state at the start reaches) and ``Tm V``.

    Blocks of 16 rows by substitution, all of the chunk's at once; blocks of 32 and 64 from them:
    ``[[X, 0], [N, Y]]⁻¹ = [[X⁻¹, 0], [−Y⁻¹ N X⁻¹, Y⁻¹]]``.
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


def _solve(s: _Shape, c: _Config, key, write_key, write_rest, value, segments, params):
    per_chunk = s.streams, s.chunks
    f32 = jnp.float32
    unroll = params.get("unroll", not backend.interpret())
    return _launch(
        functools.partial(_solve_kernel, s=s, c=c, slab=params["solve_slab"], unroll=unroll),
        per_chunk,
        dict(key=key, write_key=write_key, write_rest=write_rest, value=value, segments=segments),
        dict(
            inverse=((*per_chunk, s.chunk, s.chunk), c.work),
            half=((*per_chunk, s.chunk // BLOCK, BLOCK, BLOCK), f32),
            norm=((s.streams, s.length), f32) if c.normalize else None,
            t_key=((s.streams, s.length, s.dim), c.work),
            t_value=((s.streams, s.length, s.value_dim), c.work),
            key_sums=((*per_chunk, s.dim), f32) if c.ratio else None,
        ),
        warps=params["solve_warps"],
        stages=1,
        name="vla_delta_solve",
    )


# --- sweep -------------------------------------------------------------------------------------


def _sweep_kernel(r, *, s: _Shape, c: _Config, width: int, span: int, reverse: bool):
    """``S ← keep·S + outer + leftᵀ x``, ``x = inner − right S``, over the chunks of a super-chunk.

    ``left`` has tokens layout, the rest stream layout. Forward, rows of the last segment of a chunk
    reach its end; in reverse, rows of the first segment reach its start (and ``left`` is the key).
    Without an initial state the state starts as the identity. The key sum rides along.
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


def _compose(f, g, initial, reverse):
    """States where each super-chunk starts, from the maps ``S ↦ f S + g`` of all of them."""

    def combine(earlier, later):
        (f1, g1), (f2, g2) = earlier, later
        product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        return product(f2, f1), product(f2, g1) + g2

    if reverse:
        f, g = f[:, ::-1], g[:, ::-1]
    f, g = jax.lax.associative_scan(combine, (f[:, :-1], g[:, :-1]), axis=1)
    after = jnp.matmul(f, initial[:, None], precision=jax.lax.Precision.HIGHEST) + g
    states = jnp.concatenate([initial[:, None], after], axis=1)
    return states[:, ::-1] if reverse else states


def _sweep(s: _Shape, c: _Config, params, *, reverse, segments, initial, initial_sum, **arrays):
    """The sweep with its outputs; cut in super-chunks where ``super_chunks`` says so."""
    width = min(s.value_dim, params["sweep_width"])
    blocks = s.value_dim // width
    supers = super_chunks(s.streams, blocks, s.chunks, params)
    span = -(-s.chunks // supers)
    supers = -(-s.chunks // span)
    state = (s.streams, supers, s.dim, s.value_dim), jnp.float32
    sums = initial_sum is not None
    total = ((s.streams, supers, s.dim), jnp.float32) if sums else None

    def launch(inputs, outputs, width, blocks):
        return _launch(
            functools.partial(_sweep_kernel, s=s, c=c, width=width, span=span, reverse=reverse),
            (s.streams, supers, blocks),
            dict(inputs, segments=segments),
            outputs,
            warps=params["sweep_warps"],
            stages=params["sweep_stages"],
            name="vla_delta_sweep_reverse" if reverse else "vla_delta_sweep",
        )

    if supers == 1:
        initial = initial[:, None]
        initial_sum = initial_sum[:, None] if sums else None
    else:
        zeros = dict(initial=jnp.zeros(*state), initial_sum=jnp.zeros(*total) if sums else None)
        ends = launch(arrays | zeros, dict(final=state, final_sum=total), width, blocks)
        linear = {n: x for n, x in arrays.items() if n in ("left", "left_rest", "right", "norm")}
        square = (s.streams, supers, s.dim, s.dim), jnp.float32
        map_width = min(s.dim, params["sweep_width"])
        f = launch(linear, dict(final=square), map_width, s.dim // map_width)["final"]
        initial = _compose(f, ends["final"], initial, reverse)
        if sums:
            initial_sum = _compose_sums(s, span, ends["final_sum"], initial_sum, segments, reverse)
    per_chunk = s.streams, s.chunks
    out = launch(
        dict(arrays, initial=initial, initial_sum=initial_sum),
        dict(
            starts=((*per_chunk, s.dim, s.value_dim), c.work),
            sum_starts=((*per_chunk, s.dim), jnp.float32) if sums else None,
            residual=None if reverse else ((s.streams, s.length, s.value_dim), c.work),
            d_value=((s.batch, s.length, s.heads, s.value_dim), c.work) if reverse else None,
            final=state,
            final_sum=total,
        ),
        width,
        blocks,
    )
    end = 0 if reverse else -1
    out["final"] = out["final"][:, end]
    out["final_sum"] = out["final_sum"][:, end] if sums else None
    return out


def _compose_sums(s: _Shape, span, terms, initial, segments, reverse):
    """The key sum where each super-chunk starts."""
    keep = jnp.ones(terms.shape[:2], jnp.float32)
    if segments is not None:
        low = np.arange(terms.shape[1]) * span * s.chunk
        high = np.minimum(low + span * s.chunk, s.length) - 1
        keep = segments[:, high] == segments[:, np.maximum(low - 1, 0)]
        keep = jnp.repeat(keep.astype(jnp.float32), s.heads, axis=0)
    return _compose(keep[..., None, None], terms[..., None, :], initial[:, None], reverse)[:, :, 0]


# --- read --------------------------------------------------------------------------------------


def _read_kernel(r, *, s: _Shape, c: _Config, width: int):
    """The output of one chunk of one query head, and the ratio's denominator ``z·q``."""
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


def _read(s: _Shape, c: _Config, params, dtype, **inputs):
    width = min(s.value_dim, params["read_width"])
    query_streams = s.streams * s.groups
    shape = s.batch, s.length, s.heads * s.groups, s.value_dim
    out = _launch(
        functools.partial(_read_kernel, s=s, c=c, width=width),
        (query_streams, s.chunks, s.value_dim // width),
        inputs if c.ratio else inputs | dict(key=None),
        dict(
            out=(shape, dtype),
            weight=((query_streams, s.length), jnp.float32) if c.ratio else None,
        ),
        warps=params["read_warps"],
        stages=1,
        name="vla_delta_read",
    )
    return out["out"], out.get("weight")


# --- backward: pull ----------------------------------------------------------------------------


def _query_cotangent(r, c: _Config, query_stream, here, d_out):
    """The cotangent of ``S q`` from that of the output, as an operand."""
    if not c.ratio:
        return d_out.astype(c.work)
    weight = jnp.maximum(r["weight"][query_stream, here], c.eps)
    return (d_out.astype(jnp.float32) / weight[:, None]).astype(c.work)


def _pull_kernel(r, *, s: _Shape, c: _Config, width: int, slab: int):
    """``Tmᵀ A``, ``−Tmᵀ tril(Q Aᵀ)ᵀ dO`` and ``Qᵀ dO`` of a chunk, summed over the group."""
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


def _pull(s: _Shape, c: _Config, params, **inputs):
    width = min(s.value_dim, params["pull_width"])
    per_chunk = s.streams, s.chunks
    ratio = c.ratio
    return _launch(
        functools.partial(_pull_kernel, s=s, c=c, width=width, slab=params["pull_slab"]),
        (*per_chunk, s.value_dim // width),
        inputs,
        dict(
            pull=((s.streams, s.length, s.value_dim), c.work),
            t_write=((s.streams, s.length, s.dim), c.work),
            outer=((*per_chunk, s.dim, s.value_dim), c.work),
            d_weight=((s.streams * s.groups, s.length), jnp.float32) if ratio else None,
            d_key_sums=((*per_chunk, s.dim), jnp.float32) if ratio else None,
        ),
        warps=params["pull_warps"],
        stages=1,
        name="vla_delta_pull",
    )


# --- backward: grads ---------------------------------------------------------------------------


def _grads_kernel(r, *, s: _Shape, c: _Config, width: int, slab: int):
    """Cotangents of query, key and write key: one chunk, ``width`` columns."""
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


def _grads(s: _Shape, c: _Config, params, **inputs):
    width = min(s.dim, params["grads_width"])
    query, key, write_key = (inputs[n] for n in ("query", "key", "write_key"))
    return _launch(
        functools.partial(_grads_kernel, s=s, c=c, width=width, slab=params["grads_slab"]),
        (s.streams, s.chunks, s.dim // width),
        inputs,
        dict(
            d_query=(query.shape, query.dtype),
            d_key=(key.shape, key.dtype),
            d_write_key=(write_key.shape, jnp.float32),
            d_raw_key=(key.shape, key.dtype) if c.ratio else None,
        ),
        warps=params["grads_warps"],
        stages=1,
        name="vla_delta_grads",
    )


# --- the primitive -----------------------------------------------------------------------------


class _Call(NamedTuple):
    """Static sizes and choices of a call, and how its arrays are padded."""

    shape: _Shape
    config: _Config
    params: dict[str, Any]
    length: int
    dim: int
    value_dim: int

    def tokens(self, x: Array | None, dim: int) -> Array | None:
        """``[B, T, *, D]`` with T and D padded with zeros."""
        return None if x is None else _pad(x, 1, self.shape.length, dim)

    def state(self, x: Array) -> Array:
        """``[B, H, D, E]`` as ``[B·H, D, E]`` float32, padded."""
        x = x.astype(jnp.float32).reshape(self.shape.streams, *x.shape[2:])
        return _pad(_pad(x, 1, self.shape.dim), 2, self.shape.value_dim)

    def unstate(self, x: Array) -> Array:
        x = x[:, : self.dim, : self.value_dim]
        return x.reshape(self.shape.batch, self.shape.heads, *x.shape[1:])

    def sum(self, x: Array | None) -> Array:
        """``[B, H, D]`` as ``[B·H, D]`` float32, padded."""
        s = self.shape
        if x is None:
            return jnp.zeros((s.streams, s.dim), jnp.float32)
        return _pad(x.astype(jnp.float32).reshape(s.streams, -1), 1, s.dim)

    def unsum(self, x: Array) -> Array:
        return x[:, : self.dim].reshape(self.shape.batch, self.shape.heads, -1)

    def cut(self, x: Array, dim: int) -> Array:
        return x[:, : self.length, :, :dim]


def _pad(x: Array, axis: int, size: int, last: int | None = None, mode="constant") -> Array:
    """``x`` padded at the end of ``axis`` to ``size``, and of its last axis to ``last``."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, size - x.shape[axis])
    if last is not None:
        pads[-1] = (0, last - x.shape[-1])
    return jnp.pad(x, pads, mode=mode) if any(high for _, high in pads) else x


def _prepare(query, key, write_key, value, normalize_key, readout, eps, precision, params):
    if readout not in ("ratio", "none"):
        raise ValueError(f"readout must be 'ratio' or 'none', got {readout!r}")
    if readout == "ratio" and not normalize_key:
        raise ValueError("readout='ratio' sums the raw keys: it needs normalize_key=True")
    arrays = query, key, write_key, value
    dim, value_dim = key.shape[-1], value.shape[-1]
    backend.require(NAME, tuple(x.dtype for x in arrays), (dim, value_dim))
    params = backend.parameters(NAME, max(dim, value_dim), params)
    dtypes = {jnp.dtype(x.dtype) for x in arrays}
    wide = jnp.float32 if len(dtypes) > 1 else dtypes.pop()
    mode = backend.dot_mode(wide, precision, wide=False)
    # float16 has too few exponents for cotangents; tf32 has its precision and those of float32.
    work = jnp.bfloat16 if mode == "input" and wide == jnp.bfloat16 else jnp.float32
    if work == jnp.float32 and mode == "input":
        mode = "tf32"
    if work == jnp.float32:
        params = params | params["float32"]
    batch, length, heads, _ = key.shape
    chunk = min(params["chunk"], backend.power_of_two(length))
    shape = _Shape(
        batch,
        -(-length // chunk) * chunk,
        heads,
        query.shape[2] // heads,
        backend.power_of_two(dim),
        backend.power_of_two(value_dim),
        chunk,
    )
    config = _Config(
        normalize_key, readout == "ratio", eps, work, mode, "tf32" if mode == "input" else mode
    )
    return _Call(shape, config, params, length, dim, value_dim)


def forward(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    initial_memory: Array,
    segment_ids: Array | None,
    *,
    normalize_key: bool = False,
    readout: str = "none",
    initial_key_sum: Array | None = None,
    eps: float = 1e-6,
    precision=None,
    params: Mapping[str, Any] | None = None,
    write_rest: Array | None = None,
    solve_rest: bool = False,
    save_residuals: bool = True,
) -> tuple[Array, Array, Array | None, Residuals | None]:
    """``S ← S + a (v − Sᵀ k)ᵀ``, ``o = Sᵀ q`` over tokens; equations (10) to (13).

    Args:
      query: ``[B, T, Hq, D]``.
      key, write_key: ``[B, T, H, D]``; value: ``[B, T, H, E]``.
      initial_memory: ``[B, H, D, E]``.
      segment_ids: int32 ``[B, T]`` or None.
      normalize_key: whether keys are to be scaled to unit length.
      readout: ``"ratio"`` divides by ``max(z·q, eps)``, ``z`` the running sum of the keys as given.
      initial_key_sum: ``[B, H, D]`` or None, which is zeros.
      precision: a ``jax.lax`` precision; ``HIGHEST`` means float32-accurate products.
      params: overrides of the table of parameters.
      write_rest: ``[B, T, H, D]``, what rounding took from ``write_key``, or None. The rounding of
        a write points anywhere, and what later keys seldom reach adds up.
      solve_rest: whether the triangular solve takes it too: writes that are not of unit length can
        correct one another many times within a chunk.
      save_residuals: whether a backward is to follow.

    Returns:
      ``(out [B, T, Hq, E], memory [B, H, D, E], key_sum [B, H, D] or None, residuals or None)``.
    """
    call = _prepare(query, key, write_key, value, normalize_key, readout, eps, precision, params)
    s, c, params = call.shape, call.config, call.params
    dtype = query.dtype
    query, key, write_key = (call.tokens(x, s.dim) for x in (query, key, write_key))
    rest = call.tokens(write_rest, s.dim)
    value = call.tokens(value, s.value_dim)
    segments = _padded_segments(segment_ids, s)
    solved = _solve(s, c, key, write_key, rest if solve_rest else None, value, segments, params)
    swept = _sweep(
        s,
        c,
        params,
        reverse=False,
        segments=segments,
        initial=call.state(initial_memory),
        initial_sum=call.sum(initial_key_sum) if c.ratio else None,
        left=write_key,
        left_rest=rest,
        right=solved["t_key"],
        inner=solved["t_value"],
        key_sums=solved.get("key_sums"),
    )
    out, weight = _read(
        s,
        c,
        params,
        dtype,
        query=query,
        key=key,
        write_key=write_key,
        segments=segments,
        starts=swept["starts"],
        residual=swept["residual"],
        key_sums=swept.get("sum_starts"),
    )
    out = call.cut(out, call.value_dim)
    residuals = Residuals(
        solved["inverse"],
        solved.get("norm"),
        swept["residual"],
        swept["starts"],
        out if c.ratio else None,
        weight,
        swept.get("sum_starts"),
    )
    return (
        out,
        call.unstate(swept["final"]),
        call.unsum(swept["final_sum"]) if c.ratio else None,
        residuals if save_residuals else None,
    )


def backward(
    residuals: Residuals,
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    initial_memory: Array,
    segment_ids: Array | None,
    d_out: Array,
    d_memory: Array,
    d_key_sum: Array | None = None,
    *,
    normalize_key: bool = False,
    readout: str = "none",
    initial_key_sum: Array | None = None,
    eps: float = 1e-6,
    precision=None,
    params: Mapping[str, Any] | None = None,
    write_rest: Array | None = None,
) -> tuple[Array, Array, Array | None, Array, Array, Array, Array | None]:
    """Cotangents from those of ``out``, ``memory`` and ``key_sum``; equations (17) to (21).

    The one of ``write_key`` is float32 whatever that is: the solve takes it on from here.

    Returns:
      ``(d_query, d_normalized_key, d_raw_key, d_write_key, d_value, d_initial_memory,
      d_initial_key_sum)``. The second is the cotangent of the unit key (of the key itself if it is
      not normalised), the third what the ratio adds for the key as given; the third and the last
      are None without the ratio.
    """
    del initial_memory, initial_key_sum  # S and z at chunk starts are among the residuals
    call = _prepare(query, key, write_key, value, normalize_key, readout, eps, precision, params)
    s, c, params = call.shape, call.config, call.params
    value_dtype = value.dtype
    query, key, write_key = (call.tokens(x, s.dim) for x in (query, key, write_key))
    rest = call.tokens(write_rest, s.dim)
    d_out, out = (call.tokens(x, s.value_dim) for x in (d_out, residuals.out))
    segments = _padded_segments(segment_ids, s)
    pulled = _pull(
        s,
        c,
        params,
        query=query,
        write_key=write_key,
        write_rest=rest,
        d_out=d_out,
        out=out,
        weight=residuals.weight,
        inverse=residuals.inverse,
        segments=segments,
    )
    swept = _sweep(
        s,
        c,
        params,
        reverse=True,
        segments=segments,
        initial=call.state(d_memory),
        initial_sum=call.sum(d_key_sum) if c.ratio else None,
        left=key,
        right=pulled["t_write"],
        inner=pulled["pull"],
        outer=pulled["outer"],
        norm=residuals.norm,
        key_sums=pulled.get("d_key_sums"),
    )
    grads = _grads(
        s,
        c,
        params,
        query=query,
        key=key,
        write_key=write_key,
        segments=segments,
        d_out=d_out,
        d_value=swept["d_value"],
        residual=residuals.residual,
        starts=residuals.starts,
        ends=swept["starts"],
        norm=residuals.norm,
        weight=residuals.weight,
        d_weight=pulled.get("d_weight"),
        key_sums=residuals.key_sums,
        d_key_sums=swept.get("sum_starts"),
    )
    d_raw_key = grads.get("d_raw_key")
    return (
        call.cut(grads["d_query"], call.dim),
        call.cut(grads["d_key"], call.dim),
        None if d_raw_key is None else call.cut(d_raw_key, call.dim),
        call.cut(grads["d_write_key"], call.dim),
        call.cut(swept["d_value"], call.value_dim).astype(value_dtype),
        call.unstate(swept["final"]),
        call.unsum(swept["final_sum"]) if c.ratio else None,
    )


def _padded_segments(segment_ids, s: _Shape):
    if segment_ids is None:
        return None
    return _pad(segment_ids.astype(jnp.int32), 1, s.length, mode="edge")
