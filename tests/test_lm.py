"""The language model and its example: decoding, text, training, streaming."""

import dataclasses
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import training  # noqa: E402
from lm import LanguageRun, Reader, functions  # noqa: E402
from model import MIXERS, Model, ModelConfig  # noqa: E402
from ngrams import NGrams  # noqa: E402
from text import Split, Text  # noqa: E402

from vla_jax import generation  # noqa: E402

SIZES = dict(
    vocab_size=32, max_length=None, d_model=16, num_heads=4, ffn_dim=16, implementation="reference"
)
WHOLE = dict(num_kv_heads=2, short_conv=3, ngrams=3, ngram_bits=6, ngram_width=8, window=16)
MODELS = {
    "vla": ModelConfig("vla", num_layers=1, **SIZES),
    "everything": ModelConfig(layers=("vla", "softmax"), **WHOLE, **SIZES),
    "bfloat16": ModelConfig(  # the prefill that is used: chunkwise
        layers=("vla", "softmax"), **WHOLE, dtype="bfloat16", **{**SIZES, "implementation": "xla"}
    ),
    "baselines": ModelConfig(num_layers=2, layers=("deltanet", "linear"), **WHOLE, **SIZES),
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
    for i, (path, param) in enumerate(nnx.iter_graph(model)):  # logits that are not all alike
        if isinstance(param, nnx.Param) and "embedding" in path:
            param[...] = 0.6 * jax.random.normal(jax.random.key(i), param.shape)
    ids = np.random.default_rng(seed).integers(32, size=(2, LENGTH))
    atol = 0.25 if name == "bfloat16" else 1e-3  # logits reach 8, whose half unit is 0.016
    return model, jnp.asarray(ids), atol


@pytest.mark.parametrize("name", ["everything", "bfloat16", "baselines", "positions"])
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
    alone, other = nnx.jit(lambda m, x: m(x, return_state=True))(model, ids[:1, 4:])
    np.testing.assert_allclose(padded[0, 4:], alone[0], atol=atol)
    np.testing.assert_array_equal(state.position, [LENGTH - 4, LENGTH])
    first = jax.tree.map(lambda x: x[:1], state)
    after, expected = (one_step(model, ids[:1, 0], s)[0] for s in (first, other))
    np.testing.assert_allclose(after, expected, atol=atol)


def test_packed_documents_do_not_meet():
    model, ids, atol = setting("everything")
    segments = jnp.asarray([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    call = nnx.jit(lambda model, **options: model(ids, return_state=True, **options))
    packed, state = call(model, segment_ids=segments)
    trained = nnx.jit(lambda model: model(ids, segment_ids=segments))(model)
    np.testing.assert_allclose(packed, trained, atol=atol)
    for document in (0, 1):  # alone: the other one is padding
        mask = segments == document
        alone, end = call(model, mask=mask)
        np.testing.assert_allclose(packed[mask], alone[mask], atol=atol)
    found, expected = (one_step(model, ids[:, 0], s)[0] for s in (state, end))
    np.testing.assert_allclose(found, expected, atol=atol)


def test_strings_are_told_apart_and_end_with_the_document():
    rngs = nnx.Rngs(0)
    table = NGrams(4, 8, 8, 16, rngs=rngs)
    assert not np.any(table(jnp.ones((1, 5), jnp.int32))[0])  # untrained: nothing
    table.rows.embedding[...] = jax.random.normal(rngs.params(), table.rows.embedding.shape)
    ids = jnp.asarray([[5, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3]])
    out, history = table(ids)
    np.testing.assert_array_equal(history, [[1, 2, 3]])
    # Strings of at most four: the last three tokens are alike, the one before is not.
    assert np.any(np.abs(out[0, 3] - out[0, 7]) > 0.1)
    shorter = NGrams(3, 8, 8, 16, rngs=nnx.Rngs(1))
    shorter.rows.embedding[...] = table.rows.embedding[: 2 << 8]
    out, _ = shorter(ids)
    for a, b in ((3, 7), (7, 11)):
        np.testing.assert_array_equal(out[0, a], out[0, b])
    assert np.any(out[0, 0] != out[0, 1])
    apart, history = shorter(ids, segment_ids=jnp.asarray([[0] * 9 + [1] * 3]))
    np.testing.assert_array_equal(history, [[2, 3]])
    np.testing.assert_array_equal(apart[0, :9], out[0, :9])
    alone, _ = shorter(ids[:, 9:])
    np.testing.assert_array_equal(apart[0, 9:], alone[0])
    _, history = shorter(ids, segment_ids=jnp.asarray([[0] * 11 + [1]]))
    np.testing.assert_array_equal(history, [[-1, 3]])


def test_a_full_window_is_an_error_and_nan_under_jit():
    config = dataclasses.replace(MODELS["positions"], max_length=None, window=4)
    assert config.capacity == 4
    layer, x = MIXERS["softmax"](config, nnx.Rngs(0)), jnp.ones((1, 4, 16))
    _, state = layer(x, return_state=True)
    with pytest.raises(ValueError, match=r"keeps window = 4 tokens of a sequence, got 5"):
        layer.step(x[:, 0], state)
    out, _ = nnx.jit(lambda layer, x, state: layer.step(x, state))(layer, x[:, 0], state)
    assert np.all(np.isnan(out))
    assert layer(jnp.ones((1, 5, 16))).shape == (1, 5, 16)  # no state, no window
    config = dataclasses.replace(config, window=None)
    with pytest.raises(ValueError, match="needs window to decode"):
        MIXERS["softmax"](config, nnx.Rngs(0)).init_state(1)


def test_size_of_the_state():
    config = MODELS["vla"]
    state = Model(config, nnx.Rngs(0)).init_state(1)
    assert config.capacity is None
    assert sum(x.size for x in jax.tree.leaves(state)) < 5 * 4 * 16 + 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ("vla",)}, "layers must name num_layers = 2 mixers"),
        ({"layers": ("vla", "other")}, "layers must be one of vla, .*, got 'other'"),
        ({"window": 0}, "window must be at least 1"),
        ({"ngrams": 1}, "ngrams must be at least 2, got 1"),
        ({"ngram_bits": 25}, "ngram_bits must be from 1 to 24, got 25"),
    ],
)
def test_model_config_says_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_segments_need_a_model_without_positions():
    model, ids, _ = setting("positions")
    with pytest.raises(ValueError, match="max_length=None"):
        model(ids, segment_ids=jnp.zeros_like(ids))


