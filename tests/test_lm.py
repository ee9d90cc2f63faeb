"""The language model and its example: decoding, text, training, streaming.

One file, because one small trained model serves the tests of all of these.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import training  # noqa: E402
from embedding import lookup  # noqa: E402
from lm import LanguageRun, Reader, bits_per_byte, functions  # noqa: E402
from model import (  # noqa: E402
    MIXERS,
    Model,
    ModelConfig,
    parameter_count,
    with_parameter_count,
)
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
    "gates": ModelConfig(  # prefill by the solve with decay, steps by Cholesky
        layers=("vla", "gated_mesa"),
        inverse="read",
        beta=True,
        decay=True,
        **WHOLE,
        **{**SIZES, "implementation": "xla"},
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


@pytest.mark.parametrize("name", ["everything", "bfloat16", "gates", "baselines", "positions"])
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
        ({"layers": ("vla", "other")}, "layers must be one of vla, .*softmax, .*got 'other'"),
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


def start(name, *arguments, before=""):
    """The command in a subprocess, after a line of Python."""
    script = f"import sys; sys.argv = {[name, *arguments]!r}; sys.path.insert(0, 'examples')\n"
    script += (
        textwrap.dedent(before) + f"\nfrom absl import app; import {name}; app.run({name}.main)"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def command(name, *arguments):
    done = start(name, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8", "replace"), done.stderr.decode()


@pytest.mark.slow
def test_commands(trained, tmp_path):
    run = f"--run={trained[1].out_dir}"
    (tmp_path / "log").write_text("one\ntwo\nthree")
    size = generation_state_bytes(trained[1])
    out, err = command("generate", run, "--prompt=line 1", "--prompt=x", "--max_new=20", "--stop=")
    assert out.startswith("--- line 1")
    assert f"{size:,} bytes of state a sequence, at 27 bytes of text" in err
    assert f"({size:,} at 1,000 and {size:,} at 1,000,000)" in err
    out, err = command("stream", run, f"--file={tmp_path / 'log'}", "--block=4")
    assert [line.split()[-1] for line in out.splitlines()] == ["one", "two", "three"]
    assert "13 bytes" in err
    assert f"{size:,} at 1,000,000" in err


def generation_state_bytes(run):
    model, _ = training.load_model(run.out_dir)
    return sum(x.nbytes for x in jax.tree.leaves(model.init_state(1)))


KILL = """
    import os, signal

    saves = 0

    def hook(event, arguments):  # a session is renamed when it is whole
        global saves
        if event == "os.rename" and arguments[1].endswith("session"):
            saves += 1
            if saves == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
