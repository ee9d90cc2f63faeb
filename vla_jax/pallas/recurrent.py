"""The whole recurrence, token by token, in one launch: short sequences and decoding steps.

A program is one head. It holds the inverse ``A`` (D×D), and then the memory ``S`` (D×E), on chip
from the first token to the last, in float32, so nothing but tokens moves: best where T is too short
for the chunkwise kernels to pay (up to about 64), correct for any T. Equation numbers are those of
``docs/derivation.md``.

The backward is a second launch, four sweeps over the tokens, each with one matrix on chip, all in
closed form (equations (17) to (26) with chunks of one token):

    1  from the end    R, the cotangent of S: those of the residual and of the solution α
    2  from the start  A once more: β = A dα
    3  from the start  S once more: the cotangents that S multiplies, of the query and the unit key
    4  from the end    Σ β αᵀ + α βᵀ: the cotangent of the directions, and all of the key's

No atomics: two runs give equal bits. Nothing is kept for the backward but α, its gain, the residual
``v − S k̂`` and the ratio's denominator, all per token.

Every array here has the batch for its first axis, ``lambda0`` too (``[B, H]``): a ``vmap`` folds
into it (``backend.fold_batch``) instead of adding a grid axis. D and E are padded with zeros to
powers of two, which changes nothing: a zero feature is never read and never written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax import numerics
from vla_jax.pallas import backend
from vla_jax.types import Array, VLAState

NAME = "vla_recurrent"
MAX_DIM = 128

backend.TABLE.update(
    {
        (None, NAME, 32): {"num_warps": 1, "rederive_every": numerics.REDERIVE_EVERY},
        (None, NAME, 64): {"num_warps": 4, "rederive_every": numerics.REDERIVE_EVERY},
        (None, NAME, 128): {"num_warps": 8, "rederive_every": numerics.REDERIVE_EVERY},
        (None, "vla_decode", 32): {"num_warps": 1, "rederive_every": numerics.REDERIVE_EVERY},
        (None, "vla_decode", 64): {"num_warps": 4, "rederive_every": numerics.REDERIVE_EVERY},
        (None, "vla_decode", 128): {"num_warps": 4, "rederive_every": numerics.REDERIVE_EVERY},
    }
)


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs, float32."""

    alpha: Array  # [B, T, H, D]
    gain: Array  # [B, T, H], the write key is gain * alpha
    residual: Array  # [B, T, H, E], v − S k̂
    weight: Array  # [B, T, Hq], z·q


