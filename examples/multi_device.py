"""One computation on one device and on many, in the four ways that JAX offers.

    JAX_NUM_CPU_DEVICES=4 python examples/multi_device.py

computes a loss and the gradient of the keys by ``vla_attention``

1. on one device;
2. under ``jit``, batch over ``data`` and heads over ``model`` (``NamedSharding``);
3. under ``pmap``, a part of the batch on each device;
4. context parallel: the sequence itself over the devices (``vla_jax.sharding``);

and prints what each finds. The numbers agree to the rounding of float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding

import vla_jax
from vla_jax.sharding import context_parallel_attention

_LENGTH = flags.DEFINE_integer("length", 256, "Tokens of a sequence.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "D, and E.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 4, "Sequences.", lower_bound=1)


def inputs() -> tuple[jax.Array, ...]:
    """Query, key (feature-mapped), value: ``[B, T, H, D]``."""
    rng = np.random.default_rng(0)
    shape = (_BATCH.value, _LENGTH.value, _HEADS.value, _DIM.value)
    query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    return vla_jax.feature_map(query), vla_jax.feature_map(key), value


def step(attention: Callable[..., Any], *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of squares of the output, and its gradient with respect to the keys."""
    loss = lambda query, key, value: jnp.sum(attention(query, key, value) ** 2)  # noqa: E731
    return jax.value_and_grad(loss, 1)(*tokens)


def one_device(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Nothing sharded."""
    return jax.jit(functools.partial(step, vla_jax.vla_attention))(*tokens)


def jit_with_sharding(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Batch and heads are independent: place the inputs, and ``jit`` does the rest."""
    count = jax.device_count()
    model = 2 if count % 2 == 0 and _HEADS.value % 2 == 0 else 1
    mesh = jax.make_mesh((count // model, model), ("data", "model"))
    placed = jax.device_put(tokens, NamedSharding(mesh, jax.P("data", None, "model")))
    return one_device(placed)


def pmap(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """A part of the batch on each device; the leading axis is the device's."""
    count = jax.device_count()

    def replica(*tokens):
        loss, gradient = step(vla_jax.vla_attention, *tokens)
        return jax.lax.psum(loss, "data"), gradient

    parts = [x.reshape(count, -1, *x.shape[1:]) for x in tokens]
    loss, gradient = jax.pmap(replica, "data")(*parts)
    return loss[0], gradient.reshape(tokens[1].shape)


def context_parallel(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The sequence over the devices: inside ``shard_map``, by name of the mesh axis."""
    mesh = jax.make_mesh((jax.device_count(),), ("context",))
    spec = jax.P(None, "context")
    tokens = jax.device_put(tokens, NamedSharding(mesh, spec))
    attention = functools.partial(context_parallel_attention, axis_name="context")
    attention = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return jax.jit(functools.partial(step, attention))(*tokens)


def main(argv: list[str]) -> None:
    """Runs all four and prints the numbers."""
    if len(argv) > 1:
        sys.exit(f"multi_device: unexpected argument {argv[1]!r}")
    count = jax.device_count()
    for name, size in (("batch", _BATCH.value), ("length", _LENGTH.value)):
        if size % count:
            sys.exit(f"multi_device: --{name}={size} is not divisible by the {count} devices")
    tokens = inputs()
    print(f"{count} devices: {jax.devices()[0].device_kind}")
    for way in (one_device, jit_with_sharding, pmap, context_parallel):
        loss, gradient = way(tokens)
        norm = float(jnp.linalg.norm(gradient))
        print(f"{way.__name__:18} loss {float(loss):.4f}  |d key| {norm:.5f}", flush=True)


if __name__ == "__main__":
    app.run(main)
