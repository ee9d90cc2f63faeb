"""The examples: what the tasks promise; a run resumes, reports and refuses as it should."""

import dataclasses
import itertools
import json
import pathlib
import signal
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from support import example

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import training  # noqa: E402
from model import MIXERS, Model, ModelConfig  # noqa: E402
from tasks import MQAR, Copy, Group  # noqa: E402

TASKS = (
    MQAR(),
    MQAR(num_pairs=3, vocab_size=16, seq_len=30),
    MQAR(num_pairs=1, vocab_size=2),
    MQAR(num_pairs=8, layout="zoology"),
    MQAR(num_pairs=7, vocab_size=16, layout="zoology", seq_len=28),
    Copy(),
    Group(),
    Group("s3", 5),
    Copy(num_tokens=1, vocab_size=3),
)
MQAR_TASKS = tuple(t for t in TASKS if isinstance(t, MQAR))


def draw(task, seed=0, batch_size=32):
    return task.sample(np.random.default_rng(seed), batch_size)


# --- tasks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_batches_are_well_formed_and_a_seed_fixes_them(task):
    data = draw(task)
    for array, dtype in zip(data, (np.int32, np.int32, np.float32), strict=True):
        assert array.shape == (32, task.length)
        assert array.dtype == dtype
    assert data.inputs.min() >= 0
    assert data.inputs.max() < task.vocab_size
    assert data.targets.max() < task.vocab_size
    assert set(np.unique(data.weights)) <= {0, 1}
    assert np.all(data.weights.sum(axis=1) > 0)
    for array, again in zip(data, draw(task), strict=True):
        np.testing.assert_array_equal(array, again)
    if task.vocab_size > 4:
        assert np.any(draw(task, seed=1).inputs != data.inputs)


@pytest.mark.parametrize("task", MQAR_TASKS, ids=str)
def test_mqar_asks_for_the_value_that_followed_the_key(task):
    n = task.num_pairs
    for inputs, targets, weights in zip(*draw(task), strict=True):
        keys, values = inputs[: 2 * n : 2], inputs[1 : 2 * n : 2]
        assert len(set(keys)) == n
        answers = dict(zip(keys, values, strict=True))
        asked = np.flatnonzero(weights)
        assert asked.min() >= 2 * n
        assert set(inputs[asked]) == set(keys) or len(asked) < n
        assert [answers[k] for k in inputs[asked]] == list(targets[asked])


def test_published_layout():
    task = MQAR(num_pairs=4)
    assert task.length == 13
    inputs, _, weights = draw(task)
    assert np.all(inputs[:, 8] == 127)
    assert np.all(np.delete(inputs, 8, axis=1) < 127)
    np.testing.assert_array_equal(weights[0], [0] * 9 + [1] * 4)
    assert np.all(np.sort(inputs[:, 9:], axis=1) == np.sort(inputs[:, 0:8:2], axis=1))


def test_published_layout_fills_a_longer_sequence_with_queries():
    task = MQAR(num_pairs=4, seq_len=21)
    inputs, _, weights = draw(task)
    assert np.all(weights.sum(axis=1) == 12)
    for row in inputs:
        np.testing.assert_array_equal(np.unique(row[9:], return_counts=True)[1], [3] * 4)


def test_zoology_layout_keeps_keys_values_and_fillers_apart():
    task = MQAR(num_pairs=8, layout="zoology")
    inputs, targets, weights = draw(task, batch_size=64)
    assert np.all((inputs[:, 0:16:2] >= 1) & (inputs[:, 0:16:2] < 64))
    assert np.all(inputs[:, 1:16:2] >= 64)
    tail, asked = inputs[:, 16:], weights[:, 16:] == 1
    assert np.all(weights.sum(axis=1) == 8)  # every key once
    assert np.all((tail < 64) == asked)  # no filler is a key
    assert np.all(targets[weights == 1] >= 64)


