"""The only file that knows the Triton back end of Pallas: launches, and what kernels are made of.

From JAX 0.11 on, its lowering warns that this back end is deprecated. The warning is JAX's own, and
raised where no code of ours is on the stack; Python's default filters hide it, ``-W error`` and
pytest do not (filter: ``ignore:The Pallas Triton backend:DeprecationWarning``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax import numerics
from vla_jax.pallas import common
from vla_jax.types import Array, DTypeLike

TINY = 2.0**-126  # the smallest normal float32

# --- calling -----------------------------------------------------------------------------------


def call(
    kernel: Callable,
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int = 1,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> list[Array]:
    """One launch, or a run of the interpreter: the arrays of ``outputs``, written by ``kernel``.

    The kernel gets a reference to every whole array, inputs first, and indexes them itself. Outputs
    vary over the mesh axes of a ``shard_map`` over which any input does.

    Args:
      name: what profilers show.
      aliases: ``{input: output}`` by position: pairs that share their memory.

    Raises:
      NotImplementedError: for a grid or an array that is too large, before the launch.
    """
    kernel.__name__ = name
    common.check_elements(name, (inputs, outputs))
    if len(grid) > 3 or max(grid[1:], default=1) > 65535:
        raise NotImplementedError(f"{name}: grid {grid} does not fit a launch")
    axes = numerics.varying_axes(inputs)
    kind = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[_whole(x) for x in inputs],
        out_specs=[_whole(x) for x in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, **kind) for x in outputs],
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=common.interpret(),
        name=name,
    )(*numerics.varying_alike(inputs))


def _whole(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


# --- inside kernels ----------------------------------------------------------------------------


def dot_mode(dtype: DTypeLike, precision=None, *, wide: bool) -> str:
    """The ``mode`` of ``dot`` for inputs of ``dtype``.

    ``wide`` is for operands held in float32 whatever the inputs are (the solve); otherwise 16-bit
    inputs multiply as they are. float32 inputs, and ``precision="highest"``, get products that are
    accurate to float32.
    """
    if isinstance(precision, tuple):
        precision = max(precision, key=lambda p: _precision(p).value)
    if jnp.dtype(dtype) == jnp.float32:
        asked = jax.lax.Precision.HIGHEST if precision is None else _precision(precision)
        return "tf32" if asked == jax.lax.Precision.DEFAULT else "tf32x3"
    if precision is not None and _precision(precision) == jax.lax.Precision.HIGHEST:
        return "tf32x3"
    return "tf32" if wide else "input"


def _precision(name) -> jax.lax.Precision:
    return jax.lax.Precision(name) if not isinstance(name, jax.lax.Precision) else name


def dot(a, b, *, mode: str, trans_a: bool = False, trans_b: bool = False) -> Array:
    """``a @ b`` accumulated in float32; sides are powers of two, at least 16.

    An operand may be a tuple: of one array, or with ``"bf16x3"`` of two that are its terms.

    Modes: ``"tf32"`` one pass on operands of 11 bits, ``"tf32x3"`` three passes, accurate to
    float32, ``"bf16x3"`` float32 operands split in two bfloat16 ones, 16 bits, whose products cost
    less than twice ``"tf32"`` (an operand that is bfloat16 is exact and takes one pass less),
    ``"input"`` operands as they are (of one dtype; float32 operands mean ``"tf32x3"``).
    """
    precision: jax.lax.Precision | jax.lax.DotAlgorithmPreset | None
    if mode == "bf16x3":
        (a, *a_low), (b, *b_low) = _bfloat16_terms(a), _bfloat16_terms(b)
        pairs = [*((x, b) for x in a_low), *((a, x) for x in b_low), (a, b)]
        passes = [dot(*pair, mode="input", trans_a=trans_a, trans_b=trans_b) for pair in pairs]
        return sum(passes[1:], passes[0])
    a, b = (x[0] if isinstance(x, tuple) else x for x in (a, b))
    if mode == "input" and a.dtype == b.dtype and a.dtype.itemsize == 2:
        precision = None
    else:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if common.interpret():
            precision = jax.lax.Precision.HIGHEST
        elif mode == "tf32":
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
        else:
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    contract = (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ()))
    return jax.lax.dot_general(
        a, b, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _bfloat16_terms(x: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """``x`` as a sum of bfloat16 arrays, the largest first."""
    if isinstance(x, tuple) and len(x) > 1:
        return x
    (x,) = x if isinstance(x, tuple) else (x,)
    if x.dtype == jnp.bfloat16:
        return (x,)
    x = x.astype(jnp.float32)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def loop(count, body: Callable, init):
    """``fori_loop`` from 0 to ``count`` whose counter is int32 under any JAX configuration."""
    count = np.int32(count) if isinstance(count, int) else count.astype(jnp.int32)
    return jax.lax.fori_loop(np.int32(0), count, body, init)


def unrolled_loop(count: int, body: Callable, init):
    """A loop unrolled in a kernel, where constant indices fold; rolled in the interpreter."""
    if common.interpret():
        return loop(count, body, init)
    for i in range(count):
        init = body(i, init)
    return init


def unit_scale(x: Array, *, keepdims: bool = True) -> tuple[Array, Array]:
    """``(p, r)`` with ``x·p·r`` of unit length along the last axis, or zero where ``x`` is.

    ``p`` scales the largest entry to one, so that no square overflows or vanishes.
    """
    last = x.ndim - 1
    peak = jnp.max(jnp.abs(x), axis=last, keepdims=keepdims)
    scale = 1 / jnp.maximum(peak, TINY)
    scaled = x * (scale if keepdims or not last else scale[:, None])
    square = jnp.sum(scaled * scaled, axis=last, keepdims=keepdims)
    present = peak > 0
    return scale, jnp.where(present, jax.lax.rsqrt(jnp.where(present, square, 1)), 0)


def inverse_norm(x: Array) -> Array:
    """``1 / ‖x‖`` along the last axis, 0 where ``x`` is zero; finite, whatever ``x`` is."""
    scale, inverse = unit_scale(x, keepdims=False)
    return jnp.minimum(scale * inverse, 1 / TINY)


def store(ref, index: tuple, value: Array, *, mask: Array) -> None:
    """``ref[index] = value`` where ``mask`` holds; the rest of ``ref`` is not touched."""
    if common.interpret():
        ref[index] = jnp.where(mask, value, ref[index])
    else:
        plt.store(ref.at[index], value, mask=mask)


def barrier() -> None:
    """What the program's threads wrote to device memory before is read after by all of them."""
    if not common.interpret():
        plt.debug_barrier()


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """int32 indices along ``axis``."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
