"""The GPU kernels through the public functions, interpreted: what is theirs alone.

They run the common cases with every other implementation (`INTERPRETED` in `conftest`).
"""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from support import (
    assert_close,
    cast,
)
from tolerances import REORDERED32

import vla_jax
from vla_jax import implementations, numerics, pallas
from vla_jax.bundles import Attention
from vla_jax.pallas import common
from vla_jax.plan import Plan


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setenv(common.INTERPRET, "1")


def test_rounding_of_write_keys_does_not_add_up():
    """Keys along one axis, writes everywhere: what the writes' rounding puts aside is never read.

    The kernels' memory is off by .011 here, by .026 if the sweep gets the 16 bits alone; what is
    carried in ``"xla"`` is float32.
    """
    dim, rng = 16, np.random.default_rng(0)
    raw = rng.standard_normal((1, 1024, 1, dim))
    direction = raw @ rng.standard_normal((dim, dim))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True) * np.sqrt(dim)
    call = {
        "query": np.exp(rng.standard_normal(raw.shape)),
        "key": 1 + 0.03 * raw,
        "value": rng.standard_normal(raw.shape),
        "direction": direction,
    }
    narrow = cast(call, jnp.bfloat16)
    call = {name: np.asarray(x, np.float64) for name, x in narrow.items()}
    _, (memory, *_), _ = oracle.attention(**call)
    for implementation, tolerance in (("xla", 1e-4), ("pallas", 0.016)):
        _, state = vla_jax.vla_attention(**narrow, return_state=True, implementation=implementation)
        error = np.linalg.norm(np.asarray(state.memory, np.float64) - memory)
        assert error < tolerance * np.linalg.norm(memory), implementation


def test_rounding_of_long_write_keys():
    """``"rls"`` writes of ``u = k̂ / √D`` overshoot, and correct one another within a chunk.

    The kernels' memory is off by .006 here, by .013 if the triangular solve gets the 16 bits alone.
    """
    rng = np.random.default_rng(0)
    query, key = (np.exp(rng.standard_normal((1, 64, 2, 24))) for _ in range(2))
    call = {"query": query, "key": key, "value": rng.standard_normal((1, 64, 2, 40))}
    narrow = cast(call, jnp.bfloat16)
    call = {name: np.asarray(x, np.float64) for name, x in narrow.items()}
    options = {"write_gain": "rls", "readout": "none"}
    _, (memory, *_), _ = oracle.attention(**call, **options)
    _, state = vla_jax.vla_attention(
        **narrow, **options, return_state=True, implementation="pallas"
    )
    error = np.linalg.norm(np.asarray(state.memory, np.float64) - memory)
    assert error < 0.009 * np.linalg.norm(memory), error / np.linalg.norm(memory)