def test_zoology_gaps_follow_the_power_law():
    inputs, _, weights = draw(MQAR(1, layout="zoology", seq_len=66), batch_size=4000)
    slot = (np.argmax(weights[:, 2:], axis=1) // 2) + 1
    law = np.arange(1, 33) ** -0.99
    law /= law.sum()
    found = np.bincount(slot, minlength=33)[1:] / len(inputs)
    np.testing.assert_allclose(found, law, atol=5 * np.sqrt(law.max() / len(inputs)))


def test_copy_is_not_solved_by_repeating_the_input():
    task = Copy(num_tokens=16)
    inputs, targets, weights = draw(task, batch_size=64)
    np.testing.assert_array_equal(inputs[:, :16], targets[:, 16:][:, :16])
    assert np.mean(inputs[weights == 1] == targets[weights == 1]) < 0.03


def test_parity_is_the_number_of_ones():
    inputs, targets, _ = draw(Group("parity", 9))
    np.testing.assert_array_equal(targets, np.cumsum(inputs, axis=1) % 2)


def test_words_of_s3_are_products_of_permutations():
    inputs, targets, _ = draw(Group("s3", 9))
    matrices = [np.eye(3)[list(p)] for p in itertools.permutations(range(3))]
    for word, found in zip(inputs, targets, strict=True):
        state = np.eye(3)
        for element, number in zip(word, found, strict=True):
            state = matrices[element] @ state
            np.testing.assert_array_equal(state, matrices[number])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "s4"}, "group must be one of parity, s3, got 's4'"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
    ],
)
def test_a_group_that_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Group(**options)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_an_untrained_model_copies_at_chance(mixer):
    task = Copy(num_tokens=8)
    model = Model(ModelConfig(mixer, max_length=16, d_model=32, num_heads=2), nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    _, accuracy = training.eval_step(graphdef, params, draw(task, batch_size=128))
    assert float(accuracy) < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 0}, "num_pairs must be at least 1, got 0"),
        ({"num_pairs": 128}, "num_pairs = 128 needs as many distinct keys"),
        ({"num_pairs": 64, "layout": "zoology"}, "num_pairs = 64 needs"),
        ({"seq_len": 17}, "seq_len must be at least 18"),
        ({"seq_len": 31, "layout": "zoology"}, "seq_len must be at least 32"),
        ({"layout": "other"}, "layout must be one of published, zoology"),
    ],
)
def test_mqar_says_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**options)


# --- model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_the_model_is_causal(mixer):
    model = Model(ModelConfig(mixer, max_length=12, d_model=16, num_heads=2), nnx.Rngs(0))
    ids = np.random.default_rng(0).integers(128, size=(2, 12))
    changed = ids.copy()
    changed[:, 8:] = 5
    apply = nnx.jit(lambda model, ids: model(ids))
    logits, other = apply(model, ids), apply(model, changed)
    assert logits.shape == (2, 12, 128)
    np.testing.assert_allclose(logits[:, :8], other[:, :8], atol=1e-5)
    assert np.any(np.abs(logits[:, 8:] - other[:, 8:]) > 1e-3)


def test_arms_differ_in_the_mixer_alone():
    shapes = []
    for mixer in sorted(MIXERS):
        params = nnx.to_pure_dict(nnx.state(Model(ModelConfig(mixer), nnx.Rngs(0)), nnx.Param))
        for block in params["blocks"].values():
            del block["mixer"]
        shapes.append(jax.tree.map(lambda x: x.shape, params))
    assert all(other == shapes[0] for other in shapes)


def test_gates_are_options_of_the_model():
    gates = {"beta": True, "decay": True, "inverse": "read"}
    sizes = {"max_length": 4, "d_model": 16, "num_heads": 2, "num_layers": 1, "ffn_dim": 16}
    gated = ModelConfig("vla", **gates, **sizes)
    assert (gated.lambda0, ModelConfig("vla", **sizes).lambda0) == (1, 0.1)
    assert gated.settings().items() >= gates.items()
    assert not gates.keys() & ModelConfig("vla", **sizes).settings().keys()  # as results were kept
    layer = Model(gated, nnx.Rngs(0)).blocks[0].mixer.config
    assert (layer.inverse, layer.beta, layer.decay, layer.lambda0) == ("read", True, True, 1)
    assert ModelConfig(**gated.settings()) == gated
    with pytest.raises(ValueError, match="decay needs a layer of 'vla', got softmax"):
        ModelConfig("softmax", decay=True)
    with pytest.raises(ValueError, match="write_gain must be None or left out"):
        ModelConfig("vla", inverse="read", write_gain="rls")


# --- training ----------------------------------------------------------------------------------

SMALL = MQAR(num_pairs=2, vocab_size=16)
SETTINGS = training.TrainConfig(
    steps=8,
    batch_size=4,
    warmup=2,
    eval_every=4,
    eval_batches=1,
    checkpoint_every=3,
    log_every=2,
)


def small_run(out_dir, config=SETTINGS, mixer="softmax", **options):
    model = ModelConfig(
        mixer, SMALL.vocab_size, SMALL.length, d_model=16, num_heads=2, num_layers=1, ffn_dim=16
    )
    return training.Run(SMALL, model, config, out_dir, **options)


def train(*args, **options):
    run = small_run(*args, **options)
    try:
        return run.train(progress=False), run
    finally:
        run.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), mixer="vla")


@pytest.fixture
def interrupt_in(monkeypatch):
    """Makes the next run receive Ctrl-C, so many times, while it computes the given step."""

    def arrange(step, times=1):
        original = training.batch

        def batch(task, config, stream, index, *rest):
            if stream == training.TRAIN and index + 1 == step:
                monkeypatch.setattr(training, "batch", original)
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return original(task, config, stream, index, *rest)

        monkeypatch.setattr(training, "batch", batch)

    # A job in the background of a script starts with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield arrange
    signal.signal(signal.SIGINT, before)


