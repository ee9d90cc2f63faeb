"""Runs that survive: signals, kills, damaged folders, numbers that are not finite, full disks."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
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

import commands  # noqa: E402
import grid  # noqa: E402
import rows  # noqa: E402
import training  # noqa: E402
from model import Model, ModelConfig  # noqa: E402
from tasks import MQAR  # noqa: E402
from text import Text  # noqa: E402

TASK = MQAR(num_pairs=2, vocab_size=16)
MODEL = ModelConfig("softmax", 16, TASK.length, d_model=8, num_heads=2, num_layers=1, ffn_dim=8)
SETTINGS = training.TrainConfig(
    steps=6, batch_size=4, warmup=2, eval_every=3, eval_batches=1, checkpoint_every=2, log_every=1,
    target_accuracy=2.0,
)  # fmt: skip


def open_run(out_dir, config=SETTINGS, **options):
    return training.Run(TASK, MODEL, config, out_dir, **options)


def train(out_dir, config=SETTINGS, **options):
    run = open_run(out_dir, config, **options)
    try:
        return run.train(progress=False), run
    finally:
        run.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run as if it had been stopped before its result was written."""
    shutil.copytree(finished[1].out_dir, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def same(result, other):
    names = ("history", "eval_accuracy", "eval_loss", "steps")
    return all(result[name] == other[name] for name in names)


# --- numbers that are not finite ------------------------------------------------------------------

DIVERGES = dataclasses.replace(SETTINGS, learning_rate=1e30, warmup=0, clip=1e30)


@pytest.mark.parametrize("changes", [{"checkpoint_every": 1}, {"log_every": 10}])
def test_nothing_is_saved_that_is_not_finite(changes, tmp_path):
    with pytest.raises(FloatingPointError, match=r"^the loss is nan at step \d; no checkpoint has"):
        train(tmp_path, dataclasses.replace(DIVERGES, **changes))
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))
    assert not (tmp_path / "result.json").exists()
    assert training.Run(TASK, MODEL, dataclasses.replace(DIVERGES, **changes), tmp_path).step == 0


@pytest.mark.parametrize("part", ["params", "opt_state", "hopeless"])
def test_the_last_good_checkpoint_is_named_and_kept(part, tmp_path, monkeypatch):
    original = training.train_step

    def step(params, opt_state, data, **options):
        params, opt_state, scores = original(params, opt_state, data, **options)
        if int(jax.tree.leaves(opt_state)[0]) == 4:
            ruin = lambda x: x * jnp.nan if x.dtype == jnp.float32 else x  # noqa: E731
            if part == "opt_state":
                opt_state = jax.tree.map(ruin, opt_state)
            else:
                by = 1e38 if part == "hopeless" else jnp.nan
                params = jax.tree.map(lambda x: x * by, params)
        return params, opt_state, scores

    monkeypatch.setattr(training, "train_step", step)
    message = r"(not finite|is nan) at step 4; the last good checkpoint is that of step 2$"
    with pytest.raises(FloatingPointError, match=message):
        train(tmp_path)
    monkeypatch.undo()
    run = open_run(tmp_path)
    assert run.step == 2
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(run.state[1:]))
    run.close()


# --- damaged folders ------------------------------------------------------------------------------

HARM = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "gone": pathlib.Path.unlink,
    "changed": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()),
}


def harm(checkpoint, how, which=slice(None)):
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    for path in files[which]:
        HARM[how](path)


@pytest.mark.parametrize(("how", "which"), [("cut", 0), ("gone", 3), ("changed", -1), ("cut", -1)])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(how, which, finished, copied, capfd):
    harm(copied / "checkpoints" / "6", how, slice(which, (which + 1) or None))
    result, run = train(copied)
    said = capfd.readouterr().err
    assert (
        f"{copied}/checkpoints/6 is damaged; the run goes on from the checkpoint of step 4" in said
    )
    assert "Traceback" not in said
    assert (copied / "damaged-6").is_dir()
    assert same(result, finished[0])
    jax.tree.map(np.testing.assert_array_equal, run.state[1:], finished[1].state[1:])
    reopened = open_run(copied)
    assert reopened.finished
    assert reopened.step == 6
    reopened.close()


