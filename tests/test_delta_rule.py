"""delta_rule, for every implementation, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from support import assert_close, cast, chunks

import vla_jax
from benchmarks.cases import Case, draw
from vla_jax.bundles import Delta

pytestmark = pytest.mark.operation(operation=Delta)

CASES = (
    Case(2, 1, 1, 2, 4, 5, initial=True),
    Case(1, 17, 2, 2, 5, 4, segments="single", initial=True, chunk_size=8),
    Case(2, 65, 1, 1, 16, 32, segments="edges", initial=True),
    Case(1, 100, 2, 1, 32, 5, chunk_size=32),
)
NAMES = ("query", "key", "write_key", "value")


@functools.lru_cache(None)
def expected(case):
    """Keys and write keys of any sign, not normalised (but contracting: |a| |k| < 1)."""
    call, rng = draw(case), np.random.default_rng(5)
    inputs = {
        "query": rng.standard_normal(call["query"].shape),
        "key": rng.standard_normal(call["key"].shape) / case.dim,
        "write_key": rng.standard_normal(call["key"].shape),
        "value": call["value"],
    }
    if case.initial:
        inputs["memory"] = call["initial_state"][0]
    arguments = [inputs[n] for n in NAMES]
    options = {"initial_memory": inputs.get("memory"), "segment_ids": call["segment_ids"]}
    values = oracle.delta_rule(*arguments, **options)
    cotangents = tuple(rng.standard_normal(x.shape) for x in values)
    gradients = oracle.delta_rule_grad(*cotangents, *arguments, **options)
    return inputs, call["segment_ids"], cotangents, values, gradients


@functools.lru_cache(None)
def rule(**options):
    @jax.jit
    def run(inputs, segment_ids, cotangents):
        def primal(inputs):
            return vla_jax.delta_rule(
                *(inputs[n] for n in NAMES),
                initial_memory=inputs.get("memory"),
                segment_ids=segment_ids,
                **options,
            )

        values, pullback = jax.vjp(primal, inputs)
        return values, pullback(cotangents)[0]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, implementation, precision):
    inputs, segment_ids, cotangents, values, gradients = expected(case)
    run = rule(**chunks(implementation, case.chunk_size))
    actual, actual_gradients = run(*cast((inputs, segment_ids, cotangents), precision.dtype))
    assert_close(actual[0], values[0], precision.values, "out")
    assert_close(actual[1], values[1], precision.values, "memory")
    for name, x in actual_gradients.items():
        assert_close(x, gradients[name], precision.gradients, f"gradient of {name}")


def test_float32(implementation):
    inputs, segment_ids, cotangents, values, gradients = expected(CASES[2])
    run = rule(**chunks(implementation, CASES[2].chunk_size))
    actual, actual_gradients = run(*cast((inputs, segment_ids, cotangents), jnp.float32))
    assert actual[0].dtype == actual[1].dtype == jnp.float32
    assert_close(actual[0], values[0], tolerances.FLOAT32, "out")
    assert_close(actual[1], values[1], tolerances.FLOAT32, "memory")
    for name, x in actual_gradients.items():
        assert_close(x, gradients[name], tolerances.FLOAT32, f"gradient of {name}")


def test_zero_keys_make_it_linear_attention(implementation, x64):
    """S k dropped: out_t = sum_{s<=t} (q_t . a_s) v_s."""
    inputs = dict(expected(CASES[3])[0])
    q, a, v = (inputs[n] for n in ("query", "write_key", "value"))
    out, memory = vla_jax.delta_rule(q, np.zeros_like(a), a, v, implementation=implementation)
    scores = np.tril(np.einsum("bthd,bshd->bhts", q, a))
    assert_close(out, np.einsum("bhts,bshe->bthe", scores, v), tolerances.FLOAT64)
    assert_close(memory, np.einsum("bthd,bthe->bhde", a, v), tolerances.FLOAT64)


def test_deltanet_stores_exactly(implementation, x64):
    """a = k of unit length: reading with the key just written returns its value."""
    inputs = expected(CASES[3])[0]
    key, _ = oracle.normalize(inputs["key"])
    out, _ = vla_jax.delta_rule(key, key, key, inputs["value"], implementation=implementation)
    assert_close(out, inputs["value"], tolerances.FLOAT64)


def test_correlated_keys(fast_implementation):
    """Nearly equal keys, where a Neumann product of the triangular inverse would blow up."""
    rng = np.random.default_rng(6)
    key = np.abs(1 + 0.05 * rng.standard_normal((1, 128, 1, 16)))
    key = (key / np.linalg.norm(key, axis=-1, keepdims=True)).astype(np.float32)
    value = rng.standard_normal((1, 128, 1, 8)).astype(np.float32)
    out, memory = vla_jax.delta_rule(
        key, key, key, value, implementation=fast_implementation, chunk_size=128
    )
    wanted, wanted_memory = oracle.delta_rule(key, key, key, value)
    assert_close(out, wanted, tolerances.FLOAT32, "out")
    assert_close(memory, wanted_memory, tolerances.FLOAT32, "memory")