def test_result(uninterrupted):
    result, run = uninterrupted
    assert json.loads(run.result_path.read_text()) == result
    assert (run.out_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    expected = {"model": "vla", "num_pairs": 2, "seq_len": 7, "seed": 0, "steps": 8}
    assert {name: result[name] for name in expected} == expected
    assert 0 <= result["eval_accuracy"] <= 1
    assert result["train_seconds"] > 0
    assert result["device"] == jax.devices()[0].device_kind
    assert result["versions"].keys() >= {"python", "jax", "flax", "vla_jax"}
    assert [point["step"] for point in result["history"]] == [2, 4, 6, 8]
    assert not list(run.out_dir.glob(".*"))


@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_resumed_run_equals_an_uninterrupted_one(step, uninterrupted, interrupt_in, tmp_path):
    interrupt_in(step)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, mixer="vla")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (tmp_path / "result.json").exists()
    resumed = small_run(tmp_path, mixer="vla")
    assert resumed.step == step
    result = resumed.train(progress=False)
    resumed.close()
    expected, run = uninterrupted
    for name in ("history", "eval_accuracy", "eval_loss"):
        assert result[name] == expected[name]
    jax.tree.map(np.testing.assert_array_equal, resumed.state[1:], run.state[1:])


def test_a_second_interrupt_does_not_wait(interrupt_in, tmp_path):
    interrupt_in(5, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    run = small_run(tmp_path)
    assert run.step == 3  # the last regular checkpoint
    run.close()


def test_a_killed_run_resumes_at_its_checkpoint(uninterrupted, tmp_path, monkeypatch):
    def killed(run):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "_finish", killed)
        original, saved = training.Run._save, []

        def save(run):
            original(run) if run.step < 8 else killed(run)
            saved.append(run.step)

        patch.setattr(training.Run, "_save", save)
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, mixer="vla")
    assert saved == [3, 6]
    result, _ = train(tmp_path, mixer="vla")
    assert result["history"] == uninterrupted[0]["history"]


def test_a_finished_run_is_reported_and_not_repeated(uninterrupted, monkeypatch):
    expected, run = uninterrupted
    monkeypatch.setattr(training, "train_step", None)  # a call would raise
    again = small_run(run.out_dir, mixer="vla")
    assert again.finished
    assert again.train(progress=False) == expected
    again.close()


def test_other_settings_are_refused_unless_overwritten(tmp_path):
    train(tmp_path)
    other = dataclasses.replace(SETTINGS, batch_size=2)
    with pytest.raises(training.SettingsError, match=r"training.batch_size is 4 there and 2 here"):
        small_run(tmp_path, other)
    run = small_run(tmp_path, other, overwrite=True)
    assert run.step == 0
    assert not run.finished
    run.close()


def test_early_stop(tmp_path):
    result, _ = train(tmp_path, dataclasses.replace(SETTINGS, target_accuracy=0.0))
    assert result["steps"] == SETTINGS.eval_every


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan at step"):
        train(tmp_path, dataclasses.replace(SETTINGS, learning_rate=1e38, clip=1e38, warmup=0))


@pytest.mark.parametrize("field", ["steps", "batch_size", "eval_every", "learning_rate"])
def test_train_config_says_what_does_not_fit(field):
    with pytest.raises(ValueError, match=f"{field} must be"):
        training.TrainConfig(**{field: 0})


def test_held_out_data_are_not_training_data():
    streams = (training.TRAIN, training.VALIDATION, training.TEST)
    rows = [
        {r.tobytes() for r in training.batch(MQAR(), SETTINGS, s, i).inputs}
        for s in streams
        for i in range(3)
    ]
    assert len(set().union(*rows)) == sum(map(len, rows))


# --- command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_pairs=0"], "num_pairs"),
        (
            ["--model=other"],
            "should be one of <deltanet|deltanet_elu|",
        ),
        (["--num_heads=3"], "d_model must be a multiple of num_heads = 3, got 128"),
        (["--model=softmax", "--lambda0=1"], "--lambda0 needs --model=vla"),
        (["--model=gated_mesa", "--decay"], "--decay needs --model=vla, got --model=gated_mesa"),
        (["--inverse=read", "--readout=ratio"], "readout must be 'none' or left out"),
    ],
)
def test_command_names_a_bad_flag(arguments, message, tmp_path):
    done = example("mqar", f"--out_dir={tmp_path}", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_command(tmp_path):
    sizes = ["--num_pairs=2", "--d_model=16", "--num_heads=2", "--num_layers=1", "--ffn_dim=16"]
    flags = [f"--out_dir={tmp_path}", "--model=softmax", "--steps=3", "--batch_size=4", *sizes]
    done = example("mqar", "--noprogress", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 3
    assert "finished run" in example("mqar", *flags).stdout
