"""Kernels in programs over several devices: batch and heads are parallel, all other axes whole.

XLA cannot look into a kernel. A function that launches some is given a partitioning rule here, by
which each device runs it on the batch and heads that it holds, without communication. In a program
of one device, and inside ``jax.shard_map``, the function stands alone.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from vla_jax.bundles import AXES
from vla_jax.types import Array

Axes = tuple[str, ...]  # the letters of an array's axes; "" for one that is none of them

# Sizes to try a function with: by how an axis grows from one to the other it is told what it is.
_ONCE, _GROWN = {"B": 1, "H": 1}, {"B": 3, "H": 2}
_LETTERS = {1: "", 2: "H", 3: "B", 6: "BH"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """What a forward saves for its backward, with batch and heads on axes of their own.

    Attributes:
      arrays: the leaves of it.
      axes: the letters of each leaf as the function has it; "BH" is split in two in ``arrays``.
      tree: their structure.
    """

    arrays: list[Array]
    axes: tuple[Axes, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run on each device's batch and heads where the program is of several devices.

    Args:
      function: of bundles (``bundles``, with ``lambda0 [B, H]``) and what it has saved, to bundles
        and what is to be saved. Each array that it saves has the batch on its first axis, and heads
        on one axis or, behind the batch, on that; no other axis depends on how many there are.
    """

    def call(*args):
        if several() or any(isinstance(x, Held) for x in args):
            return _spread(function, args)
        return function(*args)

    return call