"""


@pytest.mark.slow
def test_generation_that_is_killed_goes_on_as_if_it_had_not_been(trained, tmp_path):
    run, session = f"--run={trained[1].out_dir}", f"--session={tmp_path / 'session'}"
    arguments = (run, session, "--chunk=8", "--stop=", "--temperature=2", "--top_p=1")
    killed = start("generate", *arguments, "--prompt=line", "--max_new=40", before=KILL)
    assert killed.returncode == -signal.SIGKILL
    assert len(killed.stdout) == len("line") + 24
    on = start("generate", *arguments, "--max_new=24")  # two chunks were saved
    assert on.returncode == 0, on.stderr.decode()

    model, _ = training.load_model(trained[1].out_dir)
    prefill, step = functions(model)
    whole = generation.generate(
        jax.tree_util.Partial(prefill, model.init_state(1)),
        step,
        *generation.left_pad([b"\0line"]),
        max_new=40,
        key=jax.random.key(0),
        temperature=2,
        top_p=1.0,
    )
    expected = bytes(whole.tokens[0].tolist())
    assert killed.stdout == b"line" + expected[:24]
    assert on.stdout == expected[16:]
    other = start("generate", run, session, "--prompt=x", "--prompt=y")
    assert b"--session takes one --prompt" in other.stderr


@pytest.mark.slow
def test_reading_that_is_killed_goes_on_from_the_block_before(trained, tmp_path):
    text = "".join(f"line {i} of the log\n" for i in range(9))
    (tmp_path / "log").write_text(text)
    arguments = (f"--run={trained[1].out_dir}", f"--file={tmp_path / 'log'}", "--block=16")
    whole, _ = command("stream", *arguments)
    arguments += (f"--session={tmp_path / 'session'}", "--save_every=1")
    killed = start("stream", *arguments, before=KILL)
    assert killed.returncode == -signal.SIGKILL
    on, _ = command("stream", *arguments)  # after 32 bytes: within the second line
    pieces = killed.stdout.decode().splitlines()[:1] + on.splitlines()
    for found, expected in zip(pieces, whole.splitlines(), strict=True):
        found, expected = found.split(maxsplit=3), expected.split(maxsplit=3)
        assert (found[0], found[3]) == (expected[0], expected[3])
        assert float(found[1]) == pytest.approx(float(expected[1]), abs=0.11)


def test_bits_per_byte_in_blocks_is_that_at_once(trained):
    _, run = trained
    for config in (SMALL, dataclasses.replace(SMALL, layers=("softmax",), ngrams=3, ngram_bits=6)):
        graphdef, params = nnx.split(Model(config, nnx.Rngs(0)))
        held_out = Split(run.task.split(2).documents, 32)
        nats = sum(
            float(training.eval_step(graphdef, params, rows)[0]) * np.sum(rows.weights)
            for rows in held_out.windows(4)
        )
        expected = nats / np.log(2) / held_out.num_bytes
        found = bits_per_byte(config, params, held_out, 32, block=8)
        assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="multiple of 8, got 20"):
        bits_per_byte(config, params, held_out, 20, block=8)


def test_a_training_step_in_bfloat16(trained, folder):
    _, run = trained
    data = training.batch(run.task, TRAINING, training.TRAIN, 0)
    found = {}
    for dtype in (None, "bfloat16"):
        config = dataclasses.replace(
            SMALL, implementation="xla", dtype=dtype, ngrams=3, ngram_bits=6
        )
        graphdef, params = nnx.split(Model(config, nnx.Rngs(0)))
        state, losses = TRAINING.optimizer().init(params), []
        for _ in range(3):
            params, state, score = training.train_step(
                params, state, data, graphdef=graphdef, config=TRAINING
            )
            losses.append(float(score.loss))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
        found[dtype] = losses
    assert found[None][2] < found[None][0]
    np.testing.assert_allclose(found["bfloat16"], found[None], rtol=0.01)
    assert found["bfloat16"] != found[None]


def test_embedding_gradient_of_frequent_tokens_in_bfloat16():
    """A sum of thousands of cotangents, which in 16 bits would end after the first few."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 2048)))
    sizes = {"vocab_size": 16, "d_model": 32, "num_heads": 2, "num_layers": 1, "ffn_dim": 32}
    found = {}
    for dtype in (None, "bfloat16"):
        config = ModelConfig(
            "linear", max_length=None, ngrams=2, ngram_bits=1, dtype=dtype, **sizes
        )
        graphdef, params = nnx.split(Model(config, nnx.Rngs(0)))

        def loss(params, graphdef=graphdef):
            logits = nnx.merge(graphdef, params)(ids)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 1])

        gradient = jax.jit(jax.grad(loss))(params)
        found[dtype] = [gradient["tokens"]["embedding"], gradient["ngrams"]["rows"]["embedding"]]
    for narrow, wide in zip(found["bfloat16"], found[None], strict=True):
        narrow, wide = np.asarray(narrow[...]), np.asarray(wide[...])
        assert np.linalg.norm(narrow - wide) < 0.03 * np.linalg.norm(wide)