# --- text --------------------------------------------------------------------------------------

DOCUMENTS = [b"abc", b"d", b"efghijklm" * 3, b"", b"nop"]


@pytest.mark.parametrize("length", [2, 3, 8, 100])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_windows_score_every_byte_once(length, batch_size):
    split, scored = Split(DOCUMENTS, length), []
    for rows in split.windows(batch_size):
        assert rows.inputs.shape == (batch_size, length)
        scored += rows.targets[rows.weights == 1].tolist()
        assert np.all(np.diff(rows.segment_ids, axis=1) >= 0)
    assert bytes(scored) == b"".join(DOCUMENTS)


def test_rows_are_packed_documents():
    rows = Split(DOCUMENTS, 12).sample(np.random.default_rng(0), 64)
    for inputs, targets, weights, ids in zip(*rows, strict=True):
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        np.testing.assert_array_equal(weights[:-1], ids[1:] == ids[:-1])
        np.testing.assert_array_equal(inputs[1:] == 0, ids[1:] != ids[:-1])


def test_head_and_gzip():
    split = Split([b"ab" * 50, b"cd" * 50], 8)
    assert split.head(130).documents == [b"ab" * 50, b"cd" * 15]
    assert split.head(0).documents == split.documents
    sizes = [len(gzip.compress(b, 9)) for b in (b"ab" * 50 + b"cd" * 50, b"ab" * 50, b"cd" * 50)]
    found = split.gzip_bits_per_byte()
    assert found["gzip_bits_per_byte"] == 8 * sizes[0] / 200
    assert found["gzip_each_bits_per_byte"] == 8 * (sizes[1] + sizes[2]) / 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(120):
        place = root / f"part{i % 3}"
        place.mkdir(exist_ok=True)
        (place / f"{i}.txt").write_text(f"line {i} of {i * i}\nand another: {i}\n" * 2)
    (root / ".hidden").write_text("no")
    return root


def test_a_file_stays_in_its_split(folder, tmp_path):
    task = Text(str(folder), 16)
    sizes = task.train_bytes, task.validation_bytes, task.test_bytes
    assert min(sizes) > 0
    assert sum(sizes) == sum(f.stat().st_size for f in folder.rglob("*.txt"))
    assert all(f"{size:,}" in task.describe() for size in sizes)
    assert task == Text(str(folder), 16)
    part = Text(str(folder), 16, pattern="*[02468].txt")
    for stream in range(3):
        assert set(part.split(stream).documents) <= set(task.split(stream).documents)
    (tmp_path / "one").write_bytes(bytes(range(1, 251)) * 4)
    one = Text(str(tmp_path / "one"), 16)
    assert (one.train_bytes, one.validation_bytes, one.test_bytes) == (900, 50, 50)
    for path, message in ((tmp_path / "none", "a file or a folder"), (ROOT / ".ci", "give more")):
        with pytest.raises(ValueError, match=message):
            Text(str(path), 16)


# --- training, generation, streaming: one small run ----------------------------------------------

TRAINING = training.TrainConfig(
    steps=6, batch_size=4, warmup=2, target_accuracy=2.0, eval_every=3, eval_batches=1,
    checkpoint_every=2, log_every=1, accumulate=2,
)  # fmt: skip
SMALL = dataclasses.replace(MODELS["vla"], layers=("vla",), vocab_size=256, short_conv=2)


def language_run(data, out_dir, config=TRAINING):
    run = LanguageRun(Text(str(data), 16), SMALL, config, out_dir)
    run.test_bytes = 100
    return run


