"""The single-launch kernels of short sequences and of decoding, interpreted, against the oracle."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from support import (
    STATE,
    assert_close,
    assert_rms_close,
    cast,
    draw_cotangents,
    oracle_value_and_gradients,
    split_call,
)
from tolerances import BFLOAT16_RMS, REORDERED32

import vla_jax
from benchmarks import cases
from vla_jax.pallas import backend, recurrent

# (case, tokens between two derivations of the inverse)
CASES = [(cases.CASES[i], 1024) for i in (0, 1, 2, 3)] + [(cases.CASES[i], 24) for i in (4, 6, 7)]
STEP = {"write_gain": "unit", "readout": "ratio", "eps": 1e-6}


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setenv(backend.INTERPRET, "1")


def run(call, cotangents, dtype=jnp.float32, params=None, eps=1e-6, **options):
    """((out, state), gradients) as `oracle_value_and_gradients` arranges them, in ``dtype``."""
    inputs, rest = split_call(call)
    batch, _, heads, dim = call["key"].shape
    shapes = ((dim, call["value"].shape[-1]), (dim, dim), (dim,))
    narrow = ("query", "key", "value", "direction")
    inputs = {n: jnp.asarray(x, dtype if n in narrow else "float32") for n, x in inputs.items()}
    mask = rest.get("mask")
    segment_ids = rest.get("segment_ids")

    def arguments(inputs):
        tokens = [inputs.get(n) for n in narrow]
        if mask is not None:
            tokens = [x if x is None else jnp.where(mask[..., None, None], x, 0) for x in tokens]
        state = [
            inputs.get(n, jnp.zeros((batch, heads, *s), "float32"))
            for n, s in zip(STATE, shapes, strict=True)
        ]
        return *tokens, jnp.broadcast_to(inputs["lambda0"], (batch, heads)), *state

    variant = types.SimpleNamespace(**options, eps=eps)

    @jax.jit
    def go(inputs, cotangents):
        arrays, pull = jax.vjp(arguments, inputs)
        kernels = (
            functools.partial(k, params=params) for k in (recurrent.forward, recurrent.backward)
        )
        forward, backward = kernels
        (out, *state), saved = recurrent.attention_forward(
            *arrays, segment_ids, variant=variant, kernel=forward
        )
        gradients = recurrent.attention_backward(
            saved, (cotangents[0], *cotangents[1]), variant=variant, kernel=backward
        )
        return (out, state), pull(tuple(gradients))[0]

    out, state = cotangents
    return go(inputs, (jnp.asarray(out, dtype), cast(state, "float32")))


@pytest.mark.parametrize(("case", "rederive_every"), CASES, ids=str)
def test_values_and_gradients(case, rederive_every):
    call = cases.draw(case)
    options = {"write_gain": case.write_gain, "readout": case.readout}
    cotangents = draw_cotangents(call)
    values, gradients = run(call, cotangents, params={"rederive_every": rederive_every}, **options)
    expected, expected_gradients = oracle_value_and_gradients(call, cotangents, **options)
    assert_close(values[0], expected[0], REORDERED32, "out")
    for name, x, y in zip(STATE, values[1], expected[1], strict=True):
        assert_close(x, y, REORDERED32, name)
    assert gradients.keys() == expected_gradients.keys()
    for name, y in expected_gradients.items():
        # lambda0's is a sum of terms of both signs: its scale is theirs, about one.
        floor = {"floor": 1} if name == "lambda0" else {}
        assert_close(gradients[name], y, REORDERED32, f"gradient of {name}", **floor)


def test_bfloat16():
    case = cases.Case(1, 33, 2, 2, 16, 32, segments="edges", initial=True)
    call, options = cases.draw(case), {"write_gain": "unit", "readout": "ratio"}
    for name in ("query", "key", "value", "direction"):
        call[name] = np.asarray(jnp.asarray(call[name], "bfloat16"), np.float64)
    cotangents = draw_cotangents(call)
    values, gradients = run(call, cotangents, jnp.bfloat16, **options)
    expected, expected_gradients = oracle_value_and_gradients(call, cotangents, **options)
    assert values[0].dtype == gradients["query"].dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in values[1])
    assert_rms_close(values[0], expected[0], BFLOAT16_RMS, "out")
    for name in ("query", "key", "value", "direction", *STATE):
        assert_rms_close(gradients[name], expected_gradients[name], BFLOAT16_RMS, name)


@pytest.mark.parametrize("write_gain", ["unit", "projection"])
def test_absent_tokens_are_exactly_zero(write_gain):
    case = cases.Case(1, 7, 1, 1, 8, 5)
    call = cases.draw(case)
    call["key"][:, 2:5] = 0
    call["direction"][:, 2:5] = 0
    options = {"write_gain": write_gain, "readout": "none"}
    _, gradients = run(call, draw_cotangents(call), **options)
    assert all(np.isfinite(x).all() for x in gradients.values())
    assert not np.asarray(gradients["value"])[:, 2:5].any()
    assert not np.asarray(gradients["direction"])[:, 2:5].any()
    call["key"] *= 1e-42  # CPUs flush such numbers to zero, GPUs do not
    values, gradients = run(call, draw_cotangents(call), **options)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((values, gradients)))


def test_floor_of_the_ratio():
    call = cases.draw(cases.Case(1, 9, 1, 2, 8, 8))
    options = {"write_gain": "unit", "readout": "ratio", "eps": 20.0}  # some weights are below it
    cotangents = draw_cotangents(call)
    values, gradients = run(call, cotangents, **options)
    expected, expected_gradients = oracle_value_and_gradients(call, cotangents, **options)
    assert_close(values[0], expected[0], REORDERED32, "out")
    for name in ("query", "key", "value"):
        assert_close(gradients[name], expected_gradients[name], REORDERED32, name)


def arguments(batch=2, length=5, heads=2, dim=8, value_dim=8):
    """Arguments of `recurrent.forward`."""
    rng = np.random.default_rng(0)
    token = (batch, length, heads)
    shapes = [(*token, dim), (*token, dim), (*token, value_dim), (*token, dim), (batch, heads)]
    shapes += [(batch, heads, dim, value_dim), (batch, heads, dim, dim), (batch, heads, dim)]
    arrays = [jnp.asarray(rng.random(s), "float32") for s in shapes]
    arrays[6] = arrays[6] + arrays[6].mT + 8 * jnp.eye(dim)
    return arrays


VARIANT = types.SimpleNamespace(**STEP)


def test_vmap_is_one_launch():
    def both(*arrays):
        values, saved = recurrent.attention_forward(*arrays, None, variant=VARIANT)
        return values, recurrent.attention_backward(saved, values, variant=VARIANT)

    arrays = arguments(length=3, heads=1)
    query = jnp.stack([arrays[0], 2 * arrays[0], 3 * arrays[0]])
    axes = (0, *[None] * 7)
    nested = jax.vmap(jax.vmap(both, in_axes=axes), in_axes=axes)
    values = jax.jit(nested)(query[None], *arrays[1:])
    single = jax.jit(both)
    for i in range(3):
        expected = single(query[i], *arrays[1:])
        for x, y in zip(*map(jax.tree.leaves, (expected, values)), strict=True):
            np.testing.assert_allclose(x, y[0, i], rtol=2e-6, atol=2e-6)
    text = str(jax.make_jaxpr(nested)(query[None], *arrays[1:]))
    assert text.count("pallas_call[") == 2
    assert "grid=(6,)" in text  # all programs on the first axis


def test_64_bit_mode_changes_nothing():
    arrays = arguments()
    narrow = recurrent.forward(*arrays, None, **STEP)
    with jax.enable_x64(True):
        wide = recurrent.forward(*arrays, None, **STEP)
    for x, y in zip(*map(jax.tree.leaves, (narrow, wide)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- decoding ----------------------------------------------------------------------------------


def tokens(rng, batch=2, heads=2, groups=2, dim=12, value_dim=20):
    shapes = (batch, heads * groups, dim), (batch, heads, dim), (batch, heads, value_dim)
    return [jnp.asarray(rng.random(s), "float32") for s in (*shapes, shapes[1])]


@pytest.mark.parametrize(("learned", "write_gain"), [(True, "projection"), (False, "unit")])
def test_step_equals_vla_step(learned, write_gain):
    rng = np.random.default_rng(0)
    past = rng.standard_normal((2, 2, 20, 12))
    skew = np.triu(np.ones((12, 12)), 1)  # only the symmetric part of a penalty counts
    state = vla_jax.init_state(2, 2, 12, 20).replace(
        penalty=jnp.asarray(np.einsum("bhni,bhnj->bhij", past, past) + skew - skew.T, "float32"),
        memory=jnp.asarray(rng.standard_normal((2, 2, 12, 20)), "float32"),
    )
    options = STEP | {"write_gain": write_gain}
    step = jax.jit(functools.partial(recurrent.step, params={"rederive_every": 3}, **options))
    mine = theirs = state
    for i in range(7):
        query, key, value, direction = tokens(rng)
        direction = direction if learned else None
        lambda0 = jnp.asarray([0.1, 0.1 if i < 4 else 0.4])  # its cache holds no more
        before = mine
        out, mine = step(query, key, value, direction, lambda0, before)
        expected, theirs = vla_jax.vla_step(
            query, key, value, direction, theirs, lambda0=lambda0, write_gain=write_gain
        )
        assert_close(out, expected, REORDERED32, "out")
        for name in (*STATE, "inverse", "inverse_lambda0"):
            assert_close(getattr(mine, name), getattr(theirs, name), REORDERED32, name)
        np.testing.assert_array_equal(mine.inverse_age[:, 0], i % 3 + 1)
        again, _ = step(query, key, value, direction, lambda0, before)
        np.testing.assert_array_equal(out, again)  # the earlier state is as it was


def test_step_equals_oracle():
    case = cases.Case(2, 6, 2, 1, 16, 16, initial=True)
    call = cases.draw(case)
    expected, final, _ = oracle.attention(**call)
    initial = dict(zip(STATE, cast(call["initial_state"], "float32"), strict=True))
    state = vla_jax.init_state(2, 2, 16, 16).replace(**initial)
    names = ("query", "key", "value", "direction")
    sequence = cast([np.moveaxis(call[n], 1, 0) for n in names], "float32")
    lambda0 = jnp.broadcast_to(jnp.float32(call["lambda0"]), 2)

    def step(state, token):
        out, state = recurrent.step(*token, lambda0, state, **STEP)
        return state, out

    state, out = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(state, sequence)
    assert_close(jnp.moveaxis(out, 0, 1), expected, REORDERED32, "out")
    for name, y in zip(STATE, final, strict=True):
        assert_close(getattr(state, name), y, REORDERED32, name)


# --- limits and lowering -------------------------------------------------------------------------


def test_limits_are_named(monkeypatch):
    with pytest.raises(NotImplementedError, match="up to 128, got 256"):
        recurrent.require("kernel", (jnp.float32,), (64, 256))
    with pytest.raises(NotImplementedError, match="float64"):
        recurrent.require("kernel", (jnp.float64,), (64,))
    with pytest.raises(NotImplementedError, match="2\\*\\*31 elements"):
        backend.check_elements("kernel", jax.ShapeDtypeStruct((8, 65536, 65, 64), jnp.bfloat16))
    monkeypatch.setenv(backend.INTERPRET, "0")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
            recurrent.require("kernel", (jnp.float32,), (64,))


@pytest.mark.skipif(not hasattr(jax.sharding, "AbstractDevice"), reason="this JAX needs a GPU")
def test_kernels_lower_to_triton(monkeypatch):
    monkeypatch.setenv(backend.INTERPRET, "0")
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    rng = np.random.default_rng(0)
    state = vla_jax.init_state(2, 2, 16, 16)
    step = functools.partial(recurrent.step, **STEP)
    monkeypatch.setattr(recurrent, "require", lambda *_: None)

    def both(*arrays):
        values, saved = recurrent.attention_forward(*arrays, None, variant=VARIANT)
        return recurrent.attention_backward(saved, values, variant=VARIANT)

    wanted = {
        both: (arguments(), ("vla_recurrent_forward", "vla_recurrent_backward")),
        step: ((*tokens(rng, dim=16, value_dim=16), jnp.ones(2), state), ("vla_decode_step",)),
    }
    for function, (arrays, names) in wanted.items():
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(function).trace(*arrays)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "xla.gpu.triton" in text
        assert all(name in text for name in names)
