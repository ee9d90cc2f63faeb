"""Text that is read once, and the arms that are compared on it."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest
from support import example

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import text_grid
import training
from commands import Lock
from text import Text

LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(120):
        for copy in ("one", "another")[: 1 + i % 2]:
            place = root / copy
            place.mkdir(exist_ok=True)
            (place / f"{i}.py").write_text(f"line {i} of {i * i}\nand another: {i}\n" * 2)
    return root


@pytest.fixture(scope="module")
def task(folder):
    return Text(str(folder), LENGTH, "*.py", once=True)


def test_copies_are_one_file_in_one_split(folder, task):
    documents = [document for stream in range(3) for document in task.split(stream).documents]
    assert len(documents) == 120 == len(set(documents))
    moved = Text(str(folder / "one"), LENGTH, "*.py", once=True)
    assert moved.digest == task.digest != Text(str(folder), LENGTH, "*.py").digest


def test_a_pass_reads_no_row_twice(task):
    split = task.split(training.TRAIN)
    config = training.TrainConfig(batch_size=3, seed=5)
    count = split.num_rows // 3
    rows = [training.batch(task, config, training.TRAIN, i).inputs for i in range(count)]
    whole = np.concatenate(rows)
    starts = split._bytes[: split.num_rows * LENGTH].reshape(-1, LENGTH)
    assert sorted(map(bytes, whole.astype(np.uint8))) != sorted(map(bytes, rows[0]))
    places = [np.flatnonzero(np.all(starts == row, axis=1)) for row in whole]
    order = split._order(5)[: len(whole)]
    assert len(set(order)) == len(order)
    assert all(place in found for place, found in zip(order, places, strict=True))
    other = training.batch(task, dataclasses.replace(config, seed=6), training.TRAIN, 0).inputs
    assert np.any(other != rows[0])
    with pytest.raises(ValueError, match=f"one pass over {split.num_rows} rows is {count} batches"):
        training.batch(task, config, training.TRAIN, count)


def test_held_out_rows_are_drawn_as_ever(task):
    config = training.TrainConfig(batch_size=4)
    drawn = [training.batch(task, config, training.VALIDATION, i) for i in range(50)]
    assert len(drawn) * 4 > task.split(training.VALIDATION).num_rows


def test_arms_have_as_many_parameters():
    preset = text_grid.PRESETS["smoke"]
    one = dataclasses.replace(preset, sizes=preset.sizes | {"num_layers": 1, "ffn_dim": 512})
    arms = ("vla", "softmax", "gated_deltanet", "vla gated read", "vla gated projection")
    counts = {arm: text_grid.parameter_count(one.model(arm)) for arm in arms}
    assert max(counts.values()) - min(counts.values()) < 0.02 * min(counts.values())
    assert preset.model("hybrid").mixers == ("vla", "vla", "vla", "softmax")


SMALL = dataclasses.replace(
    text_grid.PRESETS["smoke"],
    sizes={"d_model": 8, "num_heads": 1, "num_layers": 1, "ffn_dim": 8},
    contexts=(LENGTH,),
    seq_len=LENGTH,
)


def go(task, out_dir, stop=lambda: False, preset=SMALL):
    return list(text_grid.Arm("softmax", preset, task, out_dir, stop, progress=False).train())


def test_the_best_rate_goes_on_and_nothing_is_trained_twice(task, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        text_grid.LanguageRun, "_record", recording(text_grid.LanguageRun._record, steps)
    )
    asked = iter([False] * 3 + [True] * 9)
    assert not go(task, tmp_path, lambda: next(asked))  # stopped after the trial of one rate
    held = Lock(next(tmp_path.glob("softmax/*")))
    assert not go(task, tmp_path)  # the trial that another process has is passed over
    held.release()
    rows = go(task, tmp_path)
    text_grid.keep(tmp_path, rows)
    before = len(steps)
    again = go(task, tmp_path)
    assert again == rows
    assert len(steps) == before
    text_grid.keep(tmp_path, again)
    assert text_grid.RUNS.read(tmp_path) == rows
    trial, last = SMALL.trial, SMALL.train.steps
    assert [row["seed"] for row in rows] == [0, 1]
    assert before == 2 * trial + (last - trial) + last  # every step once
    runs = [json.loads(f.read_text()) for f in tmp_path.glob("softmax/*/result.json")]
    assert {run["settings"]["training"]["learning_rate"] for run in runs} == {
        rows[0]["learning_rate"]
    }
    text_grid.report(tmp_path)
    assert (tmp_path / "text_arms.png").exists()
    table = (tmp_path / "table.md").read_text()
    mean = np.mean([row["bits_per_byte"] for row in rows])
    assert "| softmax |" in table
    assert f"{mean:.3f}" in table


def recording(record, steps):
    def recorded(self, point):
        steps.append(point["step"])
        record(self, point)

    return recorded


def test_a_rate_that_diverges_is_not_chosen(task, tmp_path):
    wild = dataclasses.replace(SMALL, rates=(1e30, 1e-2), seeds=(0,))
    rows = go(task, tmp_path, preset=wild)
    assert [row["learning_rate"] for row in rows] == [1e-2]
    assert "is nan" in (tmp_path / "softmax/rate-1e+30-seed-0/diverged.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms=vla,none"], "--arms must be among"),
        (["--arms=mesa"], "--arms must be among"),  # of the grids, and in no table here
        (["--data=FOLDER", "--steps=100000", "--preset=smoke", "--arms=softmax"], "one pass over"),
    ],
)
def test_the_command_says_what_does_not_fit(flags, message, folder, tmp_path):
    flags = [flag.replace("FOLDER", str(folder)) for flag in flags]
    done = example("text_arms", f"--out_dir={tmp_path}", *flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
