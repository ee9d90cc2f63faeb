"""All that knows the interface and the versions of Pallas Mosaic GPU.

Written for jax 0.11 and later; 0.10 has the interpreter only.

Habits that every kernel keeps, because breaking one gives silent wrong numbers or a crash:
reading an accumulator is ordered by ``lax.optimization_barrier`` (inside ``Machine.product``); the
warpgroups of a program end together (``Machine.leave``); shared memory written by threads is
committed before the tensor cores or the copy engine read it; a vector that is needed along rows and
along columns has two copies in shared memory, since one reference takes one layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vla_jax.types import Array

FIRST_JAX = (0, 11)  # earlier ones have no layout for transposed stores; they can interpret
BLOCK = 16  # rows of the diagonal blocks that are inverted by substitution
SHARED = 227 * 1024  # bytes of shared memory a program can have
PAD = 8  # columns added to float32 tiles that threads read by rows: no bank conflicts


def tile(shape: tuple[int, ...], dtype=jnp.bfloat16):
    """A buffer in shared memory, swizzled for the copy engine and the tensor cores."""
    dtype = jnp.dtype(dtype)
    swizzle = plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, swizzle // dtype.itemsize)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )


def plain(shape: tuple[int, ...], dtype=jnp.float32):
    """A buffer in shared memory, row after row."""
    return plgpu.SMEM(shape, dtype)


def barrier(arrivals: int = 1, count: int = 1):
    """Barriers in shared memory; copies and warpgroups arrive."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


class _Turned:
    """A transposed reference for the interpreter, which knows none before jax 0.11."""

    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index) -> Array:
        return self.ref[...].T

    def __setitem__(self, index, value: Array) -> None:
        self.ref[...] = value.T


