"""Kernels of the penalty solve for Hopper GPUs: any weights, decay, several right-hand sides.

    P_t = γ_t P_{t-1} + β_t u_t u_tᵀ,        x_t = (λ₀ I + P_t)⁻¹ r_t

In chunks of C = 64 tokens, with Γ, e and τ as in ``delta_rule``:

    sweep   P_c at chunk starts: P ← e_C P + (τ β ∘ U)ᵀ U                        in sequence
    solve   conjugate gradients for the rows of X at once,
            M X = λ₀ X + e ∘ X P_c + (Γ ∘ β ∘ X Uᵀ) U                               parallel

The second is the whole inverse: no chain from token to token, three products a step, and as many
steps as the worst row of a chunk needs. The backward solves for the cotangents in the same way;
its sums of ``y xᵀ`` from the end are ``sweep`` in reverse, and the products of a chunk that are
left (equations (39) and (40) of ``docs/derivation.md``) are XLA's.

Precision. The penalty is kept as the sum of two 16-bit numbers, and so is each search direction,
which is *rounded* to such a sum before it is used: then its product is exact to 2⁻¹⁶, and the
recursive residual stays that of X. Directions of one 16-bit number took up to four times the steps.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vla_jax import numerics
from vla_jax.bundles import Solve
from vla_jax.chunkwise import gated_solve
from vla_jax.decay import Decay
from vla_jax.pallas.mosaic import backend
from vla_jax.pallas.mosaic.backend import Machine, barrier, plain, tile
from vla_jax.pallas.mosaic.chunks import (
    BF16,
    F32,
    FLOOR,
    LOG2E,
    RESET,
    C,
    log_decays,
    lower,
    padded,
    pieces_of,
    rem,
    segment_starts,
    split,
)  # fmt: skip
from vla_jax.types import Array

ROWS = 64  # rows of the penalty of a sweep's program
STAGES = 4  # chunks' inputs on their way or in use in a sweep

# A row is done when its residual is below this share of the right-hand side. Conjugate gradients in
# float32 end after a few times D steps even where nothing helps them.
TOLERANCE = 3e-4
STEPS_PER_DIM = 8


class _Shape(NamedTuple):
    """Static sizes of one call; length padded."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    pieces: int  # of a sequence, swept side by side

    @property
    def chunks(self) -> int:
        return self.length // C

    @property
    def span(self) -> int:
        """Chunks of a piece."""
        return self.chunks // self.pieces


