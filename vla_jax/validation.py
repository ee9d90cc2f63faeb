"""Argument checks, each written once: of shapes and dtypes always, of values where concrete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import numerics
from vla_jax.types import Array


def array(name: str, x: Any, shape: Sequence[int | None], axes: str) -> Array:
    """``x`` as a floating-point array of the given shape.

    Args:
      name: the argument's name, for the message.
      x: the argument.
      shape: expected size of each axis, None for any.
      axes: the axis letters, for the message.

    Raises:
      TypeError: if ``x`` is not an array of real floating-point numbers.
      ValueError: if rank or shape differ, or an axis is empty that is not to be.
    """
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating-point array, got dtype {x.dtype}")
    check_shape(name, x, shape, axes)
    return x


def as_array(name: str, x: Any) -> Array:
    """``x`` as a JAX array; TypeError unless it is an array of something that JAX knows."""
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    native_order(name, x)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of numbers, got dtype {x.dtype}") from error


def native_order(name: str, x: Any) -> None:
    """Raises TypeError if ``x`` is in the other byte order, which JAX has no dtypes for."""
    if not x.dtype.isnative:
        native = x.dtype.newbyteorder("=")
        raise TypeError(
            f"{name} must be in this machine's byte order, got dtype {x.dtype.str}: "
            f"{name}.astype({native.name!r}) converts it"
        )


def check_shape(name: str, x: Array, shape: Sequence[int | None], axes: str) -> None:
    """Raises ValueError unless ``x`` has ``shape`` (None for any positive size)."""
    fits = len(x.shape) == len(shape) and all(
        want is None or n == want for n, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape {axes} = [{want}], got {list(x.shape)}")
    if 0 in x.shape and 0 not in shape:
        raise ValueError(f"{name} must have no empty axis, got shape {axes} = {list(x.shape)}")


def query_heads(num_heads: int, num_kv_heads: int, query: str = "query", key: str = "key") -> None:
    """Raises ValueError unless the query heads are a multiple of the key/value heads."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{query} must have a multiple of {key}'s heads H = {num_kv_heads}, "
            f"got Hq = {num_heads}"
        )


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str | None) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def positive(name: str, value: Any, *, integer: bool = False) -> None:
    """Raises TypeError or ValueError unless ``value`` is a positive Python number."""
    kinds = (int, np.integer) if integer else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if integer else "a number"
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    if not value > 0 or not (isinstance(value, int) or np.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def flag(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a Python boolean."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a Python bool, got a traced value: where a transformation traces the "
            f"arguments of a call, give {name} inside of it, or as a static argument of it"
        )
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def size(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless ``value`` is a Python integer that an axis may have."""
    if jax.export.is_symbolic_dim(value):
        return
    positive(name, value, integer=True)
    if value >= 2**31:
        raise ValueError(f"{name} must be less than 2**31, got {value}")


def floor(name: str, value: Any, dtype: Any) -> None:
    """Raises TypeError or ValueError unless ``value`` is positive and finite in ``dtype`` too."""
    positive(name, value)
    value = value if isinstance(value, int) else float(value)  # of any size, or of a narrow dtype
    if not float(jnp.finfo(dtype).tiny) <= value <= float(jnp.finfo(dtype).max):
        rounded = 0 if value < 1 else "infinity"
        raise ValueError(
            f"{name} must be positive and finite in {jnp.dtype(dtype)}, which rounds {value} to "
            f"{rounded}"
        )


def values(name: str, x: Any, allowed: Callable[[Any], Any], expected: str) -> None:
    """Raises ValueError, naming a value, if some of a concrete ``x`` are not allowed."""
    if is_concrete(x):
        found = np.asarray(x, np.float64)
        wrong = found[~allowed(found)]
        if wrong.size:
            raise ValueError(f"{name} must be {expected}, got {wrong[0]}")


_GATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "log_decay": (lambda x: (x <= 0) & (x > -np.inf), "finite and not positive"),
    "gate": (lambda x: (x >= 0) & (x <= 1), "between 0 and 1"),
}
_WEIGHT = (lambda x: (x >= 0) & (x < np.inf), "finite and not negative")


def gate_values(name: str, x: Any, mask: Any = None) -> None:
    """Raises ValueError if a concrete weight, decay or gate ``[B, T, ...]`` is out of its range.

    Both are given as the caller gave them, which under jit are concrete where arrays made of them
    are not. Tokens that are absent do not count: with a traced ``mask [B, T]`` nothing is checked.
    """
    if is_concrete(x) and is_concrete(mask):
        found = np.asarray(x, np.float64)
        values(name, found if mask is None else found[np.asarray(mask)], *_GATES.get(name, _WEIGHT))


def floating_dtype(name: str, value: Any) -> np.dtype:
    """``value`` as the floating-point dtype that it names; TypeError if it names none."""
    try:
        dtype = None if value is None else jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating-point dtype, got {value!r}")
    return dtype


def is_concrete(x: Any) -> bool:
    """Whether the values of ``x`` can be looked at: neither traced nor in other processes."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def lambda0(value: Any, num_heads: int, dtype: Any) -> Array:
    """``lambda0`` as ``[H]`` of ``dtype``; its values are checked where they are concrete.

    Raises:
      TypeError: if it is not a real number or an array of them.
      ValueError: if its shape is neither ``[]`` nor ``[H]``, or a value is not positive
        or outside ``numerics.lambda0_range``.
    """
    try:
        # Integers may be wider than JAX's, and are not to be narrowed.
        if isinstance(value, list | tuple):
            value = np.asarray(value)
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            value = float(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = value.astype(np.float64)
        result = jnp.asarray(value)
    except OverflowError as error:
        raise ValueError(f"lambda0 must be positive and finite, got {value!r}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"lambda0 must be a number or an array, got {value!r}") from error
    if not (
        jnp.issubdtype(result.dtype, jnp.floating) or jnp.issubdtype(result.dtype, jnp.integer)
    ):
        raise TypeError(f"lambda0 must be real, got dtype {result.dtype}")
    if result.shape not in ((), (num_heads,)):
        raise ValueError(
            f"lambda0 must be a scalar or have shape [H] = [{num_heads}], got {list(result.shape)}"
        )
    low, high = numerics.lambda0_range(dtype)
    expected = f"positive and finite, in {jnp.dtype(dtype)} from {low:.8g} to {high:.8g}"
    # As given: under jit the array is traced, also where a number was given.
    values("lambda0", value, lambda x: (x >= low) & (x <= high), expected)
    return jnp.broadcast_to(result.astype(dtype), (num_heads,))


def instance(name: str, value: Any, kind: type) -> None:
    """Raises TypeError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def segments(
    ids: Any, given_mask: Any, batch: int, length: int, axis_name: str | None = None
) -> tuple[Array | None, Array | None]:
    """``segment_ids`` as int32 and ``mask`` as booleans, ``[B, T]`` both; None stays so.

    That ids do not decrease is checked where they are concrete, and of tokens that are present
    alone: an absent one takes the id of the last present token before it (the first of a row that
    of the first present one), whatever was given. ``axis_name`` as in ``numerics.ids_of_present``.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    present = mask(given_mask, batch, length)
    if ids is None:
        return None, present
    given, ids = ids, as_array("segment_ids", ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got dtype {ids.dtype}")
    check_shape("segment_ids", ids, (batch, length), "[B, T]")
    if is_concrete(given) and is_concrete(given_mask):  # under jit too
        everywhere = np.ones(ids.shape, bool)
        counted = everywhere if given_mask is None else np.asarray(given_mask)
        _do_not_decrease(np.asarray(given), counted)  # before they are narrowed
    ids = ids.astype(jnp.int32)
    if present is not None:
        ids = numerics.ids_of_present(ids, present, axis_name)
    return ids, present


def _do_not_decrease(ids: np.ndarray, present: np.ndarray) -> None:
    found = ids[present]
    if found.size and (found.min() < -(2**31) or found.max() >= 2**31):
        raise ValueError(f"segment_ids must fit in int32, got {found.min()} to {found.max()}")
    known = np.where(present, ids, np.iinfo(ids.dtype).min)
    before = np.maximum.accumulate(known, axis=1)[:, :-1]
    drop = np.argwhere(present[:, 1:] & (known[:, 1:] < before))
    if drop.size:
        b, t = drop[0]
        raise ValueError(
            f"segment_ids must not decrease along T, got {before[b, t]} then {known[b, t + 1]} at "
            f"batch {b}, position {t + 1}"
        )


def mask(value: Any, batch: int, length: int) -> Array | None:
    """``mask`` as booleans ``[B, T]``; None stays so."""
    if value is None:
        return None
    value = as_array("mask", value)
    if value.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean, got dtype {value.dtype}")
    check_shape("mask", value, (batch, length), "[B, T]")
    return value
