"""The Pallas kernels of `penalty_solve`, interpreted, against the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import support
import tolerances

from vla_jax.bundles import Solve
from vla_jax.pallas import common
from vla_jax.pallas.triton import penalty_kernels, penalty_solve

# Two super-chunks and a tail from few tokens.
SMALL = {"max_super_chunk": 64, "min_super_chunk": 64}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv(common.INTERPRET, "1")


def draw(dtype, *, dim=16, length=90, heads=2, direction=True, segments=False, normalize=True):
    """Inputs as float64 that ``dtype`` holds exactly; token 3 is absent (zero)."""
    rng = np.random.default_rng(dim + length)

    def normal(*shape, dtype=dtype):
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype)).astype(np.float64)

    tokens = 2, length, heads, dim
    key = np.asarray(jnp.asarray(np.exp(normal(*tokens) / 2), dtype)).astype(np.float64)
    u = np.asarray(jnp.asarray(oracle.normalize(normal(*tokens))[0] / dim**0.5, dtype))
    u = u.astype(np.float64)
    key[:, 3] = u[:, 3] = 0
    root = normal(2, heads, dim, dim, dtype="float32") / 4
    inputs = {
        "rhs": key if normalize else key / dim,
        "direction": u if direction else None,
        "lambda0": 0.1 * (1 + np.arange(heads, dtype=np.float32)).astype(np.float64),
        "penalty": np.asarray(root @ root.swapaxes(-1, -2), np.float32),
        "segment_ids": np.sort(rng.integers(0, 4, (2, length))).astype(np.int32)
        if segments
        else None,
    }
    cotangents = {
        "solution": normal(*tokens),
        "penalty": normal(2, heads, dim, dim, dtype="float32"),
        "normalized_rhs": normal(*tokens) if normalize else None,
        "raw_rhs": normal(*tokens) if normalize else None,
    }
    return inputs, cotangents


def expected(inputs, cotangents, normalize, write_gain):
    """Values and gradients from the oracle, named as in `actual`."""
    key, u = inputs["rhs"], inputs["direction"]
    unit = oracle.normalize(key)[0] if normalize else key
    options = {n: inputs[n] for n in ("lambda0", "segment_ids")}
    options["initial_penalty"] = inputs["penalty"]
    direction = unit / key.shape[-1] ** 0.5 if u is None else u
    alpha, penalty = oracle.penalty_solve(unit, direction, **options)
    solution, d_alpha, d_unit = alpha, cotangents["solution"], 0
    if write_gain is not None:
        solution = oracle._write_vector(alpha, unit, write_gain)
        d_alpha, d_unit = oracle._write_vector_grad(d_alpha, alpha, unit, write_gain)
    grads = oracle.penalty_solve_grad(d_alpha, cotangents["penalty"], unit, direction, **options)
    d_rhs = grads["rhs"] + d_unit
    if u is None:
        d_rhs = d_rhs + grads["direction"] / key.shape[-1] ** 0.5
    if normalize:
        d_rhs = oracle._normalize_grad(d_rhs + cotangents["normalized_rhs"], key)
        d_rhs = d_rhs + cotangents["raw_rhs"]
    return {
        "solution": solution,
        "penalty": penalty,
        "d_rhs": d_rhs,
        "d_direction": None if u is None else grads["direction"],
        "d_lambda0": grads["lambda0"],
        "d_initial_penalty": grads["penalty"],
    }


def actual(inputs, cotangents, dtype, options):
    def cast(tree):
        return {
            n: x
            if x is None or x.dtype == np.int32
            else jnp.asarray(x, "float32" if n in ("lambda0", "penalty") else dtype)
            for n, x in tree.items()
        }

    inputs, cotangents = cast(inputs), cast(cotangents)

    bundle = Solve(*inputs.values())
    bundle = bundle._replace(lambda0=jnp.broadcast_to(bundle.lambda0, bundle.penalty.shape[:2]))
    given = penalty_solve.Cotangents(*cotangents.values())

    @jax.jit
    def run(bundle, given):
        solved = penalty_solve.forward(bundle, options)
        d = penalty_solve.backward(bundle, solved.gain, solved.kept, given, options)
        return {
            "solution": solved.solution,
            "penalty": solved.penalty,
            "d_rhs": d.rhs,
            "d_direction": d.direction,
            "d_lambda0": d.lambda0.sum(0),  # given per batch entry; lambda0 is shared here
            "d_initial_penalty": d.penalty,
        }

    out = run(bundle, given)
    assert out["solution"].dtype == out["d_rhs"].dtype == jnp.dtype(dtype)
    assert out["penalty"].dtype == jnp.float32
    return out


def check(dtype, params=SMALL, normalize=True, write_gain="unit", precision=None, **kinds):
    inputs, cotangents = draw(dtype, normalize=normalize, **kinds)
    want = expected(inputs, cotangents, normalize, write_gain)
    params = dataclasses.replace(penalty_solve.TABLE[64], **params)
    options = penalty_solve.Options(normalize, write_gain, precision, params)
    got = actual(inputs, cotangents, dtype, options)
    assert got.keys() == want.keys()
    for name, x in want.items():
        if x is None:
            assert got[name] is None
        elif dtype == "float32":
            support.assert_close(got[name], x, tolerances.FLOAT32, name)
        else:
            support.assert_rms_close(got[name], x, tolerances.BFLOAT16_RMS, name)
    absent = np.asarray(got["solution"])[:, 3]
    assert not absent.any()
    if normalize:  # a zero key has a zero gradient but for what reaches it unnormalised
        raw = np.asarray(got["d_rhs"]).astype(np.float64)[:, 3]
        np.testing.assert_array_equal(raw, cotangents["raw_rhs"][:, 3])
    if kinds.get("direction", True):
        assert not np.asarray(got["d_direction"])[:, 3].any()


def test_unit_gain_with_further_cotangents(interpreted):
    check("float32")


def test_projection_gain_segments_and_odd_sizes(interpreted):
    check("float32", write_gain="projection", segments=True, dim=20, length=70)


def test_direction_from_the_key_bfloat16(interpreted):
    check("bfloat16", direction=False, segments=True)


def test_bare_solve_under_x64(interpreted, x64):
    check("float32", write_gain=None, normalize=False, segments=True, length=66)


def test_large_dimension_keeps_the_matrices_in_memory(interpreted):
    params = {"invert_rows": 16, "resident_dim": 16, "gram_width": 16, "du_width": 16}
    params |= {"factor_width": 16, "apply_width": 16, "apply_backward_width": 16, "du_tokens": 32}
    check("float32", params=SMALL | params, write_gain="rls", segments=True, dim=32, heads=1)


def test_parts_of_the_resident_inverse(interpreted):
    check("float16", params=SMALL | {"factor_width": 16, "apply_width": 16}, dim=32, heads=1)


def test_half_inverse(interpreted):
    rng = np.random.default_rng(0)
    root = rng.standard_normal((16, 16))
    matrix = np.eye(16) + root @ root.T
    got = penalty_kernels.half_inverse(jnp.asarray(matrix, "float32"), 1.0)
    support.assert_close(got, np.linalg.inv(np.linalg.cholesky(matrix)), tolerances.REORDERED32)
    # What rounding has made indefinite stays finite: no pivot is below the bound.
    rounded = jnp.asarray(matrix - 1.5 * np.eye(16), "float32")
    assert np.isfinite(penalty_kernels.half_inverse(rounded, 1.0)).all()


def test_super_chunks_split_long_narrow_inputs():
    params = penalty_solve.TABLE[64]
    length = functools.partial(penalty_solve.super_chunk_length, params=params)
    assert length(64, 1) == 64
    assert length(4096, 1024) == params.max_super_chunk
    assert length(8192, 1) == params.min_super_chunk
    for tokens in (64, 4096, 65536):
        assert length(tokens, 16) % penalty_kernels.GROUP == 0


def test_refusals():
    token, matrix = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 4, 4))
    bundle = Solve(token, None, jnp.ones((1, 1)), matrix)
    with pytest.raises(ValueError, match="direction=None"):
        penalty_solve.forward(bundle, penalty_solve.Options())


def test_what_a_chunk_keeps_is_counted_too(interpreted):
    """2³⁰ entries of the tokens index well; the matrices that their chunks keep would not."""
    tokens = jax.ShapeDtypeStruct((64, 16384, 8, 128), jnp.bfloat16)
    lambda0 = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    penalty = jax.ShapeDtypeStruct((64, 8, 128, 128), jnp.float32)
    solve = functools.partial(penalty_solve.forward, options=penalty_solve.Options())
    with pytest.raises(NotImplementedError, match=r"vla_penalty_factor: .*2\*\*31 elements"):
        jax.eval_shape(solve, Solve(tokens, tokens, lambda0, penalty))
