"""The kernels of a decoding step, interpreted, against the oracle and the plain step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from support import STATE, assert_close, cast
from tolerances import REORDERED32

import vla_jax
from benchmarks import cases
from vla_jax import numerics, pallas
from vla_jax.bundles import Step
from vla_jax.pallas import common
from vla_jax.pallas.triton import decode
from vla_jax.plan import Plan, Variant


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setenv(common.INTERPRET, "1")


def step(*arrays, rederive_every=4096, **variant):
    """The kernel's step: (query, key, value, direction, lambda0 [H], state) to (out, state)."""
    inputs = Step(*arrays)
    lambda0 = jnp.broadcast_to(inputs.lambda0, inputs.key.shape[:2])
    params = dataclasses.replace(decode.TABLE[32], rederive_every=rederive_every)
    plan = Plan("pallas", None, variant=Variant(**variant))
    return decode.forward(plan, inputs._replace(lambda0=lambda0), params)[0]


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
    kernel = jax.jit(functools.partial(step, rederive_every=3, write_gain=write_gain))
    mine = theirs = state
    for i in range(7):
        query, key, value, direction = tokens(rng)
        direction = direction if learned else None
        lambda0 = jnp.asarray([0.1, 0.1 if i < 4 else 0.4])  # its cache holds no more
        before = mine
        out, mine = kernel(query, key, value, direction, lambda0, before)
        expected, theirs = vla_jax.vla_step(
            query, key, value, direction, theirs, lambda0=lambda0, write_gain=write_gain
        )
        assert_close(out, expected, REORDERED32, "out")
        for name in (*STATE, "inverse", "inverse_lambda0"):
            assert_close(getattr(mine, name), getattr(theirs, name), REORDERED32, name)
        np.testing.assert_array_equal(mine.inverse_age[:, 0], i % 3 + 1)
        again, _ = kernel(query, key, value, direction, lambda0, before)
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
    plan = Plan("pallas", numerics.policy(*sequence))
    rule = pallas.RULES[Step]

    def body(state, token):
        (out, state), _ = rule.forward(plan, Step(*token, lambda0, state))
        return state, out

    state, out = jax.jit(lambda s, x: jax.lax.scan(body, s, x))(state, sequence)
    assert_close(jnp.moveaxis(out, 0, 1), expected, REORDERED32, "out")
    for name, y in zip(STATE, final, strict=True):
        assert_close(getattr(state, name), y, REORDERED32, name)


def test_limits_are_named(monkeypatch):
    def reason(dim, dtype=jnp.float32, **fields):
        state = vla_jax.init_state(1, 1, dim, dim).replace(**fields)
        token = jax.ShapeDtypeStruct((1, 1, dim), dtype)
        return pallas.unsupported(Step(token, token, token, None, jnp.ones(1), state), None)

    assert reason(64) is None
    assert "up to 128, got 256" in reason(256)
    assert "state with its cache" in reason(64, inverse=None)
    with jax.enable_x64(True):
        assert "float64" in reason(64, jnp.float64)
    with pytest.raises(NotImplementedError, match="2\\*\\*31 elements"):
        common.check_elements("kernel", jax.ShapeDtypeStruct((8, 65536, 65, 64), jnp.bfloat16))
    monkeypatch.setenv(common.INTERPRET, "0")
    if common.gpu() is None:
        assert "no NVIDIA GPU" in reason(64)
