"""``penalty_solve``, forward and backward (``docs/derivation.md``, sections 3 and 4): the launches.

The sequence is cut in super-chunks that run side by side. Five kernels a solve:

    gram      Σ u uᵀ over each super-chunk
    prefix    its running sum: the penalty M where each super-chunk starts
    invert    A = M⁻¹ there, in place, by symmetric Gauss-Jordan elimination over blocks of 16
    factor    W, 16 tokens at a time, with A_t = A − Σ_{s≤t} w_s w_sᵀ: all that is sequential
    apply     the solutions A_t r_t, all chunks side by side

The backward applies the same ``A`` and ``W``, which the forward keeps, to the cotangent, and then
runs ``gram``, ``prefix`` and ``du`` from the end: linear attention without decay, backwards.

Inside this file arrays are padded: ``D`` to a power of two and ``T`` to whole groups, with zeros,
which are tokens that change nothing. The kernels are in ``penalty_kernels.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.bundles import Solve
from vla_jax.pallas import common
from vla_jax.pallas.triton import backend
from vla_jax.pallas.triton import penalty_kernels as kernels
from vla_jax.pallas.triton.penalty_kernels import BLOCK, GROUP
from vla_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Sizes of tiles and of launches; ``*_warps`` and ``*_stages`` are the compiler's."""

    max_super_chunk: int = 1024  # tokens that one inverse of the penalty serves
    min_super_chunk: int = 128
    fill: int = 1024  # programs that fill the device
    gram_width: int = 64  # columns of a tile of the sums of outer products
    gram_warps: int = 4
    gram_stages: int = 2
    invert_rows: int = 64  # rows of the penalty taken at a time; all D: it stays in registers
    invert_warps: int = 2
    resident_dim: int = 128  # largest D of which factor keeps A in registers
    factor_width: int = 64  # rows of A taken at a time
    factor_warps: int = 1
    apply_chunk: int = 64  # tokens of a program of apply, and between two A that are kept
    apply_width: int = 64  # rows of A taken at a time
    apply_warps: int = 4
    apply_backward_width: int = 64
    apply_backward_warps: int = 4
    du_tokens: int = 64  # at a time
    du_width: int = 64
    du_warps: int = 4
    du_stages: int = 2


TABLE = {  # {largest D: parameters}
    64: Parameters(),
    128: Parameters(
        fill=512,
        invert_rows=128,
        invert_warps=4,
        factor_warps=4,
        apply_width=128,
        apply_backward_width=128,
        apply_backward_warps=8,
        du_tokens=32,
        du_width=128,
        du_warps=8,
    ),
    256: Parameters(
        gram_stages=1,
        invert_rows=32,
        invert_warps=4,
        factor_width=16,
        factor_warps=4,
        apply_chunk=32,
        apply_width=32,
        apply_warps=8,
        apply_backward_width=32,
        apply_backward_warps=8,
        du_tokens=16,
        du_stages=1,
    ),
}


class Options(NamedTuple):
    """Static choices of a solve.

    Attributes:
      normalize_rhs: whether to scale the right-hand sides to unit length first.
      write_gain: None: the solution is ``α``. Otherwise ``a = gain·α``, see ``apply_write_gain``.
      precision: ``jax.lax`` precision; ``HIGHEST`` forces products accurate to float32.
      params: None for those of the table.
    """

    normalize_rhs: bool = False
    write_gain: str | None = None
    precision: Any = None
    params: Parameters | None = None


class Kept(NamedTuple):
    """What the backward needs of the forward, padded."""

    w: Array  # W, [B, T, H, D] float32
    starts: Array  # A where chunks start, [B, H, chunks, D, D] float32
    terms: tuple[Array, ...]  # whose sum is the solution: one float32 or two bfloat16 arrays


class Solved(NamedTuple):
    """What ``forward`` returns."""

    solution: Array  # [B, T, H, D] in the dtype of the right-hand sides
    gain: Array | None  # [B, T, H] float32, None without a write gain
    penalty: Array  # the last one, [B, H, D, D] float32
    kept: Kept