class Sizes(NamedTuple):
    """Static sizes of one call, D and E padded."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    true_dim: int

    @property
    def streams(self) -> int:
        """Programs: heads of the whole batch."""
        return self.batch * self.heads

    def locate(self):
        """Inside a kernel: batch and head of this program, and its query heads."""
        stream = pl.program_id(0)
        batch, head = stream // self.heads, stream % self.heads
        return batch, head, [head * self.groups + g for g in range(self.groups)]


class Options(NamedTuple):
    """The static options of the recurrence."""

    write_gain: str
    readout: str
    eps: float


# --- preparing arrays --------------------------------------------------------------------------


def require(name: str, dtypes: tuple[Any, ...], dims: tuple[int, ...]) -> None:
    """Raises NotImplementedError, saying why, where the kernels cannot serve."""
    backend.require(name, dtypes)
    if max(dims) > MAX_DIM:
        raise NotImplementedError(
            f"{name} keeps the state on chip: head dimensions up to {MAX_DIM}, got {max(dims)}"
        )


def sizes(query: Array, key: Array, value: Array) -> Sizes:
    """The sizes of a call on unpadded ``[B, T, H, D]`` arrays."""
    batch, length, heads, dim = key.shape
    return Sizes(
        batch,
        length,
        heads,
        query.shape[2] // heads,
        backend.power_of_two(dim),
        backend.power_of_two(value.shape[-1]),
        dim,
    )


def _pad(x: Array | None, *widths: int) -> Array | None:
    """``x`` with its last axes padded with zeros to ``widths``."""
    if x is None or x.shape[x.ndim - len(widths) :] == widths:
        return x
    pads = [(0, 0)] * (x.ndim - len(widths))
    pads += [(0, w - n) for w, n in zip(widths, x.shape[-len(widths) :], strict=True)]
    return jnp.pad(x, pads)


def _launch(kernel, s: Sizes, inputs, outputs, params, *, name, aliases=None):
    out_shape = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    return backend.call(
        kernel,
        grid=(s.streams,),
        in_specs=backend.whole(*inputs),
        out_specs=backend.whole(*out_shape),
        out_shape=out_shape,
        num_warps=params["num_warps"],
        num_stages=params.get("num_stages", 1),
        name=name,
        input_output_aliases=aliases,
    )(*inputs)


# --- pieces of kernels -------------------------------------------------------------------------

_STRIP = 16


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _left(vector: Array, matrix: Array) -> Array:
    """``vectorᵀ matrix``."""
    return jnp.sum(vector[:, None] * matrix, axis=0)


def _right(matrix: Array, vector: Array) -> Array:
    """``matrix vector``."""
    return jnp.sum(matrix * vector[None, :], axis=1)


def _dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=0)


def _outer(x: Array, y: Array) -> Array:
    return x[:, None] * y[None, :]


def _scaled_identity(dim: int, scale) -> Array:
    return jnp.where(backend.iota((dim, dim), 0) == backend.iota((dim, dim), 1), scale, 0.0)


def _invert(matrix: Array, floor: Array, count: Array) -> Array:
    """``matrix⁻¹`` of a symmetric positive definite matrix: the sweep operator, pivot by pivot.

    ``floor`` is a lower bound of its eigenvalues and so of the pivots; ``count`` is how many pivots
    to sweep: all of them, or none where the matrix is known to be diagonal already.
    """
    dim = matrix.shape[0]
    rows, cols, index = (
        backend.iota(s, a) for s, a in (((dim, dim), 0), ((dim, dim), 1), ((dim,), 0))
    )

    def step(j, matrix):
        row = jnp.sum(jnp.where(rows == j, matrix, 0.0), axis=0)
        pivot = jnp.maximum(jnp.sum(jnp.where(index == j, row, 0.0), axis=0), floor)
        row = jnp.where(index == j, -1.0, row) * jax.lax.rsqrt(pivot)
        return jnp.where((rows == j) | (cols == j), 0.0, matrix) - _outer(row, row)

    swept = backend.loop(count, step, matrix)
    return jnp.where(count > 0, -swept, _scaled_identity(dim, 1 / floor))


def _derive(penalty: Array, lam: Array) -> Array:
    """``(λ₀ I + penalty)⁻¹``, at no cost where the penalty is zero."""
    dim = penalty.shape[0]
    largest = jnp.max(jnp.max(jnp.abs(penalty), axis=1), axis=0)
    count = jnp.where(largest > 0, np.int32(dim), np.int32(0))
    return _invert(penalty + _scaled_identity(dim, lam), lam, count)


def _update_inverse(inverse: Array, u: Array, x: Array) -> tuple[Array, Array]:
    """Sherman–Morrison, equation (1), and the product of the new inverse with ``x``.

    Both products are taken with the old inverse, side by side.
    """
    w, y = _left(u, inverse), _left(x, inverse)
    w = w * jax.lax.rsqrt(1 + _dot(u, w))
    return inverse - _outer(w, w), y - w * _dot(w, x)


def _gain(alpha: Array, unit_key: Array, write_gain: str) -> Array:
    """The scale of the write key, equation (3); 0 for an absent token."""
    if write_gain == "unit":
        return backend.inverse_norm(alpha)
    if write_gain == "projection":
        overlap = _dot(alpha, unit_key)
        present = overlap > 0
        return jnp.where(present, 1 / jnp.where(present, overlap, 1), 0)
    return jnp.float32(1)


class _Tokens:
    """Loads of the tokens of this program's head."""

    def __init__(self, s: Sizes, query, key, value, direction, segments):
        self.s, self.refs = s, (query, key, value, direction)
        self.batch, self.head, self.queries = s.locate()
        self.segments = segments

    def start(self, t) -> Array | None:
        """Whether the state restarts just before token ``t``; None if it never does."""
        if self.segments is None:
            return None
        previous = self.segments[self.batch, jnp.maximum(t - 1, 0)]
        return self.segments[self.batch, t] != previous

    def key(self, t) -> Array:
        return _wide(self.refs[1][self.batch, t, self.head, :])

    def value(self, t) -> Array:
        return _wide(self.refs[2][self.batch, t, self.head, :])

    def query(self, t, g) -> Array:
        return _wide(self.refs[0][self.batch, t, self.queries[g], :])

    def unit(self, t) -> tuple[Array, Array, Array]:
        """The key, the unit key and the inverse of the norm."""
        key = self.key(t)
        inverse_norm = backend.inverse_norm(key)
        return key, key * inverse_norm, inverse_norm

    def direction(self, t, unit_key: Array | None = None) -> Array:
        if self.refs[3] is not None:
            return _wide(self.refs[3][self.batch, t, self.head, :])
        unit_key = self.unit(t)[1] if unit_key is None else unit_key
        return unit_key * np.float32(self.s.true_dim**-0.5)


