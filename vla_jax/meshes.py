"""Meshes with Explicit axes (``jax.make_mesh``'s default): functions run as on one of Auto axes.

There an array's type says how it is sharded. A function given here takes arrays of such a mesh and
returns the same kind, batch and heads sharded as its inputs are; inside, XLA's partitioner decides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from vla_jax.bundles import AXES
from vla_jax.types import Array

# The axes of a layer's arrays and of what is not in ``AXES``; "-" is sharded by no rule.
_AXES = AXES | {
    "x": "B T -",
    "x_t": "B -",
    "conv": "B - -",
    "gate": "B T H E",
    "initial_memory": "B H D E",
    "initial_penalty": "B H D D",
    "q_proj.kernel": "- Hq -",
    "k_proj.kernel": "- H -",
    "residual": "B T Hq",
    "steps": "B T Hq",
    "logits": "B -",
    "tokens": "B -",
    "lengths": "B",
    "done": "B",
    "first": "B",
    "count": "B",
}

F = TypeVar("F", bound=Callable[..., Any])


def explicit(*results: str) -> Callable[[F], F]:
    """Gives a function the meshes with Explicit axes.

    Args:
      results: the axes of what it returns, of the array or of those of a tuple; of an array in a
        state its field's name says them. What lies where an argument does is sharded like that;
        ``"..."`` is sharded like the first argument, as far as their shapes agree.

    Raises:
      ValueError: the decorated function, for an array sharded along T, D or E.
    """

    def decorate(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
            arrays = [i for i, (_, x) in enumerate(leaves) if isinstance(x, jax.Array)]
            mesh = _mesh([leaves[i][1] for i in arrays])
            if mesh is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs).arguments
            over = _mesh_axes(bound)
            placed = {_place(path): x for path, x in _flat(bound) if isinstance(x, jax.Array)}
            values = [x for _, x in leaves]

            def body(*given):
                for i, x in zip(arrays, given, strict=True):
                    values[i] = x
                args, kwargs = jax.tree.unflatten(tree, values)
                return function(*args, **kwargs)

            given = [leaves[i][1] for i in arrays]
            run = functools.partial(jax.sharding.auto_axes, body, axes=mesh.explicit_axes)
            shapes = jax.eval_shape(run(out_sharding=NamedSharding(mesh, jax.P())), *given)
            specs = jax.tree_util.tree_map_with_path(
                lambda path, x: NamedSharding(mesh, _spec(path, x, results, over, placed)), shapes
            )
            return run(out_sharding=specs)(*given)

        return wrapped

    return decorate


def _mesh(arrays: list[Any]) -> Any:
    """The mesh in force or, without one, that of an array, if it has Explicit axes; or None."""
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _mesh_axes(arguments: Any) -> dict[str, Any]:
    """The mesh axes of batch, heads and query heads: those of the first array that has some."""
    over: dict[str, Any] = {}
    for path, x in _flat(arguments):
        if not isinstance(x, jax.Array):
            continue
        axes = _axes(_names(path), x.ndim)
        for axis, names in zip(axes or (), jax.typeof(x).sharding.spec, strict=False):
            if names is None or axis == "-":
                continue
            if axis not in ("B", "H", "Hq"):
                raise ValueError(
                    f"{_names(path)[-1]} must be whole along {axis}, got it sharded over mesh axis "
                    f"{names!r}: vla_jax.sharding.sharded_attention shards T, and so do "
                    "context_parallel_attention and axis_name= of a layer inside jax.shard_map"
                )
            over.setdefault(axis, names)
    taken = _tuple(over.get("B"))
    return {
        axis: names
        for axis, names in over.items()
        if axis == "B" or not set(_tuple(names)) & set(taken)
    }


def _tuple(names: Any) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else () if names is None else (names,)


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _place(path: Any) -> tuple[Any, ...]:
    """A path whose names are the same in a dictionary and in a dataclass."""
    return tuple(
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path
    )


def _names(path: Any) -> list[str]:
    """The names on the way to a leaf; an index is none, nor is what NNX calls a parameter's."""
    names = [name for name in _place(path) if isinstance(name, str)]
    return names[:-1] if names[1:] and names[-2:] == ["kernel", "value"] else names


def _axes(names: list[str], ndim: int) -> list[str] | None:
    """The axes of the array of that name, without T where it has one fewer."""
    found = _AXES.get(".".join(names[-2:])) or _AXES.get(names[-1]) if names else None
    if found is None:
        return None
    axes = found.split()
    if len(axes) == ndim + 1 and "T" in axes:
        axes.remove("T")
    return axes if len(axes) == ndim else None


def _spec(
    path: Any, x: Any, results: tuple[str, ...], over: dict[str, Any], placed: dict[Any, Array]
) -> jax.P:
    """How an array of the result is sharded."""
    place, names = _place(path), _names(path)
    if place and place in placed and placed[place].shape == x.shape:
        return jax.typeof(placed[place]).sharding.spec
    if names:
        return jax.P(*(over.get(axis) for axis in _axes(names, x.ndim) or ()))
    axes = results[place[0] if place else 0].split()
    if axes != ["..."]:
        return jax.P(*(over.get(axis) for axis in axes))
    first = next(iter(placed.values()))
    spec = []
    sharded = zip(first.shape, x.shape, jax.typeof(first).sharding.spec, strict=False)
    for size, wanted, names in sharded:
        if size != wanted:
            break
        spec.append(names)
    return jax.P(*spec)