def test_damage_that_only_orbax_can_see(finished, copied, capfd):
    (copied / "checkpoints.json").write_text("no JSON")
    harm(copied / "checkpoints" / "6", "cut")
    assert same(train(copied)[0], finished[0])
    assert "goes on from the checkpoint of step 4" in capfd.readouterr().err


def test_no_checkpoint_that_can_be_read(copied):
    for step in (4, 6):
        harm(copied / "checkpoints" / str(step), "cut")
    message = r"holds no checkpoint that can be read \(of step 4: .*\)\. .* overwrite it$"
    with pytest.raises(training.SettingsError, match=message):
        open_run(copied)
    with pytest.raises(ValueError, match="holds no checkpoint that can be read"):
        training.load_model(copied)
    run = open_run(copied, overwrite=True)  # nothing holds the folder any more
    assert run.step == 0
    run.close()


def test_a_model_is_loaded_from_the_checkpoint_before(copied, capfd):
    harm(copied / "checkpoints" / "6", "cut")
    model, config = training.load_model(copied)
    assert config == MODEL
    (line,) = capfd.readouterr().err.splitlines()  # nothing of orbax
    assert line.startswith(f"{copied}: the checkpoint of step 6 is damaged (")
    assert (copied / "checkpoints" / "6").is_dir()
    assert np.all(np.isfinite(model(np.zeros((1, 3), int))))


def test_a_damaged_result_is_written_anew(finished, copied, capfd):
    (copied / "result.json").write_text('{"model": ')
    assert same(train(copied)[0], finished[0])
    assert "result.json is damaged; it is written anew" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": ', r"settings\.json is damaged \(.*\)\. .* overwrite it"),
        ("[1]", r"settings\.json must hold an object with the keys task, model, training"),
        ('{"task": {}, "model": [], "training": {}}', "must hold an object with the keys"),
    ],
)
def test_damaged_settings(text, message, copied):
    (copied / "settings.json").write_text(text)
    with pytest.raises(training.SettingsError, match=message):
        open_run(copied)
    with pytest.raises(ValueError, match=message):
        training.load_model(copied)


def changed_settings(folder, group, key, value):
    settings = json.loads((folder / "settings.json").read_text())
    settings[group][key] = value
    (folder / "settings.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("group", ["model", "training"])
def test_an_unknown_key_of_the_settings(group, copied):
    changed_settings(copied, group, "flavour", 1)
    message = (
        rf"settings\.json has the key 'flavour' in '{group}', which .*: use those that trained"
    )
    with pytest.raises(ValueError, match=message):
        training.load_model(copied)
    with pytest.raises(training.SettingsError, match=rf"{group}.flavour is 1 there and None here"):
        open_run(copied)


@pytest.mark.parametrize(("key", "value"), [("d_model", "x"), ("num_heads", 3), ("mixer", "no")])
def test_a_value_of_the_settings_that_is_none(key, value, copied):
    changed_settings(copied, "model", key, value)
    with pytest.raises(ValueError, match=r"settings\.json has no use as 'model': "):
        training.load_model(copied)


# --- folders that cannot be written to ------------------------------------------------------------


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"^--out_dir=.* must be a folder to write to: .*"):
            open_run(path)


