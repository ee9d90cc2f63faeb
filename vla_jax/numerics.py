"""Safe normalisation, the feature map and the precision policy: each of them once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from vla_jax.types import Array, DTypeLike, PrecisionLike

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Decoding compares the carried inverse with the penalty after this many rank-one updates, and
# derives it afresh where that fits better. Rarely enough that the factorisation costs nothing that
# can be measured; the updates themselves drift by about 1e-5 in 10⁵ steps of float32.
REDERIVE_EVERY = 4096

# Pivots of a Cholesky factorisation, relative to their diagonal entries, in units in the last
# place. Fewer than the first and what follows has lost more than three of float32's seven digits.
# Fewer than the second and a part of a penalty is rounding: `lambda0 = 0.1` and one direction for
# 10⁵ tokens still leave 500.
RESOLVED_ULPS = 1024
NOISE_ULPS = 128


def broadcasts(function: _Function) -> _Function:
    """``function``, in which missing leading axes are meant whatever ``jax_numpy_rank_promotion``.

    For public functions, and for derivative rules: JAX traces those later, on their own.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return cast(_Function, wrapped)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def normalize(x: Array, axis: int = -1) -> Array:
    """Scales ``x`` to unit Euclidean length along ``axis``; an all-zero vector stays zero.

    Exact for any magnitude that the dtype can hold as a normal number (the vector is scaled by its
    largest entry first, so squares neither overflow nor vanish); XLA counts smaller entries, below
    1.2e-38 in float32, as zero. The gradient of a zero vector is zero.
    """
    scaled, inverse, _, present = _scaled(x, axis)
    return jnp.where(present, scaled * inverse, 0)


@normalize.defjvp
@broadcasts
def _normalize_jvp(axis, primals, tangents):
    # In terms of the result, which everybody keeps anyway, and scaled as there. The barrier keeps
    # XLA from storing the two factors, one number a vector, for every entry.
    (x,), (tangent,) = primals, tangents
    unit = normalize(x, axis)
    _, inverse, peak, present = _scaled(x, axis)
    away = _away(peak)
    first, second = jax.lax.optimization_barrier(
        (1 / (peak * away), jnp.where(present, inverse * away, 0))
    )
    tangent = tangent * first
    along = jnp.sum(unit * tangent, axis=axis, keepdims=True)
    return unit, (tangent - unit * along) * second


def inverse_norm(x: Array, axis: int = -1) -> Array:
    """``1 / ‖x‖`` along ``axis`` (kept as size one); 0, with zero gradient, where ``x`` is zero."""
    _, inverse, peak, present = _scaled(x, axis)
    return jnp.where(present, inverse / peak, 0)


def _scaled(x: Array, axis: int) -> tuple[Array, Array, Array, Array]:
    """``x`` over its largest entry, one over the length of that, the entry, and whether it is 0."""
    peak = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    present = peak != 0  # not a number stays so
    peak = jnp.where(present, peak, 1)
    away = _away(peak)
    scaled = jnp.where(present, x, 1) * (1 / (peak * away)) * away
    inverse = jax.lax.rsqrt(jnp.sum(scaled * scaled, axis=axis, keepdims=True))
    return scaled, inverse, peak, present


def _away(peak: Array) -> Array:
    """A power of two by which ``peak`` is smaller, so that its inverse is a normal number."""
    return jnp.where(peak > 1, 2**-8, 1).astype(peak.dtype)


def feature_map(x: Array) -> Array:
    """``elu(x) + 1``, the positive feature map of queries and keys (Katharopoulos et al., 2020).

    Written as ``exp(x)`` for ``x <= 0``, which keeps its relative accuracy where ``elu(x) + 1``
    would cancel to zero.
    """
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def penalty_direction(unit: Array, inverse: str = "write") -> Array:
    """The ``u`` of a unit vector, the key's where no direction is given.

    ``unit / √D``, or ``unit`` itself where the inverse is applied at the read: a ridge regression.
    """
    if inverse == "read":
        return unit
    return unit / jnp.sqrt(jnp.asarray(unit.shape[-1], unit.dtype))


