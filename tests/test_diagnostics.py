"""The diagnostics against closed forms, NumPy, the oracle, and the figures in the documentation."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from support import assert_close

import vla_jax
from vla_jax import diagnostics, numerics
from vla_jax.reference import published


def unit_pairs(dim, count=50, seed=0):
    """Random unit vectors of every alignment, the extremes among them."""
    rng = np.random.default_rng(seed)
    key, gain = rng.standard_normal((2, count, dim))
    gain = gain + np.linspace(-3, 3, count)[:, None] * key
    gain[0], gain[1] = key[0], -key[1]
    return (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (key, gain))


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_closed_forms_of_one_step(dim, x64):
    key, gain = unit_pairs(dim)
    c = diagnostics.alignment(key, gain)
    np.testing.assert_allclose(c, np.sum(key * gain, -1), atol=1e-15)
    jacobian = np.eye(dim) - key[:, :, None] * gain[:, None, :]
    norm = np.linalg.svd(jacobian, compute_uv=False)[:, 0]
    radius = np.abs(np.linalg.eigvals(jacobian)).max(-1)
    for actual, expected in (
        (diagnostics.closed_form_norm(c), norm),
        (diagnostics.step_jacobian_norm(key, gain), norm),
        (diagnostics.closed_form_radius(c), radius),
        (diagnostics.step_jacobian_radius(key, gain), radius),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)  # a double eigenvalue: √eps
    assert float(diagnostics.closed_form_norm(1.0)) == 1  # only where α̂ = k̂
    assert float(diagnostics.closed_form_norm(0.0)) == pytest.approx((1 + 5**0.5) / 2)


def test_an_absent_token_leaves_the_state():
    zero = jnp.zeros((3, 4))
    np.testing.assert_array_equal(diagnostics.step_jacobian_norm(zero, zero), 1)
    np.testing.assert_array_equal(diagnostics.step_jacobian_radius(zero, zero), 1)


def draw(length, dim=32, value_dim=32, heads=2, seed=0):
    """Feature-mapped keys, values and random directions of length 1/√D."""
    rng = np.random.default_rng(seed)
    key = np.asarray(numerics.feature_map(rng.standard_normal((1, length, heads, dim))))
    value = rng.standard_normal((1, length, heads, value_dim))
    direction = rng.standard_normal(key.shape)
    return key, value, direction / np.linalg.norm(direction, axis=-1, keepdims=True) / dim**0.5


@pytest.mark.parametrize(("random", "figure", "within"), [(False, 1.32, 0.03), (True, 1.01, 0.01)])
def test_documented_mean_norm_of_a_step(random, figure, within, x64):
    """Stability, 1: 1.32 for u from the key, towards 1 (1.008) for random u, and never 1.618."""
    key, _, direction = draw(1000)
    unit_key = numerics.normalize(jnp.asarray(key))
    u = jnp.asarray(direction) if random else unit_key / 32**0.5
    gain = numerics.normalize(vla_jax.penalty_solve(unit_key, u, lambda0=0.1)[0])
    norm = diagnostics.closed_form_norm(diagnostics.alignment(unit_key, gain))
    assert float(norm[:, 500:].mean()) == pytest.approx(figure, abs=within)
    assert float(norm.max()) < 1.6181
    assert float(norm.min()) >= 1 - tolerances.FLOAT64  # two unit vectors: c is 1 but for rounding
    few = slice(0, None, 100)
    direct = diagnostics.step_jacobian_norm(unit_key[:, few], gain[:, few])
    np.testing.assert_allclose(direct, norm[:, few], rtol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("write_gain", ["unit", "projection"])
def test_state_norm_equals_the_oracle(packed, write_gain, x64):
    key, value, direction = draw(13, dim=6, value_dim=5)
    rest, initial = {}, None
    if packed:
        rng = np.random.default_rng(1)
        rest = {
            "mask": rng.random((1, 13)) > 0.3,
            "segment_ids": np.array([[0] * 4 + [1] + [2] * 8]),
        }
        half = rng.standard_normal((1, 2, 6, 6))
        initial = (rng.standard_normal((1, 2, 6, 5)), half @ half.swapaxes(-1, -2), half[..., 0])
    actual = diagnostics.state_norm(
        *map(jnp.asarray, (key, value, direction)),
        lambda0=0.3,
        initial_state=None if initial is None else vla_jax.VLAState(*map(jnp.asarray, initial)),
        write_gain=write_gain,
        **jax.tree.map(jnp.asarray, rest),
    )
    assert actual.shape == (1, 13, 2)
    for t in range(13):
        _, (memory, _, _), _ = oracle.attention(
            key[:, : t + 1],
            key[:, : t + 1],
            value[:, : t + 1],
            direction[:, : t + 1],
            lambda0=0.3,
            initial_state=initial,
            write_gain=write_gain,
            **{name: x[:, : t + 1] for name, x in rest.items()},
        )
        expected = np.linalg.norm(memory, axis=(-2, -1))
        assert_close(actual[:, t], expected, tolerances.FLOAT64)


def test_documented_state_norm():
    """Stability, 4: on random inputs it settles near √d ‖v‖, and it is not a bound of the norm."""
    key, value, direction = (jnp.asarray(x, jnp.float32) for x in draw(2000))
    norm = diagnostics.state_norm(key, value, direction)
    scale = 32**0.5 * float(jnp.linalg.norm(value, axis=-1).mean())
    late = norm[:, 500:]
    assert 0.3 * scale < float(late.mean()) < 2 * scale
    assert float(late[:, -500:].mean()) < 1.2 * float(late[:, :500].mean())
    # Two keys at a small angle θ with opposite values of length 1 reach 2/θ.
    angle = 0.2
    pair = jnp.array([[1, 0], [np.cos(angle), np.sin(angle)]])
    key = jnp.tile(pair, (200, 1))[None, :, None]
    value = jnp.tile(jnp.array([[1.0], [-1.0]]), (200, 1))[None, :, None]
    huge = diagnostics.state_norm(key, value, lambda0=1e8)  # then α̂ = k̂
    assert float(huge[0, -1, 0]) == pytest.approx(2 / angle, rel=0.02)


def test_state_norm_streams():
    """No intermediate of size T · D · E: the program's temporaries stay near its inputs'."""
    length, dim = 4096, 32
    shape = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.float32)
    compiled = jax.jit(diagnostics.state_norm).lower(shape, shape, shape).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < length * dim * dim * 4 / 2


def test_penalty_condition_number(x64):
    key, value, direction = map(jnp.asarray, draw(20, dim=6, value_dim=5))
    _, state = vla_jax.vla_attention(key, key, value, direction, return_state=True)
    lambda0 = jnp.array([0.1, 10.0])
    matrix = lambda0[:, None, None] * np.eye(6) + state.penalty
    actual = diagnostics.penalty_condition_number(state.penalty, lambda0=lambda0)
    np.testing.assert_allclose(actual, np.linalg.cond(matrix), rtol=1e-9)
    assert (actual <= (lambda0 + 20 / 6) / lambda0 + 1e-9).all()


def test_lyapunov_falls_by_the_documented_amount(x64):
    """Stability, 3: with M fixed a step with value 0 lowers it by ‖S k̂‖² (2 − c) / ‖A k̂‖."""
    key, value, direction = map(jnp.asarray, draw(20, dim=6, value_dim=5))
    _, state = vla_jax.vla_attention(key, key, value, direction, return_state=True)
    unit_key = numerics.normalize(key[:, 3])
    matrix = 0.1 * jnp.eye(6) + state.penalty
    np.testing.assert_allclose(
        diagnostics.lyapunov(state),
        jnp.trace(state.memory.swapaxes(-1, -2) @ matrix @ state.memory, axis1=-2, axis2=-1),
        rtol=1e-12,
    )
    solution = jnp.linalg.solve(matrix, unit_key[..., None])[..., 0]
    length = jnp.linalg.norm(solution, axis=-1)
    gain = solution / length[..., None]
    read = jnp.einsum("bhde,bhd->bhe", state.memory, unit_key)
    after = state.replace(memory=state.memory - gain[..., :, None] * read[..., None, :])
    drop = jnp.sum(read**2, -1) * (2 - diagnostics.alignment(unit_key, gain)) / length
    np.testing.assert_allclose(
        diagnostics.lyapunov(state) - diagnostics.lyapunov(after), drop, rtol=1e-9
    )


def test_documented_drift_of_the_inverse(x64):
    """Stability, 8: 6e-7 after 1000 float32 Sherman–Morrison steps; the refresh breaks it."""
    _, _, direction = draw(1000)
    u = jnp.moveaxis(jnp.asarray(direction, jnp.float32), 1, 0)
    penalty = jnp.einsum("tbhi,tbhj->bhij", *[u.astype(jnp.float64)] * 2)
    fresh = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32) / np.float32(0.1), penalty.shape)

    @jax.jit
    def run(u, inverse, refresh):
        def step(carry, u_t):
            inverse, t = carry
            inverse = published.sherman_morrison(inverse, u_t)
            added = jnp.where((t + 1) % 20 == 0, refresh, 0) * jnp.eye(32, dtype=inverse.dtype)
            return ((inverse + added).astype(inverse.dtype), t + 1), None

        return jax.lax.scan(step, (inverse, 0), u)[0][0]

    exact, refreshed = (run(u, fresh, jnp.float32(r)) for r in (0, 1e-3))
    assert exact.dtype == jnp.float32
    drift = diagnostics.inverse_drift(exact, penalty)
    assert drift.shape == (1, 2)
    assert 1e-8 < float(drift.max()) < 3e-6
    assert 5e-3 < float(diagnostics.inverse_drift(refreshed, penalty).min()) < 0.1
    _, state = vla_jax.vla_step(*[jnp.ones((1, 2, 32))] * 3, None, vla_jax.init_state(1, 2, 32, 32))
    assert diagnostics.inverse_drift(state.inverse, state.penalty).max() < 1e-6


def test_wrong_arguments_are_named():
    good = jnp.ones((1, 2, 1, 3))
    with pytest.raises(ValueError, match="unit_key"):
        diagnostics.alignment(jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="penalty"):
        diagnostics.penalty_condition_number(jnp.ones((3, 3)))
    with pytest.raises(ValueError, match="inverse"):
        diagnostics.inverse_drift(jnp.ones((1, 1, 2, 2)), jnp.ones((1, 1, 3, 3)))
    with pytest.raises(ValueError, match="value"):
        diagnostics.state_norm(good, jnp.ones((1, 3, 1, 3)))
    with pytest.raises(ValueError, match="write_gain"):
        diagnostics.state_norm(good, good, write_gain="none")
    with pytest.raises(ValueError, match="lambda0"):
        diagnostics.lyapunov(vla_jax.init_state(1, 1, 2, 2), lambda0=-1)
