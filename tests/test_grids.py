"""The grids: a run among many is what it would be alone; grids resume, skip and report."""

import dataclasses
import functools
import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_close, example

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import arms
import capacity
import copy_task
import grid
import grid_report
import long_context
import overload
import state_tracking
import training
from model import ModelConfig, parameter_count
from rows import Table, digest
from tasks import MQAR

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
EXPERIMENTS = (capacity, long_context, copy_task, overload, state_tracking)
TASK = MQAR(num_pairs=2, vocab_size=16)
SIZES = {"vocab_size": 16, "d_model": 16, "num_heads": 2, "num_layers": 1, "ffn_dim": 16}
TRAIN = training.TrainConfig(
    steps=8, batch_size=4, warmup=2, eval_every=4, eval_batches=2, log_every=4, checkpoint_every=8
)


def cell(**changes):
    model = ModelConfig("softmax", max_length=TASK.length, **SIZES)
    options = {"train": TRAIN, "learning_rates": (1e-3, 1e-2), "seeds": (0, 3)} | changes
    return grid.Cell("softmax", 2, TASK, model, **options)


def experiment(*cells):
    return grid.Experiment("tiny", {"published": lambda: list(cells)}, "pairs")


def go(out_dir, *cells, **options):
    options = grid.Options(progress=False, **options)
    return grid.run(experiment(*cells), "published", cells, out_dir, options)


@pytest.fixture(scope="module")
def program():
    """Of ``cell()``, compiled."""
    made = grid.Program(cell())
    made.compile()
    return made


@pytest.fixture(scope="module")
def whole(program, tmp_path_factory):
    """A grid of four runs, uninterrupted."""
    out_dir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "Program", lambda cell: program)
        patch.setattr(program, "compile", lambda: 1.0)
        assert go(out_dir, cell())
    return out_dir, grid.RUNS.read(out_dir)


def test_each_run_is_what_it_would_be_alone(whole, tmp_path):
    out_dir, rows = whole
    history = grid.read_history(out_dir)
    assert [(r["learning_rate"], r["seed"]) for r in rows] == cell().runs()
    assert list(history) == [r["id"] for r in rows]
    for row in rows[3:]:
        config = dataclasses.replace(TRAIN, learning_rate=row["learning_rate"], seed=row["seed"])
        run = training.Run(TASK, cell().model, config, tmp_path / row["id"])
        alone = run.train(progress=False)
        run.close()
        assert_close(row["loss"], alone["eval_loss"], 1e-4)
        assert abs(row["accuracy"] - alone["eval_accuracy"]) < 0.02
        for found, point in zip(history[row["id"]], alone["history"], strict=True):
            assert found[0] == point["step"]
            assert_close(found[2], point["eval_loss"], 1e-4)
            assert_close(found[3], point["loss"], 1e-4)


def test_a_row_says_how_it_came_to_be(whole):
    _, rows = whole
    row = rows[0]
    assert row["settings"] == cell().settings()
    assert (row["id"], row["learning_rate"], row["seed"]) == (cell().run_id(1e-3, 0), 1e-3, 0)
    settings = cell().settings()
    settings["training"] |= {"learning_rate": 1e-3, "seed": 0}
    assert row["id"] == digest({"arm": "softmax", "panel": "", **settings})
    assert row["ended"] == "steps"
    assert row["steps"] == 8
    assert row["runs_together"] == 4
    assert row["train_seconds"] > 0
    assert row["device"] == jax.devices()[0].device_kind
    assert row["versions"].keys() >= {"python", "jax", "vla_jax"}
    assert row["parameters"] == parameter_count(cell().model)
    assert 0 <= row["untrained_accuracy"] < 0.5


def strip(rows):
    times = ("train_seconds", "compile_seconds", "test_seconds", "history")
    return [{n: x for n, x in row.items() if n not in times} for row in rows]


def test_a_grid_that_was_stopped_goes_on(program, whole, tmp_path):
    path = tmp_path / "partial" / f"{cell().cell_id}.npz"
    bar = grid.tqdm(disable=True)
    with pytest.raises(grid.OutOfTime):
        grid.Training(program, path).train(lambda: True, 1e9, bar)
    resumed = grid.Training(program, path)
    assert resumed.step == 4
    resumed.train(lambda: False, 0, bar)
    assert strip(resumed.rows("tiny", "published", 0.0)) == strip(whole[1])