class Cotangents(NamedTuple):
    """Those of the outputs, and what comes from elsewhere to the right-hand side.

    The last two are added before and after the backward of the normalisation: cotangents of the
    normalised right-hand side, and of the one given.
    """

    solution: Array
    penalty: Array
    normalized_rhs: Array | None = None
    raw_rhs: Array | None = None


def super_chunk_length(length: int, streams: int, params: Parameters) -> int:
    """Tokens of a super-chunk: as many as give the table's ``fill`` of programs.

    Long ones amortise the inverse at their start, short ones give more programs; with few heads the
    sequence itself is split until the device is full.
    """
    chunk = params.max_super_chunk
    while chunk > params.min_super_chunk and streams * -(-length // chunk) < params.fill:
        chunk //= 2
    unit = max(GROUP, params.apply_chunk)
    return max(unit, min(chunk, -(-length // unit) * unit))


# --- one call ----------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What every launch of a call needs: sizes, choices, and the arrays that all of them read."""

    shape: kernels.Shape
    params: Parameters
    options: Options
    lambda0: Array  # [B·H] float32
    segment_ids: Array | None  # int32, padded
    has_direction: bool
    dtype: Any  # of the right-hand sides
    u_dtype: Any  # of what the directions are, or are made from
    length: int

    @property
    def segments(self) -> list[Array]:
        return [] if self.segment_ids is None else [self.segment_ids]

    def mode(self, dtype) -> str:
        """How products of float32 operands are taken where the inputs are of ``dtype``."""
        return backend.dot_mode(dtype, self.options.precision, wide=True)

    def tokens(self, x: Array | None) -> Array | None:
        """``[B, T, H]`` or ``[B, T, H, D]`` with zeros up to the sizes that the kernels see."""
        if x is None:
            return None
        shape = self.shape
        sizes = (shape.batch, shape.length, shape.heads, shape.dim)[: x.ndim]
        return jnp.pad(x, [(0, size - n) for size, n in zip(sizes, x.shape, strict=True)])

    def square(self, x: Array) -> Array:
        """``[B, H, D, D]`` as ``[B·H, Dp, Dp]`` float32."""
        extra = self.shape.dim - self.shape.true_dim
        x = x.astype(jnp.float32).reshape(self.shape.streams, *x.shape[2:])
        return jnp.pad(x, ((0, 0), (0, extra), (0, extra))) if extra else x

    def unsquare(self, x: Array) -> Array:
        shape = self.shape
        x = x[:, : shape.true_dim, : shape.true_dim]
        return x.reshape(shape.batch, shape.heads, *x.shape[1:])

    def cut(self, x: Array) -> Array:
        return x[:, : self.length, :, : self.shape.true_dim]


def _call(inputs: Solve, options: Options) -> _Call:
    if inputs.direction is None and not options.normalize_rhs:
        raise ValueError("direction=None needs normalize_rhs=True: it is made from the unit key")
    batch, length, heads, dim = inputs.rhs.shape
    params = options.params or common.parameters(TABLE, dim)
    chunk = params.apply_chunk
    unit = max(GROUP, chunk)
    padded = -(-length // unit) * unit
    span = super_chunk_length(padded, batch * heads, params)
    shape = kernels.Shape(
        batch, padded, heads, common.power_of_two(dim), dim, -(-padded // span), span, chunk
    )
    segment_ids = inputs.segment_ids
    if segment_ids is not None:
        pads = (0, 0), (0, padded - length)
        segment_ids = jnp.pad(segment_ids.astype(jnp.int32), pads, mode="edge")
    return _Call(
        shape,
        params,
        options,
        inputs.lambda0.astype(jnp.float32).reshape(-1),
        segment_ids,
        inputs.direction is not None,
        inputs.rhs.dtype,
        (inputs.rhs if inputs.direction is None else inputs.direction).dtype,
        length,
    )


_struct = jax.ShapeDtypeStruct


# --- launches ----------------------------------------------------------------------------------


def _gram(call: _Call, x, y, *, directions: bool = False, reverse: bool = False, mode: str):
    """``x``, ``y``: tuples of as many terms; ``y`` None if it is ``x``."""
    shape, params = call.shape, call.params
    width = min(shape.dim, params.gram_width)
    kernel = functools.partial(
        kernels.gram,
        shape=shape,
        terms=len(x),
        directions=directions,
        reverse=reverse,
        segments=bool(call.segments),
        mode=mode,
        width=width,
    )
    return backend.call(
        kernel,
        [*x, *(y or ()), *call.segments],
        [_struct((shape.streams, shape.supers, shape.dim, shape.dim), jnp.float32)],
        grid=(shape.streams, shape.supers, shape.dim // width),
        warps=params.gram_warps,
        stages=params.gram_stages,
        name="vla_penalty_gram_backward" if reverse else "vla_penalty_gram",
    )[0]


def _prefix(call: _Call, ridge, initial, gram, *, reverse: bool = False):
    """``[B·H, supers, D, D]``, what is before each super-chunk, and ``[B·H, D, D]``, the last."""
    shape = call.shape
    rows = max(1, min(shape.dim, 1024 // shape.dim))
    kernel = functools.partial(
        kernels.prefix, shape=shape, rows=rows, reverse=reverse, segments=bool(call.segments)
    )
    return backend.call(
        kernel,
        [ridge, initial, gram, *call.segments],
        [_struct(x.shape, jnp.float32) for x in (gram, initial)],
        grid=(shape.streams, shape.dim // rows),
        warps=4,
        name="vla_penalty_prefix",
    )


def _invert(call: _Call, penalty):
    shape, params = call.shape, call.params
    rows = min(shape.dim, params.invert_rows)
    panel = _struct((*penalty.shape[:2], BLOCK, shape.dim), jnp.float32)
    return backend.call(
        functools.partial(kernels.invert, shape=shape, rows=rows),
        [call.lambda0, penalty],
        [_struct(penalty.shape, jnp.float32), panel],
        grid=(shape.streams, shape.supers),
        warps=params.invert_warps,
        name="vla_penalty_invert",
        aliases={1: 0},
    )[0]


def _factor(call: _Call, u, starts):
    """``W [B, T, H, D]`` and ``A`` where chunks start ``[B·H, chunks, D, D]``, float32."""
    shape, params = call.shape, call.params
    inputs = [call.lambda0, *call.segments, u, starts]
    kernel = functools.partial(
        kernels.factor,
        shape=shape,
        has_direction=call.has_direction,
        segments=bool(call.segments),
        resident=shape.dim <= params.resident_dim,
        width=min(shape.dim, params.factor_width),
        mode=call.mode(call.u_dtype),
    )
    outputs = [
        _struct(starts.shape, jnp.float32),
        _struct((shape.batch, shape.length, shape.heads, shape.dim), jnp.float32),
        _struct((shape.streams, shape.length // shape.chunk, *starts.shape[2:]), jnp.float32),
    ]
    return backend.call(
        kernel,
        inputs,
        outputs,
        grid=(shape.streams, shape.supers),
        warps=params.factor_warps,
        name="vla_penalty_factor",
        aliases={len(inputs) - 1: 0},
    )[1:]


def _apply(call: _Call, config: kernels.Apply, tokens, kept: Kept):
    """``(out, gain?, *terms)``, or backward ``(parts of −dλ₀, d_rhs?, *terms of b)``."""
    shape, params, dtype = call.shape, call.params, call.dtype
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    chunks = shape.length // shape.chunk
    if config.backward:
        outputs = [_struct((shape.streams, chunks), jnp.float32)]
        outputs += [_struct(size, dtype)] if config.has_direction else []
    else:
        outputs = [_struct(size, dtype)]
        outputs += [] if config.write_gain is None else [_struct(size[:3], jnp.float32)]
    shared = not config.backward and dtype == config.terms[0]  # the output is the first term
    outputs += [_struct(size, d) for d in config.terms[shared:]]
    inputs = [call.lambda0, *call.segments, *(x for x in tokens if x is not None)]
    return backend.call(
        functools.partial(kernels.apply, shape=shape, config=config),
        [*inputs, kept.w, kept.starts],
        outputs,
        grid=(shape.streams, chunks),
        warps=params.apply_backward_warps if config.backward else params.apply_warps,
        name="vla_penalty_apply_backward" if config.backward else "vla_penalty_apply",
    )


def _du(call: _Call, u, a, b, states, *, mode: str):
    """The cotangent of the directions; those made from the key get it in float32."""
    shape, params = call.shape, call.params
    width = min(shape.dim, params.du_width)
    kernel = functools.partial(
        kernels.du,
        shape=shape,
        tokens=params.du_tokens,
        terms=len(a),
        segments=bool(call.segments),
        directions=not call.has_direction,
        mode=mode,
        width=width,
    )
    dtype = call.u_dtype if call.has_direction else jnp.float32
    return backend.call(
        kernel,
        [u, *a, *b, states, *call.segments],
        [_struct((shape.batch, shape.length, shape.heads, shape.dim), dtype)],
        grid=(shape.streams, shape.supers, shape.dim // width),
        warps=params.du_warps,
        stages=params.du_stages,
        name="vla_penalty_du",
    )[0]


# --- the primitive -----------------------------------------------------------------------------


def _terms(call: _Call) -> tuple[Any, ...]:
    """Dtypes of the arrays whose sum a solution is for the backward: float32, or 16 bits of it."""
    if call.dtype == jnp.float32 or call.mode(call.dtype) != "tf32":
        return (jnp.float32,)
    return jnp.bfloat16, jnp.bfloat16


def _applied(call: _Call) -> kernels.Apply:
    """The choices of the apply kernel that forward and backward share."""
    return kernels.Apply(
        backward=False,
        has_direction=call.has_direction,
        normalize_rhs=call.options.normalize_rhs,
        write_gain=call.options.write_gain,
        segments=call.segment_ids is not None,
        has_d_normalized=False,
        has_d_raw=False,
        terms=_terms(call),
        mode=call.mode(call.dtype),
        width=min(call.shape.dim, call.params.apply_width),
    )


def forward(inputs: Solve, options: Options) -> Solved:
    """Solves for every token.

    Args:
      inputs: with ``lambda0 [B, H]``; ``rhs`` raw keys with ``normalize_rhs``, and then
        ``direction`` may be None, which is the unit key over ``√D``.
      options: static choices.
    """
    call = _call(inputs, options)
    shape = call.shape
    rhs, direction = call.tokens(inputs.rhs), call.tokens(inputs.direction)
    u = rhs if direction is None else direction
    mode = backend.dot_mode(u.dtype, options.precision, wide=not call.has_direction)
    gram = _gram(call, (u,), None, directions=not call.has_direction, mode=mode)
    starts, penalty = _prefix(call, call.lambda0, call.square(inputs.penalty), gram)
    w, starts = _factor(call, u, _invert(call, starts))
    config = _applied(call)
    solution, *terms = _apply(call, config, [rhs], Kept(w, starts, ()))
    gain = None if options.write_gain is None else terms.pop(0)[:, : call.length]
    if call.dtype == config.terms[0]:
        terms = [solution, *terms]
    starts = starts.reshape(shape.batch, shape.heads, *starts.shape[1:])
    kept = Kept(w, starts, tuple(terms))
    return Solved(call.cut(solution), gain, call.unsquare(penalty), kept)


def rest(kept: Kept, rhs: Array) -> Array | None:
    """What rounding to bfloat16 took from the solution, ``[B, T, H, D]``; None where none is kept.

    Args:
      kept: as ``forward`` returned it.
      rhs: as it was given to ``forward``.
    """
    if rhs.dtype != jnp.bfloat16 or len(kept.terms) < 2:
        return None
    return kept.terms[1][:, : rhs.shape[1], :, : rhs.shape[-1]]


def backward(
    inputs: Solve,
    gain: Array | None,
    kept: Kept,
    cotangents: Cotangents,
    options: Options,
) -> Solve:
    """Cotangents of the inputs from those of ``forward``; of ``lambda0`` ``[B, H]``.

    ``gain`` and ``kept`` are those of ``forward``, called with the same options. The cotangent of
    ``direction`` is None if it was, and then part of that of ``rhs``.

    Solutions and ``b`` stay in float32 here, and multiply in float32 or as two bfloat16 terms: with
    an ill-conditioned penalty ``u`` is nearly orthogonal to both, and rounding them would leave
    nothing of the cotangent of ``u``.
    """
    call = _call(inputs, options)
    shape, write_gain = call.shape, options.write_gain
    rhs, direction, gain = (call.tokens(x) for x in (inputs.rhs, inputs.direction, gain))
    given = Cotangents(*map(call.tokens, cotangents._replace(penalty=None)))
    kept = kept._replace(starts=kept.starts.reshape(shape.streams, *kept.starts.shape[2:]))
    fused = call.has_direction
    config = _applied(call)._replace(
        backward=True,
        has_d_normalized=fused and given.normalized_rhs is not None,
        has_d_raw=fused and given.raw_rhs is not None,
        width=min(shape.dim, call.params.apply_backward_width),
    )
    operands = [
        rhs if options.normalize_rhs or write_gain == "projection" else None,
        given.solution,
        gain if write_gain else None,
        given.normalized_rhs if fused else None,
        given.raw_rhs if fused else None,
        *kept.terms,
    ]
    overlap, *b = _apply(call, config, operands, kept)
    d_rhs = b.pop(0) if fused else None
    d_lambda0 = -overlap.reshape(shape.batch, shape.heads, -1).sum(-1)

    mode = "bf16x3" if len(b) == 2 else config.mode
    outer = _gram(call, kept.terms, tuple(b), reverse=True, mode=mode)
    x = call.square(cotangents.penalty)
    ridge = jnp.zeros_like(call.lambda0)
    states, start = _prefix(call, ridge, -(x + x.swapaxes(1, 2)), outer, reverse=True)
    d_u = _du(call, direction if fused else rhs, kept.terms, b, states, mode=mode)
    if fused:
        d_direction = call.cut(d_u)
    else:
        d_direction, d_rhs = None, _key_cotangent(call, rhs, gain, kept.terms, b, d_u, given)
    return Solve(call.cut(d_rhs), d_direction, d_lambda0, call.unsquare(start) / -2)


def _key_cotangent(call: _Call, rhs, gain, solution, b, d_u, given: Cotangents) -> Array:
    """The cotangent of the raw key where the direction is made from it too."""
    dtype = rhs.dtype
    rhs, gain, d_solution, d_normalized, d_raw = (
        None if x is None else x.astype(jnp.float32)
        for x in (rhs, gain, given.solution, given.normalized_rhs, given.raw_rhs)
    )
    solution, b = (sum(x.astype(jnp.float32) for x in terms) for terms in (solution, b))
    x = b * (1 if gain is None else gain[..., None])
    x += d_u * call.shape.true_dim**-0.5
    if call.options.write_gain == "projection":
        x -= jnp.sum(d_solution * solution, axis=-1, keepdims=True) * solution
    if d_normalized is not None:
        x += d_normalized
    inverse = numerics.inverse_norm(rhs)
    unit = rhs * inverse
    x = (x - jnp.sum(x * unit, axis=-1, keepdims=True) * unit) * inverse
    return (x if d_raw is None else x + d_raw).astype(dtype)
