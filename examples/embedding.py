"""Rows of an embedding, with a gradient that keeps its digits and is quick on GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from vla_jax import numerics

_SMALL = 1024  # rows of a table whose cotangent is a matrix product


def lookup(table: nnx.Embed, ids: jax.Array) -> jax.Array:
    """Rows of a table, rounded to its ``dtype`` after they are taken.

    Rounded before, as in ``nnx.Embed``, the table's cotangent is a sum in 16 bits: of the thousands
    of cotangents of a frequent token it keeps the first few. Of a small table it is a matrix
    product here, because GPUs add colliding rows one by one (openxla/xla 26371 and 46225).
    """
    rows, ids = numerics.varying_alike((table.embedding[...], ids))
    return _take(len(rows), rows.dtype, jnp.dtype(table.dtype), rows, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _take(size, wide, dtype, table, ids):
    return jnp.take(table, ids, axis=0).astype(dtype)


def _take_fwd(size, wide, dtype, table, ids):
    return _take(size, wide, dtype, table, ids), ids


def _take_bwd(size, wide, dtype, ids, cotangent):
    ids, rows = ids.reshape(-1), cotangent.reshape(-1, cotangent.shape[-1])
    if size > _SMALL:
        return jnp.zeros((size, rows.shape[-1]), wide).at[ids].add(rows.astype(wide)), None
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=wide)
    return product("nv,nd->vd", jax.nn.one_hot(ids, size, dtype=dtype), rows), None


_take.defvjp(_take_fwd, _take_bwd)