def test_what_is_there_is_not_run_again(whole, monkeypatch, capsys):
    out_dir, rows = whole
    monkeypatch.setattr(grid, "Program", None)  # a call would raise
    (out_dir / "partial").mkdir(exist_ok=True)
    assert go(out_dir, cell())
    assert grid.RUNS.read(out_dir) == rows
    assert "| softmax |" in capsys.readouterr().out
    assert (out_dir / "table.md").exists()
    assert (out_dir / "tiny-published.png").stat().st_size > 1000
    assert not list((out_dir / "partial").glob("*"))


def test_only_the_missing_seeds_of_a_single_rate_are_run():
    one = cell(learning_rates=(1e-3,))
    assert grid._left(one, {one.run_id(1e-3, 0)}).seeds == (3,)
    assert one.run_id(1e-3, 0) == cell(learning_rates=(1e-3,), seeds=(0,)).run_id(1e-3, 0)
    swept = cell()
    assert grid._left(swept, {swept.run_id(1e-3, 0)}) == swept
    assert grid._left(swept, {swept.run_id(*r) for r in swept.runs()}) is None


ROWS = [
    {"id": "1e3", "accuracy": 0.1, "ended": "another rate", "settings": {"d": 2, "e": None}},
    {"id": "2", "accuracy": None, "curve": [[1, 2.5]], "settings": {"d": 2, "e": None}},
    {"id": 'λ, "3"', "accuracy": 1.0, "settings": {"d": 4}},
]
TABLE = Table(columns=("id", "ended", "accuracy", "curve"), text=("id", "ended"))


