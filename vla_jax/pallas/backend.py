"""The only file that knows Pallas back ends, compiler parameters, devices and versions of JAX.

Kernels are lowered through Triton. ``VLA_JAX_PALLAS_INTERPRET=1`` in the environment runs them as
ordinary XLA operations on any device: slow, for tests.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from vla_jax import numerics
from vla_jax.types import Array, DTypeLike

INTERPRET = "VLA_JAX_PALLAS_INTERPRET"
MIN_COMPUTE_CAPABILITY = 8.0
MAX_DIM = 256
MAX_ELEMENTS = 2**31  # kernels index with 32 bits
# Of Pallas through Triton and of jax-triton.
_CUSTOM_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "triton_kernel_call_ffi")
TINY = 2.0**-126  # the smallest normal float32

# Tile sizes and launch parameters: (device kind or None for any, primitive, largest D it is for).
# The entry with the smallest sufficient D is used; ``params=`` of a primitive overrides it.
_SOLVE: dict[str, Any] = {
    "max_super_chunk": 1024,  # tokens that one inverse of the penalty serves
    "min_super_chunk": 128,
    "fill": 1024,  # programs that fill the device
    "gram_width": 64,  # columns of a tile of the sums of outer products
    "gram_warps": 4,
    "gram_stages": 2,
    "invert_rows": 64,  # rows of the penalty taken at a time; all D: it stays in registers
    "invert_warps": 2,
    "resident_dim": 128,  # largest D of which factor keeps A in registers
    "factor_width": 64,  # rows of A taken at a time
    "factor_warps": 1,
    "apply_chunk": 64,  # tokens of a program of apply, and between two A that are kept
    "apply_width": 64,  # rows of A taken at a time
    "apply_warps": 4,
    "apply_backward_width": 64,
    "apply_backward_warps": 4,
    "du_tokens": 64,  # at a time
    "du_width": 64,
    "du_warps": 4,
    "du_stages": 2,
}
TABLE: dict[tuple[str | None, str, int], dict[str, Any]] = {
    (None, "penalty_solve", 64): _SOLVE,
    (None, "penalty_solve", 128): _SOLVE
    | {
        "fill": 512,
        "invert_rows": 128,
        "invert_warps": 4,
        "factor_warps": 4,
        "apply_width": 128,
        "apply_backward_width": 128,
        "apply_backward_warps": 8,
        "du_tokens": 32,
        "du_width": 128,
        "du_warps": 8,
    },
    (None, "penalty_solve", 256): _SOLVE
    | {
        "gram_stages": 1,
        "invert_rows": 32,
        "invert_warps": 4,
        "factor_width": 16,
        "factor_warps": 4,
        "apply_chunk": 32,
        "apply_width": 32,
        "apply_warps": 8,
        "apply_backward_width": 32,
        "apply_backward_warps": 8,
        "du_tokens": 16,
        "du_width": 64,
        "du_stages": 1,
    },
}


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter instead of being compiled."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


def _gpu():
    """The GPU that arrays are placed on by default, or None."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    return device if "cuda" in getattr(device.client, "platform_version", "cuda").lower() else None


def _reason_unavailable() -> str | None:
    if interpret():
        return None
    gpu = _gpu()
    if gpu is None:
        return f"no NVIDIA GPU is visible to JAX (set {INTERPRET}=1 to interpret the kernels)"
    capability = float(gpu.compute_capability)
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is older than {MIN_COMPUTE_CAPABILITY}"
    return None


def is_available() -> bool:
    """Whether the kernels can run here: an NVIDIA GPU from Ampere on, or interpret mode."""
    return _reason_unavailable() is None


def require(primitive: str, dtypes: tuple[DTypeLike, ...] = (), dims: tuple[int, ...] = ()) -> None:
    """Raises NotImplementedError, saying why, where the kernels cannot serve ``primitive``."""
    reason = _reason_unavailable()
    for dtype in dtypes:
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
            reason = f"inputs are {jnp.dtype(dtype).name}; float32, bfloat16 and float16 are served"
    if max(dims, default=1) > MAX_DIM:
        reason = f"a head dimension of {max(dims)} is above {MAX_DIM}"
    if reason is not None:
        raise NotImplementedError(f"implementation='pallas' cannot serve {primitive}: {reason}")