def several() -> bool:
    """Whether a program may be of several devices that XLA's partitioner shares it among."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and set(mesh.manual_axes) != set(mesh.axis_names)


def _spread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    axes = [letters for x in args for letters in _axes(x)]
    sizes = _sizes(leaves, axes)

    def joined(*leaves):
        args = jax.tree.unflatten(tree, leaves)
        return function(*(_release(x) if isinstance(x, Held) else x for x in args))

    def tried(counts):
        shapes = [
            _resized(x, letters, sizes, counts) for x, letters in zip(leaves, axes, strict=True)
        ]
        return jax.eval_shape(joined, *shapes)

    once, grown = tried(_ONCE), tried(_GROWN)
    small, out_tree = jax.tree.flatten(once)
    found = [_letters(x, y) for x, y in zip(small, jax.tree.leaves(grown), strict=True)]

    def local(*leaves):
        batch = leaves[0].shape[0]
        results = jax.tree.leaves(joined(*leaves))
        return tuple(_split(x, a, batch) for x, a in zip(results, found, strict=True))

    out_axes = [_alone(letters) for letters in found]
    shared = custom_partitioning(local)
    shared.def_partition(
        _partition(local, sizes, axes, out_axes),
        decode_shardings=True,
        sharding_rule=_sharding_rule(axes, out_axes),
    )
    return _hold(jax.tree.unflatten(out_tree, shared(*leaves)), once, found)


# --- the axes of arrays ------------------------------------------------------------------------


def _axes(x: Any) -> list[Axes]:
    """The letters of every leaf of an argument."""
    if isinstance(x, Held):
        return [_alone(letters) for letters in x.axes]

    def named(path, leaf):
        name = path[-1].name
        letters = AXES["weight"] if name == "lambda0" else AXES[name]
        wanted = letters.split()
        if len(wanted) > leaf.ndim:  # a single token's, or the [B, H] of lambda0
            wanted.remove("T")
        return tuple(wanted)

    paths, _ = jax.tree_util.tree_flatten_with_path(x)
    return [named(path, leaf) for path, leaf in paths]


def _sizes(leaves: Sequence[Array], axes: Sequence[Axes]) -> dict[str, int]:
    return {
        letter: size
        for x, letters in zip(leaves, axes, strict=True)
        for letter, size in zip(letters, x.shape, strict=True)
    }


def _resized(x: Array, axes: Axes, sizes: dict[str, int], counts: dict[str, int]) -> Any:
    """The shape of ``x`` with other counts of batch and heads; groups stay as large as they are."""
    heads = sizes["H"]
    new = {"B": counts["B"], "H": counts["H"], "Hq": sizes.get("Hq", heads) // heads * counts["H"]}
    shape = [new.get(letter, size) for letter, size in zip(axes, x.shape, strict=True)]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _letters(once: Any, grown: Any) -> Axes:
    return tuple(_LETTERS[y // x] for x, y in zip(once.shape, grown.shape, strict=True))


def _alone(axes: Axes) -> Axes:
    """The letters behind ``_split``."""
    return tuple(letter for both in axes for letter in (("B", "H") if both == "BH" else (both,)))


def _split(x: Array, axes: Axes, batch: int) -> Array:
    """``x`` with batch and heads on axes of their own."""
    shape = [
        size
        for letter, whole in zip(axes, x.shape, strict=True)
        for size in ((batch, whole // batch) if letter == "BH" else (whole,))
    ]
    return x.reshape(shape)


def _join(x: Array, axes: Axes) -> Array:
    """Inverse of ``_split``."""
    sizes = iter(x.shape)
    return x.reshape([next(sizes) * (next(sizes) if two == "BH" else 1) for two in axes])


def _hold(results: Any, once: Any, found: Sequence[Axes]) -> Any:
    """What a forward returned, ``(outputs, saved)``, holding what it saves; others as they are."""
    if type(results) is not tuple:
        return results
    outputs, saved = results
    arrays, tree = jax.tree.flatten(saved)
    return outputs, Held(arrays, tuple(found[len(found) - len(arrays) :]), tree)


def _release(held: Held) -> Any:
    arrays = [_join(x, axes) for x, axes in zip(held.arrays, held.axes, strict=True)]
    return jax.tree.unflatten(held.tree, arrays)


# --- the rule ----------------------------------------------------------------------------------


def _sharding_rule(axes: Sequence[Axes], out_axes: Sequence[Axes]) -> str:
    """Which axes go together, for the propagation of shardings: batch, heads, query heads."""
    count = 0

    def words(letters):
        nonlocal count
        for letter in letters:
            count += 1
            yield letter.lower() if letter in ("B", "H", "Hq") else f"x{count}"

    def side(arrays):
        return ", ".join(" ".join(words(letters)) for letters in arrays)

    return f"{side(axes)} -> {side(out_axes)}"


def _partition(
    local: Callable[..., Any], sizes: dict[str, int], axes: list[Axes], out_axes: list[Axes]
) -> Callable[..., Any]:
    """The callback of ``custom_partitioning``."""

    def partition(mesh, given, results):
        results = jax.tree.leaves(results)
        if not isinstance(given[0].sharding, NamedSharding):  # some axes are shard_map's
            _check_alike(given, axes, results, out_axes)
            return mesh, local, *(tuple(x.sharding for x in side) for side in (results, given))
        over = _mesh_axes(mesh, sizes, given, axes)

        def placed(side):
            specs = (jax.P(*(over.get(letter) for letter in letters)) for letters in side)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, local, placed(out_axes), placed(axes)

    return partition


def _mesh_axes(mesh: Any, sizes: dict[str, int], given: Any, axes: list[Axes]) -> dict[str, Any]:
    """The mesh axes of batch and heads, from how the arguments come; warns of what is gathered."""
    over: dict[str, Any] = {}
    whole: set[str] = set()
    for x, letters in zip(given, axes, strict=True):
        for letter, names in zip(letters, x.sharding.spec, strict=True):
            if names is None:
                continue
            if letter in ("B", "H", "Hq"):
                over.setdefault(letter, names)
            elif letter == "T":
                whole |= set(names if isinstance(names, tuple) else (names,))
    if whole:
        warnings.warn(
            f"the kernels gather a sequence sharded over {sorted(whole)}: under jit T is whole on "
            "each device. vla_jax.sharding.sharded_attention shards it",
            stacklevel=2,
        )

    def divides(names, size):
        names = names if isinstance(names, tuple) else (names,)
        return size % math.prod(mesh.shape[name] for name in names) == 0

    batch = over.get("B")
    if batch is not None and not divides(batch, sizes["B"]):
        batch = None
    taken = batch if isinstance(batch, tuple) else (batch,)
    heads = over.get("H", over.get("Hq"))
    if heads is not None:
        names = heads if isinstance(heads, tuple) else (heads,)
        if not divides(heads, sizes["H"]):
            warnings.warn(
                f"the kernels run all heads on each device: {names} does not divide the "
                f"{sizes['H']} key/value heads. Shard heads over an axis that does",
                stacklevel=2,
            )
            heads = None
        elif set(names) & set(taken):
            heads = None
    return {"B": batch, "H": heads, "Hq": heads}


def _check_alike(given: Any, axes: list[Axes], results: Any, out_axes: list[Axes]) -> None:
    """Raises NotImplementedError unless batch and heads are shared out alike everywhere."""
    parts: dict[str, set[int]] = {}
    for x, letters in zip([*given, *results], [*axes, *out_axes], strict=True):
        local = x.sharding.shard_shape(x.shape)
        for letter, size, part in zip(letters, x.shape, local, strict=True):
            letter = letter[:1] if letter in ("B", "H", "Hq") else "other axes"
            parts.setdefault(letter, set()).add(size // part)
    if any(len(counts) > 1 for counts in parts.values()) or parts.get("other axes", {1}) != {1}:
        raise NotImplementedError(
            f"inside jax.shard_map the axes that are not its own must shard batch and heads of "
            f"all arrays alike and no other axis, found parts {parts}: "
            "jax.lax.with_sharding_constraint, or name those axes to shard_map too"
        )
