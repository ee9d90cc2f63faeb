"""Kernels of the delta rule with decay for Hopper GPUs, forward and backward.

    S_t = γ_t S_{t-1} + a_t (v_t − γ_t S_{t-1}ᵀ k_t)ᵀ,        o_t = S_tᵀ q_t

In chunks of C = 64 tokens, with Γ[t, s] = γ_{s+1} ⋯ γ_t for s ≤ t (zero across a reset), the decay
since the chunk's start e_t (zero once a reset has come) and until its end τ_s:

    invert  Tm = (I + strict(Γ ∘ K Aᵀ))⁻¹ and the inverse lengths of the keys        parallel
    sweep   E = Tm (V − e ∘ K S), O = e ∘ Q S + tril(Γ ∘ Q Aᵀ) E,
            S ← e_C S + (τ ∘ A)ᵀ E                                                in sequence

    back    x = τ ∘ A R + tril(Γ ∘ Q Aᵀ)ᵀ dO, dE = dV = Tmᵀ x,
            R ← e_C R + (e ∘ Q)ᵀ dO − (e ∘ K)ᵀ dE                                 in sequence
    grads   dQ, dK, dA, d log γ                                                      parallel

Memory in a sweep is transposed, ``[E, D]``, and split in blocks of 64 value columns: so the left
operand of all three products of the chain comes from registers, and a chunk's step never waits for
shared memory. (The structure, a triangular inverse by itself and a warp-specialised sweep with the
memory in registers, is that of FlashQLA and of ``jax-linear-attention``; the delta rule with any
write key, resets as positions and the direct cotangent of the decay are of this library.)

One file, because the four kernels share one layout of chunks, blocks and decays, and the launches
one plan of shared memory.

A key that is normalised here is never rounded in between: products take the key as given, and its
inverse length scales their rows or columns in float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vla_jax.pallas.mosaic import backend
from vla_jax.pallas.mosaic.backend import BLOCK, PAD, Machine, barrier, plain, tile
from vla_jax.pallas.mosaic.chunks import (
    BF16,
    F32,
    FLOOR,
    LOG2E,
    RESET,
    C,
    below,
    log_decays,
    lower,
    padded,
    pieces_of,
    places,
    rem,
    segment_starts,
    split,
    upper,
)  # fmt: skip
from vla_jax.types import Array

WIDTH = 64  # value columns of a sweep's program, key columns of the cotangents' program


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs; T padded to whole chunks."""

    inverse: Array  # Tm, [B, H, T, C]
    norm: Array | None  # 1 / ‖key‖, [B, H, T]
    total: Array | None  # log2 of the decay since the chunk's start, [B, H, T]
    residual: Array  # E, [B, T, H, E]
    starts: Array  # S at chunk starts, [B, H, N, E, D]
    maps: Array | None  # transposed linear part of each piece's map of S, [B, P, H, D, D]


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


