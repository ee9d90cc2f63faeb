"""Axis legend, type aliases and the recurrent state.

Axes, used in every shape in this package:

    B   batch
    T   time
    H   key/value heads
    G   query heads that share one key/value head (Hq = G * H, head ``h`` reads state ``h // G``)
    Hq  query heads
    D   key (and query, and direction) dimension
    E   value dimension
    N   chunks
    C   tokens of a chunk
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
DTypeLike: TypeAlias = Any
PrecisionLike: TypeAlias = (
    str | jax.lax.Precision | tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision] | None
)

WriteGain: TypeAlias = Literal["unit", "projection", "rls"]
Readout: TypeAlias = Literal["ratio", "none"]
Implementation: TypeAlias = Literal["reference", "xla", "associative", "pallas", "triton"]

Inverse: TypeAlias = Literal["write", "read"]

WRITE_GAINS: tuple[str, ...] = ("unit", "projection", "rls")
READOUTS: tuple[str, ...] = ("ratio", "none")
INVERSES: tuple[str, ...] = ("write", "read")


class Arrays:
    """A base of frozen dataclasses of arrays: equal where structure, dtypes and values are.

    NaN equals NaN, so that a copy equals what it is a copy of. The hash looks at structure, shapes
    and dtypes alone.
    """

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, structure = jax.tree.flatten(self)
        theirs, other_structure = jax.tree.flatten(other)
        alike = bool(structure == other_structure)  # type: ignore[operator]
        return alike and all(map(_equal, mine, theirs))

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self)
        return hash((structure, tuple(map(_kind, leaves))))


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else type(x)


def _equal(x: Any, y: Any) -> bool:
    if x is y or _kind(x) != _kind(y):
        return x is y
    if not all(isinstance(z, jax.Array | np.ndarray | np.generic) for z in (x, y)):
        return bool(x == y)
    return bool(jnp.array_equal(x, y, equal_nan=jnp.issubdtype(x.dtype, jnp.inexact)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class VLAState(Arrays):
    """The whole memory of a sequence: what decoding carries from token to token.

    A pytree of arrays, constant in size whatever the length of the sequence. All zeros means a
    fresh sequence. Values are immutable: an operation returns a new state and the old one stays
    usable.

    Attributes:
      memory: ``[B, H, D, E]``, the associative memory, key dimension first (the transpose of the
        ``S`` of the equations).
      penalty: ``[B, H, D, D]``, the sum of ``u uᵀ`` over the tokens read so far, without the
        ``lambda0 * I`` term. Of one that is made in another way the symmetric part is used; it must
        be positive semidefinite, which is not checked: without that nothing is promised.
      key_sum: ``[B, H, D]``, the sum of the keys (not normalised), the ``z`` of the equations.
      inverse: ``[B, H, D, D]``, a cache for decoding: ``(lambda0 I + penalty)⁻¹``. It is derived
        from ``penalty`` and carries no gradient of its own; the two fields below say whether it
        holds. ``None`` switches the cache off; a step then factorises the penalty. A state that is
        put together by hand leaves this and what follows None.
      inverse_lambda0: ``[B, H]``, the ``lambda0`` for which ``inverse`` holds, 0 where it holds for
        none (the next step then derives it from ``penalty``).
      inverse_age: ``[B, H]``, how many rank-one updates ``inverse`` has received since it was last
        compared with ``penalty``.
      penalty_rest: ``[B, H, D, D]``, what rounding has kept out of ``penalty`` while decoding,
        below its last digit (compensated summation): ``penalty + penalty_rest`` is the sum. Without
        it 10⁵ additions of one direction make ``lambda0 I + penalty`` indefinite in float32.
    """

    memory: Array
    penalty: Array
    key_sum: Array
    inverse: Array | None = None
    inverse_lambda0: Array | None = None
    inverse_age: Array | None = None
    penalty_rest: Array | None = None

    def replace(self, **changes: Any) -> VLAState:
        """Returns a copy of the state with the given fields changed.

        The fields after ``key_sum`` belong to ``penalty``: with a new penalty those that are not
        given too start afresh (those that are None stay so), so no stale inverse is ever used.
        """
        if "penalty" in changes:
            shape = getattr(changes["penalty"], "shape", ())
            for name in ("inverse", "inverse_lambda0", "inverse_age", "penalty_rest"):
                old = getattr(self, name)
                if old is not None and name not in changes:
                    per_head = name.startswith("inverse_")
                    changes[name] = jnp.zeros(shape[:-2] if per_head else shape, old.dtype)
        return dataclasses.replace(self, **changes)