def test_rows_are_read_as_they_were_written_and_settings_stored_once(tmp_path):
    assert TABLE.read(tmp_path) == []
    TABLE.append(tmp_path, ROWS[:1])
    TABLE.append(tmp_path, ROWS[1:])
    assert TABLE.read(tmp_path) == ROWS
    lines = (tmp_path / "runs.csv").read_text("utf-8").splitlines()
    assert lines[0] == "cell,id,ended,accuracy,curve"
    assert len(lines) == 4
    cells = (tmp_path / "cells.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["settings"] for line in cells] == [{"d": 2, "e": None}, {"d": 4}]
    with pytest.raises(ValueError, match=r"must have the columns cell, id; found cell, id, ended"):
        Table(columns=("id",)).read(tmp_path)
    (tmp_path / "cells.jsonl").write_text(cells[0] + "\n", "utf-8")
    with pytest.raises(ValueError, match="names the cell"):
        TABLE.read(tmp_path)


@pytest.mark.parametrize("kept", ["none", "header", "row"])
@pytest.mark.parametrize("cut", ["runs.csv", "cells.jsonl"])
def test_a_line_that_a_kill_cut_short_is_no_row(cut, kept, tmp_path):
    first = {"none": [], "header": [], "row": ROWS[:1]}[kept]
    if kept != "none":
        TABLE.append(tmp_path, first)
    with (tmp_path / cut).open("a") as file:
        file.write('{"cell": "b", "accu' if cut == "cells.jsonl" else 'b,"acc')
    assert TABLE.read(tmp_path) == first
    TABLE.append(tmp_path, ROWS[1:])
    assert TABLE.read(tmp_path) == [*first, *ROWS[1:]]


def test_a_cell_that_was_killed_before_its_rows_is_run_again(whole, tmp_path):
    """What comes before the rows in time, history and settings, does no harm twice."""
    out_dir, rows = whole
    history = grid.read_history(out_dir)
    full = [row | {"history": history[row["id"]]} for row in rows]
    grid.append_rows(tmp_path, full)
    path = grid.RUNS.path(tmp_path)
    path.write_text(path.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")
    assert grid.RUNS.read(tmp_path) == []
    grid.append_rows(tmp_path, full)
    assert grid.RUNS.read(tmp_path) == rows
    assert grid.read_history(tmp_path) == history
    assert len((tmp_path / "cells.jsonl").read_text("utf-8").splitlines()) == 1


def test_runs_end_when_they_should(program, monkeypatch):
    monkeypatch.setattr(program, "init", lambda: None)
    run = grid.Training(program, pathlib.Path("none"))
    run.step = 4
    good, bad = np.asarray([[0.5, 0.9995], [0.2, 0.3]]), np.zeros((2, 2))
    run._record(np.asarray([[1.0, 1.0], [np.nan, 1.0]]), good, bad)
    assert run.ended.tolist() == [["", "target"], ["diverged", ""]]
    run.step = 8 - 4
    run._record(np.ones((2, 2)), np.asarray([[0.9995, 0.0], [0.0, 0.0]]), bad)
    assert run.ended.tolist() == [["target", "target"], ["diverged", "another rate"]]
    assert run._done()


def test_a_run_that_has_ended_is_frozen(program):
    data = program.draw(TASK, training.TRAIN, 0, TRAIN.eval_every)
    active = np.asarray([[True, False], [False, True]])
    before = program.init()
    after, _ = program.chunk(program.init(), active, data, program.rates)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x[~active], y[~active])
    assert any(np.any(x[active] != y[active]) for x, y in zip(
        jax.tree.leaves(before[0]), jax.tree.leaves(after[0]), strict=True))  # fmt: skip


def test_the_best_rate_is_chosen_on_validation_data():
    def row(rate, seed, validation, test, ended="steps"):
        same = {"panel": "", "arm": "x", "setting": 4, "lengths": {}}
        return same | {
            "learning_rate": rate, "seed": seed, "validation_accuracy": validation,
            "accuracy": test, "ended": ended,
        }  # fmt: skip

    rows = [row(1, 0, 0.5, 0.9), row(1, 1, 0.5, 0.9), row(2, 0, 0.8, 0.7), row(2, 1, None, None)]
    outcome = grid_report.outcomes(rows)["", "x", 4]
    assert outcome.rate == 1
    rows = [row(1, 0, 0.999, 1.0, "another rate"), row(2, 0, 0.999, 0.99, "target")]
    assert grid_report.outcomes(rows)["", "x", 4].rate == 2
    assert grid_report._spread([0.1, 0.2]) == "0.150 (0.100–0.200)"


def test_plots_show_every_length_and_state(tmp_path, monkeypatch):
    def row(arm, panel, floats, test, lengths):
        return {
            "panel": panel, "arm": arm, "setting": 4, "lengths": lengths, "learning_rate": 1,
            "seed": 0, "validation_accuracy": 0.5, "accuracy": test, "ended": "steps",
            "state_floats": floats,
        }  # fmt: skip

    rows = [
        row("vla", "d_model 64", 100, 0.9, {"2T": 0.8, "4T": 0.7}),
        row("softmax", "d_model 64", 400, 0.6, {"2T": 0.5, "4T": 0.4}),
        row("vla", "d_model 128", 200, 1.0, {"2T": 0.95, "4T": None}),
    ]
    found = grid_report.outcomes(rows)
    figures = []
    monkeypatch.setattr(grid_report, "_save", lambda figure, *_: figures.append(figure))

    def lines(axes):
        drawn = [c.lines[0] for c in axes.containers]
        return [([round(float(x)) for x in a.get_xdata()], list(a.get_ydata())) for a in drawn]

    grid_report.plot_lengths(capacity.EXPERIMENT, "zoology", found, tmp_path / "lengths.png")
    wide, narrow = figures[-1].axes
    assert "d_model 128" in wide.get_title()
    assert "d_model 64" in narrow.get_title()
    assert lines(wide) == [([0, 1, 2], [1.0, 0.95, 0.0])]
    assert lines(narrow) == [([0, 1, 2], [0.9, 0.8, 0.7]), ([0, 1, 2], [0.6, 0.5, 0.4])]
    assert [t.get_text() for t in narrow.get_xticklabels()] == ["as trained", "2T", "4T"]
    grid_report.plot_states(capacity.EXPERIMENT, "zoology", found, tmp_path / "states.png")
    (axes,) = figures[-1].axes
    assert lines(axes) == [([100, 200], [0.9, 1.0]), ([400], [0.6])]


def test_reports_write_what_the_rows_allow(tmp_path):
    for preset, names in (
        ("zoology", {"capacity-zoology.png", "capacity-zoology-lengths.png",
                     "capacity-zoology-states.png"}),
        ("published", {"capacity-published.png"}),
    ):  # fmt: skip
        out = tmp_path / preset
        out.mkdir()
        rows = grid.RUNS.read(RESULTS / f"capacity-{preset}")
        assert grid_report.report(capacity.EXPERIMENT, preset, rows, out)
        assert {p.name for p in out.iterdir()} == names | {"table.md"}


@pytest.mark.parametrize(
    "name",
    ["capacity-ablation", "capacity-fair", "capacity-published", "capacity-zoology",
     "copy_task-fair", "copy_task-published", "long_context-fair", "long_context-published",
     "overload-published"],
)  # fmt: skip
def test_kept_tables_are_those_of_the_kept_rows(name):
    module, preset = name.rsplit("-", 1)
    (experiment_,) = (m.EXPERIMENT for m in EXPERIMENTS if m.EXPERIMENT.name == module)
    rows = grid.RUNS.read(RESULTS / name)
    wanted = {c.run_id(*run) for c in experiment_.presets[preset]() for run in c.runs()}
    assert {row["id"] for row in rows} <= wanted  # so that the command finds them
    text = grid_report.table(experiment_, preset, grid_report.outcomes(rows))
    assert text == (RESULTS / name / "table.md").read_text("utf-8")


def test_kept_measurements_are_not_made_again(state_norm, monkeypatch, tmp_path):
    for table, name, call, made in (
        (overload.RECALL, "overload-recall", overload._recall, (overload, "_accuracy")),
        (copy_task.UNTRAINED, "copy_task-untrained", copy_task._untrained, (copy_task, "Model")),
        (state_norm.TABLE, "state_norm", functools.partial(state_norm.run, "published"),
         (state_norm, "inputs")),
    ):  # fmt: skip
        monkeypatch.setattr(*made, None)  # a call would raise
        out_dir = shutil.copytree(RESULTS / name, tmp_path / name)
        (out_dir / "table.md").unlink()
        call(out_dir)
        assert table.read(out_dir) == table.read(RESULTS / name)
        assert (out_dir / "table.md").read_bytes() == (RESULTS / name / "table.md").read_bytes()


def test_kept_results_are_small():
    sizes = {path: path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()}
    assert sizes
    assert max(sizes.values()) < 100_000, max(sizes, key=sizes.get)
    assert sum(sizes.values()) < 1_000_000


@pytest.mark.parametrize("module", EXPERIMENTS, ids=lambda m: m.EXPERIMENT.name)
def test_presets_are_well_formed(module):
    for preset, make in module.EXPERIMENT.presets.items():
        cells = make()
        ids = [cell.run_id(*run) for cell in cells for run in cell.runs()]
        assert len(set(ids)) == len(ids)
        if preset in ("fair", "zoology"):
            for one in cells:
                assert len(one.learning_rates) >= 4
                assert len(one.seeds) == 3
                assert one.lengths or one.model.short_conv is None


def test_fair_arms_have_equally_many_parameters():
    cells = [c for c in capacity._fair() if c.setting == 16 and c.model.short_conv]
    counts = {c.arm: parameter_count(c.model) for c in cells}
    assert len(counts) == len(arms.FAIR_ARMS + arms.ABLATIONS + arms.GATED_ARMS)
    assert max(counts.values()) - min(counts.values()) < 0.005 * counts["vla"]


def test_arms_that_are_drawn_together_differ_in_colour():
    for question in (*arms.QUESTIONS.values(), *arms.TEXT_QUESTIONS.values()):
        assert set(question) <= arms.ARMS.keys()
        colours = {grid_report.arm_style(arm)["color"] for arm in question}
        assert len(colours) == len(question) <= 6


def test_a_plot_of_many_arms_is_split_by_question():
    few = ["softmax", "vla", "identity"]
    assert grid_report._views({"panel": few}) == [("panel", "panel", few)]
    many = list(arms.ARMS)
    views = grid_report._views({"panel": many})
    assert {arm for _, _, here in views for arm in here} == set(many)
    assert all(1 <= len(here) <= 6 and panel == "panel" for _, panel, here in views)
    assert len({title for title, _, _ in views}) == len(views)


def test_steps_must_fit():
    with pytest.raises(ValueError, match="steps must be a multiple of eval_every = 4, got 6"):
        cell(train=dataclasses.replace(TRAIN, steps=6))


def test_distinct_ids_of_a_large_vocabulary():
    keys = MQAR(num_pairs=64, vocab_size=8192, layout="zoology").sample(
        np.random.default_rng(0), 500
    ).inputs[:, :128:2]  # fmt: skip
    assert all(len(set(row)) == 64 for row in keys)
    assert keys.min() >= 1
    assert keys.max() < 4096
    counts = np.bincount(keys.ravel() // 512, minlength=8)
    np.testing.assert_allclose(counts, keys.size / 8, rtol=0.06)


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--arms=other", "--arms must be among vla, identity"),
        ("--time_limit=nan", "time_limit"),
        ("--seeds=0,x", "--seeds must be numbers, got 0,x"),
        ("--seeds=1,1", "--seeds must differ, got 1,1"),
        ("--seeds=0,4294967296", "--seeds must be from 0 to 2**32 - 1, got 0,4294967296"),
        ("--settings=x", "--settings must be numbers, got x"),
    ],
)
def test_a_command_names_a_bad_flag(flag, message, tmp_path):
    done = example("capacity", f"--out_dir={tmp_path}", flag)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["long_context", "state_tracking"])