def _stages(count: int, stage: int, fixed: int) -> int:
    """How many chunks' inputs are on their way or in use: what fits, at most ``count``."""
    return max(min(count, (backend.SHARED - fixed - 4096) // stage), 1)


# --- invert ------------------------------------------------------------------------------------
#
# A program owns ``run`` consecutive chunks of one head: one warpgroup, with two chunks' keys in
# shared memory, of which the next is on its way. Two programs share a multiprocessor: tiles of
# 64 × 64 float32 are 32 registers a thread; alive at once are N, X and one product. (Three
# warpgroups to a program, which caps a thread at 168 registers, spilled and was slower.) Blocks of
# 16 rows by substitution in float32, blocks of 32 and 64 from them: X ← X − X N X with only the
# blocks below the diagonal of the next size in N.


def _running(m: Machine, log_decay) -> Array:
    """log2 of the decay since the chunk's start, along rows.

    ``FLOOR`` a token is enough: what is 160 doublings apart is zero, so that resets need no masks.
    """
    row, column = places(m)
    g = jnp.maximum(m.load(log_decay, "columns") * LOG2E, FLOOR)
    return jnp.sum(jnp.where(row >= column, m.across(g, (C, C)), 0.0), axis=1)


def _invert_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, run: int):
    del warpgroup
    gated, normalize = "log_decay" in r, "norm" in r
    batch, block, head = split(program, s.batch, s.chunks // run, s.heads)
    square = (C, C)

    def fetch(n, slot):
        here = pl.ds((block * run + n) * C, C)
        ready = r["ready"].at[slot]
        for name in ("key", "write", "rest"):
            if name in r:
                m.fetch(r[name].at[batch, here, head], r[name + "_tile"].at[slot], ready)
        if gated:
            m.fetch(r["log_decay"].at[batch, head, here], r["decays"].at[slot], ready)

    def chunk(n):
        slot = rem(n, 2)
        here = pl.ds((block * run + n) * C, C)
        m.wait(r["ready"].at[slot])

        @pl.when(n + 1 < run)
        def _():
            m.commit()  # what was read of the other slot comes before the copy into it
            fetch(n + 1, 1 - slot)

        keys = r["key_tile"].at[slot]
        writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
        triangle = m.product(*((keys, m.turned(a)) for a in writes))
        m.sent(0, read=True)  # what the chunk before left in the vectors and in ``operand_tile``
        if normalize:
            k = m.load(keys).astype(F32)
            largest = jnp.max(jnp.abs(k), axis=1)
            known = largest > 0
            inverse = 1 / jnp.where(known, largest, 1.0)
            k = k * m.down(inverse, k.shape)
            norm = jnp.where(known, lax.rsqrt(jnp.sum(k * k, axis=1)) * inverse, 0.0)
            r["norm_vector"][...] = norm
            triangle = triangle * m.down(norm, square)
        if gated:
            total = _running(m, r["decays"].at[slot])
            r["total_vector"][...] = total
            m.commit()
            triangle = lower(m, triangle, (total, m.load(r["total_vector"], "columns")))
        triangle = below(m, triangle)
        x = m.block_inverses(triangle, r["buffer"])
        # Blocks of 16, 32 and 64 by the highest bit in which row and column differ.
        row, column = places(m)
        apart = row ^ column
        x = jnp.where(apart < BLOCK, x, 0.0)
        for size in (BLOCK, 2 * BLOCK):
            corner = (apart >= size) if size == 2 * BLOCK else (apart >= size) & (apart < 2 * size)
            r["operand_tile"][...] = x.astype(BF16)
            m.commit()
            link = m.product((jnp.where(corner, triangle, 0.0).astype(BF16), r["operand_tile"]))
            r["operand_tile"][...] = link.astype(BF16)
            m.commit()
            x = x - m.product((x.astype(BF16), r["operand_tile"]))
        r["operand_tile"][...] = x.astype(BF16)
        m.commit()
        copies = [(r["operand_tile"], r["inverse"].at[batch, head, here])]
        for name in ("norm", "total"):
            if name in r:
                copies.append((r[name + "_vector"], r[name].at[batch, head, here]))
        m.send(*copies)

    fetch(0, 0)
    pl.loop(0, run)(chunk)
    m.sent(read=True)


def _invert(s: _Shape, key, write, rest, log_decay, normalize, interpret):
    run = next(n for n in (8, 4, 2, 1) if s.chunks % n == 0)
    gated = log_decay is not None
    pairs = 2 + (rest is not None)
    vectors = ("total",) if gated else ()
    vectors += ("norm",) if normalize else ()
    scratch = dict(
        key_tile=tile((2, C, s.dim)),
        write_tile=tile((2, C, s.dim)),
        operand_tile=tile((C, C)),
        buffer=plain((C, C + PAD)),
        ready=barrier(pairs + gated, 2),
        **{name + "_vector": plain((C,)) for name in vectors},
    )
    if rest is not None:
        scratch["rest_tile"] = tile((2, C, s.dim))
    if gated:
        scratch["decays"] = plain((2, C))
    vector = (s.batch, s.heads, s.length), F32
    return backend.launch(
        functools.partial(_invert_kernel, s=s, run=run),
        name="vla_hopper_delta_invert",
        programs=s.batch * (s.chunks // run) * s.heads,
        inputs=dict(key=key, write=write, rest=rest, log_decay=log_decay),
        outputs=dict(
            inverse=((s.batch, s.heads, s.length, C), BF16), **dict.fromkeys(vectors, vector)
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
    batch, piece, head, block = split(program, s.batch, s.pieces, s.heads, s.blocks)
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
            if "value" in r:
                m.fetch(r["value"].at[batch, here, head, columns], r["value_tile"].at[slot], ready)
            m.fetch(r["inverse"].at[batch, head, here], r["inverse_tile"].at[slot], ready)
            if normalize:
                m.fetch(r["norm"].at[batch, head, here], r["norm_columns"].at[slot], ready)
            if gated:
                for name in ("total_columns", "total_rows")[: 1 + read]:
                    m.fetch(r["total"].at[batch, head, here], r[name].at[slot], ready)

        @pl.loop(0, s.span)
        def _(n):
            slot = rem(n, stages)

            @pl.when(n >= stages)
            def _():
                m.wait(r["free"].at[slot])

            fetch(n, slot)
            if read:

                @pl.loop(0, s.groups)
                def _(g):
                    step = n * s.groups + g
                    place = rem(step, depth)

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
            memory = m.load_global(r["initial"].at[start, head, columns])
        else:
            memory = m.zeros((WIDTH, s.dim))

        def step(n, memory):
            slot, half = rem(n, stages), rem(n, 2)
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
            recalled = m.product((rounded, m.turned(keys)))
            scale = None
            if gated:
                total = m.load(r["total_columns"].at[slot], "columns")
                end = r["total_columns"][slot, C - 1]
                scale = jnp.exp2(total)
            if normalize:
                norm = m.load(r["norm_columns"].at[slot], "columns")
                scale = norm if scale is None else scale * norm
            if scale is not None:
                recalled = recalled * m.across(scale, across)
            if "value" in r:
                wanted = m.load(m.turned(r["value_tile"].at[slot])).astype(F32) - recalled
            else:
                wanted = recalled * -1.0
            residual = m.product((wanted.astype(BF16), m.turned(inverse)))
            if read or save:
                m.turned(r["residual_tile"].at[half])[...] = residual.astype(BF16)
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
                residual = residual * m.across(jnp.exp2(end - total), across)
                memory = memory * jnp.exp2(end)
            residual = residual.astype(BF16)
            writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
            memory = m.product(*((residual, a) for a in writes), init=memory)
            m.arrive(r["free"].at[slot])
            return memory

        memory = lax.fori_loop(0, s.span, step, memory)
        if read:
            for n in range(max(s.span - 2, 0), s.span):
                m.wait(r["passed"].at[n % 2])
        r["final"].at[start, head, columns][...] = memory
        m.sent(read=True)

    if not read:
        return

    @pl.when(warpgroup == 1)
    def _():
        m.registers(232, more=True)

        @pl.loop(0, s.span)
        def _(n):
            slot, half = rem(n, stages), rem(n, 2)
            m.wait(r["ready"].at[slot])
            writes = r["write_tile"].at[slot]
            totals = None
            if gated:
                totals = (
                    m.load(r["total_rows"].at[slot], "rows"),
                    m.load(r["total_columns"].at[slot], "columns"),
                )

            @pl.loop(0, s.groups)
            def _(g):
                step = n * s.groups + g
                place, side = rem(step, depth), rem(step, 2)
                m.wait(r["query_ready"].at[place])
                query = r["query_tile"].at[place]
                scores = lower(m, m.product((query, m.turned(writes))), totals).astype(BF16)

                @pl.when(g == 0)
                def _():
                    m.wait(r["known"].at[half])

                out = m.product((query, m.turned(r["memory_tile"].at[half])))
                if gated:
                    out = out * m.down(jnp.exp2(totals[0]), out.shape)
                out = m.product((scores, r["residual_tile"].at[half]), init=out)
                m.arrive(r["query_free"].at[place])
                m.sent(1, read=True)
                r["out_tile"].at[side][...] = out.astype(BF16)
                m.commit()
                target = r["out"].at[batch, tokens(n), head * s.groups + g, columns]
                m.send((r["out_tile"].at[side], target))

            m.arrive(r["passed"].at[half])
            m.arrive(r["free"].at[slot])

        m.sent(read=True)


def _views(names, count: int) -> dict:
    """Buffers of vectors, ``count`` slots each."""
    return {name: plain((count, C)) for name in names}


def _sweep(
    s: _Shape, query, key, write, rest, value, inverse, norm, total, initial, save, interpret
):
    gated, normalize, read = total is not None, norm is not None, query is not None
    names = ("total_columns", "total_rows")[: gated * (1 + read)]
    extra = rest is not None
    stage = 2 * C * ((2 + extra) * s.dim + WIDTH + C) + 256 * (len(names) + normalize)
    fixed = 0
    if read or save:
        fixed += 2 * 2 * WIDTH * (s.dim + C)
    depth = 2
    if read:
        fixed += depth * 2 * C * s.dim + 2 * 2 * C * WIDTH
    stages = _stages(4, stage, fixed)
    scratch = dict(
        key_tile=tile((stages, C, s.dim)),
        write_tile=tile((stages, C, s.dim)),
        inverse_tile=tile((stages, C, C)),
        ready=barrier(3 + (value is not None) + extra + normalize + len(names), stages),
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
    if value is not None:
        scratch["value_tile"] = tile((stages, C, WIDTH))
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
            total=total,
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


def _back_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, stages: int, depth: int):
    batch, piece, head, block = split(program, s.batch, s.pieces, s.heads, s.blocks)
    columns = pl.ds(block * WIDTH, WIDTH)
    start = batch * s.pieces + piece
    gated, normalize, save = "total" in r, "norm" in r, "ends" in r
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
            slot = rem(n, stages)
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
                for name in ("total_columns", "total_rows"):
                    m.fetch(r["total"].at[batch, head, here], r[name].at[slot], ready)

            @pl.loop(0, s.groups)
            def _(g):
                step = n * s.groups + g
                place = rem(step, depth)

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

        def step(n, ends):
            slot, half = rem(n, stages), rem(n, 2)
            m.wait(r["ready"].at[slot])
            rounded = ends.astype(BF16)
            if save:
                m.sent(1, read=True)
                r["ends_tile"].at[half][...] = rounded
            writes = [r[x].at[slot] for x in ("write_tile", "rest_tile") if x in r]
            x = m.product(*((rounded, m.turned(a)) for a in writes))
            back = None
            if gated:
                total = m.load(r["total_columns"].at[slot], "columns")
                end = r["total_columns"][slot, C - 1]
                back = jnp.exp2(total)
                x = x * m.across(jnp.exp2(end - total), across)
                ends = ends * jnp.exp2(end)

            def add(g, ends):
                place = rem(n * s.groups + g, depth)
                m.wait(r["query_ready"].at[place])
                d_out = m.load(m.turned(r["d_out_tile"].at[place]))
                if gated:
                    d_out = (d_out.astype(F32) * m.across(back, across)).astype(BF16)
                ends = m.product((d_out, r["query_tile"].at[place]), init=ends)
                m.arrive(r["query_free"].at[place])
                return ends

            ends = lax.fori_loop(0, s.groups, add, ends) if s.groups > 1 else add(0, ends)
            m.wait(r["known"].at[half])
            x = x + m.load(m.turned(r["pull_tile"].at[half])).astype(F32)
            m.arrive(r["passed"].at[half])
            d_residual = m.product((x.astype(BF16), r["inverse_tile"].at[slot]))
            if save:
                m.turned(r["d_value_tile"].at[half])[...] = d_residual.astype(BF16)
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

        ends = m.load_global(r["d_final"].at[start, head, columns])
        ends = lax.fori_loop(0, s.span, step, ends)
        r["d_initial"].at[start, head, columns][...] = ends
        m.sent(read=True)

    @pl.when(warpgroup == 1)
    def _():
        m.registers(232, more=True)

        @pl.loop(0, s.span)
        def _(n):
            slot, half = rem(n, stages), rem(n, 2)
            m.wait(r["ready"].at[slot])
            totals = None
            if gated:
                totals = (
                    m.load(r["total_rows"].at[slot], "rows"),
                    m.load(r["total_columns"].at[slot], "columns"),
                )

            def add(g, pull):
                place = rem(n * s.groups + g, depth)
                m.wait(r["query_ready"].at[place])
                query = r["query_tile"].at[place]
                scores = m.product((r["write_tile"].at[slot], m.turned(query)))
                scores = upper(m, scores, totals).astype(BF16)
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


def _back(
    s: _Shape, query, key, write, rest, inverse, norm, total, d_out, d_final, save, interpret
):
    gated, normalize, extra = total is not None, norm is not None, rest is not None
    names = ("total_columns", "total_rows") if gated else ()
    depth = 2
    stage = 2 * C * ((2 + extra) * s.dim + C) + 256 * (len(names) + normalize)
    fixed = 2 * 2 * WIDTH * (C + save * (s.dim + C)) + depth * 2 * C * (s.dim + WIDTH)
    stages = _stages(4, stage, fixed)
    scratch = dict(
        key_tile=tile((stages, C, s.dim)),
        write_tile=tile((stages, C, s.dim)),
        inverse_tile=tile((stages, C, C)),
        query_tile=tile((depth, C, s.dim)),
        d_out_tile=tile((depth, C, WIDTH)),
        pull_tile=tile((2, C, WIDTH)),
        ready=barrier(3 + extra + normalize + len(names), stages),
        free=barrier(2, stages),
        query_ready=barrier(2, depth),
        query_free=barrier(2, depth),
        known=barrier(1, 2),
        passed=barrier(1, 2),
        **_views(names, stages),
    )
    if extra:
        scratch["rest_tile"] = tile((stages, C, s.dim))
    if normalize:
        scratch |= _views(("norm_columns",), stages)
    if save:
        scratch |= dict(ends_tile=tile((2, WIDTH, s.dim)), d_value_tile=tile((2, C, WIDTH)))
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
            total=total,
        ),
        outputs=dict(
            d_value=((s.batch, s.length, s.heads, s.value_dim), BF16) if save else None,
            ends=((s.batch, s.heads, s.chunks, s.value_dim, s.dim), BF16) if save else None,
            d_initial=(d_final.shape, F32),
        ),
        scratch=scratch,
        interpret=interpret,
    )


# --- grads -------------------------------------------------------------------------------------
#
# A program owns one chunk of one head and 64 key columns: one warpgroup, two or three programs to a
# multiprocessor. Everything that goes into d log γ is a sum over key columns, so that each program
# gives its part. Registers: tiles of 64 × 64 float32 are 32 a thread; alive at once are dA, one
# masked product and two more. Local memory is no refuge: shared memory leaves the first-level cache
# next to nothing, and 500 bytes a thread spilled doubled the time. Sums go along rows only: sums
# down columns would cross warps. Shared memory: eight input tiles, in which later operands and the
# outputs take the place of what has been read for the last time.


def _grads_kernel(m: Machine, r, program, warpgroup, *, s: _Shape):
    del warpgroup
    gated, normalize = "total" in r, "norm" in r
    batch, n, head, part = split(program, s.batch, s.chunks, s.heads, s.dim // WIDTH)
    here, columns = pl.ds(n * C, C), pl.ds(part * WIDTH, WIDTH)
    square = (C, C)
    first = pl.ds(0, C)  # where a wider tile holds a square

    def fetch_query(g):
        at = batch, here, head * s.groups + g
        m.fetch(r["d_out"].at[at], r["d_out_tile"], r["queries"])
        m.fetch(r["query"].at[(*at, columns)], r["query_tile"], r["queries"])

    def fetch():
        fetch_query(0)
        for name in ("residual", "d_value"):
            m.fetch(r[name].at[batch, here, head], r[name + "_tile"], r["values"])
        if gated:
            for name in ("total_rows", "total_columns"):
                m.fetch(r["total"].at[batch, head, here], r[name], r["vectors"])
        if normalize:
            m.fetch(r["norm"].at[batch, head, here], r["norm_rows"], r["vectors"])
        for name in ("write", "key"):
            m.fetch(r[name].at[batch, here, head, columns], r[name + "_tile"], r["tiles"])
        for name in ("starts", "ends"):
            m.fetch(r[name].at[batch, head, n, :, columns], r[name + "_tile"], r["tiles"])

    def rows(x, scale):
        return x if scale is None else x * m.down(scale, x.shape)

    def along(x, ref):
        """Row by row, ``x`` times the tile in ``ref``."""
        return jnp.sum(x * m.load(ref).astype(F32), axis=1)

    def norm():
        return m.load(r["norm_rows"], "rows") if normalize else None

    def totals():
        if not gated:
            return None
        return m.load(r["total_rows"], "rows"), m.load(r["total_columns"], "columns")

    def since_start(x):
        return rows(x, jnp.exp2(totals()[0])) if gated else x

    def until_end(x):
        if not gated:
            return x
        return rows(x, jnp.exp2(r["total_columns"][C - 1] - totals()[0]))

    def query_head(g, carried):
        d_write, crossing, source = carried
        d_out, query, write = r["d_out_tile"], r["query_tile"], r["write_tile"]
        m.wait(r["queries"])
        d_query = since_start(m.product((d_out, r["starts_tile"])))
        if gated:
            source = source + along(d_query, query)
        scores = lower(m, m.product((d_out, m.turned(r["residual_tile"]))), totals())
        low = scores.astype(BF16)
        d_query = m.product((low, write), init=d_query).astype(BF16)
        d_out.at[:, first][...] = low
        m.commit()
        if gated:
            d_write, overlap = m.products(
                (d_write, (m.turned(d_out.at[:, first]), query)), (None, (query, m.turned(write)))
            )
            overlap = scores * overlap
            crossing = overlap if crossing is None else crossing + overlap
        else:
            d_write = m.product((m.turned(d_out.at[:, first]), query), init=d_write)
        query[...] = d_query
        m.commit()
        m.send((query, r["d_query"].at[batch, here, head * s.groups + g, columns]))
        if s.groups > 1:

            @pl.when(g + 1 < s.groups)
            def _():
                m.sent(0, read=True)
                fetch_query(g + 1)

        return d_write, crossing, source

    key, write, d_out = r["key_tile"], r["write_tile"], r["d_out_tile"]
    residual, d_value = r["residual_tile"], r["d_value_tile"]
    fetch()
    if gated or normalize:
        m.wait(r["vectors"])
    m.wait(r["values"])
    m.wait(r["tiles"])
    source = jnp.sum(m.zeros(square), axis=1) if gated else None
    if s.groups > 1:
        zero = m.zeros(square)
        carried = zero, zero if gated else None, source
        carried = lax.fori_loop(0, s.groups, query_head, carried)
    else:
        carried = query_head(0, (None, None, source))
    d_write, crossing, source = carried
    if gated:
        # Kept in shared memory until the keys' part of it is known, for want of registers.
        d_out.at[:, first][...] = crossing.astype(BF16)

    carried = until_end(m.product((residual, r["ends_tile"])))
    if gated:
        r["sink_columns"][...] = along(carried, write)
    d_write = d_write + carried
    triangle = below(m, m.product((d_value, m.turned(residual))))
    if gated:
        triangle = lower(m, triangle, totals())
    d_key = since_start(m.product((d_value, r["starts_tile"])))
    if gated:
        r["source_columns"][...] = source - _scaled(along(d_key, key), norm())
    d_key = m.product((triangle.astype(BF16), write), init=d_key)
    triangle = rows(triangle, norm()) * -1.0
    d_value.at[:, first][...] = triangle.astype(BF16)
    m.commit()
    if gated:
        d_write, overlap = m.products(
            (d_write, (m.turned(d_value.at[:, first]), key)), (None, (key, m.turned(write)))
        )
        crossing = m.load(d_out.at[:, first]).astype(F32) + triangle * overlap
        residual.at[:, first][...] = crossing.astype(BF16)
    else:
        d_write = m.product((m.turned(d_value.at[:, first]), key), init=d_write)
    key[...] = (d_key * -1.0).astype(BF16)
    copies = [(key, r["d_key"].at[batch, here, head, columns])]
    target = r["d_write"].at[batch, here, head, columns]
    if r["d_write"].dtype == BF16:
        write[...] = d_write.astype(BF16)
        copies.append((write, target))
    else:
        target[...] = d_write
    m.commit()
    m.send(*copies)
    if gated:
        kept = None
        for low in range(0, s.value_dim, WIDTH):
            cut = pl.ds(low, WIDTH)
            x = along(m.load(r["starts_tile"].at[cut]).astype(F32), r["ends_tile"].at[cut])
            kept = x if kept is None else kept + x
        r["kept_columns"][...] = kept * jnp.exp2(r["total_columns"][C - 1])
        m.commit()
        row, column = places(m)
        later = jnp.where(column >= row, 1.0, 0.0).astype(BF16)
        total = m.product((later, residual.at[:, first]))
        total = total + m.across(m.load(r["sink_columns"], "columns"), square)
        ends = m.across(m.load(r["source_columns"], "columns"), square)
        row, column = places(m)
        total = jnp.where(column < row, total, ends)
        total = total + m.across(m.load(r["kept_columns"], "columns"), square)
        r["decay_rows"][...] = jnp.sum(total, axis=1)
        m.commit()
        m.send((r["decay_rows"], r["d_decay"].at[part, batch, head, here]))
    m.sent(read=True)


def _scaled(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale


def _grads(s: _Shape, query, key, write, norm, total, d_out, res, back, write_dtype, interpret):
    gated, normalize = total is not None, norm is not None
    names = ("total_rows", "total_columns") if gated else ()
    parts = s.dim // WIDTH
    wide, narrow = tile((C, s.value_dim)), tile((C, WIDTH))
    states = tile((s.value_dim, WIDTH))
    vectors = list(names)
    if gated:
        vectors += ["source_columns", "sink_columns", "kept_columns", "decay_rows"]
    if normalize:
        vectors.append("norm_rows")
    scratch = dict(
        d_out_tile=wide,
        residual_tile=wide,
        d_value_tile=wide,
        query_tile=narrow,
        key_tile=narrow,
        write_tile=narrow,
        starts_tile=states,
        ends_tile=states,
        queries=barrier(2),
        values=barrier(2),
        tiles=barrier(4),
        **{name: plain((C,)) for name in vectors},
    )
    if gated or normalize:
        scratch["vectors"] = barrier(len(names) + normalize)
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
            total=total,
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


class _Call(NamedTuple):
    """One call: its sizes, and how its arrays are padded to whole chunks and pieces."""

    shape: _Shape
    pad: int

    def tokens(self, x: Array | None) -> Array | None:
        """``[B, T, …]`` padded with zeros."""
        return padded(x, self.pad)

    def state(self, x: Array | None) -> Array | None:
        """``[B, H, D, E]`` transposed, float32."""
        return None if x is None else jnp.swapaxes(x.astype(F32), 2, 3)

    def decay(self, log_decay: Array | None, segment_ids: Array | None) -> Array | None:
        """``[B, H, T]`` float32, with the starts of segments as resets."""
        return log_decays(log_decay, segment_ids, self.shape.heads, self.pad)


def _call(query, key, value, pieces) -> _Call:
    batch, length, heads, dim = key.shape
    value_dim = value.shape[-1]
    for name, size in (("key", dim), ("value", value_dim)):
        if size not in (64, 128):
            raise NotImplementedError(f"{name} dimension must be 64 or 128, got {size}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype != BF16:
            raise NotImplementedError(f"{name} must be bfloat16, got {x.dtype}")
    if pieces is None:
        pieces = pieces_of(batch * heads * value_dim // WIDTH, -(-length // C))
    pad = -length % (C * pieces)
    groups = query.shape[2] // heads
    return _Call(_Shape(batch, length + pad, heads, groups, dim, value_dim, pieces), pad)


def _spread(x: Array | None, s: _Shape, *, last: bool = False) -> Array | None:
    """``[B, H, E, D]`` as the first (or last) of each sequence's pieces, zeros elsewhere."""
    if x is None or s.pieces == 1:
        return x
    out = jnp.zeros((s.batch, s.pieces, *x.shape[1:]), F32).at[:, -1 if last else 0].set(x)
    return out.reshape(s.batch * s.pieces, *x.shape[1:])


def _join(shifts: Array, maps: Array, s: _Shape, *, reverse: bool) -> Array:
    """States at the pieces' starts (ends: ``reverse``) from what each piece makes of the first.

    A piece takes the transposed state X to ``X maps + shift``, its cotangent to
    ``R mapsᵀ + shift``; the first piece's shift holds what its given state becomes.
    """
    shifts = shifts.reshape(s.batch, s.pieces, *shifts.shape[1:])
    order = range(s.pieces - 1, -1, -1) if reverse else range(s.pieces)
    product = "bhed,bhcd->bhec" if reverse else "bhed,bhdc->bhec"
    state, states = None, {}
    for piece in order:
        if state is not None:
            states[piece] = state
            state = jnp.einsum(product, state, maps[:, piece], precision=lax.Precision.HIGHEST)
        shift = shifts[:, piece]
        state = shift if state is None else state + shift
    return jnp.stack([states[i] for i in sorted(states)], axis=1)


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
    pieces: int | None = None,
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
      pieces: in how many pieces a sequence is cut that are swept side by side; None: by size.
      interpret: run by Pallas' interpreter.

    Returns:
      ``(out [B, T, Hq, E], memory [B, H, D, E] float32, residuals or None)``.
    """
    call = _call(query, key, value, pieces)
    s = call.shape
    query, key, write_key, write_rest, value = map(
        call.tokens, (query, key, write_key, write_rest, value)
    )
    decay = call.decay(log_decay, segment_ids)
    solved = _invert(
        s, key, write_key, write_rest if solve_rest else None, decay, normalize_key, interpret
    )
    inverse, norm = solved["inverse"], solved.get("norm")
    total = solved.get("total")

    def sweep(s, query, value, initial, save):
        return _sweep(
            s,
            query,
            key,
            write_key,
            write_rest,
            value,
            inverse,
            norm,
            total,
            initial,
            save,
            interpret,
        )

    initial = call.state(initial_memory)
    maps = None
    if s.pieces > 1:
        given = _spread(initial, s)
        shifts = sweep(s, None, value, given, False)["final"]
        eye = jnp.broadcast_to(
            jnp.eye(s.dim, dtype=F32), (s.batch * s.pieces, s.heads, s.dim, s.dim)
        )
        maps = sweep(s._replace(value_dim=s.dim), None, None, eye, False)["final"]
        maps = maps.reshape(s.batch, s.pieces, *maps.shape[1:])
        starts = _join(shifts, maps, s, reverse=False)
        if initial is None:
            initial = jnp.zeros_like(starts[:, 0])
        initial = jnp.concatenate([initial[:, None], starts], axis=1)
        initial = initial.reshape(-1, *initial.shape[2:])
    swept = sweep(s, query, value, initial, save_residuals)
    residuals = None
    if save_residuals:
        residuals = Residuals(inverse, norm, total, swept["residual"], swept["starts"], maps)
    final = swept["final"].reshape(s.batch, s.pieces, *swept["final"].shape[1:])[:, -1]
    return swept["out"][:, : s.length - call.pad], jnp.swapaxes(final, 2, 3), residuals


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
    maps, total = residuals.maps, residuals.total
    call = _call(query, key, value, 1 if maps is None else maps.shape[1])
    s = call.shape
    query, key, write_key, write_rest, d_out = map(
        call.tokens, (query, key, write_key, write_rest, d_out)
    )
    if d_memory is None:
        d_final = jnp.zeros((s.batch, s.heads, s.value_dim, s.dim), F32)
    else:
        d_final = call.state(d_memory)

    def back(d_final, save):
        return _back(
            s,
            query,
            key,
            write_key,
            write_rest,
            residuals.inverse,
            residuals.norm,
            total,
            d_out,
            d_final,
            save,
            interpret,
        )

    if s.pieces > 1:
        shifts = back(_spread(d_final, s, last=True), False)["d_initial"]
        ends = _join(shifts, maps, s, reverse=True)
        d_final = jnp.concatenate([ends, d_final[:, None]], axis=1)
        d_final = d_final.reshape(-1, *d_final.shape[2:])
    swept = back(d_final, True)
    grads = _grads(
        s,
        query,
        key,
        write_key,
        residuals.norm,
        total,
        d_out,
        residuals,
        swept,
        jnp.dtype(write_dtype),
        interpret,
    )
    length = s.length - call.pad
    d_log_decay = None
    if log_decay is not None:
        d_log_decay = jnp.swapaxes(jnp.sum(grads["d_decay"], axis=0), 1, 2)[:, :length]
        resets = log_decay <= RESET
        if segment_ids is not None:
            resets |= segment_starts(segment_ids)
        d_log_decay = jnp.where(resets, 0.0, d_log_decay)
    d_initial = swept["d_initial"].reshape(s.batch, s.pieces, *swept["d_initial"].shape[1:])[:, 0]
    return (
        grads["d_query"][:, :length],
        grads["d_key"][:, :length],
        grads["d_write"][:, :length],
        swept["d_value"][:, :length],
        jnp.swapaxes(d_initial, 2, 3),
        d_log_decay,
    )
