"""Many devices: data, tensor and context parallel against one device, on virtual CPU devices.

The suite has four of them; the case of eight runs in a process of its own.
"""

import collections
import functools
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from cases import Case, draw
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import INPUTS, STATE, assert_close, split_call, value_and_pullback

import vla_jax
from vla_jax import layer, linen, sharding
from vla_jax.nnx import VariationalLinearAttention

ROOT = pathlib.Path(__file__).parent.parent
TOKENS = ("query", "key", "value", "direction", "segment_ids", "mask")

# Three devices' worth of one segment, borders on, before and after those of devices, one segment.
BORDERS = np.array([[0] * 3 + [1] * 9 + [2] * 4, [5] * 8 + [6] * 7 + [7], [3] * 16])
CASES = {
    "segments": Case(3, 16, 2, 2, 4, 3, mask="random", initial=True, per_head=True, chunk_size=2),
    "plain": Case(1, 24, 1, 1, 4, 5, initial=True, write_gain="projection", chunk_size=4),
    "key": Case(2, 8, 1, 2, 3, 3, direction="key", initial=True, readout="none", write_gain="rls"),
}


def mesh_of(**axes):
    count = math.prod(axes.values())
    if jax.device_count() < count:
        pytest.skip(f"needs {count} (virtual) devices")
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=auto, devices=jax.devices()[:count]
    )


def draw_call(name, dtype=np.float64):
    call = draw(CASES[name])
    if name == "segments":
        call["segment_ids"] = BORDERS
        call["mask"][0, 4:8] = False  # a device without a token
    floating = lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x  # noqa: E731
    return jax.tree.map(lambda x: floating(np.asarray(x)), call)


def options_of(name, implementation="xla"):
    case = CASES[name]
    return dict(
        implementation=implementation,
        chunk_size=case.chunk_size if implementation in ("xla", "associative") else None,
        write_gain=case.write_gain,
        readout=case.readout,
    )


def attention(inputs, rest, mesh, batch=None, **options):
    """`context_parallel_attention` under shard_map: (out, (memory, penalty, key_sum))."""
    arguments = {**inputs, **rest}
    sharded = {n: P(batch, "context") for n in TOKENS} | {n: P(batch) for n in STATE}
    specs = {n: sharded.get(n, P()) for n in arguments}

    def local(arguments):
        arguments = dict(arguments)
        state = [arguments.pop(n, None) for n in STATE]
        if state[0] is not None:
            arguments["initial_state"] = vla_jax.VLAState(*state)
        out, state = sharding.context_parallel_attention(
            **arguments, axis_name="context", **options, return_state=True
        )
        return out, tuple(getattr(state, n) for n in STATE)

    out_specs = (P(batch, "context"), (P(batch),) * 3)
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(arguments)


def vjp_of(function):
    @jax.jit
    def run(inputs, rest, cotangents):
        primals, pullback = jax.vjp(lambda x: function(x, rest), inputs)
        return primals, pullback(cotangents)[0]

    return run


@functools.lru_cache(None)
def single_device(name, dtype):
    """Inputs, cotangents and what one device makes of them."""
    inputs, rest = split_call(draw_call(name, dtype))
    shapes = jax.eval_shape(lambda: value_and_pullback_primals(inputs, rest, name))
    rng = np.random.default_rng(3)
    cotangents = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)
    wanted = value_and_pullback(**options_of(name))(inputs, rest, cotangents)
    return inputs, rest, cotangents, wanted


def value_and_pullback_primals(inputs, rest, name):
    from support import attention as plain

    return plain(inputs, rest, **options_of(name))


def check(name, mesh, dtype, tolerance, batch=None, implementation="xla"):
    inputs, rest, cotangents, wanted = single_device(name, dtype)
    options = options_of(name, implementation)
    run = vjp_of(lambda x, r: attention(x, r, mesh, batch, **options))
    primals, gradients = run(inputs, rest, cotangents)
    assert set(gradients) == {n for n in INPUTS if n in inputs}
    for label, actual, expected in (
        ("value", primals, wanted[0]),
        ("gradient", gradients, wanted[1]),
    ):
        jax.tree.map_with_path(
            lambda path, x, y, label=label: assert_close(x, y, tolerance, f"{label} of {path}"),
            actual,
            expected,
        )


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_equals_one_device(name, devices, x64):
    check(name, mesh_of(context=devices), np.float64, tolerances.FLOAT64)


@pytest.mark.parametrize("implementation", ["reference", "associative"])
def test_context_parallel_of_every_implementation(implementation, x64):
    mesh = mesh_of(context=2)
    check("segments", mesh, np.float64, tolerances.FLOAT64, implementation=implementation)


@pytest.mark.parametrize("devices", [2, 4])
def test_context_parallel_in_float32(devices):
    check("segments", mesh_of(context=devices), np.float32, tolerances.FLOAT32)


def test_context_parallel_beside_data_parallel(x64):
    check("key", mesh_of(data=2, context=2), np.float64, tolerances.FLOAT64, batch="data")
