"""Sampling and the decoding loop, on a model small enough to know the answer."""

import functools
import gc
import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import vla_jax
from vla_jax import generation
from vla_jax.generation import generate, left_pad, sample, stream

V = 8
LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))
DRAWS = 4000


def frequencies(**options):
    rows = jnp.broadcast_to(LOGITS, (DRAWS, 5))
    tokens = sample(rows, jax.random.key(0), **options)
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 9, "top_p": 1.0}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0, 0]),  # 4/7 reaches one half
        ({"temperature": 0.5}, np.array([16, 9, 2.25, 1, 0.25]) / 28.5),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 1e-6}, [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies(options, expected):
    np.testing.assert_allclose(frequencies(**options), expected, atol=0.035)


def test_sampling_takes_any_shape_dtype_and_order():
    logits = jnp.flip(jnp.broadcast_to(LOGITS, (2, 3, 5)), -1).astype(jnp.bfloat16)
    assert sample(logits[0, 0], temperature=0) == 4
    tokens = sample(logits, jax.random.key(0), top_p=0.3, top_k=4)
    np.testing.assert_array_equal(tokens, np.full((2, 3), 4))
    assert sample(jnp.zeros(1), jax.random.key(0), top_k=1, top_p=0.1) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be finite and not negative, got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got str"),
        ({"top_k": 0}, ValueError, "top_k must be positive"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer"),
        ({"top_p": 0.0}, ValueError, "top_p must be positive"),
        ({"top_p": 1.5}, ValueError, "top_p must be at most 1, got 1.5"),
        ({"key": None}, ValueError, "key must be a random key"),
        ({"logits": jnp.zeros(3, jnp.int32)}, TypeError, "logits must be a floating-point array"),
        ({"logits": jnp.zeros(())}, ValueError, r"logits must have shape \[..., V\]"),
    ],
)
def test_sampling_says_what_is_wrong(options, error, message):
    with pytest.raises(error, match=message):
        sample(**{"logits": LOGITS, "key": jax.random.key(0), **options})


def test_left_pad():
    ids, mask = left_pad([b"ab", [7]], length=3)
    np.testing.assert_array_equal(ids, [[0, 97, 98], [0, 0, 7]])
    np.testing.assert_array_equal(mask, [[False, True, True], [False, False, True]])
    assert left_pad([b"abc", b"a"])[0].shape == (2, 3)
    for prompts, length in (([], None), ([b"a", b""], None), ([b"abc"], 2)):
        with pytest.raises(ValueError, match="prompt"):
            left_pad(prompts, length)


# --- the loop: a model whose memory is the paper's -----------------------------------------------

TABLES = jax.random.normal(jax.random.key(3), (3, V, 4))


def project(tables, ids):
    query, key, value = (table[ids][..., None, :] for table in tables)
    return vla_jax.feature_map(query), vla_jax.feature_map(key), value


def gates(tables, ids, inverse):
    """Weights and a decay for each token, where an inverse is named."""
    if inverse is None:
        return {}
    weight, decay = (table[ids][..., :1] for table in tables[:2])
    beta, log_decay = jax.nn.sigmoid(weight), -jax.nn.softplus(decay)
    return {"beta": beta, "log_decay": log_decay, "inverse": inverse}


def read(tables, ids, mask, inverse=None):
    out, state = vla_jax.vla_attention(
        *project(tables, ids), **gates(tables, ids, inverse), mask=mask, return_state=True,
        implementation="reference",
    )  # fmt: skip
    return out[:, :, 0] @ tables[2].T * 4, {"vla": state, "last": ids[:, -1]}


def step(tables, token, state, inverse=None):
    tokens = *project(tables, token), None
    out, vla = vla_jax.vla_step(*tokens, state["vla"], **gates(tables, token, inverse))
    return out[:, 0] @ tables[2].T * 4, {"vla": vla, "last": token}


MODEL = Partial(read, TABLES), Partial(step, TABLES)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 0]]
KEY = jax.random.key(5)