def test_a_command_without_time_only_reports(command, tmp_path):
    done = example(command, f"--out_dir={tmp_path}", "--preset=smoke", "--time_limit=0")
    assert done.returncode == 0, done.stderr
    assert "Not all runs are there yet" in done.stdout


# --- what needs no training ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def state_norm():
    import state_norm

    return state_norm


def test_the_decomposition_of_the_state_norm(state_norm):
    """Against float64 NumPy, token by token."""
    _, key, value, _ = (
        None if x is None else np.asarray(x[0], np.float64) for x in state_norm.inputs(0, 30)
    )
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    arms = {
        "linear attention": (0 * key, key),
        "linear, unit keys": (0 * key, unit),
        "delta rule (A ≡ I)": (unit, unit),
    }
    for arm, (read, write) in arms.items():
        memory = np.zeros((4, 32, 32))
        for k, a, v in zip(read, write, value, strict=True):
            memory += np.einsum("hd,he->hde", a, v - np.einsum("hde,hd->he", memory, k))
        expected = np.linalg.norm(memory, axis=(1, 2)).mean()
        assert_close(state_norm.norm(arm, 0, 30)["norm"], expected, 1e-4)


def test_a_step_has_the_norm_that_the_closed_form_gives(state_norm):
    found = state_norm.jacobian("learned", 0, 20)
    assert found["norm_against_closed_form"] < 1e-4
    assert found["norm"][2] < 1.618
    assert found["radius"][1] < 1.001