def train(*args):
    run = language_run(*args)
    try:
        return run.train(progress=False), run
    finally:
        run.close()


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    return train(folder, tmp_path_factory.mktemp("run"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_reports_bits_per_byte(trained):
    result, run = trained
    assert result["scored_bytes"] == 100
    assert result["trained_bytes"] == 6 * 4 * 16
    assert 0 < result["bits_per_byte"] < 12
    assert result["gzip_bits_per_byte"] > 0
    assert lines(run.out_dir / "metrics.jsonl") == result["history"]
    assert {"bits_per_byte", "eval_bits_per_byte", "bytes"} <= result["history"][-1].keys()


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(trained, folder, tmp_path):
    script = """
        import os, signal, sys
        import test_lm

        def hook(event, arguments):  # a checkpoint is renamed when it is whole
            if event == "os.rename" and "/checkpoints/4" in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        test_lm.train(*sys.argv[1:])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), folder, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    run = language_run(folder, tmp_path)
    assert run.step == 2
    result = run.train(progress=False)
    run.close()
    expected = trained[0]
    for found, expected in zip(result["history"], trained[0]["history"], strict=True):
        # The subprocess computes with other threads, so not bit for bit.
        expected = {k: pytest.approx(v, rel=1e-4) for k, v in expected.items() if k != "seconds"}
        assert {k: v for k, v in found.items() if k != "seconds"} == expected
    assert result["bits_per_byte"] == pytest.approx(trained[0]["bits_per_byte"], rel=1e-4)
    assert lines(tmp_path / "metrics.jsonl") == result["history"]


def test_accumulation_is_the_gradient_of_the_whole(trained, folder):
    _, run = trained
    data = training.batch(run.task, TRAINING, training.TRAIN, 0)
    assert len(set(np.sum(data.weights, axis=1))) > 1
    optimizer = run.config.optimizer()
    params = run.state.params
    results = []
    for accumulate in (None, 4):
        config = dataclasses.replace(TRAINING, accumulate=accumulate)
        new, _, found = training.train_step(
            params, optimizer.init(params), data, graphdef=run.graphdef, config=config
        )
        results.append((found, new))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *results)
    with pytest.raises(ValueError, match="accumulate must divide batch_size = 4, got 3"):
        dataclasses.replace(TRAINING, accumulate=3)


def test_a_trained_model_is_loaded_and_generates(trained, tmp_path):
    _, run = trained
    model, config = training.load_model(run.out_dir)
    assert config == SMALL
    jax.tree.map(np.testing.assert_array_equal, nnx.split(model)[1], run.state.params)
    prefill, step = functions(model)
    prefill = jax.tree_util.Partial(prefill, model.init_state(2))
    ids, mask = generation.left_pad([b"\0line", b"\0"])
    both = generation.generate(prefill, step, ids, mask, max_new=5, temperature=0)
    logits = nnx.jit(lambda model, ids: model(ids))(
        model, jnp.concatenate([ids, both.tokens], axis=1)[:1]
    )
    np.testing.assert_array_equal(jnp.argmax(logits[0, 4:-1], axis=-1), both.tokens[0])
    for place, message in ((tmp_path, "no settings.json"), (tmp_path / "no", "no trained model")):
        with pytest.raises(ValueError, match=message):
            training.load_model(place)


def test_reading_in_blocks_is_reading_at_once(trained, tmp_path):
    _, run = trained
    model, _ = training.load_model(run.out_dir)
    text = b"first line\n\nthe third, which is longer than a block\r\nand an open end"
    ids = jnp.asarray([[0, *text]])
    logits = nnx.jit(lambda model, ids: model(ids[:, :-1]))(model, ids)
    bits = -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)[0, :, 0]
    bits = np.asarray(bits) / np.log(2)

    reader, other, found = Reader(model, 8), Reader(model, 8), []
    for i in range(0, len(text), 8):
        found += reader.read(text[i : i + 8])
        if i == 24:  # in the middle of a line
            reader.save(tmp_path / "session")
            other.load(tmp_path / "session")
            assert other.bytes_read == 32
            reader = other
    found += reader.finish()
    pieces = text.splitlines(keepends=True)
    assert [line.text for line in found] == [piece.rstrip() for piece in pieces]
    assert [line.number for line in found] == [1, 2, 3, 4]
    ends = np.cumsum([len(piece) for piece in pieces])
    expected = [bits[end - len(p) : end].sum() for p, end in zip(pieces, ends, strict=True)]
    np.testing.assert_allclose([line.bits for line in found], expected, rtol=1e-4)
    assert reader.bytes_read == len(text)


def command(name, *arguments):
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_commands(trained, tmp_path):
    run = f"--run={trained[1].out_dir}"
    (tmp_path / "log").write_text("one\ntwo\nthree")
    session = f"--session={tmp_path / 'session'}"
    first = command("generate", run, "--prompt=line 1", "--max_new=20", "--stop=", session)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("line 1")
    assert "bytes of state a sequence, at 27 bytes of text" in first.stderr
    assert (tmp_path / "session").exists()
    done = command("stream", run, f"--file={tmp_path / 'log'}", "--block=4")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["one", "two", "three"]
    assert "13 bytes" in done.stderr