def by_hand(prompt, count, inverse):
    """Greedy decoding that reads everything anew for each token, without padding."""
    ids, anew = list(prompt), jax.jit(read, static_argnames="inverse")
    for _ in range(count):  # one length, so one compilation: the end is masked
        padded = jnp.asarray([ids + [0] * (16 - len(ids))])
        logits, _ = anew(TABLES, padded, jnp.arange(16)[None] < len(ids), inverse=inverse)
        ids.append(int(jnp.argmax(logits[0, len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("inverse", [None, "write", "read"])
def test_greedy_decoding_of_prompts_of_different_lengths(inverse):
    """Without gates and with them."""
    model = (Partial(functools.partial(f, inverse=inverse), TABLES) for f in (read, step))
    result = generate(*model, *left_pad(PROMPTS), max_new=9, temperature=0)
    np.testing.assert_array_equal(result.lengths, [9] * 3)
    for row, prompt in zip(np.asarray(result.tokens), PROMPTS, strict=True):
        assert row.tolist() == by_hand(prompt, 9, inverse)
    assert not result.done.any()


@pytest.fixture(scope="module")
def drawn():
    return generate(*MODEL, *left_pad(PROMPTS), max_new=10, key=KEY, temperature=2.0)


@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
def test_streaming_yields_the_same_tokens(chunk, drawn):
    chunks = list(
        stream(*MODEL, *left_pad(PROMPTS), max_new=10, chunk=chunk, key=KEY, temperature=2.0)
    )
    assert len(chunks) == -(-10 // chunk)
    tokens = np.concatenate([np.asarray(c.tokens)[:, : int(c.lengths[0])] for c in chunks], 1)
    np.testing.assert_array_equal(tokens, drawn.tokens)
    np.testing.assert_allclose(chunks[-1].logits, drawn.logits, rtol=1e-5)


def test_a_stop_token_ends_a_sequence_and_its_state(drawn):
    tokens = np.asarray(drawn.tokens)
    stop = (int(tokens[0, 2]),)
    options = {"key": KEY, "temperature": 2.0, "stop": stop}
    for result in (
        generate(*MODEL, *left_pad(PROMPTS), max_new=10, **options),
        list(stream(*MODEL, *left_pad(PROMPTS), max_new=10, chunk=10, **options))[-1],
    ):
        for row, whole, length, done in zip(
            np.asarray(result.tokens), tokens, result.lengths, result.done, strict=True
        ):
            met = np.flatnonzero(whole == stop[0])
            assert bool(done) == bool(len(met))
            expected = met[0] + 1 if len(met) else 10
            assert length == expected
            np.testing.assert_array_equal(row[:expected], whole[:expected])
            assert not row[expected:].any()
        # What the first sequence is left with is what it had read when it ended.
        alone = generate(
            *MODEL, *left_pad(PROMPTS), max_new=int(result.lengths[0]), key=KEY, temperature=2.0
        )
        np.testing.assert_allclose(result.state["vla"].memory[0], alone.state["vla"].memory[0])
        np.testing.assert_allclose(result.logits[0], alone.logits[0], rtol=1e-5)


def test_streaming_ends_when_every_sequence_has():
    everything = tuple(range(V))
    chunks = list(
        stream(*MODEL, *left_pad(PROMPTS), max_new=None, chunk=4, key=KEY, stop=everything)
    )
    assert len(chunks) == 1
    np.testing.assert_array_equal(chunks[0].lengths, [1, 1, 1])


def test_streaming_without_a_bound_goes_on():
    chunks = stream(*MODEL, *left_pad(PROMPTS), max_new=None, chunk=4, key=KEY)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(c.state)) for c in itertools.islice(chunks, 5)]
    assert len(set(sizes)) == 1


def test_generation_goes_on_from_its_state(drawn):
    first = generate(*MODEL, *left_pad(PROMPTS), max_new=4, temperature=0)
    resume = Partial(lambda logits, state, ids, mask: (logits, state), first.logits, first.state)
    second = generate(resume, MODEL[1], first.tokens, max_new=5, temperature=0)
    whole = generate(*MODEL, *left_pad(PROMPTS), max_new=9, temperature=0)
    np.testing.assert_array_equal(
        np.concatenate([first.tokens, second.tokens], axis=1), whole.tokens
    )


def test_streaming_goes_on_with_the_draws_it_would_have_made(drawn):
    first = generate(*MODEL, *left_pad(PROMPTS), max_new=4, key=KEY, temperature=2.0)
    resume = Partial(lambda logits, state, ids, mask: (logits, state), first.logits, first.state)
    options = {"max_new": 6, "chunk": 4, "key": KEY, "temperature": 2.0}
    rest = list(stream(resume, MODEL[1], first.tokens, drawn=4, **options))
    tokens = [np.asarray(c.tokens)[:, : int(c.lengths[0])] for c in (first, *rest)]
    np.testing.assert_array_equal(np.concatenate(tokens, axis=1), drawn.tokens)
    with pytest.raises(ValueError, match="drawn must not be negative, got -1"):
        stream(resume, MODEL[1], first.tokens, drawn=-1, **options)
    with pytest.raises(TypeError, match="drawn must be an integer, got float"):
        stream(resume, MODEL[1], first.tokens, drawn=1.0, **options)


def test_memory_is_flat_over_100_000_steps():
    """Arrays that are alive, and the memory of the process where the system tells it."""
    chunks = stream(*MODEL, *left_pad(PROMPTS[:1]), max_new=100_000, chunk=5_000, temperature=0)
    gc.collect()  # what other tests left must not go away in between
    alive, resident, produced = [], [], 0
    for chunk in chunks:
        produced += int(chunk.lengths[0])
        jax.block_until_ready(chunk)
        alive.append(sum(x.nbytes for x in jax.live_arrays()))
        resident.append(resident_bytes())
    assert produced == 100_000
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(chunk.state))
    # The tokens of two chunks are alive at most, and nothing that grows with their number.
    assert max(alive[2:]) - alive[1] <= 2 * 4 * 5_000
    # 10⁵ steps that each kept this model's state of about 200 bytes would be 20 MB.
    assert resident[-1] - resident[2] < 15e6


def resident_bytes():
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def test_new_parameters_do_not_recompile():
    options = {"max_new": 3, "temperature": 0, "stop": (2,)}
    generate(*MODEL, *left_pad(PROMPTS), **options)
    compiled = generation._decode._cache_size()
    other = Partial(read, -TABLES), Partial(step, -TABLES)
    generate(*other, *left_pad(PROMPTS), **options)
    assert generation._decode._cache_size() == compiled


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new": 0}, ValueError, "max_new must be positive"),
        ({"max_new": None}, TypeError, "max_new must be an integer"),
        ({"top_p": 2.0}, ValueError, "top_p must be at most 1"),
        ({"key": None}, ValueError, "key must be a random key"),
        ({"prompts": [[1]]}, TypeError, "prompts must be an array of integers"),
        ({"prompts": jnp.ones((1, 2))}, TypeError, "prompts must be an array of integers"),
        ({"prompts": jnp.ones(2, jnp.int32)}, ValueError, "prompts must have shape"),
        ({"mask": jnp.array([[True, False]])}, ValueError, "pad on the left"),
        ({"mask": jnp.array([[True]])}, ValueError, "mask must have shape"),
        ({"step": 3}, TypeError, "prefill and step must be callable, got int"),
    ],
)
def test_generate_says_what_is_wrong(options, error, message):
    good = {
        "prefill": MODEL[0],
        "step": MODEL[1],
        "prompts": jnp.ones((1, 2), jnp.int32),
        "max_new": 2,
        "key": KEY,
    }
    with pytest.raises(error, match=message):
        generate(**{**good, **options})


def test_stream_checks_before_the_first_chunk():
    with pytest.raises(ValueError, match="chunk must be positive"):
        stream(*MODEL, jnp.ones((1, 2), jnp.int32), max_new=2, chunk=0, key=KEY)