def test_a_folder_is_held_by_one_run(tmp_path):
    run = open_run(tmp_path)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(ValueError, match="is in use by another process"):
            open_run(tmp_path, **options)
    with pytest.raises(ValueError, match="is in use by"), grid.locked(tmp_path):
        pass
    run.close()
    open_run(tmp_path).close()
    other = open_run(tmp_path)
    del other  # as a crash: the kernel closes what a process held
    open_run(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_checkpoint_that_cannot_be_written(number, tmp_path, monkeypatch):
    run = open_run(tmp_path)
    save = run._manager.save

    def full(step, **options):
        if step == 4:
            raise OSError(number, os.strerror(number), "some file")
        return save(step, **options)

    monkeypatch.setattr(run._manager, "save", full)
    message = rf"^the checkpoint of step 4 cannot be written to {tmp_path} \(some file: "
    message += rf"{os.strerror(number)}\); the last good checkpoint is that of step 2$"
    with pytest.raises(training.CheckpointError, match=message):
        run.train(progress=False)
    run.close()
    run = open_run(tmp_path)
    assert run.step == 2
    run.close()


def test_outputs_are_checked_and_left_as_they_are(tmp_path):
    (tmp_path / "old").write_text("old")
    assert commands.output(tmp_path / "old", "append").read_text() == "old"
    commands.output(tmp_path / "new", "append")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    for path in (tmp_path, tmp_path / "no" / "r.jsonl", tmp_path / "old" / "r"):
        for check in (commands.output, commands.replaceable):
            with pytest.raises(ValueError, match=rf"^--append={path} must be a file to write to: "):
                check(path, "append")


def test_a_damaged_grid(tmp_path, capfd):
    table = rows.Table(columns=("id", "loss"), shared=False)
    path = table.path(tmp_path)
    path.write_text("id,loss\n1,2\n3,[\n4,5\n6,")
    with pytest.raises(ValueError, match=r"runs\.csv is damaged at line 3 .*: remove that line"):
        table.read(tmp_path)
    path.write_text("id,loss\n1,2\n3,")
    assert table.read(tmp_path) == [{"id": 1, "loss": 2}]
    train = dataclasses.replace(SETTINGS, eval_every=3, target_accuracy=2.0)
    cell = grid.Cell("softmax", 2, TASK, MODEL, train, (1e-3,), (0,))
    partial = tmp_path / "cell.npz"
    for content in (b"", b"PK\3\4 no more", b"\x93NUMPY"):
        partial.write_bytes(content)
        assert grid.Training(grid.Program(cell), partial).step == 0
        assert "is damaged" in capfd.readouterr().err


# --- weight decay ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["vla", "gated_deltanet", "published_deltanet", "mesa"])
def test_weight_decay_acts_on_matrices_alone(mixer):
    model = Model(dataclasses.replace(MODEL, mixer=mixer, short_conv=2), nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    zero = jax.tree.map(jnp.zeros_like, params)
    config = training.TrainConfig(learning_rate=1.0, weight_decay=0.1, warmup=0, steps=10)
    optimizer = config.optimizer()
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    moved = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(update)
        for path, update in jax.tree.flatten_with_path(updates)[0]
    }
    values = training._by_name(params)
    decayed = {name for name in moved if ".kernel" in name or ".embedding" in name}
    decayed = {n for n in decayed if not any(f".{g}." in n for g in ("beta", "gate", "log_decay"))}
    assert decayed
    assert decayed < moved.keys()
    for name, update in moved.items():
        expected = -0.1 * np.asarray(values[name]) if name in decayed else 0 * update
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=name)


# --- file names -----------------------------------------------------------------------------------


def test_file_names_of_any_encoding(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}é.txt").write_text(f"line {i} of a text that goes on\n" * 2)
    before = Text(str(tmp_path), 16)
    os.rename(tmp_path / "7é.txt", os.fsencode(tmp_path) + b"/7\xe9.txt")
    after = Text(str(tmp_path), 16)
    sizes = [sum(getattr(t, f"{s}_bytes") for s in ("train", "validation", "test"))
             for t in (before, after)]  # fmt: skip
    assert sizes[0] == sizes[1]
    assert before.digest != after.digest or before.train_bytes == after.train_bytes
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    os.rename(tmp_path / "8é.txt", folder + "/8")
    Text(str(tmp_path), 16)
    with pytest.raises(ValueError, match="out_dir must be UTF-8"):
        open_run(folder)


# --- signals and kills ----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("step", [1, 5])
def test_a_signal_saves_and_another_run_goes_on(
    number, code, step, finished, tmp_path, monkeypatch
):
    original = training.batch
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def batch(task, config, stream, index):
        if stream == training.TRAIN and index + 1 == step:
            signal.raise_signal(number)
        return original(task, config, stream, index)

    monkeypatch.setattr(training, "batch", batch)
    with pytest.raises(training.Interrupted) as interrupted:
        train(tmp_path)
    monkeypatch.undo()
    assert interrupted.value.code == code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run = open_run(tmp_path)
    assert run.step == step
    result = run.train(progress=False)
    run.close()
    assert same(result, finished[0])
    jax.tree.map(np.testing.assert_array_equal, run.state[1:], finished[1].state[1:])
    signal.signal(signal.SIGINT, before)