def parameters(primitive: str, dim: int, overrides: Mapping[str, Any] | None = None) -> dict:
    """The table's entry for this primitive, head dimension and the present device."""
    gpu = _gpu()
    for kind in (getattr(gpu, "device_kind", None), None):
        fits = [d for k, p, d in TABLE if k == kind and p == primitive and d >= dim]
        if fits:
            return {**TABLE[kind, primitive, min(fits)], **(overrides or {})}
    raise NotImplementedError(f"no parameters of {primitive} for a head dimension of {dim}")


# --- calling -----------------------------------------------------------------------------------


def _quiet_params() -> type:
    """Triton compiler parameters whose lowering does not repeat JAX's deprecation notice.

    Newer versions of JAX warn at each lowering that the Triton back end of Pallas is to go. That is
    for this file to know and not for its users; only the lowering of these parameters is silenced.
    """
    try:
        from jax._src.pallas import core
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering

        class QuietParams(plt.CompilerParams):
            pass

        def lowering(*args, **kwargs):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The Pallas Triton backend")
                return pallas_call_lowering(*args, **kwargs)

        core.register_lowering_rule(QuietParams, lowering, "gpu")
        return QuietParams
    except (ImportError, AttributeError, TypeError):
        return plt.CompilerParams


_CompilerParams = _quiet_params()


def call(
    kernel: Callable,
    *,
    grid: tuple[int, ...],
    in_specs,
    out_specs,
    out_shape,
    num_warps: int,
    num_stages: int,
    name: str,
    cost_estimate=None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable:
    """``pl.pallas_call`` through Triton, or through the interpreter.

    Outputs vary over the mesh axes of a ``shard_map`` over which any input does.

    Raises:
      NotImplementedError: for a grid or an array that is too large, before the launch.
    """
    kernel.__name__ = name  # what profilers show

    def run(*inputs):
        check_elements(name, (inputs, out_shape))
        if len(grid) > 3 or max(grid[1:], default=1) > 65535:
            raise NotImplementedError(f"{name}: grid {grid} does not fit a launch")
        axes = numerics.varying_axes(inputs)
        kind = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **kind), out_shape
            ),
            input_output_aliases=dict(input_output_aliases or {}),
            compiler_params=_CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret(),
            cost_estimate=cost_estimate,
            name=name,
        )(*numerics.varying_alike(inputs))

    return run


def check_elements(name: str, arrays: Any) -> None:
    """Raises NotImplementedError if an array of the tree is too large for 32-bit indices."""
    for x in jax.tree.leaves(arrays):
        if math.prod(x.shape) >= MAX_ELEMENTS:
            raise NotImplementedError(
                f"{name}: an array of shape {list(x.shape)} has 2**31 elements or more; "
                "split the batch"
            )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export`` must be told to serialise a program with these kernels.

    Their custom calls hold Triton code, of which JAX does not promise that another version of
    jaxlib reads it: export and load with the same one. Pass the list as ``disabled_checks``.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]


def fold_batch(function: Callable) -> Callable:
    """``function`` of trees of arrays that all have a batch axis first; ``vmap`` folds into it."""
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def rule(axis_size, in_batched, *args):
        def fold(x, batched):
            if not batched:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        out = folded(*jax.tree.map(fold, args, tuple(in_batched)))
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return folded


def whole(*arrays) -> list[pl.BlockSpec]:
    """One spec an array: the kernel gets the whole array and indexes it itself."""

    def spec(shape):
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    return [spec(x.shape) for x in arrays]


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
        if interpret():
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
    if interpret():
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
    if interpret():
        ref[index] = jnp.where(mask, value, ref[index])
    else:
        plt.store(ref.at[index], value, mask=mask)


def barrier() -> None:
    """What the program's threads wrote to device memory before is read after by all of them."""
    if not interpret():
        plt.debug_barrier()


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """int32 indices along ``axis``."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << (n - 1).bit_length())