def test_a_decoding_step_by_name():
    """The kernel of a step: its value, its derivative, and what it cannot do."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    kernel = plain = vla_jax.init_state(2, 2, 8, 6)
    for _ in range(3):
        tokens = jnp.exp(draw(2, 4, 8)), jnp.exp(draw(2, 2, 8)), draw(2, 2, 6), draw(2, 2, 8) / 3
        out, kernel = vla_jax.vla_step(*tokens, kernel, implementation="pallas")
        wanted, plain = vla_jax.vla_step(*tokens, plain)
        assert_close(out, np.asarray(wanted), REORDERED32)
    jax.tree.map(lambda x, y: assert_close(x, np.asarray(y), REORDERED32), kernel, plain)

    def loss(key, implementation):
        tokens_ = (tokens[0], key, *tokens[2:])
        return jnp.sum(vla_jax.vla_step(*tokens_, plain, implementation=implementation)[0] ** 2)

    assert_close(
        jax.grad(loss)(tokens[1], "pallas"), np.asarray(jax.grad(loss)(tokens[1], "xla")), 1e-5
    )
    bare = vla_jax.VLAState(plain.memory, plain.penalty, plain.key_sum)
    with pytest.raises(NotImplementedError, match="cache"):
        vla_jax.vla_step(*tokens, bare, implementation="pallas")


def test_what_the_kernels_cannot_do(monkeypatch):
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(NotImplementedError, match="chunk_size"):
        vla_jax.vla_attention(x, x, x, implementation="pallas", chunk_size=16)
    wide = jnp.ones((1, 4, 1, 512))
    with pytest.raises(NotImplementedError, match="512"):
        vla_jax.vla_attention(wide, wide, wide, implementation="pallas")
    with jax.enable_x64(True):
        y = jnp.ones((1, 4, 1, 8), jnp.float64)
        with pytest.raises(NotImplementedError, match="float64"):
            vla_jax.vla_attention(y, y, y, implementation="pallas")
    monkeypatch.delenv(common.INTERPRET)
    if common.unavailable():
        with pytest.raises(NotImplementedError, match="pallas"):
            vla_jax.vla_attention(x, x, x, implementation="pallas")


def test_what_none_means(monkeypatch):
    """The kernels in programs for GPUs, one or several."""
    x = jnp.ones((1, 4, 1, 16))
    seen = []

    def best(x, direction=None, chunk_size=None):
        matrix, vector = jnp.ones((1, 1, 16, 16)), jnp.ones((1, 1, 16))
        bundle = Attention(x, x, x, direction, jnp.ones(1), matrix, matrix, vector)
        return implementations.choose(None, bundle, chunk_size)

    def look(x, **options):
        seen.append(best(x, **options))
        return x

    monkeypatch.delenv(common.INTERPRET, raising=False)
    assert best(x) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(common, "unavailable", lambda: None)
    assert best(x) == "xla"  # it lies on a CPU
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.jit(lambda x: look(x))(x)
    assert seen.pop() == "pallas"
    jax.jit(lambda x: look(x, chunk_size=16))(x)
    jax.jit(lambda x: look(x.astype(jnp.int8)))(x)  # none of the kernels'
    jax.jit(lambda x: look(x, direction=x.astype(jnp.float8_e4m3fn)))(x)
    with jax.default_device("cpu"):
        jax.jit(lambda x: look(x))(x)
    assert seen == ["xla"] * 4
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    jax.jit(lambda x: look(x))(x)
    assert seen[-1] == "pallas"
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = jax.shard_map(lambda x: look(x), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    jax.jit(inside)(x)
    assert seen[-1] == "pallas"


def test_without_the_back_end(monkeypatch):
    """A JAX that has lost Pallas's Triton back end: named, passed over, refused by name."""
    for name in [n for n in sys.modules if n.startswith("vla_jax.pallas")]:
        monkeypatch.delitem(sys.modules, name)
    missing = "jax.experimental.pallas.triton"
    monkeypatch.setitem(sys.modules, missing, None)
    pallas = importlib.import_module("vla_jax.pallas")
    monkeypatch.setattr(vla_jax, "pallas", pallas)
    assert pallas.export_checks()
    x, matrix, vector = jnp.ones((1, 4, 1, 16)), jnp.ones((1, 1, 16, 16)), jnp.ones((1, 1, 16))
    bundle = Attention(x, x, x, None, jnp.ones(1), matrix, matrix, vector)
    assert missing in pallas.unsupported(bundle, None)
    with pytest.raises(NotImplementedError, match=f"triton: .*{missing}"):
        implementations.choose("pallas", bundle, None)
    with pytest.raises(NotImplementedError, match=missing):
        pallas.RULES[Attention].forward(Plan("pallas", numerics.policy(x)), bundle)
    monkeypatch.setattr(implementations, "not_on_gpus", lambda arrays: None)
    assert implementations.choose(None, bundle, None) == "xla"

    def broken(name):
        raise ImportError("another module", name="another")

    monkeypatch.setattr(pallas.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="another module"):
        pallas.unsupported(bundle, None)


def test_reasons_of_every_family_are_given():
    x = jnp.ones((1, 1, 1, 300))
    bundle = Attention(x, x, x, None, jnp.ones(1), x, x, x)
    mosaic = "mosaic: its vla_attention is the one with gates"
    reasons = f"{mosaic}; triton: a head dimension of 300 is above 256"
    assert pallas.unsupported(bundle, None) == reasons
