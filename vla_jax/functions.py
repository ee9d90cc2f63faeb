"""Functions in pickles: by name wherever a name leads to them.

Python pickles a plain function by its name, but not one that ``jax.jit`` has made of it, such as
``jax.nn.silu``, although the same name leads to that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Named:
    module: str
    name: str

    def find(self) -> Any:
        """What the name stands for; raises ImportError or AttributeError."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclasses.dataclass(frozen=True)
class _Partial:
    kind: type
    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with a name in place of each function that has one, partial ones included."""
    return {name: _named(value) for name, value in values.items()}


def from_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of ``by_name``."""
    return {name: _found(value) for name, value in values.items()}


def _named(value: Any) -> Any:
    if isinstance(value, functools.partial):
        args, keywords = tuple(map(_named, value.args)), by_name(value.keywords)
        return _Partial(type(value), _named(value.func), args, keywords)
    module, name = (getattr(value, x, None) for x in ("__module__", "__qualname__"))
    if isinstance(value, type) or not (isinstance(module, str) and isinstance(name, str)):
        return value
    reference = _Named(module, name)
    try:
        found = reference.find()
    except (ImportError, AttributeError):
        return value
    return reference if found is value else value


def _found(value: Any) -> Any:
    if isinstance(value, _Partial):
        args, keywords = map(_found, value.args), from_names(value.keywords)
        return value.kind(_found(value.function), *args, **keywords)
    return value.find() if isinstance(value, _Named) else value