def test_a_first_step_without_unit_lengths(state_norm):
    """``M = λ₀ I + k̂ k̂ᵀ / D``, so that ``α = k / (λ₀ + 1 / D)`` and the step is symmetric."""
    dim, lambda0 = 96, state_norm.LAMBDA0
    key = np.random.default_rng([0, dim]).standard_normal(dim)
    square = {"unit": 1, "raw keys": np.linalg.norm(key), "raw gains": 1 / (lambda0 + 1 / dim)}
    square["raw keys and gains"] = key @ key / (lambda0 + 1 / dim)
    for lengths in state_norm.LENGTHS:
        found = state_norm.amplification(lengths, "normal", "key", 0, dim, 1)
        for name in ("largest", "product_end"):
            assert_close(found[name], max(1, abs(1 - square[lengths])), 1e-9, name)


def test_refreshing_the_inverse_is_no_guard(state_norm):
    drift = [state_norm.drift(m, "random", 0, (200,))["drift"]["200"]
             for m in ("rank one", "refresh")]  # fmt: skip
    assert drift[0] < 1e-5
    assert drift[1] > 1e-4


def test_an_adversary_beats_the_random_norm(state_norm):
    norms = [state_norm.adversary("key", 0, steps)["norm"] for steps in (100, 400)]
    assert norms[1] > 1.2 * norms[0]


def test_recall_without_training():
    raw, value = np.random.default_rng(0).standard_normal((2, 8, 24, 1, 32)).astype(np.float32)
    u_map = jnp.eye(32)
    arms = ("linear attention", "VLA, u = k̂ / √D, unit", "VLA, u = k̂, rls")
    accuracy = {
        arm: float(overload._accuracy(arm, raw, value, u_map))
        for arm in (*arms, "exact ridge regression")
    }
    assert accuracy["exact ridge regression"] > 0.98
    assert accuracy["VLA, u = k̂, rls"] == accuracy["exact ridge regression"]
    assert accuracy["linear attention"] < 0.3
    assert accuracy["linear attention"] < accuracy["VLA, u = k̂ / √D, unit"]


def test_the_published_copy_target_is_the_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(copy_task, "_UNTRAINED", ("softmax",))
    monkeypatch.setattr(copy_task, "SEEDS", (0,))
    copy_task._untrained(tmp_path)
    small, large = copy_task.UNTRAINED.read(tmp_path)
    assert small["next_token_accuracy"] < 0.03
    assert large["next_token_accuracy"] < 0.03
    assert large["current_token_accuracy"] > 0.9  # "solved" without any training
