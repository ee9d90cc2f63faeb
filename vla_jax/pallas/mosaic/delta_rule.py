"""Kernels of the delta rule with decay for Hopper GPUs, forward and backward.

    S_t = γ_t S_{t-1} + a_t (v_t − γ_t S_{t-1}ᵀ k_t)ᵀ,        o_t = S_tᵀ q_t

In chunks of C = 64 tokens, with Γ[t, s] = γ_{s+1} ⋯ γ_t for s ≤ t (zero across a reset), the decay
since the chunk's start e_t (zero once a reset has come) and until its end τ_s:

    invert  Tm = (I + strict(Γ ∘ K Aᵀ))⁻¹ and the inverse lengths of the keys      chunks side by side
    sweep   E = Tm (V − e ∘ K S), O = e ∘ Q S + tril(Γ ∘ Q Aᵀ) E,
            S ← e_C S + (τ ∘ A)ᵀ E                                                in sequence

    back    x = τ ∘ A R + tril(Γ ∘ Q Aᵀ)ᵀ dO, dE = dV = Tmᵀ x,
            R ← e_C R + (e ∘ Q)ᵀ dO − (e ∘ K)ᵀ dE                                 in sequence
    grads   dQ, dK, dA, d log γ                                                    chunks side by side

Memory in a sweep is transposed, ``[E, D]``, and split in blocks of 64 value columns: so the left
operand of all three products of the chain comes from registers, and a chunk's step never waits for
shared memory. (The structure, a triangular inverse by itself and a warp-specialised sweep with the
memory in registers, is that of FlashQLA and of ``jax-linear-attention``; the delta rule with any
write key, resets as positions and the direct cotangent of the decay are of this library.)

A key that is normalised here is never rounded in between: products take the key as given, and its
inverse length scales their rows or columns in float32.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vla_jax.pallas.mosaic import backend
from vla_jax.pallas.mosaic.backend import BLOCK, PAD, Machine, barrier, plain, tile
from vla_jax.types import Array

C = 64  # tokens of a chunk
WIDTH = 64  # value columns of a sweep's program, key columns of the cotangents' program
RESET = -104.0  # a log decay from here on is a reset: exp(−104) is zero in float32
F32, BF16 = jnp.float32, jnp.bfloat16


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs; T padded to whole chunks."""

    inverse: Array  # Tm, [B, H, T, C]
    norm: Array | None  # 1 / ‖key‖, [B, H, T]
    residual: Array  # E, [B, T, H, E]
    starts: Array  # S at chunk starts, [B, H, N, E, D]


