"""``delta_rule``, forward and backward (``docs/derivation.md``, sections 3 and 4): the launches.

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
Inside this file D and E are padded with zeros to powers of two, and T to whole chunks. The kernels
are in ``delta_kernels.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import numerics
from vla_jax.bundles import Delta
from vla_jax.pallas import common
from vla_jax.pallas.triton import backend
from vla_jax.pallas.triton import delta_kernels as kernels
from vla_jax.pallas.triton.delta_kernels import BLOCK, Config, Shape
from vla_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Sizes of tiles and of launches; ``*_warps`` and ``*_stages`` are the compiler's."""

    chunk: int = 64
    solve_slab: int = 128  # columns of a product at a time, where it can be cut
    solve_warps: int = 2
    unroll: bool | None = None  # the substitution; None: where it is compiled
    sweep_width: int = 64  # columns of the state that one program carries
    sweep_warps: int = 4
    sweep_stages: int = 2
    read_width: int = 128  # columns of the output that one program writes
    read_warps: int = 4
    pull_width: int = 128
    pull_slab: int = 64
    pull_warps: int = 4
    grads_width: int = 64
    grads_slab: int = 128
    grads_warps: int = 4
    fill: int = 512  # programs of the sweep that fill the device
    min_span: int = 16  # fewest chunks of a super-chunk


# {largest D or E: parameters}, where operands are bfloat16 and where they are float32. Measured on
# an H200. Slower there: one or four warps for the solve, eight anywhere else, narrower tiles.
TABLE = {
    64: Parameters(sweep_stages=3),
    128: Parameters(),
    256: Parameters(solve_slab=64, sweep_width=32, sweep_stages=1, grads_slab=64),
}
TABLE_FLOAT32 = {
    64: Parameters(),
    128: Parameters(),
    256: dataclasses.replace(TABLE[256], chunk=32, read_width=64, pull_width=64),
}


class Options(NamedTuple):
    """Static choices of a call.

    Attributes:
      normalize_key: whether keys are to be scaled to unit length.
      readout: ``"ratio"`` divides by ``max(z·q, eps)``, ``z`` the running sum of the keys as given;
        it needs ``normalize_key``.
      eps: the floor.
      precision: a ``jax.lax`` precision; ``HIGHEST`` means float32-accurate products.
      solve_rest: whether the triangular solve takes ``Extra.write_rest`` too: writes that are not
        of unit length can correct one another many times within a chunk.
      params: None for those of the table.
    """

    normalize_key: bool = False
    readout: str = "none"
    eps: float = 1e-6
    precision: Any = None
    solve_rest: bool = False
    params: Parameters | None = None


