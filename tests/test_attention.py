"""vla_attention, vla_step and the state, for every implementation, against the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from support import (
    STATE,
    assert_close,
    assert_matches,
    assert_rms_close,
    attention,
    cast,
    chunks,
    draw_cotangents,
    options_of,
    oracle_value_and_gradients,
    split_call,
    value_and_pullback,
)

import vla_jax
from benchmarks.cases import CASES, Case, draw
from vla_jax import numerics

SMALL = Case(2, 22, 2, 2, 5, 4, initial=True, per_head=True, segments="random")


@functools.lru_cache(None)
def expected(case):
    call = draw(case)
    cotangents = draw_cotangents(call)
    return call, cotangents, oracle_value_and_gradients(call, cotangents, **options_of(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, implementation, precision):
    if implementation == "associative" and case.length <= (case.chunk_size or 16):
        pytest.skip("one chunk: nothing to scan, the same program as xla")
    call, cotangents, reference = expected(case)
    run = value_and_pullback(**options_of(case), **chunks(implementation, case.chunk_size))
    primals, gradients = run(*cast((*split_call(call), cotangents), precision.dtype))
    assert primals[0].dtype == precision.dtype
    assert all(x.dtype == precision.dtype for x in primals[1])
    assert_matches(primals, gradients, reference, precision.values, precision.gradients)


def ill_conditioned(length=4096, dim=16, condition=1e3):
    """Directions in half of the dimensions, so that M keeps lambda0 as an eigenvalue."""
    call = draw(Case(1, length, 2, 1, dim, 8), seed=7)
    rng = np.random.default_rng(8)
    plane = np.linalg.qr(rng.standard_normal((dim, dim)))[0][: dim // 2]
    direction = rng.standard_normal((1, length, 2, dim // 2)) @ plane
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True) * np.sqrt(dim)
    largest = np.linalg.eigvalsh(np.einsum("bthd,bthe->hde", direction, direction)).max()
    call.update(direction=direction, lambda0=largest / (condition - 1))
    return jax.tree.map(lambda x: np.asarray(x, np.float32).astype(np.float64), call)


@functools.lru_cache(None)
def expected_ill_conditioned():
    call = ill_conditioned()
    cotangents = draw_cotangents(call)
    return call, cotangents, oracle_value_and_gradients(call, cotangents)


@pytest.mark.slow
def test_float32_long_and_ill_conditioned(implementation):
    call, cotangents, reference = expected_ill_conditioned()
    run = value_and_pullback(implementation=implementation)
    primals, gradients = run(*cast((*split_call(call), cotangents), jnp.float32))
    assert primals[0].dtype == jnp.float32
    assert_matches(primals, gradients, reference, tolerances.FLOAT32, tolerances.FLOAT32_GRADIENT)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(implementation, dtype):
    """Padding too: a cotangent over ``eps`` there is more than float16 holds."""
    case = Case(2, 100, 2, 2, 16, 32, segments="random", mask="left")
    call = draw(case)
    rounded = {n: np.asarray(cast(call[n], dtype)) for n in ("query", "key", "value")}
    rounded["direction"] = np.asarray(cast(call["direction"], dtype))
    call = {**call, **{n: x.astype(np.float64) for n, x in rounded.items()}}
    cotangents = draw_cotangents(call)
    (out, state), expected_gradients = oracle_value_and_gradients(call, cotangents)

    inputs, rest = split_call(call)
    inputs = {n: x if n == "lambda0" else cast(x, dtype) for n, x in inputs.items()}
    run = value_and_pullback(implementation=implementation)
    cotangents = (cast(cotangents[0], dtype), cast(cotangents[1], jnp.float32))
    primals, gradients = run(cast({"lambda0": 0.1}, jnp.float32) | inputs, rest, cotangents)
    assert primals[0].dtype == dtype
    assert all(x.dtype == jnp.float32 for x in primals[1])
    assert_rms_close(primals[0], out, tolerances.BFLOAT16_RMS, "out")
    for name, x, y in zip(STATE, primals[1], state, strict=True):
        assert_rms_close(x, y, tolerances.BFLOAT16_RMS, name)
    for name, x in gradients.items():
        if name != "lambda0":
            assert x.dtype == dtype, name
        assert_rms_close(x, expected_gradients[name], tolerances.BFLOAT16_RMS, name)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_chunk_size_does_not_matter(chunk_size, fast_implementation, x64):
    call, _, (values, _) = expected(SMALL)
    inputs, rest = split_call(call)
    run = jax.jit(
        functools.partial(attention, chunk_size=chunk_size, implementation=fast_implementation)
    )
    out, state = run(inputs, rest)
    assert_close(out, values[0], tolerances.FLOAT64)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT64), state, values[1])


def test_split_and_resume(implementation, x64):
    """Split anywhere (here also inside segments), resume, compare with the oracle's one call."""
    call, _, (values, _) = expected(SMALL)
    inputs, rest = split_call(call)
    ids, outs = rest["segment_ids"], []
    run = jax.jit(functools.partial(attention, **chunks(implementation, 4)))
    for start, stop in ((0, 5), (5, 21), (21, 22)):
        part = {n: x if n in (*STATE, "lambda0") else x[:, start:stop] for n, x in inputs.items()}
        if start:  # the state belongs to the first segment: drop it in rows that begin another
            goes_on = ids[:, start] == ids[:, start - 1]
            for n in STATE:
                part[n] = part[n] * goes_on.reshape(-1, *[1] * (part[n].ndim - 1))
        out, state = run(part, {"segment_ids": ids[:, start:stop]})
        inputs.update(zip(STATE, state, strict=True))
        outs.append(out)
    assert_close(jnp.concatenate(outs, 1), values[0], tolerances.FLOAT64)
    for name, x, y in zip(STATE, state, values[1], strict=True):
        assert_close(x, y, tolerances.FLOAT64, name)