def _two(x: Array) -> tuple[Array, Array]:
    """``x`` as the sum of two 16-bit numbers."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


# --- sweep -------------------------------------------------------------------------------------
#
# A program owns 64 rows of one head's matrix in one piece, and goes through the chunks: one
# warpgroup, [64, D] float32 in registers (32 or 64 a thread), STAGES chunks' inputs in shared
# memory. In reverse it goes from the end, and a matrix belongs to the end of its chunk.


def _sweep_kernel(m: Machine, r, program, warpgroup, *, s: _Shape, reverse: bool):
    del warpgroup
    batch, piece, head, block = split(program, s.batch, s.pieces, s.heads, s.dim // ROWS)
    rows = pl.ds(block * ROWS, ROWS)
    start = batch * s.pieces + piece
    gated, weighted, save = "total" in r, "weight" in r, "high" in r
    ahead = STAGES - 1
    steps = s.span * s.groups

    def chunk(n):
        return piece * s.span + (s.span - 1 - n if reverse else n)

    def fetch(step, slot):
        n, g = (step, 0) if s.groups == 1 else split(step, s.span, s.groups)
        here, ready = pl.ds(chunk(n) * C, C), r["ready"].at[slot]
        token_head = head * s.groups + g
        m.fetch(r["left"].at[batch, here, token_head, rows], r["left_tile"].at[slot], ready)
        m.fetch(r["right"].at[batch, here, token_head], r["right_tile"].at[slot], ready)
        for name in ("total", "weight"):
            if name in r:
                m.fetch(r[name].at[batch, head, here], r[name + "_rows"].at[slot], ready)

    for i in range(min(ahead, steps)):
        fetch(jnp.int32(i), i)

    def step(n, matrix):
        if save:
            m.sent(0, read=True)
            r["high_tile"][...], r["low_tile"][...] = _two(matrix)
            m.commit()
            m.send(
                *(
                    (r[x + "_tile"], r[x].at[batch, head, chunk(n), rows, :])
                    for x in ("high", "low")
                )
            )
        for g in range(s.groups):
            i = n * s.groups + g
            slot = rem(i, STAGES)
            m.wait(r["ready"].at[slot])

            later = i + ahead

            @pl.when(later < steps)
            def _(later=later):
                m.commit()  # what was read of the slot comes before the copy into it
                fetch(later, rem(later, STAGES))

            left = m.load(r["left_tile"].at[slot]).astype(F32)
            scale = None
            if gated:
                total, end = m.load(r["total_rows"].at[slot], "rows"), r["total_rows"][slot, C - 1]
                scale = jnp.exp2(total if reverse else end - total)
                if g == 0:
                    matrix = matrix * jnp.exp2(end)
            if weighted:
                weight = m.load(r["weight_rows"].at[slot], "rows")
                scale = weight if scale is None else scale * weight
            if scale is not None:
                left = left * m.down(scale, left.shape)
            r["scaled_high"][...], r["scaled_low"][...] = _two(left)
            m.commit()
            right = r["right_tile"].at[slot]
            pairs = ((m.turned(r["scaled_" + x]), right) for x in ("high", "low"))
            matrix = m.product(*pairs, init=matrix)
        return matrix

    if "initial" in r:
        matrix = m.load_global(r["initial"].at[start, head, rows])
    else:
        matrix = m.zeros((ROWS, s.dim))
    matrix = lax.fori_loop(0, s.span, step, matrix)
    r["final"].at[start, head, rows][...] = matrix
    m.sent(read=True)


def _sweep(s: _Shape, left, right, total, weight, initial, *, reverse, save, interpret):
    """Matrices ``[B, H, N, D, D]`` as ``high`` and ``low``, and ``final [B·pieces, H, D, D]``."""
    vectors = {"total": total, "weight": weight}
    vectors = {name: x for name, x in vectors.items() if x is not None}
    scratch = dict(
        left_tile=tile((STAGES, C, ROWS), left.dtype),
        right_tile=tile((STAGES, C, s.dim)),
        scaled_high=tile((C, ROWS)),
        scaled_low=tile((C, ROWS)),
        ready=barrier(2 + len(vectors), STAGES),
        **{name + "_rows": plain((STAGES, C)) for name in vectors},
    )
    matrices = ((s.batch, s.heads, s.chunks, s.dim, s.dim), BF16) if save else None
    if save:
        scratch |= dict(high_tile=tile((ROWS, s.dim)), low_tile=tile((ROWS, s.dim)))
    return backend.launch(
        functools.partial(_sweep_kernel, s=s, reverse=reverse),
        name="vla_hopper_penalty_sweep",
        programs=s.batch * s.pieces * s.heads * (s.dim // ROWS),
        inputs=dict(left=left, right=right, **vectors, initial=initial),
        outputs=dict(
            high=matrices, low=matrices, final=((s.batch * s.pieces, s.heads, s.dim, s.dim), F32)
        ),
        scratch=scratch,
        interpret=interpret,
    )


def matrices(s: _Shape, left, right, total, weight, initial, *, reverse, interpret):
    """As ``_sweep``, of whole sequences: ``(high, low, final [B, H, D, D])``."""
    sweep = functools.partial(
        _sweep, s, left, right, total, weight, reverse=reverse, interpret=interpret
    )
    if s.pieces > 1:
        sums = sweep(None, save=False)["final"].reshape(s.batch, s.pieces, s.heads, s.dim, s.dim)
        kept = jnp.ones((s.batch, s.pieces, s.heads), F32)
        if total is not None:
            ends = total.reshape(s.batch, s.heads, s.pieces, s.span, C)[..., -1]
            kept = jnp.moveaxis(jnp.exp2(jnp.sum(ends, axis=-1)), 2, 1)
        state = jnp.zeros_like(sums[:, 0]) if initial is None else initial
        states: dict[int, Array] = {}
        for piece in range(s.pieces - 1, -1, -1) if reverse else range(s.pieces):
            states[piece] = state
            state = kept[:, piece, :, None, None] * state + sums[:, piece]
        initial = jnp.stack([states[i] for i in range(s.pieces)], axis=1)
        initial = initial.reshape(-1, s.heads, s.dim, s.dim)
    swept = sweep(initial, save=True)
    final = swept["final"].reshape(s.batch, s.pieces, s.heads, s.dim, s.dim)
    return swept["high"], swept["low"], final[:, 0 if reverse else -1]


# --- solve -------------------------------------------------------------------------------------
#
# A program owns one chunk of one query head: one warpgroup. Its matrices, the solution and, for
# D = 128, the residual are in shared memory; in registers are the direction and its product,
# [64, D] float32 (32 or 64 a thread), and [64, 64] of scores. Two programs or three share a
# multiprocessor.


def _solve_kernel(m: Machine, r, program, warpgroup, *, s: _Shape):
    del warpgroup
    batch, chunk, head, group = split(program, s.batch, s.chunks, s.heads, s.groups)
    here = pl.ds(chunk * C, C)
    target = batch, here, head * s.groups + group
    gated, weighted = "total" in r, "weight" in r
    square, ready = (C, C), r["ready"]
    m.fetch(r["u"].at[batch, here, head], r["u_tile"], ready)
    m.fetch(r["rhs"].at[target], r["rhs_tile"], ready)
    for name in ("high", "low"):
        m.fetch(r[name].at[batch, head, chunk], r[name + "_tile"], ready)
    if gated:
        for name in ("total_rows", "total_columns"):
            m.fetch(r["total"].at[batch, head, here], r[name], ready)
    if weighted:
        m.fetch(r["weight"].at[batch, head, here], r["weight_columns"], ready)
    lambda0 = r["lambda0"][batch, head]
    m.wait(ready)

    def inner(x, y):
        return jnp.sum(x * y, axis=1)

    def scale_by(vector, x):
        return x * m.down(vector, x.shape)

    totals = since = None
    if gated:
        totals = tuple(m.load(r["total_" + x], x) for x in ("rows", "columns"))
        since = jnp.exp2(totals[0])
    pairs = lower(m, m.full(square, 1.0), totals)
    if weighted:
        pairs = pairs * m.across(m.load(r["weight_columns"], "columns"), square)
    r["pairs_tile"][...] = pairs

    # Rows of size about 1, in two steps where one would leave the range of float32.
    rhs = m.load(r["rhs_tile"]).astype(F32)
    largest = jnp.max(jnp.abs(rhs), axis=1)
    first = jnp.where(largest > 2.0**60, F32(2.0**-64), 1.0)
    first = jnp.where(largest < 2.0**-60, 2.0**64, first)
    usual = (largest > 0) & (largest < jnp.inf)
    second = 1 / jnp.where(usual, largest * first, 1.0)
    rhs = scale_by(second, scale_by(first, rhs))
    size = inner(rhs, rhs)
    limit = size * TOLERANCE**2

    def product(p):
        """The rounded ``p``, and M times it."""
        high, low = _two(p)
        p = high.astype(F32) + low.astype(F32)
        carried, scores = m.products(
            (None, (high, r["high_tile"]), (low, r["high_tile"]), (high, r["low_tile"])),
            (None, *((x, m.turned(r["u_tile"])) for x in (high, low))),
        )
        if gated:
            carried = scale_by(since, carried)
        scores = _two(scores * m.load(r["pairs_tile"]))
        return p, m.product(*((x, r["u_tile"]) for x in scores), init=carried + p * lambda0)

    m.commit()
    kept = s.dim == 128  # the residual is kept in shared memory
    r["solution_tile"][...] = m.zeros((C, s.dim))
    if kept:
        r["residual_tile"][...] = rhs
    going = jnp.where(size > 0, F32(1), 0.0)

    def body(carry):
        i, _, going, direction, *residual = carry
        p, q = product(direction)
        (residual,) = residual or (m.load(r["residual_tile"]),)
        curvature = inner(p, q)
        stuck = curvature <= 0  # what is not a number goes on, into the solution
        going = jnp.where(stuck, 0.0, going)
        inverse = 1 / jnp.where(stuck, 1.0, curvature)
        step = inner(p, residual) * inverse * going
        r["solution_tile"][...] = m.load(r["solution_tile"]) + scale_by(step, p)
        residual = residual - scale_by(step, q)
        if kept:
            r["residual_tile"][...] = residual
        going = jnp.where(inner(residual, residual) > limit, going, 0.0)
        back = inner(residual, q) * inverse
        direction = scale_by(going, residual - scale_by(back, p))
        # Whether any row goes on, as a number that all threads read: two slots, so that none is
        # written before all have read it.
        slot = rem(i, 2)
        r["going"].at[slot][...] = jnp.max(m.down(going, square), axis=0)
        m.commit()
        carry = i + 1, r["going"][slot, 0], going, direction
        return carry if kept else (*carry, residual)

    first_direction = scale_by(going, rhs)
    start = jnp.int32(0), jnp.float32(1), going, first_direction
    bound = STEPS_PER_DIM * s.dim
    lax.while_loop(
        lambda carry: (carry[0] < bound) & (carry[1] > 0),
        body,
        start if kept else (*start, rhs),
    )
    solution = m.load(r["solution_tile"])
    scale = jnp.where(usual, largest, 1.0)
    solution = scale_by(jnp.where(size < jnp.inf, scale, jnp.nan), solution)
    r["solution_tile"][...] = solution
    m.commit()
    m.send((r["solution_tile"], r["solution"].at[target]))
    m.sent(read=True)


def _solve(s: _Shape, rhs, u, lambda0, high, low, total, weight, interpret):
    scratch = dict(
        u_tile=tile((C, s.dim)),
        rhs_tile=tile((C, s.dim), rhs.dtype),
        high_tile=tile((s.dim, s.dim)),
        low_tile=tile((s.dim, s.dim)),
        pairs_tile=tile((C, C), F32),
        solution_tile=tile((C, s.dim), F32),
        going=plain((2, C)),
        ready=barrier(4 + 2 * (total is not None) + (weight is not None)),
    )
    if s.dim == 128:
        scratch["residual_tile"] = tile((C, s.dim), F32)
    if total is not None:
        scratch |= dict(total_rows=plain((C,)), total_columns=plain((C,)))
    if weight is not None:
        scratch["weight_columns"] = plain((C,))
    return backend.launch(
        functools.partial(_solve_kernel, s=s),
        name="vla_hopper_penalty_solve",
        programs=s.batch * s.chunks * s.heads * s.groups,
        inputs=dict(u=u, rhs=rhs, high=high, low=low, lambda0=lambda0, total=total, weight=weight),
        outputs=dict(solution=((s.batch, s.length, s.heads * s.groups, s.dim), F32)),
        scratch=scratch,
        interpret=interpret,
    )["solution"]


# --- the primitive -----------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the backward keeps of the forward beside its inputs; T padded to whole chunks."""

    solution: Array  # [B, T, Hq, D]
    high: Array  # P_c at chunk starts, [B, H, N, D, D], in two 16-bit numbers
    low: Array
    total: Array | None  # log2 of the decay since the chunk's start, [B, H, T]


