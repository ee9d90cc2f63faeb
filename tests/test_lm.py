"""The language model and its example: decoding, text, training, streaming."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from model import Model, ModelConfig  # noqa: E402

SIZES = dict(
    vocab_size=32, max_length=None, d_model=16, num_heads=4, ffn_dim=16, implementation="reference"
)
MODELS = {
    "vla": ModelConfig("vla", num_layers=1, **SIZES),
    "everything": ModelConfig(
        layers=("vla", "softmax"), num_kv_heads=2, short_conv=3, window=16, **SIZES
    ),
    "bfloat16": ModelConfig(
        layers=("vla", "softmax"),
        num_kv_heads=2,
        short_conv=3,
        window=16,
        dtype="bfloat16",
        **SIZES,
    ),
    "positions": ModelConfig("softmax", num_layers=1, **{**SIZES, "max_length": 16}),
}
LENGTH = 11


@nnx.jit
def read(model, ids, mask, state):
    return model(ids, mask=mask, initial_state=state, return_state=True)


@nnx.jit
def one_step(model, token, state):
    return model.step(token, state)


def setting(name, seed=0):
    model = Model(MODELS[name], nnx.Rngs(seed))
    for path, param in nnx.iter_graph(model):  # logits that are not all alike
        if isinstance(param, nnx.Param) and "embedding" in path:
            param[...] = param[...] * 30
    ids = np.random.default_rng(seed).integers(32, size=(2, LENGTH))
    atol = 0.15 if name == "bfloat16" else 1e-3
    return model, jnp.asarray(ids), atol


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_prefill_at_every_split(name):
    model, ids, atol = setting(name)
    whole = nnx.jit(lambda m, x: m(x))(model, ids)
    assert np.std(whole) > 0.3
    assert whole.dtype == jnp.float32
    state, end = model.init_state(2), None
    for t in range(LENGTH):
        logits, state = one_step(model, ids[:, t], state)
        np.testing.assert_allclose(logits, whole[:, t], atol=atol)
    np.testing.assert_array_equal(state.position, [LENGTH, LENGTH])
    everything = jnp.ones((2, LENGTH), bool)
    for split in range(LENGTH + 1):  # one compilation: the split is a mask
        first = everything & (jnp.arange(LENGTH) < split)
        head, state = read(model, ids, first, model.init_state(2))
        tail, end = read(model, ids, everything & ~first, state)
        logits = jnp.where(first[..., None], head, tail)
        np.testing.assert_allclose(logits, whole, atol=atol)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(end))


@pytest.mark.parametrize("name", ["everything", "positions"])
def test_padding_on_the_left_is_absent(name):
    model, ids, atol = setting(name)
    mask = jnp.arange(LENGTH) >= jnp.array([[4], [0]])
    padded, state = read(model, jnp.where(mask, ids, 31), mask, model.init_state(2))
    alone, other = model(ids[:1, 4:], return_state=True)
    np.testing.assert_allclose(padded[0, 4:], alone[0], atol=atol)
    np.testing.assert_array_equal(state.position, [LENGTH - 4, LENGTH])
    first = jax.tree.map(lambda x: x[:1], state)
    after, expected = (one_step(model, ids[:1, 0], s)[0] for s in (first, other))
    np.testing.assert_allclose(after, expected, atol=atol)


def test_packed_documents_do_not_meet():
    model, ids, atol = setting("everything")
    segments = jnp.asarray([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    packed, state = model(ids, segment_ids=segments, return_state=True)
    np.testing.assert_allclose(packed, model(ids, segment_ids=segments), atol=atol)
    for row, cut in enumerate((4, 9)):
        ends = []
        for part in (slice(0, cut), slice(cut, None)):
            alone, end = model(ids[row : row + 1, part], return_state=True)
            np.testing.assert_allclose(packed[row, part], alone[0], atol=atol)
            ends.append(end)
        here = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        found, expected = (one_step(model, ids[:1, 0], s)[0] for s in (here, ends[1]))
        np.testing.assert_allclose(found, expected, atol=atol)


def test_a_full_window_is_an_error_and_nan_under_jit():
    config = dataclasses.replace(MODELS["positions"], max_length=None, window=4)
    model, ids = Model(config, nnx.Rngs(0)), jnp.zeros((1, 5), jnp.int32)
    assert config.capacity == 4
    _, state = model(ids[:, :4], return_state=True)
    with pytest.raises(ValueError, match=r"keeps window = 4 tokens of a sequence, got 5"):
        model.step(ids[:, 0], state)
    with pytest.raises(ValueError, match="window = 4"):
        model(ids, return_state=True)
    assert np.all(np.isnan(one_step(model, ids[:, 0], state)[0]))
    model(ids)  # no state, no window
    with pytest.raises(ValueError, match="needs window in ModelConfig"):
        Model(dataclasses.replace(config, window=None), nnx.Rngs(0)).init_state(1)


def test_size_of_the_state():
    config = MODELS["vla"]
    state = Model(config, nnx.Rngs(0)).init_state(1)
    assert config.capacity is None
    assert sum(x.size for x in jax.tree.leaves(state)) < 5 * 4 * 16 + 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ("vla",)}, "layers must name num_layers = 2 mixers"),
        ({"layers": ("vla", "other")}, "layers must be one of vla, softmax, got 'other'"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_model_config_says_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_segments_need_a_model_without_positions():
    model, ids, _ = setting("positions")
    with pytest.raises(ValueError, match="max_length=None"):
        model(ids, segment_ids=jnp.zeros_like(ids))