@pytest.mark.parametrize("size", [7, 2000])  # a matrix product, and one row after the other
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_lookup_and_its_gradient(size, dtype):
    graphdef, params = nnx.split(nnx.Embed(size, 5, dtype=dtype, rngs=nnx.Rngs(0)))
    ids = jax.random.randint(jax.random.key(0), (3, 50), 0, size)

    def rows(params):
        return lookup(nnx.merge(graphdef, params), ids)

    out, pull = jax.vjp(rows, params)
    table = params["embedding"][...]
    np.testing.assert_array_equal(out, table[ids].astype(dtype or jnp.float32))
    cotangent = jax.random.normal(jax.random.key(1), out.shape).astype(out.dtype)
    expected = np.zeros(table.shape)
    np.add.at(expected, np.asarray(ids), np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(pull(cotangent)[0]["embedding"][...], expected, atol=1e-5)


def test_equal_parameters_of_every_mixer():
    config = ModelConfig(layers=("vla",) * 3, num_layers=3, **{**SIZES, "d_model": 32})
    count = parameter_count(config)
    for layers in (("vla", "deltanet", "softmax"), ("linear",) * 3):
        other = with_parameter_count(dataclasses.replace(config, layers=layers), count)
        assert abs(parameter_count(other) - count) <= 3 * (2 * 32 + 1) / 2


def test_tensorboard_is_optional(trained, folder, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, path, purge_step):
            written.append((path, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    run = language_run(folder, tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"need tensorboardX: pip install 'vla-jax\[tensorboard"):
        run.log_to_tensorboard()
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    run.log_to_tensorboard()
    run.train(progress=False)
    run.close()
    assert written[0] == (str(tmp_path / "tensorboard"), 1)
    last = run.history[-1]
    assert ("eval_bits_per_byte", last["eval_bits_per_byte"], 6) in written
    assert written[-1] == "closed"


@pytest.mark.slow
def test_training_command(folder, tmp_path):
    arguments = f"--data={folder} --seq_len=16 --steps=2 --batch_size=2 --d_model=16 --num_heads=2"
    arguments += " --ffn_dim=16 --ngram_bits=4 --layers=vla,softmax --test_bytes=64"
    arguments += " --decay --beta --inverse=read"
    arguments += f" --contexts=16 --append={tmp_path / 'lines'} --noprogress"
    out, _ = command("train_lm", *arguments.split(), f"--out_dir={tmp_path / 'run'}")
    assert "parameters with ffn_dim" in out
    (line,) = lines(tmp_path / "lines")
    assert line["model"] == "vla,softmax"
    assert line["bits_per_byte_at_context"].keys() == {"16"}
    # Trained and scored at the same context, in one way and the other.
    found = line["bits_per_byte_at_context"]["16"]
    assert found == pytest.approx(line["bits_per_byte"], rel=1e-4)
    assert line["settings"]["model"]["inverse"] == "read"
    for wrong, message in (
        ("--layers=vla,softmax", b"--model=linear contradicts --layers=vla,softmax"),
        ("--beta", b"--beta needs a layer of vla, got --layers=linear"),
    ):
        assert message in start("train_lm", "--model=linear", wrong).stderr


def test_latency_command(tmp_path):
    arguments = ("--preset=cpu", "--contexts=4,40", "--steps=2", "--repeats=1")
    out, _ = command("latency", *arguments, f"--append={tmp_path / 'lines'}")
    found = lines(tmp_path / "lines")
    assert found == [json.loads(line) for line in out.splitlines()]
    assert [(x["model"], x["context"]) for x in found] == [
        ("vla", 4), ("vla", 40), ("softmax", 4), ("softmax", 40),
    ]  # fmt: skip
    assert all(x["milliseconds_per_byte"] > 0 for x in found)
    sizes = [x["state_bytes"] for x in found]
    assert sizes[0] == sizes[1]
    assert sizes[3] - sizes[2] == 36 * 2 * 192 * 4  # keys and values of a layer, float32