class _Shape(NamedTuple):
    """Static sizes of one call; length padded."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    pieces: int  # of a sequence, swept side by side

    @property
    def chunks(self) -> int:
        return self.length // C

    @property
    def span(self) -> int:
        """Chunks of a piece."""
        return self.chunks // self.pieces

    @property
    def blocks(self) -> int:
        return self.value_dim // WIDTH


class _Gates(NamedTuple):
    """The decay of a call, ``[B, H, T]``; chunk by chunk."""

    total: Array  # log2 of the decay since the chunk's start, resets left out
    reach: Array  # int32, the last reset of the chunk up to this token; −1: none
    carry: Array  # e: what is left of the memory at the chunk's start
    tail: Array  # τ: what will be left at the chunk's end


def _gates(log_decay: Array | None, pad: int) -> _Gates | None:
    if log_decay is None:
        return None
    g = jnp.pad(log_decay.astype(F32), ((0, 0), (0, pad), (0, 0)))
    g = jnp.swapaxes(g, 1, 2)
    batch, heads, length = g.shape
    g = g.reshape(batch, heads, length // C, C)
    reset = g <= RESET
    total = jnp.cumsum(jnp.where(reset, 0.0, g), axis=-1) * math.log2(math.e)
    position = jnp.arange(C, dtype=jnp.int32)
    reach = lax.cummax(jnp.where(reset, position, -1), axis=3)
    carry = jnp.where(reach < 0, jnp.exp2(total), 0.0)
    end = jnp.exp2(total[..., -1:] - total)
    tail = jnp.where(position >= reach[..., -1:], end, 0.0)
    return _Gates(*(x.reshape(batch, heads, length) for x in (total, reach, carry, tail)))


def _lower(m: Machine, x: Array, gates: dict, *, strict: bool = False) -> Array:
    """``Γ ∘ x`` with tokens in order along rows (t) and columns (s)."""
    row, column = m.iota(x.shape, 0), m.iota(x.shape, 1)
    keep = row > column if strict else row >= column
    if not gates:
        return jnp.where(keep, x, 0.0)
    keep &= column >= m.down(m.load(gates["reach_rows"], "rows"), x.shape)
    exponent = m.down(m.load(gates["total_rows"], "rows"), x.shape) - m.across(
        m.load(gates["total_columns"], "columns"), x.shape
    )
    return x * jnp.exp2(jnp.where(keep, exponent, -jnp.inf))


def _upper(m: Machine, x: Array, gates: dict) -> Array:
    """``Γᵀ ∘ x``: the tokens of columns (t) come after those of rows (s)."""
    row, column = m.iota(x.shape, 0), m.iota(x.shape, 1)
    keep = column >= row
    if not gates:
        return jnp.where(keep, x, 0.0)
    keep &= row >= m.across(m.load(gates["reach_columns"], "columns"), x.shape)
    exponent = m.across(m.load(gates["total_columns"], "columns"), x.shape) - m.down(
        m.load(gates["total_rows"], "rows"), x.shape
    )
    return x * jnp.exp2(jnp.where(keep, exponent, -jnp.inf))


def _split(index: Array, *sizes: int) -> tuple[Array, ...]:
    """``index`` as digits, the last size the fastest."""
    digits = []
    for size in reversed(sizes[1:]):
        digits.append(lax.rem(index, size))
        index = lax.div(index, size)
    return (index, *reversed(digits))


def _stages(count: int, stage: int, fixed: int) -> int:
    """How many chunks' inputs are on their way or in use: what fits, at most ``count``."""
    return max(min(count, (backend.SHARED - fixed - 4096) // stage), 1)


# --- invert ------------------------------------------------------------------------------------
#
# A program owns ``run`` consecutive chunks of one head: one warpgroup, two chunks' keys in shared
# memory, of which the next is on its way. Registers: tiles of 64 × 64 float32 are 32 a thread; alive
# at once are N, X and one product. Blocks of 16 rows by substitution in float32, blocks of 32 and 64
# from them: X ← X − X N X with only the blocks below the diagonal of the next size in N.


def _invert_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, run: int, normalize: bool):
    del warpgroup
    batch, block, head = _split(program, s.batch, s.chunks // run, s.heads)
    square = (C, C)
    gated = "total" in r
    row, column = m.iota(square, 0), m.iota(square, 1)

    def fetch(n, slot):
        here = pl.ds((block * run + n) * C, C)
        ready = r["ready"].at[slot]
        for name in ("key", "write", "rest"):
            if name in r:
                m.fetch(r[name].at[batch, here, head], r[name + "_tile"].at[slot], ready)
        if gated:
            for name in ("total_rows", "total_columns", "reach_rows"):
                source = r[name.split("_")[0]].at[batch, head, here]
                m.fetch(source, r[name].at[slot], ready)

    fetch(0, 0)

    @pl.loop(0, run)
    def chunk(n):
        slot = lax.rem(n, 2)
        here = pl.ds((block * run + n) * C, C)
        m.wait(r["ready"].at[slot])

        @pl.when(n + 1 < run)
        def _():
            m.commit()  # what this program read of the other slot comes before the copy into it
            fetch(n + 1, 1 - slot)

        keys = r["key_tile"].at[slot]
        writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
        lower = m.product(*((keys, a.T) for a in writes))
        if normalize:
            k = m.load(keys).astype(F32)
            largest = jnp.max(jnp.abs(k), axis=1)
            known = largest > 0
            inverse = 1 / jnp.where(known, largest, 1.0)
            k = k * m.down(inverse, k.shape)
            norm = jnp.where(known, lax.rsqrt(jnp.sum(k * k, axis=1)) * inverse, 0.0)
            lower = lower * m.down(norm, square)
        views = {}
        if gated:
            names = ("total_rows", "total_columns", "reach_rows")
            views = {name: r[name].at[slot] for name in names}
        lower = _lower(m, lower, views, strict=True)
        x = m.block_inverses(lower, r["buffer"])
        x = jnp.where(lax.div(row, BLOCK) == lax.div(column, BLOCK), x, 0.0)
        for size in (2 * BLOCK, 4 * BLOCK):
            half = size // 2
            corner = lax.div(row, size) == lax.div(column, size)
            corner &= (lax.rem(row, size) >= half) & (lax.rem(column, size) < half)
            r["operand"][...] = x.astype(BF16)
            m.commit()
            link = m.product((jnp.where(corner, lower, 0.0).astype(BF16), r["operand"]))
            r["operand"][...] = link.astype(BF16)
            m.commit()
            x = x - m.product((x.astype(BF16), r["operand"]))
        m.sent(1, read=True)  # the tile of the chunk before the last
        r["inverse_tile"].at[slot][...] = x.astype(BF16)
        if normalize:
            r["norm_rows"].at[slot][...] = norm
        m.commit()
        copies = [(r["inverse_tile"].at[slot], r["inverse"].at[batch, head, here])]
        if normalize:
            copies.append((r["norm_rows"].at[slot], r["norm"].at[batch, head, here]))
        m.send(*copies)

    m.sent()


def _invert(s: _Shape, key, write, rest, gates, normalize, interpret):
    run = next(n for n in (8, 4, 2, 1) if s.chunks % n == 0)
    pair = tile((2, C, s.dim))
    rows = plain((2, C))
    gated = gates is not None
    scratch = dict(
        key_tile=pair,
        write_tile=pair,
        inverse_tile=tile((2, C, C)),
        operand=tile((C, C)),
        buffer=plain((C, C + PAD)),
        ready=barrier(2 + (rest is not None) + 3 * gated, 2),
    )
    if rest is not None:
        scratch["rest_tile"] = pair
    if normalize:
        scratch["norm_rows"] = rows
    if gated:
        scratch |= dict(total_rows=rows, total_columns=rows, reach_rows=plain((2, C), jnp.int32))
    return backend.launch(
        functools.partial(_invert_kernel, s=s, run=run, normalize=normalize),
        name="vla_hopper_delta_invert",
        programs=s.batch * (s.chunks // run) * s.heads,
        inputs=dict(
            key=key,
            write=write,
            rest=rest,
            total=gates.total if gated else None,
            reach=gates.reach if gated else None,
        ),
        outputs=dict(
            inverse=((s.batch, s.heads, s.length, C), BF16),
            norm=((s.batch, s.heads, s.length), F32) if normalize else None,
        ),
        scratch=scratch,
        interpret=interpret,
    )


# --- sweep -------------------------------------------------------------------------------------
#
# A program owns one head of one piece and 64 value columns, and goes through the chunks with three
# warpgroups. 0: the memory, [64, D] float32 in registers (32 or 64 a thread). 1: the output. 2: the
# copies into ``stages`` slots. What 1 needs of 0, memory and residuals in bfloat16, lies in two
# slots each.


def _sweep_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, stages: int, depth: int):
    batch, piece, head, block = _split(program, s.batch, s.pieces, s.heads, s.blocks)
    columns = pl.ds(block * WIDTH, WIDTH)
    first = piece * s.span
    start = batch * s.pieces + piece
    gated, normalize, save, read = "total" in r, "norm" in r, "starts" in r, "out" in r
    across = (WIDTH, C)

    def tokens(n):
        return pl.ds((first + n) * C, C)

    @pl.when(warpgroup == 2)
    def _():
        m.registers(40, more=False)

        def fetch(n, slot):
            here, ready = tokens(n), r["ready"].at[slot]
            for name in ("key", "write", "rest"):
                if name in r:
                    m.fetch(r[name].at[batch, here, head], r[name + "_tile"].at[slot], ready)
            m.fetch(r["value"].at[batch, here, head, columns], r["value_tile"].at[slot], ready)
            m.fetch(r["inverse"].at[batch, head, here], r["inverse_tile"].at[slot], ready)
            if normalize:
                m.fetch(r["norm"].at[batch, head, here], r["norm_columns"].at[slot], ready)
            if gated:
                for name in _SWEEP_GATES if read else _STATE_GATES:
                    source = r[name.split("_")[0]].at[batch, head, here]
                    m.fetch(source, r[name].at[slot], ready)

        @pl.loop(0, s.span)
        def _(n):
            slot = lax.rem(n, stages)

            @pl.when(n >= stages)
            def _():
                m.wait(r["free"].at[slot])

            fetch(n, slot)
            if read:

                @pl.loop(0, s.groups)
                def _(g):
                    step = n * s.groups + g
                    place = lax.rem(step, depth)

                    @pl.when(step >= depth)
                    def _():
                        m.wait(r["query_free"].at[place])

                    source = r["query"].at[batch, tokens(n), head * s.groups + g]
                    m.fetch(source, r["query_tile"].at[place], r["query_ready"].at[place])

        for n in range(max(s.span - stages, 0), s.span):
            m.wait(r["free"].at[n % stages])
        if read:
            steps = s.span * s.groups
            for step in range(max(steps - depth, 0), steps):
                m.wait(r["query_free"].at[step % depth])

    @pl.when(warpgroup == 0)
    def _():
        m.registers(232, more=True)
        if "initial" in r:
            m.fetch(r["initial"].at[start, head, columns], r["memory"], r["memory_ready"])
            m.wait(r["memory_ready"])
            memory = m.load(r["memory"])
        else:
            memory = m.zeros((WIDTH, s.dim))

        def step(n, memory):
            slot, half = lax.rem(n, stages), lax.rem(n, 2)
            m.wait(r["ready"].at[slot])
            keys, inverse = r["key_tile"].at[slot], r["inverse_tile"].at[slot]
            rounded = memory.astype(BF16)
            if read or save:
                if read:

                    @pl.when(n >= 2)
                    def _():
                        m.wait(r["passed"].at[half])

                if save:
                    m.sent(1, read=True)
                r["memory_tile"].at[half][...] = rounded
            recalled = m.product((rounded, keys.T))
            scale = None
            if gated:
                scale = m.load(r["carry_columns"].at[slot], "columns")
            if normalize:
                norm = m.load(r["norm_columns"].at[slot], "columns")
                scale = norm if scale is None else scale * norm
            if scale is not None:
                recalled = recalled * m.across(scale, across)
            value = m.load(r["value_tile"].at[slot].T).astype(F32)
            residual = m.product(((value - recalled).astype(BF16), inverse.T))
            if read or save:
                r["residual_tile"].at[half].T[...] = residual.astype(BF16)
                m.commit()
                if read:
                    m.arrive(r["known"].at[half])
                if save:
                    m.send(
                        (
                            r["memory_tile"].at[half],
                            r["starts"].at[batch, head, first + n, columns],
                        ),
                        (
                            r["residual_tile"].at[half],
                            r["residual"].at[batch, tokens(n), head, columns],
                        ),
                    )
            if gated:
                tail = m.load(r["tail_columns"].at[slot], "columns")
                residual = residual * m.across(tail, across)
                memory = memory * r["carry_columns"][slot, C - 1]
            residual = residual.astype(BF16)
            writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
            memory = m.product(*((residual, a) for a in writes), init=memory)
            m.arrive(r["free"].at[slot])
            return memory

        memory = lax.fori_loop(0, s.span, step, memory)
        if read:
            for n in range(max(s.span - 2, 0), s.span):
                m.wait(r["passed"].at[n % 2])
        r["memory"][...] = memory
        m.commit()
        m.send((r["memory"], r["final"].at[start, head, columns]))
        m.sent()

    if not read:
        return

    @pl.when(warpgroup == 1)
    def _():
        m.registers(232, more=True)

        @pl.loop(0, s.span)
        def _(n):
            slot, half = lax.rem(n, stages), lax.rem(n, 2)
            m.wait(r["ready"].at[slot])
            writes = r["write_tile"].at[slot]
            views = {}
            if gated:
                names = ("total_rows", "total_columns", "reach_rows")
                views = {name: r[name].at[slot] for name in names}
                carry = m.load(r["carry_rows"].at[slot], "rows")

            @pl.loop(0, s.groups)
            def _(g):
                step = n * s.groups + g
                place, side = lax.rem(step, depth), lax.rem(step, 2)
                m.wait(r["query_ready"].at[place])
                query = r["query_tile"].at[place]
                scores = _lower(m, m.product((query, writes.T)), views).astype(BF16)

                @pl.when(g == 0)
                def _():
                    m.wait(r["known"].at[half])

                out = m.product((query, r["memory_tile"].at[half].T))
                if gated:
                    out = out * m.down(carry, out.shape)
                out = m.product((scores, r["residual_tile"].at[half]), init=out)
                m.arrive(r["query_free"].at[place])
                m.sent(1, read=True)
                r["out_tile"].at[side][...] = out.astype(BF16)
                m.commit()
                target = r["out"].at[batch, tokens(n), head * s.groups + g, columns]
                m.send((r["out_tile"].at[side], target))

            m.arrive(r["passed"].at[half])
            m.arrive(r["free"].at[slot])

        m.sent()


_STATE_GATES = ("carry_columns", "tail_columns")
_SWEEP_GATES = (*_STATE_GATES, "carry_rows", "total_rows", "total_columns", "reach_rows")


def _views(names, count: int) -> dict:
    """Buffers of vectors, ``count`` slots each."""
    return {
        name: plain((count, C), jnp.int32 if name.startswith("reach") else F32) for name in names
    }


def _sweep(
    s: _Shape, query, key, write, rest, value, inverse, norm, gates, initial, save, interpret
):
    gated, normalize, read = gates is not None, norm is not None, query is not None
    names = (_SWEEP_GATES if read else _STATE_GATES) if gated else ()
    extra = rest is not None
    stage = 2 * C * ((2 + extra) * s.dim + WIDTH + C) + 256 * (len(names) + normalize)
    fixed = 4 * WIDTH * s.dim
    if read or save:
        fixed += 2 * 2 * WIDTH * (s.dim + C)
    depth = 2
    if read:
        fixed += depth * 2 * C * s.dim + 2 * 2 * C * WIDTH
    stages = _stages(4, stage, fixed)
    scratch = dict(
        key_tile=tile((stages, C, s.dim)),
        write_tile=tile((stages, C, s.dim)),
        value_tile=tile((stages, C, WIDTH)),
        inverse_tile=tile((stages, C, C)),
        memory=plain((WIDTH, s.dim)),
        ready=barrier(4 + extra + normalize + len(names), stages),
        free=barrier(1 + read, stages),
        **_views(names, stages),
    )
    if extra:
        scratch["rest_tile"] = tile((stages, C, s.dim))
    if normalize:
        scratch |= _views(("norm_columns",), stages)
    if read or save:
        scratch |= dict(memory_tile=tile((2, WIDTH, s.dim)), residual_tile=tile((2, C, WIDTH)))
    if read:
        scratch |= dict(
            query_tile=tile((depth, C, s.dim)),
            query_ready=barrier(1, depth),
            query_free=barrier(1, depth),
            known=barrier(1, 2),
            passed=barrier(1, 2),
            out_tile=tile((2, C, WIDTH)),
        )
    if initial is not None:
        scratch["memory_ready"] = barrier()
    state = (s.batch * s.pieces, s.heads, s.value_dim, s.dim)
    return backend.launch(
        functools.partial(_sweep_kernel, s=s, stages=stages, depth=depth),
        name="vla_hopper_delta_sweep",
        programs=s.batch * s.pieces * s.heads * s.blocks,
        warpgroups=3,
        inputs=dict(
            query=query,
            key=key,
            write=write,
            rest=rest,
            value=value,
            inverse=inverse,
            norm=norm,
            initial=initial,
            **(gates._asdict() if gated else {}),
        ),
        outputs=dict(
            out=((s.batch, s.length, s.heads * s.groups, s.value_dim), BF16) if read else None,
            final=(state, F32),
            starts=((s.batch, s.heads, s.chunks, s.value_dim, s.dim), BF16) if save else None,
            residual=((s.batch, s.length, s.heads, s.value_dim), BF16) if save else None,
        ),
        scratch=scratch,
        interpret=interpret,
    )


# --- back --------------------------------------------------------------------------------------
#
# A program owns one head of one piece and 64 value columns, and goes through the chunks from the
# last to the first. Warpgroup 0: the memory's cotangent R, transposed like the memory. 1: what a
# chunk's outputs say of its residuals, tril(Γ ∘ Q Aᵀ)ᵀ dO. 2: copies. The part of R's update that
# needs no residual comes before 0 waits for 1, so that any number of query heads passes through
# ``depth`` slots.


_BACK_GATES = (
    "carry_columns",
    "tail_columns",
    "total_rows",
    "total_columns",
    "reach_columns",
)


def _back_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, stages: int, depth: int):
    batch, piece, head, block = _split(program, s.batch, s.pieces, s.heads, s.blocks)
    columns = pl.ds(block * WIDTH, WIDTH)
    start = batch * s.pieces + piece
    gated, normalize = "total" in r, "norm" in r
    across = (WIDTH, C)

    def chunk(n):
        return piece * s.span + s.span - 1 - n

    def tokens(n):
        return pl.ds(chunk(n) * C, C)

    @pl.when(warpgroup == 2)
    def _():
        m.registers(40, more=False)

        @pl.loop(0, s.span)
        def _(n):
            slot = lax.rem(n, stages)
            here, ready = tokens(n), r["ready"].at[slot]

            @pl.when(n >= stages)
            def _():
                m.wait(r["free"].at[slot])

            for name in ("key", "write", "rest"):
                if name in r:
                    m.fetch(r[name].at[batch, here, head], r[name + "_tile"].at[slot], ready)
            m.fetch(r["inverse"].at[batch, head, here], r["inverse_tile"].at[slot], ready)
            if normalize:
                m.fetch(r["norm"].at[batch, head, here], r["norm_columns"].at[slot], ready)
            if gated:
                for name in _BACK_GATES:
                    source = r[name.split("_")[0]].at[batch, head, here]
                    m.fetch(source, r[name].at[slot], ready)

            @pl.loop(0, s.groups)
            def _(g):
                step = n * s.groups + g
                place = lax.rem(step, depth)

                @pl.when(step >= depth)
                def _():
                    m.wait(r["query_free"].at[place])

                at = batch, here, head * s.groups + g
                ready = r["query_ready"].at[place]
                m.fetch(r["query"].at[at], r["query_tile"].at[place], ready)
                m.fetch(r["d_out"].at[(*at, columns)], r["d_out_tile"].at[place], ready)

        for n in range(max(s.span - stages, 0), s.span):
            m.wait(r["free"].at[n % stages])
        steps = s.span * s.groups
        for step in range(max(steps - depth, 0), steps):
            m.wait(r["query_free"].at[step % depth])

    @pl.when(warpgroup == 0)
    def _():
        m.registers(232, more=True)
        m.fetch(r["d_final"].at[start, head, columns], r["memory"], r["memory_ready"])
        m.wait(r["memory_ready"])

        def step(n, ends):
            slot, half = lax.rem(n, stages), lax.rem(n, 2)
            m.wait(r["ready"].at[slot])
            rounded = ends.astype(BF16)
            m.sent(1, read=True)
            r["ends_tile"].at[half][...] = rounded
            writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
            x = m.product(*((rounded, a.T) for a in writes))
            back = None
            if gated:
                back = m.load(r["carry_columns"].at[slot], "columns")
                x = x * m.across(m.load(r["tail_columns"].at[slot], "columns"), across)
                ends = ends * r["carry_columns"][slot, C - 1]

            def add(g, ends):
                place = lax.rem(n * s.groups + g, depth)
                m.wait(r["query_ready"].at[place])
                d_out = m.load(r["d_out_tile"].at[place].T)
                if gated:
                    d_out = (d_out.astype(F32) * m.across(back, across)).astype(BF16)
                ends = m.product((d_out, r["query_tile"].at[place]), init=ends)
                m.arrive(r["query_free"].at[place])
                return ends

            ends = lax.fori_loop(0, s.groups, add, ends) if s.groups > 1 else add(0, ends)
            m.wait(r["known"].at[half])
            x = x + m.load(r["pull_tile"].at[half].T).astype(F32)
            m.arrive(r["passed"].at[half])
            d_residual = m.product((x.astype(BF16), r["inverse_tile"].at[slot]))
            r["d_value_tile"].at[half].T[...] = d_residual.astype(BF16)
            m.commit()
            m.send(
                (r["ends_tile"].at[half], r["ends"].at[batch, head, chunk(n), columns]),
                (r["d_value_tile"].at[half], r["d_value"].at[batch, tokens(n), head, columns]),
            )
            if normalize:
                norm = m.load(r["norm_columns"].at[slot], "columns")
                back = norm if back is None else back * norm
            if back is not None:
                d_residual = d_residual * m.across(back, across)
            # The sign goes to the rounded operand: an accumulator just read is never negated.
            ends = m.product(((d_residual * -1.0).astype(BF16), r["key_tile"].at[slot]), init=ends)
            m.arrive(r["free"].at[slot])
            return ends

        ends = lax.fori_loop(0, s.span, step, m.load(r["memory"]))
        r["memory"][...] = ends
        m.commit()
        m.send((r["memory"], r["d_initial"].at[start, head, columns]))
        m.sent()

    @pl.when(warpgroup == 1)
    def _():
        m.registers(232, more=True)

        @pl.loop(0, s.span)
        def _(n):
            slot, half = lax.rem(n, stages), lax.rem(n, 2)
            m.wait(r["ready"].at[slot])
            views = {}
            if gated:
                names = ("total_rows", "total_columns", "reach_columns")
                views = {name: r[name].at[slot] for name in names}

            def add(g, pull):
                place = lax.rem(n * s.groups + g, depth)
                m.wait(r["query_ready"].at[place])
                query = r["query_tile"].at[place]
                scores = m.product((r["write_tile"].at[slot], query.T))
                scores = _upper(m, scores, views).astype(BF16)
                pull = m.product((scores, r["d_out_tile"].at[place]), init=pull)
                m.arrive(r["query_free"].at[place])
                return pull

            if s.groups > 1:
                pull = lax.fori_loop(0, s.groups, add, m.zeros((C, WIDTH)))
            else:
                pull = add(0, None)

            @pl.when(n >= 2)
            def _():
                m.wait(r["passed"].at[half])

            r["pull_tile"].at[half][...] = pull.astype(BF16)
            m.commit()
            m.arrive(r["known"].at[half])
            m.arrive(r["free"].at[slot])

        for n in range(max(s.span - 2, 0), s.span):
            m.wait(r["passed"].at[n % 2])


def _back(s: _Shape, query, key, write, rest, inverse, norm, gates, d_out, d_final, interpret):
    gated, normalize, extra = gates is not None, norm is not None, rest is not None
    names = _BACK_GATES if gated else ()
    depth = 2
    stage = 2 * C * ((2 + extra) * s.dim + C) + 256 * (len(names) + normalize)
    fixed = 4 * WIDTH * s.dim + 2 * 2 * WIDTH * (s.dim + 2 * C) + depth * 2 * C * (s.dim + WIDTH)
    stages = _stages(4, stage, fixed)
    scratch = dict(
        key_tile=tile((stages, C, s.dim)),
        write_tile=tile((stages, C, s.dim)),
        inverse_tile=tile((stages, C, C)),
        query_tile=tile((depth, C, s.dim)),
        d_out_tile=tile((depth, C, WIDTH)),
        memory=plain((WIDTH, s.dim)),
        ends_tile=tile((2, WIDTH, s.dim)),
        d_value_tile=tile((2, C, WIDTH)),
        pull_tile=tile((2, C, WIDTH)),
        ready=barrier(3 + extra + normalize + len(names), stages),
        free=barrier(2, stages),
        query_ready=barrier(2, depth),
        query_free=barrier(2, depth),
        known=barrier(1, 2),
        passed=barrier(1, 2),
        memory_ready=barrier(),
        **_views(names, stages),
    )
    if extra:
        scratch["rest_tile"] = tile((stages, C, s.dim))
    if normalize:
        scratch |= _views(("norm_columns",), stages)
    return backend.launch(
        functools.partial(_back_kernel, s=s, stages=stages, depth=depth),
        name="vla_hopper_delta_back",
        programs=s.batch * s.pieces * s.heads * s.blocks,
        warpgroups=3,
        inputs=dict(
            query=query,
            key=key,
            write=write,
            rest=rest,
            inverse=inverse,
            norm=norm,
            d_out=d_out,
            d_final=d_final,
            **(gates._asdict() if gated else {}),
        ),
        outputs=dict(
            d_value=((s.batch, s.length, s.heads, s.value_dim), BF16),
            ends=((s.batch, s.heads, s.chunks, s.value_dim, s.dim), BF16),
            d_initial=(d_final.shape, F32),
        ),
        scratch=scratch,
        interpret=interpret,
    )


# --- grads -------------------------------------------------------------------------------------
#
# A program owns one chunk of one head and 64 key columns: one warpgroup. Everything that goes into
# d log γ is a sum over key columns, so that each program gives its part. Registers: tiles of 64 × 64
# float32 are 32 a thread; alive at once are dA, the matrix of d log γ, both masked products of the
# cotangents, and one product. Sums go along rows only: sums down columns would cross warps.


_GRADS_GATES = (
    "carry_rows",
    "tail_rows",
    "total_rows",
    "total_columns",
    "reach_rows",
)


def _grads_kernel(m: Machine, r, program, warpgroup, *, s: _Shape):
    del warpgroup
    batch, n, head, part = _split(program, s.batch, s.chunks, s.heads, s.dim // WIDTH)
    here, columns = pl.ds(n * C, C), pl.ds(part * WIDTH, WIDTH)
    gated, normalize = "total" in r, "norm" in r
    shape = (C, WIDTH)

    def fetch_query(g):
        at = batch, here, head * s.groups + g
        m.fetch(r["d_out"].at[at], r["d_out_tile"], r["queries"])
        m.fetch(r["query"].at[(*at, columns)], r["query_tile"], r["queries"])

    fetch_query(0)
    for name in ("residual", "d_value"):
        m.fetch(r[name].at[batch, here, head], r[name + "_tile"], r["values"])
    if gated:
        for name in _GRADS_GATES:
            m.fetch(r[name.split("_")[0]].at[batch, head, here], r[name], r["vectors"])
    if normalize:
        m.fetch(r["norm"].at[batch, head, here], r["norm_rows"], r["vectors"])
    for name in ("write", "key"):
        m.fetch(r[name].at[batch, here, head, columns], r[name + "_tile"], r["tiles"])
    for name in ("starts", "ends"):
        m.fetch(r[name].at[batch, head, n, :, columns], r[name + "_tile"], r["tiles"])

    if gated or normalize:
        m.wait(r["vectors"])
    views = {}
    carry = tail = norm = None
    if gated:
        views = {x: r[x] for x in ("total_rows", "total_columns", "reach_rows")}
        carry, tail = m.load(r["carry_rows"], "rows"), m.load(r["tail_rows"], "rows")
    if normalize:
        norm = m.load(r["norm_rows"], "rows")

    def rows(x, *scales):
        for scale in scales:
            if scale is not None:
                x = x * m.down(scale, x.shape)
        return x

    def along(x, ref, *scales):
        """Row by row, ``x`` times the tile in ``ref``."""
        total = jnp.sum(x * m.load(ref).astype(F32), axis=1)
        for scale in scales:
            if scale is not None:
                total = total * scale
        return total

    def put(name, x, at):
        m.sent(0, read=True)
        tile = r["out_tile"] if x.dtype == BF16 else r["wide_tile"]
        tile[...] = x
        m.commit()
        m.send((tile, r[name].at[(*at, columns)]))

    def query_head(g, carried):
        d_write, crossing, source = carried
        m.wait(r["queries"])
        scores = _lower(m, m.product((r["d_out_tile"], r["residual_tile"].T)), views)
        low = scores.astype(BF16)
        r["scores_tile"][...] = low
        m.commit()
        if s.groups == 1:
            m.wait(r["tiles"])
        d_query = rows(m.product((r["d_out_tile"], r["starts_tile"])), carry)
        if gated:
            source = source + along(d_query, r["query_tile"])
        d_query = m.product((low, r["write_tile"]), init=d_query)
        put("d_query", d_query.astype(BF16), (batch, here, head * s.groups + g))
        d_write = m.product((r["scores_tile"].T, r["query_tile"]), init=d_write)
        if gated:
            crossing = crossing + scores * m.product((r["query_tile"], r["write_tile"].T))
        if s.groups > 1:

            @pl.when(g + 1 < s.groups)
            def _():
                m.commit()
                fetch_query(g + 1)

        return d_write, crossing, source

    m.wait(r["values"])
    if s.groups > 1:
        m.wait(r["tiles"])
    zero = m.zeros(shape)
    source = jnp.sum(zero, axis=1) if gated else None
    carried = zero, zero if gated else None, source
    if s.groups > 1:
        carried = lax.fori_loop(0, s.groups, query_head, carried)
    else:
        carried = query_head(0, carried)
    d_write, crossing, source = carried

    carried = rows(m.product((r["residual_tile"], r["ends_tile"])), tail)
    if gated:
        sink = along(carried, r["write_tile"])
    d_write = d_write + carried

    triangle = _lower(m, m.product((r["d_value_tile"], r["residual_tile"].T)), views, strict=True)
    d_key = rows(m.product((r["d_value_tile"], r["starts_tile"])), carry)
    if gated:
        source = source - along(d_key, r["key_tile"], norm)
        overlap = rows(m.product((r["key_tile"], r["write_tile"].T)), norm)
        crossing = crossing - triangle * overlap
    d_key = m.product((triangle.astype(BF16), r["write_tile"]), init=d_key)
    put("d_key", (d_key * -1.0).astype(BF16), (batch, here, head))
    r["scores_tile"][...] = (rows(triangle, norm) * -1.0).astype(BF16)
    m.commit()
    d_write = m.product((r["scores_tile"].T, r["key_tile"]), init=d_write)
    put("d_write", d_write.astype(r["d_write"].dtype), (batch, here, head))

    if gated:
        kept = None
        for low in range(0, s.value_dim, WIDTH):
            cut = pl.ds(low, WIDTH)
            x = m.load(r["starts_tile"].at[cut]).astype(F32)
            x = jnp.sum(x * m.load(r["ends_tile"].at[cut]).astype(F32), axis=1)
            kept = x if kept is None else kept + x
        r["source_columns"][...] = source
        r["sink_columns"][...] = sink
        r["kept_columns"][...] = kept * r["carry_rows"][C - 1]
        r["scores_tile"][...] = crossing.astype(BF16)
        m.commit()
        square = (C, C)
        row, column = m.iota(square, 0), m.iota(square, 1)
        later = jnp.where(column >= row, 1.0, 0.0).astype(BF16)
        total = m.product((later, r["scores_tile"]))
        total = total + m.across(m.load(r["sink_columns"], "columns"), square)
        ends = m.across(m.load(r["source_columns"], "columns"), square)
        total = jnp.where(column < row, total, ends)
        total = total + m.across(m.load(r["kept_columns"], "columns"), square)
        m.sent(0, read=True)
        r["decay_row"][...] = jnp.sum(total, axis=1)
        m.commit()
        m.send((r["decay_row"], r["d_decay"].at[part, batch, head, here]))
    m.sent()


def _grads(s: _Shape, query, key, write, norm, gates, d_out, res, back, write_dtype, interpret):
    gated, normalize = gates is not None, norm is not None
    names = _GRADS_GATES if gated else ()
    scratch = dict(
        d_out_tile=tile((C, s.value_dim)),
        residual_tile=tile((C, s.value_dim)),
        d_value_tile=tile((C, s.value_dim)),
        query_tile=tile((C, WIDTH)),
        key_tile=tile((C, WIDTH)),
        write_tile=tile((C, WIDTH)),
        starts_tile=tile((s.value_dim, WIDTH)),
        ends_tile=tile((s.value_dim, WIDTH)),
        scores_tile=tile((C, C)),
        out_tile=tile((C, WIDTH)),
        queries=barrier(2),
        values=barrier(2),
        tiles=barrier(4),
    )
    if names or normalize:
        scratch["vectors"] = barrier(len(names) + normalize)
    scratch |= {n: plain((C,), jnp.int32 if n.startswith("reach") else F32) for n in names}
    if normalize:
        scratch["norm_rows"] = plain((C,))
    if write_dtype == F32:
        scratch["wide_tile"] = tile((C, WIDTH), F32)
    if gated:
        for name in ("source_columns", "sink_columns", "kept_columns", "decay_row"):
            scratch[name] = plain((C,))
    parts = s.dim // WIDTH
    return backend.launch(
        functools.partial(_grads_kernel, s=s),
        name="vla_hopper_delta_grads",
        programs=s.batch * s.chunks * s.heads * parts,
        inputs=dict(
            query=query,
            key=key,
            write=write,
            norm=norm,
            d_out=d_out,
            residual=res.residual,
            starts=res.starts,
            ends=back["ends"],
            d_value=back["d_value"],
            **(gates._asdict() if gated else {}),
        ),
        outputs=dict(
            d_query=(query.shape, BF16),
            d_key=(key.shape, BF16),
            d_write=(write.shape, write_dtype),
            d_decay=((parts, s.batch, s.heads, s.length), F32) if gated else None,
        ),
        scratch=scratch,
        interpret=interpret,
    )


# --- the primitive -----------------------------------------------------------------------------


class Call(NamedTuple):
    """Inputs of a call, padded to whole chunks."""

    shape: _Shape
    gates: _Gates | None
    pad: int

    def tokens(self, x: Array | None) -> Array | None:
        if x is None or not self.pad:
            return x
        return jnp.pad(x, ((0, 0), (0, self.pad), *((0, 0),) * (x.ndim - 2)))


def _starts(segment_ids: Array) -> Array:
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(change, ((0, 0), (1, 0)))[:, :, None]


def _resets(log_decay: Array, segment_ids: Array | None) -> Array:
    resets = log_decay <= RESET
    return resets if segment_ids is None else resets | _starts(segment_ids)


def _call(query, key, value, log_decay, segment_ids) -> Call:
    batch, length, heads, dim = key.shape
    if segment_ids is not None:
        log_decay = jnp.zeros((batch, length, heads), F32) if log_decay is None else log_decay
        log_decay = jnp.where(_starts(segment_ids), RESET, log_decay.astype(F32))
    pad = -length % C
    shape = _Shape(
        batch, length + pad, heads, query.shape[2] // heads, dim, value.shape[-1], pieces=1
    )
    return Call(shape, _gates(log_decay, pad), pad)


def forward(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    initial_memory: Array | None = None,
    *,
    log_decay: Array | None = None,
    segment_ids: Array | None = None,
    write_rest: Array | None = None,
    solve_rest: bool = False,
    normalize_key: bool = False,
    save_residuals: bool = True,
    interpret: bool = False,
) -> tuple[Array, Array, Residuals | None]:
    """``S ← γ S + a (v − γ Sᵀ k)ᵀ``, ``o = Sᵀ q`` over tokens.

    Args:
      query: ``[B, T, Hq, D]`` bfloat16, like key, write_key, value and write_rest.
      key, write_key: ``[B, T, H, D]``; value: ``[B, T, H, E]``. D and E are 64 or 128.
      initial_memory: ``[B, H, D, E]`` float32 or None, which is zeros.
      log_decay: ``[B, T, H]`` or None; −104 or less forgets everything before the token.
      segment_ids: int32 ``[B, T]`` or None; the memory restarts where it changes.
      write_rest: ``[B, T, H, D]``, what rounding took from ``write_key``, or None.
      solve_rest: whether the triangular solve takes it too.
      normalize_key: whether keys are scaled to unit length.
      save_residuals: whether a backward is to follow.
      interpret: run by Pallas' interpreter.

    Returns:
      ``(out [B, T, Hq, E], memory [B, H, D, E] float32, residuals or None)``.
    """
    call = _call(query, key, value, log_decay, segment_ids)
    s = call.shape
    query, key, write_key, write_rest, value = map(
        call.tokens, (query, key, write_key, write_rest, value)
    )
    solved = _invert(
        s, key, write_key, write_rest if solve_rest else None, call.gates, normalize_key, interpret
    )
    initial = None
    if initial_memory is not None:
        initial = jnp.swapaxes(initial_memory.astype(F32), 2, 3)
    inverse, norm = solved["inverse"], solved.get("norm")
    swept = _sweep(
        s,
        query,
        key,
        write_key,
        write_rest,
        value,
        inverse,
        norm,
        call.gates,
        initial,
        save_residuals,
        interpret,
    )
    residuals = None
    if save_residuals:
        residuals = Residuals(inverse, norm, swept["residual"], swept["starts"])
    out = swept["out"][:, : s.length - call.pad]
    return out, jnp.swapaxes(swept["final"], 2, 3), residuals


def backward(
    residuals: Residuals,
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    d_out: Array,
    d_memory: Array | None = None,
    *,
    log_decay: Array | None = None,
    segment_ids: Array | None = None,
    write_rest: Array | None = None,
    write_dtype=jnp.float32,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array, Array | None]:
    """Cotangents from those of ``out`` and ``memory`` (None: zeros).

    Returns:
      ``(d_query, d_key, d_write_key, d_value, d_initial_memory, d_log_decay or None)``. The second
      is the cotangent of the unit key if ``forward`` normalised; the third has ``write_dtype``.
    """
    call = _call(query, key, value, log_decay, segment_ids)
    s = call.shape
    query, key, write_key, write_rest, d_out = map(
        call.tokens, (query, key, write_key, write_rest, d_out)
    )
    if d_memory is None:
        d_final = jnp.zeros((s.batch, s.heads, s.value_dim, s.dim), F32)
    else:
        d_final = jnp.swapaxes(d_memory.astype(F32), 2, 3)
    inverse, norm = residuals.inverse, residuals.norm
    back = _back(
        s, query, key, write_key, write_rest, inverse, norm, call.gates, d_out, d_final, interpret
    )
    grads = _grads(
        s,
        query,
        key,
        write_key,
        norm,
        call.gates,
        d_out,
        residuals,
        back,
        jnp.dtype(write_dtype),
        interpret,
    )
    length = s.length - call.pad
    d_log_decay = None
    if log_decay is not None:
        d_log_decay = jnp.swapaxes(jnp.sum(grads["d_decay"], axis=0), 1, 2)[:, :length]
        d_log_decay = jnp.where(_resets(log_decay, segment_ids), 0.0, d_log_decay)
    return (
        grads["d_query"][:, :length],
        grads["d_key"][:, :length],
        grads["d_write"][:, :length],
        back["d_value"][:, :length],
        jnp.swapaxes(back["d_initial"], 2, 3),
        d_log_decay,
    )