class Extra(NamedTuple):
    """Arrays beside those of ``delta_rule``.

    Attributes:
      key_sum: ``[B, H, D]``, the initial one, for the ratio; None is zeros.
      write_rest: ``[B, T, H, D]``, what rounding took from ``write_key``, or None. The rounding of
        a write points anywhere, and what later keys seldom reach adds up.
    """

    key_sum: Array | None = None
    write_rest: Array | None = None


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs, padded."""

    inverse: Array  # Tm, [B·H, N, C, C]
    norm: Array | None  # 1 / ‖key‖, [B·H, T]
    residual: Array  # E, [B·H, T, E]
    starts: Array  # S at chunk starts, [B·H, N, D, E]
    out: Array | None  # [B, T, Hq, E], unpadded; for the ratio, like the rest below
    weight: Array | None  # z·q, [B·Hq, T]
    key_sums: Array | None  # z at chunk starts, [B·H, N, D]


class Swept(NamedTuple):
    """What ``forward`` returns."""

    out: Array  # [B, T, Hq, E] in the dtype of the query
    memory: Array  # [B, H, D, E] float32
    key_sum: Array | None  # [B, H, D] float32, None without the ratio
    residuals: Residuals


class Cotangents(NamedTuple):
    """Those of ``out``, ``memory`` and, for the ratio, ``key_sum``."""

    out: Array
    memory: Array
    key_sum: Array | None = None


class Gradients(NamedTuple):
    """What ``backward`` returns.

    Attributes:
      inputs: the one of ``key`` is that of the unit key where keys are normalised; the one of
        ``write_key`` is float32 whatever that is: the solve takes it on from here.
      raw_key: what the ratio adds for the key as given; None without it.
      key_sum: of the initial one; None without the ratio.
    """

    inputs: Delta
    raw_key: Array | None
    key_sum: Array | None


def super_chunks(streams: int, blocks: int, chunks: int, params: Parameters) -> int:
    """In how many super-chunks the sweep is cut: one, unless programs are far too few.

    Cutting costs two further sweeps (of F and of G), so it pays from eight super-chunks on.
    """
    count = min(params.fill // (streams * blocks), chunks // params.min_span)
    return 1 << (count.bit_length() - 1) if count >= 8 else 1


# --- one call ----------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Static sizes and choices of a call, and how its arrays are padded."""

    shape: Shape
    config: Config
    params: Parameters
    length: int
    dim: int
    value_dim: int

    def tokens(self, x: Array | None, dim: int) -> Array | None:
        """``[B, T, *, D]`` with T and D padded with zeros."""
        return None if x is None else _pad(x, 1, self.shape.length, dim)

    def segments(self, ids: Array | None) -> Array | None:
        """int32 ``[B, T]``, padded with the last one."""
        if ids is None:
            return None
        return _pad(ids.astype(jnp.int32), 1, self.shape.length, mode="edge")

    def inputs(self, x: Delta) -> Delta:
        """The inputs padded; ``memory [B·H, D, E]``."""
        s = self.shape
        query, key, write_key = (self.tokens(y, s.dim) for y in (x.query, x.key, x.write_key))
        value, memory = self.tokens(x.value, s.value_dim), self.state(x.memory)
        return Delta(query, key, write_key, value, memory, self.segments(x.segment_ids))

    def state(self, x: Array) -> Array:
        """``[B, H, D, E]`` as ``[B·H, D, E]`` float32, padded."""
        x = x.astype(jnp.float32).reshape(self.shape.streams, *x.shape[2:])
        return _pad(_pad(x, 1, self.shape.dim), 2, self.shape.value_dim)

    def unstate(self, x: Array) -> Array:
        x = x[:, : self.dim, : self.value_dim]
        return x.reshape(self.shape.batch, self.shape.heads, *x.shape[1:])

    def sum(self, x: Array | None) -> Array | None:
        """``[B, H, D]`` as ``[B·H, D]`` float32, padded; None without the ratio."""
        s = self.shape
        if not self.config.ratio:
            return None
        if x is None:
            return jnp.zeros((s.streams, s.dim), jnp.float32)
        return _pad(x.astype(jnp.float32).reshape(s.streams, -1), 1, s.dim)

    def unsum(self, x: Array | None) -> Array | None:
        if x is None:
            return None
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