class Machine:
    """What a kernel's body calls: on a device, or the same meaning for the interpreter on a CPU.

    The interpreter knows neither operands in registers nor inlined code, so that products and the
    inverse of diagonal blocks are ordinary array operations there.
    """

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted

    # --- layouts

    def _layout(self, name: str):
        tiles = plgpu.Layout.WGMMA
        return {"tile": tiles, "rows": tiles.reduce(1), "columns": tiles.reduce(0)}[name]

    def load(self, ref, layout: str = "tile") -> Array:
        """A tile, or a vector that goes along a tile's rows or columns."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, layout=self._layout(layout))

    def turned(self, ref):
        """``ref`` transposed, to read and to write."""
        return _Turned(ref) if self.interpreted else ref.T

    def down(self, vector: Array, shape) -> Array:
        """``vector[i]`` in every column of row i."""
        return lax.broadcast_in_dim(vector, shape, [0])

    def across(self, vector: Array, shape) -> Array:
        """``vector[j]`` in every row of column j."""
        return lax.broadcast_in_dim(vector, shape, [1])

    def full(self, shape, value: float) -> Array:
        """A float32 tile of one value."""
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpreted else plgpu.layout_cast(x, self._layout("tile"))

    def zeros(self, shape) -> Array:
        """A tile of zeros."""
        return self.full(shape, 0)

    def index(self, size: int, layout: str) -> Array:
        """``0 … size − 1`` as a vector."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, (size,), 0)
        return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=self._layout(layout))

    def load_global(self, ref) -> Array:
        """A tile straight from global memory to registers, for what is read once a program."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, layout=self._layout("tile"), optimized=False)

    # --- products

    def products(self, *terms) -> tuple[Array, ...]:
        """``init + Σ a @ b`` for each of ``terms = (init or None, (a, b), ...)``, with one wait.

        ``a`` is a reference to shared memory or 16-bit registers, ``b`` a reference.
        """
        if self.interpreted:
            return tuple(self._dots(*term) for term in terms)
        shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for _, *pairs in terms]
        inits = [
            self.zeros(s) if t[0] is None else t[0] for t, s in zip(terms, shapes, strict=True)
        ]

        def multiply(accumulators):
            for accumulator, (_, *pairs) in zip(accumulators, terms, strict=True):
                for a, b in pairs:
                    plgpu.wgmma(accumulator, a, b)

        if all(term[0] is None for term in terms):

            def scoped(*accumulators):
                multiply(accumulators)
                return tuple(x[...] for x in accumulators)

            out = pl.run_scoped(scoped, *(plgpu.ACC(s, jnp.float32) for s in shapes))
        else:
            out = pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in inits))
        return lax.optimization_barrier(tuple(out))

    def product(self, *pairs, init: Array | None = None) -> Array:
        """``init + Σ a @ b`` in float32."""
        return self.products((init, *pairs))[0]

    def _dots(self, init, *pairs):
        out = 0.0 if init is None else init
        for a, b in pairs:
            a, b = (x[...].astype(jnp.float32) for x in (a, b))
            out = out + jnp.dot(a, b, precision=lax.Precision.HIGHEST)
        return out

    # --- threads and memory

    def commit(self) -> None:
        """Lets the tensor cores and the copy engine see what the warpgroup's threads wrote."""
        plgpu.commit_smem()

    def fetch(self, source, target, arrive) -> None:
        """Starts a copy to shared memory; ``arrive`` is its barrier."""
        plgpu.copy_gmem_to_smem(source, target, arrive)

    def send(self, *copies) -> None:
        """Starts copies ``(shared, global)`` as one group."""
        for source, target in copies:
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def sent(self, pending: int = 0, *, read: bool = False) -> None:
        """Waits until ``pending`` groups are under way; ``read``: until they have been read."""
        plgpu.wait_smem_to_gmem(pending, wait_read_only=read)

    def arrive(self, ref) -> None:
        """One arrival of this warpgroup."""
        plgpu.barrier_arrive(ref)

    def wait(self, ref) -> None:
        """Waits for the barrier's next completion."""
        plgpu.barrier_wait(ref)

    def registers(self, count: int, *, more: bool) -> None:
        """Moves registers between the warpgroups of a program."""
        if not self.interpreted:
            plgpu.set_max_registers(count, action="increase" if more else "decrease")

    def leave(self, done) -> None:
        """Ends all warpgroups of a program together."""
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    def block_inverses(self, lower: Array, buffer) -> Array:
        """The inverses of the diagonal blocks of ``I + lower`` in place, anything elsewhere.

        Args:
          lower: float32 ``[C, C]``; only what is below the diagonal inside diagonal blocks is used.
          buffer: float32 ``[C, C + PAD]`` in shared memory.
        """
        if self.interpreted:
            return _block_inverses(lower)
        return _inline_block_inverses(lower.shape[0])(lower, buffer)


