"""The value checks: what they accept, what they refuse, eagerly and under jit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vla_jax
from vla_jax import checks, numerics


def unit(dtype=jnp.float32, dim=64):
    x = jax.random.normal(jax.random.key(0), (5, 7, dim))
    return numerics.normalize(x).astype(dtype).at[0, 1].set(0)


def checked(f):
    return chex.chexify(jax.jit(f), async_check=False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dim", [1, 3, 64, 1024])
def test_accepts_unit_and_zero_vectors(dtype, dim):
    checks.assert_unit_norm(unit(dtype, dim))


def test_accepts_float64(x64):
    checks.assert_unit_norm(unit(jnp.float64))
    with pytest.raises(AssertionError):
        checks.assert_unit_norm(unit(jnp.float64) * (1 + 1e-12))


BAD = {
    "too long": lambda x: x.at[2, 3].multiply(1.01),
    "too short": lambda x: x.at[4, 6].multiply(0.99),
    "tiny": lambda x: x.at[1, 1].set(1e-30),  # its square underflows, but it is not zero
    "subnormal": lambda x: x.at[1, 1].set(np.float32(1e-42)),  # XLA takes it for zero, IEEE not
    "nan": lambda x: x.at[3, 3, 3].set(jnp.nan),
    "infinite": lambda x: x.at[3, 3, 3].set(jnp.inf),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=list(BAD))
def test_refuses(spoil):
    """One vector among many, eagerly and under jit."""
    bad = spoil(unit())
    with pytest.raises(AssertionError, match="keys must have unit length"):
        checks.assert_unit_norm(bad, name="keys")
    check = checked(lambda x: checks.assert_unit_norm(x, name="keys") or x.sum())
    check(unit())
    with pytest.raises(AssertionError, match="keys must have unit length"):
        check(bad)


def test_axis():
    x = jnp.eye(3)[:, :2]  # unit columns, one zero row
    checks.assert_unit_norm(x, axis=0)
    checks.assert_unit_norm(x.T)
    x = jnp.ones((4, 2)) / 2
    checks.assert_unit_norm(x, axis=0)
    with pytest.raises(AssertionError):
        checks.assert_unit_norm(x, axis=1)
    checks.assert_unit_norm(np.ones((3, 1), np.float32))
    checks.assert_unit_norm(jnp.zeros((0, 3)))


def test_tracing_needs_chexify():
    with pytest.raises(RuntimeError, match="chexify"):
        jax.jit(lambda x: checks.assert_unit_norm(x) or x)(unit())
    jax.grad(lambda x: checks.assert_unit_norm(x) or x.sum())(unit())  # concrete all the same


def test_inside_grad_or_scan():
    def step(carry, row):
        checks.assert_unit_norm(row)
        return carry + jnp.sum(row**2), None

    grad = checked(jax.grad(lambda x: step(0.0, x)[0]))
    np.testing.assert_allclose(grad(unit()), 2 * unit(), rtol=1e-6)
    scan = checked(lambda x: jax.lax.scan(step, 0.0, x)[0])
    scan(unit())
    for check in (grad, scan):
        with pytest.raises(AssertionError, match="unit length"):
            check(1.1 * unit())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.ones(1, int), "x must be a floating-point array, got dtype int32"),
        (jnp.ones(1) * 1j, "x must be a floating-point array"),
        ([1.0], "x must be an array, got list"),
        (None, "x must be an array, got NoneType"),
        ("a", "x must be an array, got str"),
        (np.array([None]), "x must be an array of numbers, got dtype object"),
    ],
)
def test_type(x, message):
    with pytest.raises(TypeError, match=message):
        checks.assert_unit_norm(x)


@pytest.mark.parametrize("axis", [2, -3, None, "a", (0, 1), 0.0, True])
def test_axis_is_named(axis):
    with pytest.raises((TypeError, ValueError), match="axis must be an"):
        checks.assert_unit_norm(jnp.eye(2), axis)


def test_no_vectors():
    with pytest.raises(ValueError, match=r"axis must be an axis of x, of shape \[\], got -1"):
        checks.assert_unit_norm(jnp.ones(()))


def test_a_kept_trace_is_refused_too():
    def f(x):
        checks.assert_unit_norm(x)
        return x

    checked(f)(jnp.eye(2))
    with pytest.raises((RuntimeError, ValueError), match=r"chexify|checkify"):
        jax.jit(f)(jnp.eye(2))


def test_tolerance_follows_the_dtype():
    order = [checks.unit_norm_tolerance(d) for d in ("float64", "float32", "float16", "bfloat16")]
    assert order == sorted(order)
    just = 1 + 0.5 * checks.unit_norm_tolerance(jnp.float32)
    checks.assert_unit_norm(unit() * just)
    with pytest.raises(AssertionError):
        checks.assert_unit_norm(unit() * (1 + 4 * checks.unit_norm_tolerance(jnp.float32)))


def test_unit_key_and_gain():
    """What the library computes satisfies it; a gain where there is no key does not."""
    key = vla_jax.feature_map(jax.random.normal(jax.random.key(1), (2, 9, 1, 8)))
    key = numerics.normalize(key.at[0, 4].set(0))
    gain = numerics.normalize(vla_jax.penalty_solve(key, key, lambda0=0.1)[0])
    checks.assert_unit_key_and_gain(key, gain)
    check = checked(lambda k, g: checks.assert_unit_key_and_gain(k, g) or g.sum())
    check(key, gain)
    leaking = gain.at[0, 4, 0, 0].set(1)
    for f in (check, checks.assert_unit_key_and_gain):
        with pytest.raises(AssertionError, match="zero where the unit key is"):
            f(key, leaking)