@pytest.mark.parametrize("write_gain", vla_jax.types.WRITE_GAINS)
@pytest.mark.parametrize("direction", ["learned", "key"])
def test_step_equals_attention(write_gain, direction, x64):
    case = dataclasses.replace(SMALL, segments=None, write_gain=write_gain, direction=direction)
    call, _, (values, _) = expected(case)

    @jax.jit
    def decode(tokens, state, lambda0):
        def body(state, token):
            out, state = vla_jax.vla_step(
                token["query"],
                token["key"],
                token["value"],
                token.get("direction"),
                state,
                lambda0=lambda0,
                write_gain=write_gain,
            )
            return state, out

        return jax.lax.scan(body, state, tokens)

    tokens = {
        n: np.moveaxis(call[n], 1, 0)
        for n in ("query", "key", "value", "direction")
        if call[n] is not None
    }
    fresh = vla_jax.init_state(2, 2, 5, 4)
    start = dataclasses.replace(
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), fresh),
        **dict(zip(STATE, map(jnp.asarray, call["initial_state"]), strict=True)),
    )
    state, outs = decode(tokens, start, call["lambda0"])
    assert_close(jnp.moveaxis(outs, 0, 1), values[0], tolerances.FLOAT64)
    for name, y in zip(STATE, values[1], strict=True):
        assert_close(getattr(state, name), y, tolerances.FLOAT64, name)


def test_step_takes_the_state_of_attention(implementation, x64):
    """Prefill with any implementation, then decode with gradients flowing through both."""
    call, _, (values, _) = expected(dataclasses.replace(SMALL, segments=None))
    inputs, _ = split_call(call)
    prefix = {n: x if n in (*STATE, "lambda0") else x[:, :21] for n, x in inputs.items()}

    @jax.jit
    def run(inputs, prefix):
        initial = vla_jax.VLAState(*(prefix[n] for n in STATE))
        _, state = vla_jax.vla_attention(
            *(prefix[n] for n in ("query", "key", "value", "direction")),
            lambda0=inputs["lambda0"],
            initial_state=initial,
            implementation=implementation,
            return_state=True,
        )
        token = [inputs[n][:, 21] for n in ("query", "key", "value", "direction")]
        return vla_jax.vla_step(*token, state, lambda0=inputs["lambda0"])

    out, state = run(inputs, prefix)
    assert_close(out, values[0][:, 21], tolerances.FLOAT64)
    for name, y in zip(STATE, values[1], strict=True):
        assert_close(getattr(state, name), y, tolerances.FLOAT64, name)