def _call(inputs: Delta, options: Options) -> _Call:
    if options.readout == "ratio" and not options.normalize_key:
        raise ValueError("readout='ratio' sums the raw keys: it needs normalize_key=True")
    query, key, write_key, value, *_ = inputs
    dim, value_dim = key.shape[-1], value.shape[-1]
    dtypes = {jnp.dtype(x.dtype) for x in (query, key, write_key, value)}
    wide = jnp.float32 if len(dtypes) > 1 else dtypes.pop()
    mode = backend.dot_mode(wide, options.precision, wide=False)
    # float16 has too few exponents for cotangents; tf32 has its precision and those of float32.
    work = jnp.bfloat16 if mode == "input" and wide == jnp.bfloat16 else jnp.float32
    if work == jnp.float32 and mode == "input":
        mode = "tf32"
    table = TABLE_FLOAT32 if work == jnp.float32 else TABLE
    params = options.params or common.parameters(table, max(dim, value_dim))
    batch, length, heads, _ = key.shape
    chunk = min(params.chunk, common.power_of_two(length))
    shape = Shape(
        batch,
        -(-length // chunk) * chunk,
        heads,
        query.shape[2] // heads,
        common.power_of_two(dim),
        common.power_of_two(value_dim),
        chunk,
    )
    config = Config(
        options.normalize_key,
        options.readout == "ratio",
        options.eps,
        work,
        mode,
        "tf32" if mode == "input" else mode,
    )
    return _Call(shape, config, params, length, dim, value_dim)


# --- launches ----------------------------------------------------------------------------------


def _launch(
    body: Callable,
    inputs: Mapping[str, Array | None],
    outputs: Mapping[str, Any],
    **launch: Any,
) -> dict[str, Array]:
    """Runs ``body`` with a dictionary of references: inputs that are not None, and outputs."""
    inputs = {n: x for n, x in inputs.items() if x is not None}
    shapes = {n: jax.ShapeDtypeStruct(*x) for n, x in outputs.items() if x is not None}

    def kernel(*refs):
        body(dict(zip([*inputs, *shapes], refs, strict=True)))

    values = backend.call(kernel, list(inputs.values()), list(shapes.values()), **launch)
    return dict(zip(shapes, values, strict=True))


def _solve(call: _Call, inputs: Delta, write_rest: Array | None) -> dict[str, Array]:
    s, c, params = call.shape, call.config, call.params
    per_chunk = s.streams, s.chunks
    f32 = jnp.float32
    unroll = not common.interpret() if params.unroll is None else params.unroll
    return _launch(
        functools.partial(kernels.solve, s=s, c=c, slab=params.solve_slab, unroll=unroll),
        dict(
            key=inputs.key,
            write_key=inputs.write_key,
            write_rest=write_rest,
            value=inputs.value,
            segments=inputs.segment_ids,
        ),
        dict(
            inverse=((*per_chunk, s.chunk, s.chunk), c.work),
            half=((*per_chunk, s.chunk // BLOCK, BLOCK, BLOCK), f32),
            norm=((s.streams, s.length), f32) if c.normalize else None,
            t_key=((s.streams, s.length, s.dim), c.work),
            t_value=((s.streams, s.length, s.value_dim), c.work),
            key_sums=((*per_chunk, s.dim), f32) if c.ratio else None,
        ),
        grid=per_chunk,
        warps=params.solve_warps,
        name="vla_delta_solve",
    )


def _sweep(call: _Call, arrays, *, reverse, segments, initial, initial_sum) -> dict[str, Any]:
    """The sweep with its outputs; cut in super-chunks where ``super_chunks`` says so."""
    s, c, params = call.shape, call.config, call.params
    width = min(s.value_dim, params.sweep_width)
    blocks = s.value_dim // width
    supers = super_chunks(s.streams, blocks, s.chunks, params)
    span = -(-s.chunks // supers)
    supers = -(-s.chunks // span)
    state = (s.streams, supers, s.dim, s.value_dim), jnp.float32
    sums = initial_sum is not None
    total = ((s.streams, supers, s.dim), jnp.float32) if sums else None

    def launch(inputs, outputs, width, blocks):
        return _launch(
            functools.partial(kernels.sweep, s=s, c=c, width=width, span=span, reverse=reverse),
            dict(inputs, segments=segments),
            outputs,
            grid=(s.streams, supers, blocks),
            warps=params.sweep_warps,
            stages=params.sweep_stages,
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
        map_width = min(s.dim, params.sweep_width)
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


def _compose(f, g, initial, reverse):
    """States where each super-chunk starts, from the maps ``S ↦ f S + g`` of all of them."""
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    if reverse:
        f, g = f[:, ::-1], g[:, ::-1]
    compose = functools.partial(numerics.compose, dot=dot)
    f, g = jax.lax.associative_scan(compose, (f[:, :-1], g[:, :-1]), axis=1)
    after = dot(f, initial[:, None]) + g
    states = jnp.concatenate([initial[:, None], after], axis=1)
    return states[:, ::-1] if reverse else states


def _compose_sums(s: Shape, span, terms, initial, segments, reverse):
    """The key sum where each super-chunk starts."""
    keep = jnp.ones(terms.shape[:2], jnp.float32)
    if segments is not None:
        low = np.arange(terms.shape[1]) * span * s.chunk
        high = np.minimum(low + span * s.chunk, s.length) - 1
        keep = segments[:, high] == segments[:, np.maximum(low - 1, 0)]
        keep = jnp.repeat(keep.astype(jnp.float32), s.heads, axis=0)
    return _compose(keep[..., None, None], terms[..., None, :], initial[:, None], reverse)[:, :, 0]


def _read(call: _Call, inputs: Delta, swept: dict[str, Any], dtype) -> dict[str, Array]:
    s, c, params = call.shape, call.config, call.params
    width = min(s.value_dim, params.read_width)
    query_streams = s.streams * s.groups
    shape = s.batch, s.length, s.heads * s.groups, s.value_dim
    return _launch(
        functools.partial(kernels.read, s=s, c=c, width=width),
        dict(
            query=inputs.query,
            key=inputs.key if c.ratio else None,
            write_key=inputs.write_key,
            segments=inputs.segment_ids,
            starts=swept["starts"],
            residual=swept["residual"],
            key_sums=swept.get("sum_starts"),
        ),
        dict(
            out=(shape, dtype),
            weight=((query_streams, s.length), jnp.float32) if c.ratio else None,
        ),
        grid=(query_streams, s.chunks, s.value_dim // width),
        warps=params.read_warps,
        name="vla_delta_read",
    )


def _pull(call: _Call, inputs: Mapping[str, Array | None]) -> dict[str, Array]:
    s, c, params = call.shape, call.config, call.params
    width = min(s.value_dim, params.pull_width)
    per_chunk = s.streams, s.chunks
    ratio = c.ratio
    return _launch(
        functools.partial(kernels.pull, s=s, c=c, width=width, slab=params.pull_slab),
        inputs,
        dict(
            pull=((s.streams, s.length, s.value_dim), c.work),
            t_write=((s.streams, s.length, s.dim), c.work),
            outer=((*per_chunk, s.dim, s.value_dim), c.work),
            d_weight=((s.streams * s.groups, s.length), jnp.float32) if ratio else None,
            d_key_sums=((*per_chunk, s.dim), jnp.float32) if ratio else None,
        ),
        grid=(*per_chunk, s.value_dim // width),
        warps=params.pull_warps,
        name="vla_delta_pull",
    )


def _grads(call: _Call, inputs: Delta, arrays: dict[str, Any]) -> dict[str, Array]:
    s, c, params = call.shape, call.config, call.params
    width = min(s.dim, params.grads_width)
    query, key, write_key = inputs.query, inputs.key, inputs.write_key
    tokens = dict(query=query, key=key, write_key=write_key, segments=inputs.segment_ids)
    return _launch(
        functools.partial(kernels.grads, s=s, c=c, width=width, slab=params.grads_slab),
        tokens | arrays,
        dict(
            d_query=(query.shape, query.dtype),
            d_key=(key.shape, key.dtype),
            d_write_key=(write_key.shape, jnp.float32),
            d_raw_key=(key.shape, key.dtype) if c.ratio else None,
        ),
        grid=(s.streams, s.chunks, s.dim // width),
        warps=params.grads_warps,
        name="vla_delta_grads",
    )


# --- the primitive -----------------------------------------------------------------------------


def forward(inputs: Delta, options: Options, extra: Extra) -> Swept:
    """``S ← S + a (v − Sᵀ k)ᵀ``, ``o = Sᵀ q`` over tokens; equations (10) to (13)."""
    call = _call(inputs, options)
    dtype = inputs.query.dtype
    inputs = call.inputs(inputs)
    rest = call.tokens(extra.write_rest, call.shape.dim)
    solved = _solve(call, inputs, rest if options.solve_rest else None)
    swept = _sweep(
        call,
        dict(
            left=inputs.write_key,
            left_rest=rest,
            right=solved["t_key"],
            inner=solved["t_value"],
            key_sums=solved.get("key_sums"),
        ),
        reverse=False,
        segments=inputs.segment_ids,
        initial=inputs.memory,
        initial_sum=call.sum(extra.key_sum),
    )
    read = _read(call, inputs, swept, dtype)
    out = call.cut(read["out"], call.value_dim)
    residuals = Residuals(
        solved["inverse"],
        solved.get("norm"),
        swept["residual"],
        swept["starts"],
        out if call.config.ratio else None,
        read.get("weight"),
        swept.get("sum_starts"),
    )
    return Swept(out, call.unstate(swept["final"]), call.unsum(swept["final_sum"]), residuals)


def backward(
    inputs: Delta,
    residuals: Residuals,
    cotangents: Cotangents,
    options: Options,
    extra: Extra,
) -> Gradients:
    """Cotangents from those of the outputs; equations (17) to (21).

    ``options`` and ``extra`` are those that ``forward`` got.
    """
    call = _call(inputs, options)
    s = call.shape
    value_dtype = inputs.value.dtype
    inputs = call.inputs(inputs)
    d_out, out = (call.tokens(x, s.value_dim) for x in (cotangents.out, residuals.out))
    pulled = _pull(
        call,
        dict(
            query=inputs.query,
            write_key=inputs.write_key,
            write_rest=call.tokens(extra.write_rest, s.dim),
            d_out=d_out,
            out=out,
            weight=residuals.weight,
            inverse=residuals.inverse,
            segments=inputs.segment_ids,
        ),
    )
    swept = _sweep(
        call,
        dict(
            left=inputs.key,
            right=pulled["t_write"],
            inner=pulled["pull"],
            outer=pulled["outer"],
            norm=residuals.norm,
            key_sums=pulled.get("d_key_sums"),
        ),
        reverse=True,
        segments=inputs.segment_ids,
        initial=call.state(cotangents.memory),
        initial_sum=call.sum(cotangents.key_sum),
    )
    grads = _grads(
        call,
        inputs,
        dict(
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
        ),
    )
    d_raw_key = grads.get("d_raw_key")
    d_inputs = Delta(
        call.cut(grads["d_query"], call.dim),
        call.cut(grads["d_key"], call.dim),
        call.cut(grads["d_write_key"], call.dim),
        call.cut(swept["d_value"], call.value_dim).astype(value_dtype),
        call.unstate(swept["final"]),
    )
    return Gradients(
        d_inputs,
        None if d_raw_key is None else call.cut(d_raw_key, call.dim),
        call.unsum(swept["final_sum"]),
    )