def _block_inverses(lower: Array) -> Array:
    size = lower.shape[0]
    row, column = (lax.broadcasted_iota(jnp.int32, lower.shape, i) for i in (0, 1))
    x = jnp.where((row > column) & (row // BLOCK == column // BLOCK), lower, 0.0)
    identity = jnp.eye(size, dtype=jnp.float32)
    power, out = -x, identity - x
    for _ in range(3):  # x is nilpotent: (I − x)(I + x²)(I + x⁴)(I + x⁸)
        power = jnp.dot(power, power, precision=lax.Precision.HIGHEST)
        out = jnp.dot(out, identity + power, precision=lax.Precision.HIGHEST)
    return out


def _interpreter():
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


@functools.cache
def _inline_block_inverses(size: int) -> Callable:
    """Warp b substitutes in block b, one lane a column: no exchange between lanes."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, vector
    from jaxlib.mlir.dialects import math as mlir_math

    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((size, size), jnp.float32, layout=layout),
    )
    def inverses(context, lower, buffer):
        del context
        f32, i32, index = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IndexType.get()
        four = ir.VectorType.get([4], f32)
        constant = utils.c
        square = utils.memref_slice(buffer, (slice(None), slice(0, size)))
        lower.store_untiled(square, optimized=False)
        utils.warpgroup_barrier()
        thread = arith.remui(utils.thread_idx(), constant(128, i32))
        lane = arith.remui(thread, constant(32, i32))
        warp = arith.divui(thread, constant(32, i32))
        first = arith.index_cast(index, arith.muli(warp, constant(BLOCK, i32)))
        inside = arith.cmpi(arith.CmpIPredicate.slt, lane, constant(BLOCK, i32))
        column = arith.addi(first, arith.index_cast(index, arith.remui(lane, constant(BLOCK, i32))))
        zero, one = constant(0.0, f32), constant(1.0, f32)
        local = arith.remui(lane, constant(BLOCK, i32))
        x = [
            arith.select(arith.cmpi(arith.CmpIPredicate.eq, local, constant(i, i32)), one, zero)
            for i in range(BLOCK)
        ]
        minus: list = []

        def entry(entries, i):
            position = ir.DenseI64ArrayAttr.get([i])
            return vector.extract(entries, dynamic_position=[], static_position=position)

        # Four rows at a time: four sums that do not wait for one another.
        for top in range(0, BLOCK, 4):
            rows = [
                [
                    vector.load(
                        four,
                        square,
                        [
                            arith.addi(first, constant(i, index)),
                            arith.addi(first, constant(low, index)),
                        ],
                    )
                    for low in range(0, top + 4, 4)
                ]
                for i in range(top, top + 4)
            ]
            for j in range(top + 4):
                if j >= top:
                    minus.append(arith.negf(x[j]))
                for i in range(max(top, j + 1), top + 4):
                    x[i] = mlir_math.fma(entry(rows[i - top][j // 4], j % 4), minus[j], x[i])
        utils.warpgroup_barrier()  # all of ``lower`` has been read
        with utils.when(inside):
            for j in range(BLOCK):
                memref.store(x[j], square, [arith.addi(first, constant(j, index)), column])
        utils.warpgroup_barrier()
        return mgpu.FragmentedArray.load_untiled(square, layout=mgpu.WGMMA_LAYOUT, optimized=False)

    return inverses


def launch(
    body: Callable,
    *,
    name: str,
    programs: int,
    inputs: dict,
    outputs: dict,
    scratch: dict,
    warpgroups: int = 1,
    interpret: bool = False,
) -> dict:
    """Runs ``body(machine, references, program, warpgroup)`` once a program.

    Args:
      programs: how many; one axis, since the others end at 65,535.
      inputs: arrays by name, None where there is none; outputs: ``(shape, dtype)`` by name.
      scratch: buffers and barriers by name.
    """
    if not interpret and jax.__version_info__ < FIRST_JAX:
        raise NotImplementedError(
            f"Mosaic GPU kernels need jax {FIRST_JAX[0]}.{FIRST_JAX[1]} or later, got "
            f"{jax.__version__}"
        )
    inputs = {n: x for n, x in inputs.items() if x is not None}
    shapes = {n: jax.ShapeDtypeStruct(*x) for n, x in outputs.items() if x is not None}
    machine = Machine(interpret)
    scratch = dict(scratch)
    if warpgroups > 1:
        scratch["done"] = barrier(warpgroups)

    def kernel(*refs, **buffers):
        references = dict(zip([*inputs, *shapes], refs, strict=True)) | buffers
        body(machine, references, lax.axis_index("program"), lax.axis_index("warpgroup"))
        if warpgroups > 1:
            machine.leave(buffers["done"])

    interpreter = dict(interpret=_interpreter()) if interpret else {}
    values = plgpu.kernel(
        kernel,
        out_type=list(shapes.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=warpgroups,
        thread_name="warpgroup",
        **interpreter,
    )(*inputs.values())
    return dict(zip(shapes, values, strict=True))