def _reset(start, fresh, carried):
    return carried if start is None else jnp.where(start, fresh, carried)


def _with_inverse(tokens: _Tokens, lam, penalty, body, carry, rederive_every: int, last: bool):
    """Runs ``inverse, carry = body(t, inverse, carry)`` over all tokens; returns the last carry.

    Args:
      penalty: reference to this head's penalty ``[D, D]``: the initial one; read and, where it is
        needed, advanced a block of ``rederive_every`` tokens at a time.
      body: gets the inverse before the token and returns the one after it.
      last: whether to leave the final penalty in ``penalty``.
    """
    length, dim = tokens.s.length, tokens.s.dim
    blocks = -(-length // rederive_every)

    def block(n, carry):
        first = n * rederive_every
        count = jnp.minimum(length - first, rederive_every)
        inverse = _derive(penalty[...], lam)

        def step(i, carry):
            inverse, carry = carry
            inverse = _reset(tokens.start(first + i), _scaled_identity(dim, 1 / lam), inverse)
            return body(first + i, inverse, carry)

        _, carry = backend.loop(count, step, (inverse, carry))
        if last or blocks > 1:

            def accumulate(i, penalty):
                u = tokens.direction(first + i)
                return _reset(tokens.start(first + i), 0.0, penalty) + _outer(u, u)

            penalty[...] = backend.loop(count, accumulate, penalty[...])
            backend.barrier()
        return carry

    return block(np.int32(0), carry) if blocks == 1 else backend.loop(blocks, block, carry)


# --- forward -----------------------------------------------------------------------------------


def _forward_kernel(*refs, s: Sizes, options: Options, given, rederive_every: int):
    refs = iter(refs)
    query, key, value, direction, segments = (next(refs) if g else None for g in given)
    lam, memory_in, _, key_sum_in = (next(refs) for _ in range(4))
    out, memory, penalty, key_sum, alphas, gains, residuals, weights = refs
    tokens = _Tokens(s, query, key, value, direction, segments)
    b, h = tokens.batch, tokens.head

    def solve(t, inverse, carry):
        _, unit_key, _ = tokens.unit(t)
        inverse, alpha = _update_inverse(inverse, tokens.direction(t, unit_key), unit_key)
        alphas[b, t, h, :] = alpha
        gains[b, t, h] = _gain(alpha, unit_key, options.write_gain)
        return inverse, carry

    _with_inverse(
        tokens, lam[b, h], penalty.at[b, h], solve, np.int32(0), rederive_every, last=True
    )
    backend.barrier()

    def write_and_read(t, carry):
        mem, z = (_reset(tokens.start(t), 0.0, x) for x in carry)
        k, unit_key, _ = tokens.unit(t)
        residual = tokens.value(t) - _left(unit_key, mem)
        mem = mem + _outer(alphas[b, t, h, :] * gains[b, t, h], residual)
        z = z + k
        residuals[b, t, h, :] = residual
        for g in range(s.groups):
            q = tokens.query(t, g)
            read, weight = _left(q, mem), _dot(q, z)
            if options.readout == "ratio":
                read = read / jnp.maximum(weight, options.eps)
            weights[b, t, tokens.queries[g]] = weight
            out[b, t, tokens.queries[g], :] = read.astype(out.dtype)
        return mem, z

    mem, z = backend.loop(s.length, write_and_read, (memory_in[b, h], key_sum_in[b, h]))
    memory[b, h] = mem
    key_sum[b, h] = z


def forward(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    lambda0: Array,
    memory: Array,
    penalty: Array,
    key_sum: Array,
    segment_ids: Array | None,
    *,
    write_gain: str,
    readout: str,
    eps: float,
    params: Mapping[str, Any] | None = None,
) -> tuple[Array, tuple[Array, Array, Array], Residuals]:
    """The recurrence, equations (1) to (5), forward.

    Args:
      query: ``[B, T, Hq, D]``; key, direction: ``[B, T, H, D]``; value: ``[B, T, H, E]``, any of
        float32, bfloat16, float16. ``direction=None`` means ``k̂ / √D``. Masks have been applied.
      lambda0: ``[B, H]`` float32.
      memory, penalty, key_sum: the initial state, float32, the penalty symmetric.
      segment_ids: int32 ``[B, T]`` or None.

    Returns:
      ``(out [B, T, Hq, E] in query's dtype, (memory, penalty, key_sum), residuals)``.
    """
    s = sizes(query, key, value)
    params = backend.parameters(NAME, max(s.dim, s.value_dim), params)
    dim, value_dim = key.shape[-1], value.shape[-1]
    out_dtype = query.dtype
    tokens = [_pad(x, s.dim) for x in (query, key)] + [_pad(value, s.value_dim)]
    tokens += [_pad(direction, s.dim), segment_ids]
    given = tuple(x is not None for x in tokens)
    state = [_pad(memory, s.dim, s.value_dim), _pad(penalty, s.dim, s.dim), _pad(key_sum, s.dim)]
    inputs = [x for x in tokens if x is not None] + [lambda0, *state]
    per_token = s.batch, s.length, s.heads
    outputs = [((s.batch, s.length, query.shape[2], s.value_dim), out_dtype)]
    outputs += [(x.shape, jnp.float32) for x in state]
    shapes = (*per_token, s.dim), per_token, (*per_token, s.value_dim), query.shape[:3]
    outputs += [(shape, jnp.float32) for shape in shapes]
    kernel = functools.partial(
        _forward_kernel,
        s=s,
        options=Options(write_gain, readout, eps),
        given=given,
        rederive_every=params["rederive_every"],
    )
    # The penalty is advanced in place.
    aliases = {len(inputs) - 2: 2}
    out, memory, penalty, key_sum, *saved = _launch(
        kernel, s, inputs, outputs, params, name=f"{NAME}_forward", aliases=aliases
    )
    state = memory[..., :dim, :value_dim], penalty[..., :dim, :dim], key_sum[..., :dim]
    return out[..., :value_dim], state, Residuals(*saved)


# --- backward ----------------------------------------------------------------------------------


def _backward_kernel(*refs, s: Sizes, options: Options, given, rederive_every: int):
    refs = iter(refs)
    query, key, value, direction, segments = (next(refs) if g else None for g in given)
    lam, memory_in, _, key_sum_in = (next(refs) for _ in range(4))
    alphas, gains, residuals, weights = (next(refs) for _ in range(4))
    d_out, d_memory_in, d_penalty_in, d_key_sum_in = (next(refs) for _ in range(4))
    d_query, d_key, d_value = (next(refs) for _ in range(3))
    d_direction = next(refs) if direction is not None else None
    d_lambda0, d_memory, d_penalty, d_key_sum = (next(refs) for _ in range(4))
    # Scratch in device memory: the running penalty, and per token the cotangents of the residual,
    # of α (then β), of k̂, of z·q, and the overlap of the write key with its cotangent.
    penalty, d_residuals, betas, d_units, d_weights, overlaps = refs
    tokens = _Tokens(s, query, key, value, direction, segments)
    b, h = tokens.batch, tokens.head
    lam = lam[b, h]
    ratio, last = options.readout == "ratio", s.length - 1

    def cotangent(t, g):
        """Of ``S q``, and the weight by which the ratio divides."""
        d = _wide(d_out[b, t, tokens.queries[g], :])
        if not ratio:
            return d, None
        weight = weights[b, t, tokens.queries[g]]
        return d / jnp.maximum(weight, options.eps), weight

    def first_sweep(i, d_mem):
        t = last - i
        _, unit_key, _ = tokens.unit(t)
        alpha, gain = alphas[b, t, h, :], gains[b, t, h]
        for g in range(s.groups):
            d_mem = d_mem + _outer(tokens.query(t, g), cotangent(t, g)[0])
        d_write = _right(d_mem, residuals[b, t, h, :])
        d_residual = _left(alpha * gain, d_mem)
        d_alpha, overlap = d_write, jnp.float32(0)
        if options.write_gain != "rls":
            overlap = _dot(d_write, alpha) * gain
            along = alpha * gain if options.write_gain == "unit" else unit_key
            d_alpha = gain * (d_write - overlap * along)
        d_value[b, t, h, :] = d_residual.astype(d_value.dtype)
        d_residuals[b, t, h, :] = d_residual
        betas[b, t, h, :] = d_alpha
        overlaps[b, t, h] = overlap
        return _reset(tokens.start(t), 0.0, d_mem - _outer(unit_key, d_residual))

    d_memory[b, h] = backend.loop(s.length, first_sweep, d_memory_in[b, h])
    backend.barrier()

    def second_sweep(t, inverse, d_lam):
        u = tokens.direction(t)
        inverse, beta = _update_inverse(inverse, u, betas[b, t, h, :])
        backend.barrier()
        betas[b, t, h, :] = beta
        return inverse, d_lam - _dot(alphas[b, t, h, :], beta)

    d_lambda0[b, h] = _with_inverse(
        tokens, lam, penalty.at[b, h], second_sweep, jnp.float32(0), rederive_every, last=False
    )
    backend.barrier()

    def third_sweep(t, carry):
        mem, z = (_reset(tokens.start(t), 0.0, x) for x in carry)
        write = alphas[b, t, h, :] * gains[b, t, h]
        d_unit = betas[b, t, h, :] - _right(mem, d_residuals[b, t, h, :])
        if options.write_gain == "projection":
            d_unit = d_unit - overlaps[b, t, h] * write
        d_units[b, t, h, :] = d_unit
        mem = mem + _outer(write, residuals[b, t, h, :])
        z = z + tokens.key(t)
        for g in range(s.groups):
            d_read, weight = cotangent(t, g)
            d_q = _right(mem, d_read)
            if ratio:
                d_weight = -_dot(tokens.query(t, g), d_q) / jnp.maximum(weight, options.eps)
                d_weight = jnp.where(weight > options.eps, d_weight, 0)
                d_weights[b, t, tokens.queries[g]] = d_weight
                d_q = d_q + d_weight * z
            d_query[b, t, tokens.queries[g], :] = d_q.astype(d_query.dtype)
        return mem, z

    backend.loop(s.length, third_sweep, (memory_in[b, h], key_sum_in[b, h]))
    backend.barrier()

    def fourth_sweep(i, carry):
        d_pen, d_z = carry
        t = last - i
        _, unit_key, inverse_norm = tokens.unit(t)
        alpha, beta, d_unit = alphas[b, t, h, :], betas[b, t, h, :], d_units[b, t, h, :]
        d_pen = d_pen - (_outer(alpha, beta) + _outer(beta, alpha))
        d_u = _left(tokens.direction(t, unit_key), d_pen)
        if d_direction is None:
            d_unit = d_unit + d_u * np.float32(s.true_dim**-0.5)
        else:
            d_direction[b, t, h, :] = d_u.astype(d_direction.dtype)
        if ratio:
            for g in range(s.groups):
                d_z = d_z + tokens.query(t, g) * d_weights[b, t, tokens.queries[g]]
        d_k = d_z + (d_unit - _dot(d_unit, unit_key) * unit_key) * inverse_norm
        d_key[b, t, h, :] = d_k.astype(d_key.dtype)
        start = tokens.start(t)
        return tuple(_reset(start, 0.0, x) for x in (d_pen, d_z))

    d_pen, d_z = backend.loop(s.length, fourth_sweep, (d_penalty_in[b, h], d_key_sum_in[b, h]))
    d_penalty[b, h] = d_pen * 0.5
    d_key_sum[b, h] = d_z


def backward(
    residuals: Residuals,
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    lambda0: Array,
    memory: Array,
    penalty: Array,
    key_sum: Array,
    segment_ids: Array | None,
    d_out: Array,
    d_memory: Array,
    d_penalty: Array,
    d_key_sum: Array,
    *,
    write_gain: str,
    readout: str,
    eps: float,
    params: Mapping[str, Any] | None = None,
) -> tuple[Array | None, ...]:
    """The cotangents of ``forward``'s arguments, in their order (without ``segment_ids``).

    Those of the tokens are in the tokens' dtypes, those of ``lambda0`` and the state in float32.
    """
    s = sizes(query, key, value)
    params = backend.parameters(NAME, max(s.dim, s.value_dim), params)
    dim, value_dim = key.shape[-1], value.shape[-1]
    tokens = [_pad(x, s.dim) for x in (query, key)] + [_pad(value, s.value_dim)]
    tokens += [_pad(direction, s.dim), segment_ids]
    given = tuple(x is not None for x in tokens)
    memory, d_memory = (_pad(x, s.dim, s.value_dim) for x in (memory, d_memory))
    d_penalty = d_penalty + jnp.swapaxes(d_penalty, -1, -2)
    penalty, d_penalty = (_pad(x, s.dim, s.dim) for x in (penalty, d_penalty))
    key_sum, d_key_sum = (_pad(x, s.dim) for x in (key_sum, d_key_sum))
    inputs = [x for x in tokens if x is not None] + [lambda0, memory, penalty, key_sum]
    place = len(inputs) - 2
    inputs += [*residuals, _pad(d_out, s.value_dim), d_memory, d_penalty, d_key_sum]
    outputs = [(x.shape, x.dtype) for x in tokens[:4] if x is not None]
    outputs += [(x.shape, jnp.float32) for x in (lambda0, memory, penalty, key_sum)]
    aliases = {place: len(outputs)}
    scratch = penalty, residuals.residual, residuals.alpha, residuals.alpha
    scratch += residuals.weight, residuals.gain
    outputs += [(x.shape, jnp.float32) for x in scratch]
    kernel = functools.partial(
        _backward_kernel,
        s=s,
        options=Options(write_gain, readout, eps),
        given=given,
        rederive_every=params["rederive_every"],
    )
    d_query, d_key, d_value, *rest = _launch(
        kernel, s, inputs, outputs, params, name=f"{NAME}_backward", aliases=aliases
    )
    d_direction = None if direction is None else rest.pop(0)[..., :dim]
    d_lambda0, d_memory, d_penalty, d_key_sum = rest[:4]
    return (
        d_query[..., :dim],
        d_key[..., :dim],
        d_value[..., :value_dim],
        d_direction,
        d_lambda0,
        d_memory[..., :dim, :value_dim],
        d_penalty[..., :dim, :dim],
        d_key_sum[..., :dim],
    )


# --- joined ------------------------------------------------------------------------------------


def attention_forward(*args, policy: Any = None, variant: Any, kernel: Callable = forward):
    """``((out, memory, penalty, key_sum), residuals)`` of the whole of ``vla_attention``.

    Args:
      *args: as ``forward``'s.
      policy: not read: every product is in float32.
      variant: ``write_gain``, ``readout`` and ``eps``.
      kernel: a function with the signature of ``forward``, the default.
    """
    del policy
    options = {n: getattr(variant, n) for n in Options._fields}
    out, state, saved = backend.fold_batch(functools.partial(kernel, **options))(*args)
    return (out, *state), (args, saved)


def attention_backward(
    residuals, cotangents, *, policy: Any = None, variant: Any, kernel: Callable = backward
):
    """Cotangents of the first eight arguments of ``attention_forward``."""
    del policy
    options = {n: getattr(variant, n) for n in Options._fields}
    args, saved = residuals
    return backend.fold_batch(functools.partial(kernel, **options))(saved, *args, *cotangents)


# --- decoding ----------------------------------------------------------------------------------


def _misfit(row: Callable, lam, inverse: Array) -> Array:
    """Largest entry of ``I − (λ₀ I + penalty) inverse``; infinite where it is not a number."""
    dim = inverse.shape[0]

    def step(i, largest):
        here = backend.iota((dim,), 0) == i
        product = _left(row(i) + jnp.where(here, lam, 0.0), inverse)
        rest = jnp.abs(jnp.where(here, 1.0, 0.0) - product)
        return jnp.maximum(largest, jnp.max(jnp.where(rest < np.inf, rest, np.inf), axis=0))

    return backend.loop(dim, step, jnp.float32(0))


def _refresh_kernel(lam, *refs, s: Sizes, rederive_every: int):
    """Derives the inverse where there is none, or where it is due and the derived one is better.

    In place. Nearly always there is nothing to do: a launch of its own keeps the registers that
    this takes out of the step.
    """
    penalty, inverse, inverse_lambda0, age = refs[4:]
    b, h, _ = s.locate()
    lam = lam[b, h]
    absent = inverse_lambda0[b, h] != lam
    due = absent | (age[b, h] >= rederive_every)
    backend.barrier()  # every thread has read them

    @pl.when(absent)
    def _():
        def symmetrize(i, carry):  # in strips, to need few registers; the inverse is free to use
            strip = pl.ds(i * _STRIP, _STRIP)
            inverse[b, h, strip, :] = (penalty[b, h, strip, :] + penalty[b, h, :, strip].T) * 0.5
            return carry

        backend.loop(s.dim // _STRIP, symmetrize, np.int32(0))
        backend.barrier()
        penalty[b, h] = inverse[b, h]
        backend.barrier()

    @pl.when(due)
    def _():
        misfit = functools.partial(_misfit, lambda i: penalty[b, h, i, :], lam)
        carried = misfit(inverse[b, h])
        derived = _derive(penalty[b, h], lam)
        better = absent | (2 * misfit(derived) < carried)

        @pl.when(better)
        def _():
            inverse[b, h] = derived

        backend.barrier()
        inverse_lambda0[b, h] = lam
        age[b, h] = jnp.float32(0)


def _step_kernel(*refs, s: Sizes, options: Options, learned: bool, compensated: bool):
    """One token of one head: every element of the state is read once and written once.

    The state is updated in place, so only the output references are used.
    """
    query, key, value, *rest = refs
    direction = rest.pop(0) if learned else None
    out, memory, penalty, key_sum, inverse, age, *rest = rest[6 if compensated else 5 :]
    b, h, queries = s.locate()
    k = _wide(key[b, h, :])
    unit_key = k * backend.inverse_norm(k)
    u = unit_key * np.float32(s.true_dim**-0.5) if direction is None else _wide(direction[b, h, :])
    a, alpha = _update_inverse(inverse[b, h], u, unit_key)
    inverse[b, h] = a
    write = alpha * _gain(alpha, unit_key, options.write_gain)
    mem = memory[b, h]
    mem = mem + _outer(write, _wide(value[b, h, :]) - _left(unit_key, mem))
    memory[b, h] = mem
    z = key_sum[b, h] + k
    for g in queries:
        q = _wide(query[b, g, :])
        read = _left(q, mem)
        if options.readout == "ratio":
            read = read / jnp.maximum(_dot(q, z), options.eps)
        out[b, g, :] = read.astype(out.dtype)
    age_now = age[b, h]
    backend.barrier()  # every thread has read the key sum and the age by now
    added = _outer(u, u)
    if compensated:  # what this addition rounds away is added with the next one
        added = added + rest[0][b, h]
    before = penalty[b, h]
    after = before + added
    penalty[b, h] = after
    if compensated:
        rest[0][b, h] = added - (after - before)
    key_sum[b, h] = z
    age[b, h] = age_now + 1


def step(
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    lambda0: Array,
    state: VLAState,
    *,
    write_gain: str,
    readout: str,
    eps: float,
    params: Mapping[str, Any] | None = None,
) -> tuple[Array, VLAState]:
    """One token, forward only, with the state updated in place where XLA can give it away.

    Args:
      query: ``[B, Hq, D]``; key, direction: ``[B, H, D]``; value: ``[B, H, E]``: any of float32,
        bfloat16, float16. ``direction=None`` means ``k̂ / √D``.
      lambda0: ``[H]`` float32.
      state: float32, with its cache (only ``penalty_rest`` may be None). Where the cache does not
        hold for ``lambda0``, or is due to be compared with the penalty, a launch before the step's
        derives the inverse.

    Returns:
      ``(out [B, Hq, E] in query's dtype, the new state)``.

    Raises:
      NotImplementedError: if the kernel cannot serve these arrays here.
    """
    arrays = jax.tree.leaves((query, key, value, direction, state))
    require("vla_decode", tuple(x.dtype for x in arrays), (key.shape[-1], value.shape[-1]))
    run = functools.partial(
        _step, options=Options(write_gain, readout, eps), params=dict(params or {})
    )
    lambda0 = jnp.broadcast_to(lambda0, key.shape[:2])
    return backend.fold_batch(run)(query, key, value, direction, lambda0, state)


def _step(query, key, value, direction, lambda0, state, *, options, params):
    dim, value_dim = key.shape[-1], value.shape[-1]
    s = sizes(query[:, None], key[:, None], value[:, None])
    params = backend.parameters("vla_decode", max(s.dim, s.value_dim), params)
    tokens = [_pad(x, s.dim) for x in (query, key)] + [_pad(value, s.value_dim)]
    tokens += [] if direction is None else [_pad(direction, s.dim)]
    memory = _pad(state.memory, s.dim, s.value_dim)
    rest = [] if state.penalty_rest is None else [_pad(state.penalty_rest, s.dim, s.dim)]
    cache = [_pad(x, s.dim, s.dim) for x in (state.penalty, state.inverse)]
    cache += [state.inverse_lambda0, state.inverse_age]
    rederive = functools.partial(_refresh_kernel, s=s, rederive_every=params["rederive_every"])
    penalty, inverse, inverse_lambda0, age = _launch(
        rederive, s, [lambda0, *cache], [(x.shape, x.dtype) for x in cache],
        {"num_warps": max(4, s.dim // 8)}, name="vla_decode_refresh",
        aliases={1 + i: i for i in range(len(cache))},
    )  # fmt: skip
    fields = [memory, penalty, _pad(state.key_sum, s.dim), inverse, age, *rest]
    inputs = [*tokens, *fields]
    outputs = [((*query.shape[:2], s.value_dim), query.dtype)]
    outputs += [(x.shape, x.dtype) for x in fields]
    kernel = functools.partial(
        _step_kernel,
        s=s,
        options=options,
        learned=direction is not None,
        compensated=bool(rest),
    )
    out, memory, penalty, key_sum, inverse, age, *rest = _launch(
        kernel, s, inputs, outputs, params, name="vla_decode_step",
        aliases={len(tokens) + i: 1 + i for i in range(len(fields))},
    )  # fmt: skip
    new = VLAState(
        memory=memory[..., :dim, :value_dim],
        penalty=penalty[..., :dim, :dim],
        key_sum=key_sum[..., :dim],
        inverse=inverse[..., :dim, :dim],
        inverse_lambda0=inverse_lambda0,
        inverse_age=age,
        penalty_rest=rest[0][..., :dim, :dim] if rest else None,
    )
    return out[..., :value_dim], new
