"""Value checks of the invariants, through chex.

Shapes, ranks and dtypes are checked elsewhere, always and statically (``validation``). What is here
looks at values and therefore costs a reduction and, under jit, needs ``chex.chexify``.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from vla_jax import numerics, validation
from vla_jax.types import Array, DTypeLike


def unit_norm_tolerance(dtype: DTypeLike) -> float:
    """How far from 1 the length of a unit vector of ``dtype`` may lie.

    Rounding every entry changes a length by at most ``eps / 2``. A 16-bit vector is normalised in
    float32 and rounded once, so ``eps`` (0.8 % in bfloat16) leaves a factor of two. A float32 or
    float64 vector also carries the error of its own sum of D squares, which grows like ``√D · eps``
    at random and is bounded by ``D / 2 · eps``: ``64 eps`` (7.6e-6 in float32) covers the bound up
    to D = 128 and the typical error up to D = 4000.
    """
    info = jnp.finfo(dtype)
    return float(info.eps) * (1 if info.bits <= 16 else 64)


def assert_unit_norm(x: Array, axis: int = -1, *, name: str = "x") -> None:
    """Asserts that every vector of ``x`` along ``axis`` has unit length or is exactly zero.

    Works on concrete arrays, and on traced ones (under ``jit``, ``grad``, ``scan``) inside a
    function wrapped in ``chex.chexify``::

        checked = chex.chexify(jax.jit(f), async_check=False)

    What fails raises AssertionError in both: at once where ``x`` is concrete, which it is under
    ``jax.grad`` too, and from the call of ``checked`` (with ``async_check=True``, chex's default,
    from a later one). Traced without that wrapper, under plain ``jax.jit`` or ``jax.vmap``, it
    refuses: RuntimeError from chex, or, where JAX has kept the trace of the same function from
    within ``chex.chexify``, ValueError from checkify. One limit is JAX's own: in the body of a
    ``scan`` that is differentiated, checkify drops every check.

    A vector with a NaN or an infinity fails, and so does one so small that its length underflows:
    only exact zeros count as zero, subnormal numbers do not.

    Args:
      x: any shape but ``[]``, floating point.
      axis: the axis of the vectors.
      name: what to call ``x`` in the message.

    Raises:
      AssertionError: if a length differs from 1 by more than ``unit_norm_tolerance(x.dtype)``.
      RuntimeError, ValueError: if ``x`` is traced outside ``chex.chexify``.
      TypeError, ValueError: if ``x`` is no floating-point array or has no such axis.

    The invariant ``‖k̂‖ = ‖α̂‖ = 1`` is that of equation (3) in ``docs/derivation.md``.
    """
    x = validation.as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating-point array, got dtype {x.dtype}")
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"axis must be an integer, got {type(axis).__name__}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an axis of {name}, of shape {list(x.shape)}, got {axis}")
    if x.size == 0:
        return
    tolerance = unit_norm_tolerance(x.dtype)
    wide = jax.lax.stop_gradient(x).astype(numerics.accumulator_dtype(x.dtype))
    length = jnp.sqrt(jnp.sum(wide * wide, axis=axis)).ravel()
    # By its bits: arithmetic may take subnormal numbers for zero. The shift drops the sign.
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    target = jnp.any(bits << 1 != 0, axis=axis).ravel().astype(length.dtype)
    worst = jnp.argmax(jnp.abs(length - target))  # a NaN counts as the largest
    chex.assert_trees_all_close(
        length[worst],
        target[worst],
        rtol=0.0,
        atol=tolerance,
        custom_message=f"{name} must have unit length (within {tolerance:.1e}) or be exactly zero "
        f"along axis {axis}: this is the length farthest from it",
    )


def assert_unit_key_and_gain(unit_key: Array, gain: Array) -> None:
    """Asserts that ``k̂`` and ``α̂`` have unit length or are exactly zero, and agree on which.

    Where ``k̂`` is zero the token is absent and ``α̂`` must be zero too, or it would write.

    Args:
      unit_key: ``k̂``, ``[..., D]``.
      gain: ``α̂ = α / ‖α‖``, ``[..., D]``.

    Raises:
      AssertionError, RuntimeError, TypeError: as ``assert_unit_norm``, under the same conditions.
    """
    assert_unit_norm(unit_key, name="the unit key")
    assert_unit_norm(gain, name="the unit write direction")
    absent = jnp.all(unit_key == 0, axis=-1, keepdims=True)
    leak = jnp.max(jnp.where(absent, jnp.abs(jax.lax.stop_gradient(gain)), 0), initial=0)
    chex.assert_trees_all_close(
        leak,
        jnp.zeros_like(leak),
        rtol=0.0,
        atol=0.0,
        custom_message="the unit write direction must be zero where the unit key is",
    )


def assert_converged(residual: Array, tolerance: float = 1e-3) -> None:
    """Asserts that every solve has come to a relative residual of ``tolerance``.

    Args:
      residual: of any shape, as ``vla_jax.diagnostics.solve_report`` gives it.
      tolerance: above what the solver stops at in 16 bits, 3e-4.

    Raises:
      AssertionError, RuntimeError: as ``assert_unit_norm``, under the same conditions.
    """
    worst = jnp.max(jax.lax.stop_gradient(residual), initial=0)
    chex.assert_trees_all_close(
        worst,
        jnp.zeros_like(worst),
        rtol=0.0,
        atol=tolerance,
        custom_message=f"the solve must come to a relative residual of {tolerance:.1e}: this is "
        "the largest. lambda0 is too small beside the weights and directions, or not finite",
    )