def test_gradient_through_steps(x64):
    """Gradients through a few decode steps equal the oracle's."""
    case = Case(2, 4, 2, 1, 4, 3, initial=True, per_head=True)
    call, cotangents, (values, gradients) = expected(case)
    inputs, _ = split_call(call)

    @jax.jit
    def run(inputs, cotangents):
        def primal(inputs):
            state, outs = vla_jax.VLAState(*(inputs[n] for n in STATE)), []
            for t in range(4):
                token = [inputs[n][:, t] for n in ("query", "key", "value", "direction")]
                out, state = vla_jax.vla_step(*token, state, lambda0=inputs["lambda0"])
                outs.append(out)
            return jnp.stack(outs, 1), tuple(getattr(state, n) for n in STATE)

        primals, pullback = jax.vjp(primal, inputs)
        return primals, pullback(cotangents)[0]

    assert_matches(*run(inputs, cotangents), (values, gradients), tolerances.FLOAT64)


def test_fresh_state_is_no_state(implementation):
    call = draw(Case(2, 17, 2, 1, 5, 4))
    inputs, _ = cast(split_call(call), jnp.float32)
    run = functools.partial(vla_jax.vla_attention, **inputs, implementation=implementation)
    state = vla_jax.init_state(2, 2, 5, 4)
    assert all(x.dtype == jnp.float32 and not x.any() for x in (state.memory, state.penalty))
    np.testing.assert_array_equal(run(initial_state=state), run())


def test_default_implementation_and_eager():
    """implementation=None works eagerly and under jit, without a state returned."""
    call = draw(Case(1, 17, 2, 2, 5, 4))
    inputs, _ = cast(split_call(call), jnp.float32)
    out = vla_jax.vla_attention(**inputs)
    assert out.shape == (1, 17, 4, 4)
    assert_close(out, oracle.attention(**call)[0], tolerances.REORDERED32)
    assert_close(jax.jit(vla_jax.vla_attention)(**inputs), out, tolerances.REORDERED32)


def test_scan_over_layers_with_remat(x64):
    """Stacked under lax.scan with remat inside: values and gradients as unrolled."""
    x = draw(Case(1, 5, 1, 1, 4, 4))["value"]
    lambda0 = jnp.asarray([0.1, 0.5])

    def layer(x, lambda0):
        key = jnp.exp(x)
        return x + vla_jax.vla_attention(key, key, x, lambda0=lambda0, chunk_size=4)

    @jax.jit
    @jax.value_and_grad
    def scanned(x):
        return jax.lax.scan(lambda x, p: (jax.remat(layer)(x, p), None), x, lambda0)[0].sum()

    @jax.jit
    @jax.value_and_grad
    def unrolled(x):
        return layer(layer(x, lambda0[0]), lambda0[1]).sum()

    jax.tree.map(lambda a, b: assert_close(a, b, tolerances.FLOAT64), scanned(x), unrolled(x))


def stepped(steps=3):
    """Tokens, and a state after some of them, its cache filled."""
    call = draw(Case(1, 8, 2, 1, 4, 3))
    tokens = {n: np.asarray(call[n], np.float32) for n in ("query", "key", "value", "direction")}
    state = vla_jax.init_state(1, 2, 4, 3)
    for t in range(steps):
        _, state = vla_jax.vla_step(**{n: x[:, t] for n, x in tokens.items()}, state=state)
    return tokens, state


