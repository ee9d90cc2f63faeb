"""States in files: save a session, load it later, on another machine or twice.

    serialization.save("session.vla", state)
    state = serialization.load("session.vla", layer.init_state(batch_size))

Any pytree of arrays will do: a ``VLAState``, a ``LayerState``, a list of them, a dict of these. A
state is constant in size, so its file is too, whatever the length of the text behind it.

A file holds a header (magic bytes, format version, length and SHA-256 of the rest) and the arrays
by name, in MessagePack (``flax.serialization``). Nothing in it is code, and no class is named in
it: the structure comes from the template that ``load`` is given.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import files

FORMAT_VERSION = 1

_MAGIC = b"vla_jax\n"
_HEADER = struct.Struct(">8sIQ32s")  # magic, version, payload length, SHA-256 of the payload

T = TypeVar("T")


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Writes the arrays of a pytree to a file, whole or not at all.

    The file is written beside ``path`` and then takes its place, so a process that is killed in the
    middle leaves an older file as it was. The mode of an older file is kept.

    Args:
      path: where to write; an existing file is replaced.
      tree: a pytree of arrays (JAX or NumPy). Typed random keys: ``jax.random.key_data`` first.

    Raises:
      TypeError: if a leaf is not an array of numbers or booleans, or traced.
      OSError: if the file cannot be written.
    """
    arrays = {}
    for name, leaf in _named(tree).items():
        dtype = _check_leaf("tree", name, leaf)
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"tree must hold concrete arrays, got a traced one at {name}: not in jit"
            )
        arrays[name] = np.asarray(leaf).astype(dtype)
    payload = flax.serialization.msgpack_serialize(arrays)
    digest = hashlib.sha256(payload).digest()
    with files.replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, FORMAT_VERSION, len(payload), digest))
        file.write(payload)


def load(path: str | os.PathLike[str], template: T) -> T:
    """Reads a file that ``save`` wrote into a pytree like ``template``.

    Args:
      path: the file.
      template: a pytree of the expected structure, shapes and dtypes, of arrays (a fresh state,
        whose values are not looked at) or of ``jax.ShapeDtypeStruct`` (``jax.eval_shape``).

    Returns:
      A pytree like ``template`` with the arrays of the file, on the default device.

    Raises:
      ValueError: naming the path, what was expected and what was found: no file there, not a file
        of states, another version of the format, truncated, corrupted, another structure, shape or
        dtype than the template's, or 64-bit numbers, which JAX would narrow without
        ``jax_enable_x64``.
      TypeError: if a leaf of the template has no such shape and dtype.
    """
    arrays = _read(pathlib.Path(path))
    expected = _named(template)
    differences = [f"{name} is missing" for name in expected if name not in arrays]
    differences += [f"{name} is not expected" for name in arrays if name not in expected]
    narrowed = []
    for name, want in expected.items():
        dtype = _check_leaf("template", name, want)
        if name not in arrays:
            continue
        found = arrays[name]
        if want.shape != found.shape or dtype != found.dtype:
            differences.append(
                f"{name} must be {_describe(want.shape, dtype)}, "
                f"found {_describe(found.shape, found.dtype)}"
            )
        elif jax.dtypes.canonicalize_dtype(dtype) != dtype:
            narrowed.append(f"{name} is {dtype}")
    if differences:
        raise ValueError(
            f"{path} holds another state than the template: {'; '.join(sorted(differences))}"
        )
    if narrowed:
        raise ValueError(
            f"{path} holds numbers that JAX narrows without jax_enable_x64: {'; '.join(narrowed)}"
        )
    leaves = [jnp.asarray(arrays[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def nbytes(tree: Any) -> int:
    """Bytes of memory that the arrays of a pytree take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _read(path: pathlib.Path) -> Mapping[str, np.ndarray]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} must be a file that vla_jax.serialization.save wrote: {error.strerror}"
        ) from error
    if data[: len(_MAGIC)] != _MAGIC[: len(data)] or not data:
        raise ValueError(
            f"{path} must be a file that vla_jax.serialization.save wrote: it begins with "
            f"{data[: len(_MAGIC)]!r} in place of {_MAGIC!r}"
        )
    if len(data) < _HEADER.size:
        raise ValueError(
            f"{path} is truncated: expected a header of {_HEADER.size} bytes, found {len(data)}"
        )
    _, version, length, digest = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, and this vla_jax reads version "
            f"{FORMAT_VERSION}: load it with the vla_jax that wrote it"
        )
    payload = memoryview(data)[_HEADER.size :]
    if len(payload) < length:
        raise ValueError(
            f"{path} is truncated: expected {_HEADER.size + length} bytes, found {len(data)}"
        )
    if len(payload) > length or hashlib.sha256(payload).digest() != digest:
        raise ValueError(
            f"{path} is corrupted: expected {length} bytes of arrays with SHA-256 {digest.hex()}"
        )
    return flax.serialization.msgpack_restore(bytes(payload))


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "state": x for path, x in leaves
    }
    if len(named) < len(leaves):
        raise ValueError("tree must have a different dotted name for every array")
    return named


def _check_leaf(argument: str, name: str, leaf: Any) -> np.dtype:
    """The dtype of a leaf in this machine's byte order; TypeError unless it can be in a file."""
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    dtype = leaf.dtype if isinstance(leaf, kinds) else None
    if dtype is None or not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        found = type(leaf).__name__ if dtype is None else dtype
        raise TypeError(
            f"{argument} must hold arrays of numbers or booleans, got {found} at {name}"
        )
    return np.dtype(dtype).newbyteorder("=")


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"{dtype.name}{list(shape)}"
