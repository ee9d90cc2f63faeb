"""penalty_solve, for every implementation, against the oracle."""

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
from vla_jax.bundles import Solve

pytestmark = pytest.mark.operation(operation=Solve)

CASES = (
    Case(2, 1, 1, 1, 4, 4, initial=True),
    Case(1, 17, 2, 1, 5, 4, segments="single", initial=True, per_head=True, chunk_size=8),
    Case(2, 65, 2, 1, 16, 4, segments="edges", initial=True, degenerate=True),
    Case(1, 100, 1, 1, 32, 4, chunk_size=32),
)


@functools.lru_cache(None)
def expected(case):
    """Right-hand sides of any sign and length: this primitive normalises nothing."""
    call, rng = draw(case), np.random.default_rng(2)
    inputs = {
        "rhs": 3 * rng.standard_normal(call["key"].shape),
        "direction": call["direction"],
        "lambda0": np.asarray(call["lambda0"]),
    }
    if case.initial:
        inputs["penalty"] = call["initial_state"][1]
    arguments = (inputs["rhs"], inputs["direction"])
    options = {
        "lambda0": inputs["lambda0"],
        "initial_penalty": inputs.get("penalty"),
        "segment_ids": call["segment_ids"],
    }
    values = oracle.penalty_solve(*arguments, **options)
    cotangents = tuple(rng.standard_normal(x.shape) for x in values)
    gradients = oracle.penalty_solve_grad(*cotangents, *arguments, **options)
    return inputs, call["segment_ids"], cotangents, values, gradients


@functools.lru_cache(None)
def solver(**options):
    def primal(inputs, segment_ids):
        return vla_jax.penalty_solve(
            inputs["rhs"],
            inputs["direction"],
            lambda0=inputs["lambda0"],
            initial_penalty=inputs.get("penalty"),
            segment_ids=segment_ids,
            **options,
        )

    @jax.jit
    def run(inputs, segment_ids, cotangents):
        values, pullback = jax.vjp(lambda x: primal(x, segment_ids), inputs)
        return values, pullback(cotangents)[0]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, implementation, precision):
    inputs, segment_ids, cotangents, values, gradients = expected(case)
    run = solver(**chunks(implementation, case.chunk_size))
    actual, actual_gradients = run(*cast((inputs, segment_ids, cotangents), precision.dtype))
    assert_close(actual[0], values[0], precision.values, "solution")
    assert_close(actual[1], values[1], precision.values, "penalty")
    for name, x in actual_gradients.items():
        assert_close(x, gradients[name], precision.gradients, f"gradient of {name}")


def test_float32(implementation):
    inputs, segment_ids, cotangents, values, gradients = expected(CASES[2])
    run = solver(**chunks(implementation, CASES[2].chunk_size))
    actual, actual_gradients = run(*cast((inputs, segment_ids, cotangents), jnp.float32))
    assert actual[0].dtype == actual[1].dtype == jnp.float32
    assert_close(actual[0], values[0], tolerances.FLOAT32, "solution")
    assert_close(actual[1], values[1], tolerances.FLOAT32, "penalty")
    for name, x in actual_gradients.items():
        assert_close(x, gradients[name], tolerances.FLOAT32, f"gradient of {name}")


def test_half_precision_right_hand_side(implementation):
    """The solution has rhs's dtype, the penalty is accumulated in float32."""
    inputs, segment_ids, _, _, _ = expected(CASES[2])
    half = cast({n: inputs[n] for n in ("rhs", "direction")}, jnp.bfloat16)
    solution, penalty = vla_jax.penalty_solve(
        half["rhs"],
        half["direction"],
        lambda0=0.1,
        initial_penalty=jnp.asarray(inputs["penalty"], jnp.float32),
        segment_ids=segment_ids,
        implementation=implementation,
    )
    wanted, wanted_penalty = oracle.penalty_solve(
        *(np.asarray(half[n]).astype(np.float64) for n in ("rhs", "direction")),
        lambda0=0.1,
        initial_penalty=inputs["penalty"],
        segment_ids=segment_ids,
    )
    assert (solution.dtype, penalty.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(solution, wanted, 1.01 * 2**-8, "solution")
    assert_close(penalty, wanted_penalty, tolerances.FLOAT32, "penalty")


def test_asymmetric_initial_penalty_counts_by_its_symmetric_part(implementation, x64):
    inputs, segment_ids, cotangents, values, gradients = expected(CASES[1])
    skew = np.random.default_rng(3).standard_normal(inputs["penalty"].shape)
    skewed = {**inputs, "penalty": inputs["penalty"] + skew - np.swapaxes(skew, -1, -2)}
    run = solver(**chunks(implementation, CASES[1].chunk_size))
    actual, actual_gradients = run(skewed, segment_ids, cotangents)
    assert_close(actual[0], values[0], tolerances.FLOAT64, "solution")
    assert_close(actual[1], values[1], tolerances.FLOAT64, "penalty")
    assert_close(actual_gradients["penalty"], gradients["penalty"], tolerances.FLOAT64)


@pytest.mark.parametrize("lambda0", [1e-3, 0.1, 1e3])
def test_solves_the_normal_equations(lambda0, implementation, x64):
    """rhs = direction at the last token: (lambda0 I + U^T U) alpha = u_T."""
    rng = np.random.default_rng(4)
    u = rng.standard_normal((1, 22, 1, 5)) + 2
    solution, penalty = vla_jax.penalty_solve(u, u, lambda0=lambda0, **chunks(implementation, 8))
    matrix = lambda0 * np.eye(5) + np.asarray(penalty[0, 0])
    assert_close(matrix @ np.asarray(solution[0, -1, 0]), u[0, -1, 0], tolerances.FLOAT64)


def test_the_penalty_of_one_repeated_direction_stays_definite(implementation):
    """Plainly summed in float32, its smallest eigenvalue with λ₀ = 0.1 was 0.038 here.

    And -0.2 after twice as many tokens: what goes on from that state is wrong.
    """
    dim, length = 16, 16384
    u = np.random.default_rng(0).standard_normal(dim)
    u = np.broadcast_to(u / (4 * np.linalg.norm(u)), (1, length, 1, dim)).astype(np.float32)
    ones = jnp.ones((1, length, 1, dim))
    options = {"lambda0": 0.1, "implementation": implementation}
    _, state = vla_jax.vla_attention(ones, ones, ones, u, return_state=True, **options)
    for penalty in (state.penalty, vla_jax.penalty_solve(ones, u, **options)[1]):
        eigenvalues = np.linalg.eigvalsh(np.asarray(penalty[0, 0], np.float64) + 0.1 * np.eye(dim))
        assert 0.098 < eigenvalues[0] < 0.102