def test_a_new_penalty_takes_no_stale_inverse():
    tokens, state = stepped()
    assert np.all(state.inverse_lambda0 > 0)
    after = {n: x[:, 3] for n, x in tokens.items()}
    # Only the symmetric part counts; the triangle has the symmetric part of nine times it.
    triangle = np.triu(18 * state.penalty, 1) + 9 * state.penalty * np.eye(4, dtype=np.float32)
    changed = state.replace(penalty=triangle)
    assert jax.tree.structure(changed) == jax.tree.structure(state)
    bare = vla_jax.VLAState(state.memory, 9 * state.penalty, state.key_sum)
    wanted, _ = vla_jax.vla_step(**after, state=bare)
    out, new = vla_jax.vla_step(**after, state=changed)
    assert_close(out, wanted, tolerances.REORDERED32)
    assert np.all(new.inverse_age == 1)
    # Part of a batch, part of a state without cache, and a cache that is given are what they say.
    empty = bare.replace(penalty=state.penalty)
    assert empty.inverse is None
    assert empty.penalty_rest is None
    smaller = jax.tree.map(lambda x: x[:, :1], state)
    half = state.replace(memory=smaller.memory, penalty=smaller.penalty, key_sum=smaller.key_sum)
    assert half.inverse.shape == (1, 1, 4, 4)
    assert half.inverse_age.shape == (1, 1)
    given = state.replace(penalty=state.penalty, inverse=state.inverse)
    assert given.inverse is state.inverse
    assert not np.any(given.inverse_lambda0)


def test_what_rounding_kept_out_of_the_penalty_is_a_part_of_it(implementation):
    """After decoding: attention, too, starts from penalty + penalty_rest."""
    tokens, state = stepped()
    rest = 0.1 * state.penalty
    whole = vla_jax.VLAState(state.memory, state.penalty + rest, state.key_sum)
    found, wanted = (
        vla_jax.vla_attention(**tokens, initial_state=s, implementation=implementation)
        for s in (dataclasses.replace(state, penalty_rest=rest), whole)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("size", [3e38, 1e-37])
def test_keys_of_any_size(size, implementation):
    """The largest and the smallest that float32 holds: exact, gradients where they are normal."""
    call = draw(Case(1, 6, 2, 1, 4, 3))
    tokens = {n: np.asarray(call[n], np.float32) for n in ("query", "key", "value", "direction")}
    key = tokens["key"] / tokens["key"].max()
    key = np.maximum(key, 0.2) * np.float32(size)
    for direction in (tokens["direction"], None):
        tokens |= {"key": key, "direction": direction}
        wanted, *_ = oracle.attention(**tokens, readout="none")
        run = functools.partial(
            vla_jax.vla_attention, **tokens, readout="none", implementation=implementation
        )
        assert_close(run(), wanted, tolerances.REORDERED32)
        assert np.isfinite(jax.grad(lambda q, run=run: run(query=q).sum())(tokens["query"])).all()


@pytest.mark.parametrize("size", [2e-37, 1e-20, 1, 1e20, 1e38])
def test_normalize_forwards_at_both_ends(size):
    """A tangent that grows with the vector gives the same one for its direction, to any order."""
    size = np.float32(size)
    x, t = np.float32([0.3, -1, 0.5, 0.2]), np.float32([1, 0.4, -0.2, 0.7])

    def tangents(scale):
        def first(x):
            return jax.jvp(numerics.normalize, (x,), (t * scale,))[1]

        return jax.jvp(first, (x * scale,), (t * scale,))

    for found, wanted in zip(tangents(size), tangents(np.float32(1)), strict=True):
        assert_close(found, wanted, tolerances.REORDERED32)


@pytest.mark.parametrize("jit", [False, True])
def test_normalize_reaches_both_ends(jit, x64):
    function = jax.value_and_grad(lambda x: numerics.normalize(x)[0])
    function = jax.jit(function) if jit else function
    for dtype in (np.float32, np.float64):
        limits = np.finfo(dtype)
        for size in (limits.max / 2, 1e30, 1, 1e-30, 4 * limits.tiny):
            unit, gradient = function(np.array([size, 2 * size], dtype))
            assert_close(unit, 0.2**0.5, 4 * limits.eps)
            wanted = 0.2**1.5 * np.array([4, -2]) / size  # (I − k̂k̂ᵀ)/‖x‖
            if abs(wanted).min() > limits.tiny:
                assert_close(gradient, wanted, 8 * limits.eps)
        for bad in (np.nan, np.inf):
            assert np.isnan(function(np.array([1, bad], dtype))[0])  # not taken for zero
