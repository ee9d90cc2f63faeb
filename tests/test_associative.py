"""The per-token associative scan: the published parallel form, multiplied on the right side."""

import jax
import numpy as np
import oracle
import tolerances
from support import assert_close

from vla_jax import associative


def problem(length=37, dim=6, value_dim=3):
    rng = np.random.default_rng(9)
    key, _ = oracle.normalize(rng.exponential(size=(2, length, 2, dim)))
    write_key, _ = oracle.normalize(key + 0.3 * rng.standard_normal(key.shape))
    return (
        rng.exponential(size=key.shape),
        key,
        write_key,
        rng.standard_normal((*key.shape[:3], value_dim)),
        rng.standard_normal((2, 2, dim, value_dim)),
    )


def test_per_token_form_equals_the_recurrence(x64):
    *arguments, initial = problem()
    wanted = oracle.delta_rule(*arguments, initial_memory=initial)
    run = jax.jit(associative.delta_rule_per_token)
    actual = run(*arguments, initial_memory=initial)
    for x, y in zip(actual, wanted, strict=True):
        assert_close(x, y, tolerances.FLOAT64)
    actual = run(*arguments)
    for x, y in zip(actual, oracle.delta_rule(*arguments), strict=True):
        assert_close(x, y, tolerances.FLOAT64)


def test_per_token_form_gradients(x64):
    *arguments, initial = problem(length=9)
    values = oracle.delta_rule(*arguments, initial_memory=initial)
    rng = np.random.default_rng(10)
    cotangents = tuple(rng.standard_normal(x.shape) for x in values)

    @jax.jit
    def run(arguments, initial):
        def primal(arguments, initial):
            return associative.delta_rule_per_token(*arguments, initial_memory=initial)

        return jax.vjp(primal, arguments, initial)[1](cotangents)

    gradients, memory = run(arguments, initial)
    wanted = oracle.delta_rule_grad(*cotangents, *arguments, initial_memory=initial)
    for name, x in zip(("query", "key", "write_key", "value"), gradients, strict=True):
        assert_close(x, wanted[name], tolerances.FLOAT64, name)
    assert_close(memory, wanted["memory"], tolerances.FLOAT64)


def test_the_wrong_side_is_noticed():
    """With D = E the wrong order has the right shape; the oracle still tells them apart."""
    query, key, write_key, value, _ = problem(length=5, dim=3, value_dim=3)
    _, memory = oracle.delta_rule(query, key, write_key, value)
    wrong = np.zeros_like(memory)
    for t in range(5):
        k, a, v = key[:, t], write_key[:, t], value[:, t]
        residual = v - (wrong @ k[..., None])[..., 0]
        wrong = wrong + a[..., :, None] * residual[..., None, :]
    assert np.abs(wrong - memory).max() > 0.1 * np.abs(memory).max()