class _Call(NamedTuple):
    """One call: its sizes and padding, and its vectors ``[B, H, T]``."""

    shape: _Shape
    pad: int
    weight: Array | None

    @classmethod
    def of(cls, inputs: Solve, pieces: int | None) -> _Call:
        batch, length, heads, dim = inputs.direction.shape
        if dim not in (64, 128):
            raise NotImplementedError(f"key dimension must be 64 or 128, got {dim}")
        if inputs.direction.dtype != BF16:
            raise NotImplementedError(f"direction must be bfloat16, got {inputs.direction.dtype}")
        if pieces is None:
            pieces = pieces_of(batch * heads * dim // ROWS, -(-length // C))
        pad = -length % (C * pieces)
        weight = inputs.weight
        if weight is not None:
            weight = jnp.swapaxes(padded(weight.astype(F32), pad), 1, 2)
        groups = inputs.rhs.shape[2] // heads
        return cls(_Shape(batch, length + pad, heads, groups, dim, pieces), pad, weight)

    def total(self, inputs: Solve) -> Array | None:
        """log2 of the decay since the chunk's start."""
        s = self.shape
        decay = log_decays(inputs.log_decay, inputs.segment_ids, s.heads, self.pad)
        if decay is None:
            return None
        decay = jnp.maximum(decay * LOG2E, FLOOR).reshape(s.batch, s.heads, s.chunks, C)
        return jnp.cumsum(decay, axis=-1).reshape(s.batch, s.heads, s.length)


def _wide(rhs: Array) -> Array:
    return rhs if rhs.dtype == BF16 else rhs.astype(F32)


def forward(
    inputs: Solve, *, pieces: int | None = None, interpret: bool = False
) -> tuple[Array, Array, Saved]:
    """``(λ₀ I + P_t)⁻¹ rhs_t`` of every token and query head, and P after the last token.

    Args:
      inputs: ``rhs`` of any float, ``direction`` bfloat16, D of 64 or 128; ``lambda0 [B, H]``.
      pieces: in how many pieces a sequence is cut that are swept side by side; None: by size.
      interpret: run by Pallas' interpreter.

    Returns:
      ``(solution [B, T, Hq, D] float32, penalty [B, H, D, D] float32, what the backward keeps)``.
    """
    call = _Call.of(inputs, pieces)
    s, total = call.shape, call.total(inputs)
    u, rhs = padded(inputs.direction, call.pad), padded(_wide(inputs.rhs), call.pad)
    high, low, penalty = matrices(
        s._replace(groups=1), u, u, total, call.weight, inputs.penalty.astype(F32),
        reverse=False, interpret=interpret,
    )  # fmt: skip
    lambda0 = inputs.lambda0.astype(F32)
    solution = _solve(s, rhs, u, lambda0, high, low, total, call.weight, interpret)
    length = s.length - call.pad
    return solution[:, :length], penalty, Saved(solution, high, low, total)


def backward(
    inputs: Solve,
    saved: Saved,
    d_solution: Array,
    d_penalty: Array,
    *,
    pieces: int | None = None,
    interpret: bool = False,
) -> Solve:
    """Equations (39) and (40): the cotangents of ``inputs``, float32, ``lambda0 [B, H]``."""
    call = _Call.of(inputs, pieces)
    s, pad, total, weight = call.shape, call.pad, saved.total, call.weight
    u = padded(inputs.direction, pad)
    rhs = padded(d_solution.astype(F32), pad)
    y = _solve(
        s, rhs, u, inputs.lambda0.astype(F32), saved.high, saved.low, total, weight, interpret
    )
    x = saved.solution
    ends = -numerics.symmetrize(d_penalty.astype(F32))
    high, low, d_initial = matrices(
        s, y, x.astype(BF16), total, None, ends, reverse=True, interpret=interpret
    )

    def cut(a, axis):
        """``[B, T, H, …, D]`` to ``[N, B, H, …, C, D]``."""
        a = a.reshape(s.batch, s.chunks, C, s.heads, -1, a.shape[-1])
        a = jnp.einsum("bnchgd->nbhgcd", a)
        return a if axis else a[:, :, :, 0]

    def vector(a):
        """``[B, H, T]`` to ``[N, B, H, C, 1]``."""
        return jnp.moveaxis(a.reshape(s.batch, s.heads, s.chunks, C, 1), 2, 0)

    def joined(a):
        """The inverse of ``cut``, without the padding."""
        a = a if a.ndim == 6 else a[:, :, :, None]
        a = jnp.einsum("nbhgcd->bnchgd", a)
        return a.reshape(s.batch, s.length, -1, a.shape[-1])[:, : s.length - pad]

    log_decay = jnp.zeros((s.batch, s.heads, s.length), F32)
    if total is not None:
        log_decay = log_decays(inputs.log_decay, inputs.segment_ids, s.heads, pad)
    chunk = gated_solve.Matrices(
        cut(u, 0).astype(F32),
        None if weight is None else vector(weight),
        Decay.of(vector(log_decay)),
        jnp.moveaxis(saved.high.astype(F32) + saved.low.astype(F32), 2, 0),
        inputs.lambda0,
    )
    later = -numerics.symmetrize(jnp.moveaxis(high.astype(F32) + low.astype(F32), 2, 0))
    pulled = chunk.pull(cut(x, 1), cut(y, 1), later, numerics.policy(inputs.direction))
    d_log_decay = None
    if inputs.log_decay is not None:
        d_log_decay = joined(pulled.log_decay)[..., 0]
        resets = inputs.log_decay <= RESET
        if inputs.segment_ids is not None:
            resets |= segment_starts(inputs.segment_ids)
        d_log_decay = jnp.where(resets, 0.0, d_log_decay)
    return inputs._replace(
        rhs=y[:, : s.length - pad],
        direction=joined(pulled.direction),
        lambda0=-jnp.sum((x * y).reshape(*x.shape[:2], s.heads, -1), axis=(1, 3)),
        penalty=-numerics.symmetrize(d_initial),
        weight=None if weight is None else joined(pulled.weight)[..., 0],
        log_decay=d_log_decay,
        segment_ids=None,
    )