def grouped(query: Array, num_kv_heads: int) -> Array:
    """``[B, T, Hq, D]`` to ``[B, T, H, G, D]``."""
    batch, length, heads, dim = query.shape
    return query.reshape(batch, length, num_kv_heads, heads // num_kv_heads, dim)


def masked(x: Array, mask: Array | None) -> Array:
    """``x [B, T, ...]`` where ``mask [B, T]`` is True, zeros elsewhere; None masks nothing."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0)


def ids_of_present(ids: Array, mask: Array, axis_name: str | None = None) -> Array:
    """``ids [B, T]``, those of masked tokens replaced, so that what was given there never counts.

    An absent token has the id of the last present one before it, before the first of a row that of
    the first: a segment without present tokens is none. With ``axis_name`` the tokens are a
    device's part of the row.
    """
    limits = jnp.iinfo(ids.dtype)
    first = jnp.min(jnp.where(mask, ids, limits.max), axis=1, keepdims=True)
    known = jnp.where(mask, ids, limits.min)
    if axis_name is not None:
        last = jax.lax.all_gather(jnp.max(known, axis=1, keepdims=True), axis_name)  # [P, B, 1]
        earlier = jnp.arange(last.shape[0]) < jax.lax.axis_index(axis_name)
        before = jnp.max(jnp.where(earlier[:, None, None], last, limits.min), axis=0)
        first = jnp.maximum(jax.lax.pmin(first, axis_name), before)
    return jnp.where(mask, ids, jnp.maximum(jax.lax.cummax(known, axis=1), first))


def compose(earlier: Any, later: Any, dot: Callable[..., Array]) -> tuple[Array, Array]:
    """Equation (15): the affine map ``S ↦ F S + G`` of ``earlier``, then ``later``, as one.

    Args:
      earlier, later: ``(F [..., D, D], G [..., D, E])``; the memory has its key dimension first.
      dot: a product of matrices over the last two axes.
    """
    (f1, g1), (f2, g2) = earlier, later
    return dot(f2, f1), dot(f2, g1) + g2


def accumulator_dtype(*dtypes: DTypeLike) -> DTypeLike:
    """The dtype of state and accumulation: float64 if any of ``dtypes`` is, otherwise float32."""
    return jnp.float64 if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else jnp.float32


@dataclasses.dataclass(frozen=True)
class Policy:
    """How matrix products are computed (the design's precision table).

    Attributes:
      accumulator: dtype of the state, of every factorisation and of accumulation.
      operand: dtype to which the operands of the delta rule's products within a chunk are rounded;
        what goes from chunk to chunk is multiplied in ``accumulator``.
      precision: ``jax.lax`` precision of the products on ``accumulator`` operands.
      requested: the precision that the caller asked for, None for the default above; for kernels,
        which have arithmetic of their own to choose from.
    """

    accumulator: DTypeLike
    operand: DTypeLike
    precision: Any
    requested: Any = None

    def dot(self, equation: str, *operands: Array) -> Array:
        """``jnp.einsum`` in accumulator precision: for the solve and for everything carried."""
        return jnp.einsum(
            equation,
            *(x.astype(self.accumulator) for x in operands),
            precision=self.precision,
            preferred_element_type=self.accumulator,
        )

    def dot_operand(self, equation: str, *operands: Array) -> Array:
        """``jnp.einsum`` with operands rounded to the inputs' dtype and wide accumulation."""
        return jnp.einsum(
            equation,
            *(x.astype(self.operand) for x in operands),
            precision=self.precision,
            preferred_element_type=self.accumulator,
        )


def precision_of(value: PrecisionLike) -> Any:
    """``precision`` in the form that ``jax.lax`` takes, hashable.

    Raises:
      TypeError, ValueError: if it is none.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        return tuple(precision_of(v) for v in value)
    if value is None or isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return value
    wanted = (
        "precision must be None, 'default', 'high', 'highest', a jax.lax.Precision, a pair of them "
        f"or a dot algorithm; got {value!r}"
    )
    if not isinstance(value, str | jax.lax.Precision):
        raise TypeError(wanted)
    try:
        return jax.lax.Precision(value)
    except ValueError as error:
        raise ValueError(wanted) from error


def policy(*inputs: Array, precision: PrecisionLike = None) -> Policy:
    """The policy for these inputs.

    float32 and float64 inputs: float32- (float64-) accurate products unless ``precision`` asks for
    less. 16-bit inputs: the solve runs in tf32 where the device has it, the delta rule's operands
    are rounded to bfloat16 if the inputs are, and everything accumulates in float32. float16 has
    too few exponents for the cotangents of a ratio, which are divided by a small ``z·q``.
    """
    dtypes = [jnp.dtype(x.dtype) for x in inputs]
    accumulator = accumulator_dtype(*dtypes)
    half = all(d.itemsize == 2 for d in dtypes)
    operand = jnp.result_type(*dtypes) if half else accumulator
    if half and operand.itemsize > 2:  # bfloat16 beside float16: no common 16-bit dtype
        half = False
    if operand != jnp.bfloat16:
        operand = accumulator
    requested = precision_of(precision)
    default = jax.lax.Precision.HIGH if half else jax.lax.Precision.HIGHEST
    return Policy(
        accumulator=jnp.dtype(accumulator),
        operand=jnp.dtype(operand),
        precision=default if requested is None else requested,
        requested=requested,
    )


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which any array of ``tree`` varies; none outside ``jax.shard_map``."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def varying_alike(tree: Any) -> Any:
    """The arrays of ``tree``, all varying over the mesh axes that any of them varies over.

    Inside ``jax.shard_map`` with replication checks a replicated array (a fresh state, a shared
    ``lambda0``) cannot become a scan's carry beside sharded tokens; this is where it is cast, and
    what sums its gradient over the devices. Does nothing elsewhere.
    """
    axes = varying_axes(tree)

    def cast(x):
        missing = tuple(axes - varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def symmetrize(x: Array) -> Array:
    """``(x + xᵀ) / 2`` over the last two axes."""
    return (x + jnp.swapaxes(x, -1, -2)) / 2


def triangular_inverse(matrix: Array) -> Array:
    """Inverse of lower triangular matrices ``[..., C, C]`` by block substitution.

    Blocks double from 1 to C: ``[[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]``, all blocks of
    a level in one batched product. As stable as substitution row by row, unlike the doubling
    product ``(I − N)(I + N²)…``, whose terms grow to binomial size and cancel when keys are
    correlated.
    """
    size = matrix.shape[-1]
    padded = 1 << (size - 1).bit_length()
    if padded != size:  # an identity block below leaves the inverse above it unchanged
        pad = [(0, 0)] * (matrix.ndim - 2) + [(0, padded - size)] * 2
        tail = jnp.diag((jnp.arange(padded) >= size).astype(matrix.dtype))
        return triangular_inverse(jnp.pad(matrix, pad) + tail)[..., :size, :size]

    def product(x, y):
        if x.shape[-1] <= 4:  # less than a matrix product costs
            return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)
        return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)

    batch = matrix.shape[:-2]
    inverse = 1 / jnp.diagonal(matrix, axis1=-2, axis2=-1)[..., None, None]
    width = 1
    while width < size:
        count = size // (2 * width)
        blocks = matrix.reshape(*batch, count, 2 * width, count, 2 * width)
        below = jnp.stack([blocks[..., i, width:, i, :width] for i in range(count)], axis=-3)
        pairs = inverse.reshape(*batch, count, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = -product(product(second, below), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]


def inverse_cholesky(matrix: Array) -> Array:
    """``L⁻¹`` for symmetric positive definite ``matrix = L Lᵀ``, ``[..., C, C]``."""
    return triangular_inverse(jax.lax.linalg.cholesky(matrix, symmetrize_input=False))


def positive_definite_inverse(matrix: Array) -> Array:
    """Inverse of symmetric positive definite matrices ``[..., D, D]`` through Cholesky."""
    return squared(inverse_cholesky(matrix))


def squared(half: Array) -> Array:
    """``halfᵀ half``: the inverse of ``matrix`` from ``half = inverse_cholesky(matrix)``."""
    return jnp.einsum("...ki,...kj->...ij", half, half, precision=jax.lax.Precision.HIGHEST)


def unresolved(half: Array, matrix: Array, ulps: int = RESOLVED_ULPS) -> Array:
    """Where rounding decides ``half = inverse_cholesky(matrix)``: ``[...]`` booleans.

    Pivot ``j`` relative to its diagonal entry is ``1 − R²`` of column ``j`` on those before it; a
    factorisation that broke down (NaN) counts as unresolved.
    """
    half, diagonal = (jnp.diagonal(x, axis1=-2, axis2=-1) for x in (half, matrix))
    pivot = 1 / (half * half * diagonal)
    return ~jnp.all(pivot >= ulps * float(jnp.finfo(matrix.dtype).eps), axis=-1)


def weighted(x: Array, beta: Array | None) -> Array:
    """``β x`` for ``x [B, T, H, D]`` and ``beta [B, T, H]``; None is 1."""
    return x if beta is None else beta.astype(x.dtype)[..., None] * x


def known_solve(matrix: Array, inverse: Array, rhs: Array) -> Array:
    """``M⁻¹`` times each row of ``rhs [..., G, D]``, by the inverse that is known already.

    ``matrix`` and ``inverse``, ``[..., D, D]``, are symmetric. Values come from ``inverse``,
    derivatives from the matrix, in any mode and to any order, whatever was done to find the
    inverse: to JAX it is a linear solve. (A rule of ``jax.custom_jvp`` is lost on the second
    derivative inside of ``jax.lax.scan``, which then is silently 0.)
    """

    def times(matrix, x):
        return jnp.einsum("...ij,...gj->...gi", matrix, x, precision=jax.lax.Precision.HIGHEST)

    # Inside jax.shard_map a cotangent varies over all that any of them does; so must the rhs.
    matrix, inverse, rhs = varying_alike((matrix, inverse, rhs))
    return jax.lax.custom_linear_solve(
        lambda x: times(matrix, x), rhs, lambda _, x: times(inverse, x), symmetric=True
    )


def regularised(penalty: Array, lambda0: Array) -> Array:
    """``λ₀ I + penalty`` for ``penalty [..., H, D, D]`` and ``lambda0 [H]``."""
    return lambda0[:, None, None] * jnp.eye(penalty.shape[-1], dtype=penalty.dtype) + penalty


def lambda0_range(dtype: DTypeLike) -> tuple[float, float]:
    """The λ₀ that computations in ``dtype`` can take.

    From the smallest normal number to where ``k̂ / λ₀`` would lose digits of ``k̂`` to underflow.
    """
    limits = jnp.finfo(dtype)
    return float(limits.tiny), float(limits.eps) / float(limits.tiny)


def compensated_sum(total: Array, addend: Array, rest: Array) -> tuple[Array, Array]:
    """``total + addend + rest``, and what rounding keeps out of it (Kahan's summation).

    The rest is the next call's, and has no derivative.
    """
    addend = addend + jax.lax.stop_gradient(rest)
    result = total + addend
    return result, jax.lax.stop_gradient(addend - (result - total))


def penalty_inverses(penalty: Array, lambda0: Array) -> tuple[Array, Array]:
    """``(λ₀ I + penalty)⁻¹``, and the same without what only ``λ₀`` keeps finite.

    By Cholesky; where ``λ₀`` is too small beside the penalty to survive their sum, from the
    eigenvalues of the penalty, of which those that are rounding count as zero. The second result
    leaves their directions out: it is what reaches a direction that the penalty is made of. No
    derivatives.

    Args:
      penalty: ``[..., H, D, D]``, positive semidefinite up to rounding.
      lambda0: ``[H]``.
    """
    penalty, lambda0 = jax.lax.stop_gradient((penalty, lambda0))
    matrix = regularised(penalty, lambda0)
    factor = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    half = jax.lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    lost = unresolved(half, matrix)[..., None, None]

    def spectral(inverse):
        values, vectors = jnp.linalg.eigh(jnp.where(lost, penalty, 0))
        present = values > NOISE_ULPS * jnp.finfo(values.dtype).eps * values[..., -1:]
        scale = jax.lax.rsqrt(jnp.where(present, values, 0) + lambda0[:, None])
        both = (vectors * x[..., None, :] for x in (scale, jnp.where(present, scale, 0)))
        full, seen = (squared(jnp.swapaxes(x, -1, -2)) for x in both)
        return jnp.where(lost, full, inverse), jnp.where(lost, seen, inverse)

    return jax.lax.cond(jnp.any(lost), spectral, lambda inverse: (inverse, inverse), squared(half))


def penalty_inverse(penalty: Array, lambda0: Array) -> Array:
    """The first of ``penalty_inverses``, with the derivatives of the inverse, in any mode."""
    inverse, _ = penalty_inverses(penalty, lambda0)
    identity = jnp.broadcast_to(jnp.eye(inverse.shape[-1], dtype=inverse.dtype), inverse.shape)
    return known_solve(regularised(penalty, lambda0), inverse, identity)


def apply_write_gain(solution: Array, unit_key: Array, write_gain: str) -> Array:
    """The write key ``a`` from ``α = A k̂``, both ``[..., D]`` (derivation, variants).

    ``"unit"`` gives ``α / ‖α‖``, ``"projection"`` ``α / (α·k̂)`` and ``"rls"`` ``α`` itself; a zero
    ``α`` gives zero in all three, with zero gradient.
    """
    if write_gain == "unit":
        return normalize(solution)
    if write_gain == "projection":
        overlap = jnp.sum(solution * unit_key, axis=-1, keepdims=True)
        present = overlap > 0  # α·k̂ = k̂ᵀ A k̂ > 0 unless the token is absent
        return jnp.where(present, solution, 0) / jnp.where(present, overlap, 1)
    return solution