def test_signals_wait_once():
    with commands.signals() as requested:
        signal.raise_signal(signal.SIGTERM)
        assert requested() == signal.SIGTERM
        with pytest.raises(commands.Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    with commands.signals() as requested:
        requested.waits = False
        with pytest.raises(commands.Interrupted):
            signal.raise_signal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with commands.signals() as requested:
        signal.raise_signal(signal.SIGTERM)
        assert not requested()
    signal.signal(signal.SIGTERM, ignored)


KILLS = """
    import os, pathlib, random, signal, sys
    import test_runs

    root = pathlib.Path(sys.argv[1])

    def child(out_dir, kill_at=None):
        '''Trains in a process of its own, killed at its n-th dealing with the run's files.'''
        if (process := os.fork()) == 0:
            seen = 0

            def hook(event, arguments):
                nonlocal seen
                if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                    seen += str(out_dir) in str(arguments[0])
                    if kill_at is not None and seen >= kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            test_runs.train(out_dir)
            (root / "seen").write_text(str(seen))
            os._exit(0)
        return os.waitpid(process, 0)[1]

    assert child(root / "whole") == 0
    seen = int((root / "seen").read_text())
    draw, kills = random.Random(0), 0
    for kill_at in draw.sample(range(10, seen // 2), 5):
        kills += child(root / "killed", kill_at) == signal.SIGKILL
    assert kills >= 2, kills
    assert child(root / "killed") == 0
    print(kills)
"""


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_as_it_would_have(tmp_path):
    """Bit by bit: parameters, optimiser and history."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLS), tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = [open_run(tmp_path / name) for name in ("whole", "killed")]
    for run in runs:
        run.close()
        assert run.step == SETTINGS.steps
        assert not list(run.out_dir.glob(".*"))
    assert same(*(run.result() for run in runs))
    jax.tree.map(np.testing.assert_array_equal, *(run.state[1:] for run in runs))


# --- commands -------------------------------------------------------------------------------------


def command(name, *arguments, **options):
    return subprocess.run(
        [sys.executable, f"{name}.py", *arguments],
        cwd=ROOT / ("benchmarks" if name in ("run", "multi_device") else "examples"),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mqar", ["--out_dir=FILE/run"]),
        ("train_lm", ["--out_dir=FILE/run"]),
        ("train_lm", ["--append=FILE/r.jsonl"]),
        ("generate", ["--session=FILE/s", "--run=FOLDER"]),
        ("stream", ["--session=FILE/s", "--run=FOLDER", "--file=FILE"]),
        ("latency", ["--append=FILE/r.jsonl"]),
        ("capacity", ["--out_dir=FILE/run", "--preset=smoke"]),
        ("state_norm", ["--out_dir=FILE/run"]),
        ("run", ["--out_dir=FILE/run"]),
        ("multi_device", ["--out=FILE/r.json", "--devices=1"]),
    ],
)
def test_commands_look_at_their_outputs_first(name, arguments, tmp_path):
    (tmp_path / "file").touch()
    arguments = [a.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
                 for a in arguments]  # fmt: skip
    if name == "train_lm":
        arguments.append(f"--out_dir={tmp_path / 'run'}") if "append" in arguments[0] else None
    done = command(name, *arguments)
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if x.startswith(f"{name}: ")]
    assert " to write to: " in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_diverges_says_so_in_one_line(tmp_path):
    sizes = ["--num_pairs=2", "--d_model=8", "--num_heads=2", "--num_layers=1", "--ffn_dim=8"]
    sizes += ["--batch_size=4", "--steps=5", "--learning_rate=1e30", "--warmup=0", "--noprogress"]
    done = command("mqar", f"--out_dir={tmp_path}", *sizes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("mqar: the loss is nan at step 5; no checkpoint")
    assert "Traceback" not in done.stderr
