"""lambda0 so small beside the penalty that float32 cannot hold their sum: finite, and how right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from support import assert_close

import vla_jax
from vla_jax import chunkwise, plan

LENGTH, DIM = 40, 8
NAMES = ("query", "key", "value", "direction")
SMALL = [1e-8, float(np.exp(-50))]  # exp(-50): a learned logarithm that ran away

# Exact for every smaller lambda0 to 1e-9: the outputs have a limit. float64 resolves it.
LIMIT = 1e-10


def tokens(seed=0, length=LENGTH, batch=1, scale=1.0):
    rng = np.random.default_rng(seed)
    shape = (batch, length, 2, DIM)
    q, k = (np.exp(rng.normal(size=shape) / 2) for _ in range(2))
    u = rng.normal(size=shape) / np.sqrt(DIM) * scale
    arrays = q, k, rng.normal(size=(*shape[:-1], 3)), u
    return {n: x.astype(np.float32) for n, x in zip(NAMES, arrays, strict=True)}


def repeated(length, size):
    inputs = tokens(length=length)
    u = inputs["direction"][:, :1]
    u = size * u / np.linalg.norm(u, axis=-1, keepdims=True)
    return inputs | {"direction": np.broadcast_to(u, inputs["direction"].shape)}


@functools.lru_cache(None)
def differentiated(implementation):
    def loss(inputs, log, cotangent, segment_ids):
        out = vla_jax.vla_attention(
            **inputs, lambda0=jnp.exp(log), segment_ids=segment_ids, implementation=implementation
        )
        return jnp.sum(out * cotangent)

    return jax.jit(jax.grad(loss, (0, 1)))


def gradients(inputs, lambda0, cotangent, segment_ids=None, implementation="xla"):
    log, cotangent = np.log(np.float32(lambda0)), cotangent.astype(np.float32)
    return differentiated(implementation)(inputs, log, cotangent, segment_ids)


def check(inputs, lambda0, expected_lambda0=LIMIT, implementation="xla", **rest):
    wanted, *_ = oracle.attention(**inputs, lambda0=expected_lambda0, **rest)
    options = {"implementation": implementation, **rest}
    out = vla_jax.vla_attention(**inputs, lambda0=lambda0, **options)
    assert_close(out, wanted, tolerances.FLOAT32, "out")
    cotangent = np.random.default_rng(1).normal(size=wanted.shape)
    found, d_log = gradients(inputs, lambda0, cotangent, **options)
    wide = {n: x.astype(np.float64) for n, x in inputs.items()}
    wanted = oracle.attention_grad(cotangent, None, **wide, lambda0=expected_lambda0, **rest)
    for name, x in found.items():
        assert_close(x, wanted[name], tolerances.SMALL_LAMBDA0_GRADIENT, name)
    scale = max(np.abs(wanted[n]).max() for n in inputs)
    assert abs(d_log - expected_lambda0 * np.sum(wanted["lambda0"])) < 1e-3 * scale


@pytest.mark.parametrize("lambda0", SMALL)
def test_independent_directions(lambda0, fast_implementation):
    check(tokens(), lambda0, implementation=fast_implementation)


def test_only_some_tokens_are_lost():
    """Once the directions span everything, lambda0 no longer matters: not the first 512 tokens."""
    check(tokens(length=600), 1e-12)


def test_segments_start_again():
    inputs = tokens(length=530, batch=2)
    ids = np.zeros((2, 530), np.int32)
    ids[0, 3:], ids[1, 520:], ids[1, 521:] = 1, 1, 2
    check(inputs, 1e-9, segment_ids=ids)


@pytest.mark.parametrize("lambda0", [1e-4, *SMALL])
def test_one_long_direction_repeated(lambda0):
    """λ₀ / ‖M‖ down to 1e-30; float64 itself resolves no less than 1e-4 beside 2e8."""
    check(repeated(200, 1e3), lambda0, expected_lambda0=1e-4)


def test_a_penalty_that_has_swallowed_lambda0(implementation):
    """Continued from a state, whose penalty is float32 and does not resolve lambda0."""
    inputs = repeated(120, 1e3)
    wanted, *_ = oracle.attention(**inputs, lambda0=1e-4)
    head, tail = (
        {n: x[:, part] for n, x in inputs.items()} for part in (slice(70), slice(70, 120))
    )
    options = {"lambda0": 1e-4, "implementation": implementation}
    _, state = vla_jax.vla_attention(**head, **options, return_state=True)
    out = vla_jax.vla_attention(**tail, **options, initial_state=state)
    assert_close(out, wanted[:, 70:], tolerances.DECODE_DRIFT)


@pytest.mark.parametrize("lambda0", [1e-4, 1e-8, 1e-36])
@pytest.mark.parametrize("cache", [True, False])
def test_decoding(lambda0, cache):
    for inputs, exact in ((tokens(), LIMIT), (repeated(LENGTH, 1e3), 1e-4)):
        if exact == LIMIT < lambda0 > 1e-6:
            exact = lambda0
        wanted, *_ = oracle.attention(**inputs, lambda0=exact)
        state = vla_jax.init_state(1, 2, DIM, 3)
        if not cache:
            state = vla_jax.VLAState(state.memory, state.penalty, state.key_sum)
        step = jax.jit(lambda *x: vla_jax.vla_step(*x, lambda0=lambda0))
        for t in range(LENGTH):
            out, state = step(*(inputs[n][:, t] for n in NAMES), state)
            assert_close(out, wanted[:, t], tolerances.DECODE_DRIFT, f"token {t}")


def test_the_limit_that_is_documented():
    """u = k̂/√D puts every key in the span of the directions: digits are lost, nothing else."""
    inputs = tokens()
    del inputs["direction"]
    for lambda0 in (1e-2, 1e-4):
        wanted, *_ = oracle.attention(**inputs, direction=None, lambda0=lambda0)
        out = vla_jax.vla_attention(**inputs, lambda0=lambda0)
        assert_close(out, wanted, 20 * 6e-8 * LENGTH / DIM / lambda0)
    for lambda0 in (1e-8, 1e-30):
        out = vla_jax.vla_attention(**inputs, lambda0=lambda0)
        assert np.isfinite(out).all()
        found = gradients(inputs, lambda0, np.ones(out.shape))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_ordinary_tokens_are_not_solved_again():
    """10⁵ tokens of one direction at the default lambda0, the widest range of an ordinary input."""
    u = np.broadcast_to(np.eye(16, dtype=np.float32)[0] / 4, (1, 100_000, 1, 16))
    chosen, inputs = plan.penalty_solve(
        u, u, lambda0=0.1, weight=None, log_decay=None, initial_penalty=None, segment_ids=None,
        chunk_size=None, implementation="xla", precision=None,
    )  # fmt: skip
    forward = chunkwise.RULES[type(inputs)].forward
    _, solved = jax.jit(functools.partial(forward, chosen))(inputs)
    assert solved.lost.stop == 0


def test_not_a_number_stays_with_its_sequence():
    """An input that is not finite is no reason to solve the others again, and does not spread."""
    inputs = tokens(batch=2)
    inputs["direction"][0, 5] = np.nan
    out = vla_jax.vla_attention(**inputs)
    alone = {n: x[1:] for n, x in inputs.items()}
    wanted = vla_jax.vla_attention(**alone)
    assert_close(out[1:], wanted, tolerances.REORDERED32)


def test_under_vmap_and_in_float64(x64):
    inputs = jax.tree.map(lambda x: x.astype(np.float64), tokens(batch=2))
    wanted, *_ = oracle.attention(**inputs, lambda0=LIMIT)

    def one(x):
        batch = {n: y[None] for n, y in x.items()}
        return vla_jax.vla_attention(**batch, lambda0=1e-18)[0]

    assert_close(jax.vmap(one)(inputs), wanted, tolerances.FLOAT32)


@pytest.mark.parametrize("lambda0", [1e-7, 2e-9])
def test_decoding_past_nearly_dependent_directions(lambda0):
    """What the penalty does not resolve yet is no start for rank-one updates of its inverse."""
    inputs = tokens(length=16)
    u = inputs["direction"]
    u[:, 7] = u[:, 6] + np.float32(4e-3) * u[:, 7]
    wanted, *_ = oracle.attention(**inputs, lambda0=lambda0)
    state = vla_jax.init_state(1, 2, DIM, 3)
    step = jax.jit(lambda *x: vla_jax.vla_step(*x, lambda0=lambda0))
    for t in range(16):
        out, state = step(*(inputs[n][:, t] for n in NAMES), state)
        assert_close(out, wanted[:, t], tolerances.DECODE_DRIFT, f"token {t}")
