"""Grids of training runs: arms × settings × learning rates × seeds, resumable, many in one program.

A `Cell` is one arm in one setting with all its learning rates and seeds, which train side by side
in one compiled program. Each run is exactly what it would be alone: its data and parameters come
from its own seed as in ``training.py``, and a run that has reached its target is frozen.

A directory holds ``runs.csv`` and ``cells.jsonl`` (``rows.py`` says how), ``history.csv`` (the
validations of every run), ``partial/`` (the state of a cell that was stopped half way),
``table.md`` and the plots. What is in ``runs.csv`` is not run again; the same command goes on where
the last one was stopped or killed. One file, because a cell, its compiled program and what it
leaves in the directory are read together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import platform
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from commands import Interrupted, Lock, check_arguments, directory, resumable, said, signals
from flax import nnx
from grid_report import report
from model import Model, ModelConfig, parameter_count, state_floats
from rows import Row, Table, digest
from tasks import Batch, Task
from tqdm import tqdm
from training import TEST, TRAIN, VALIDATION, TrainConfig, batch

import vla_jax
from vla_jax.files import replacing


@dataclasses.dataclass(frozen=True)
class Cell:
    """One arm in one setting: every learning rate with every seed.

    Attributes:
      arm: its name in tables and plots.
      setting: what the plot's axis and the table's columns show, such as 8 pairs.
      task: what is learned and tested.
      model: sizes and mixer.
      train: how; ``learning_rate`` and ``seed`` of it do not count.
      learning_rates, seeds: of the runs.
      lengths: further tasks on which the trained model is tested, by name.
      panel: name of the plot in which the cell appears.
    """

    arm: str
    setting: float
    task: Task
    model: ModelConfig
    train: TrainConfig
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    lengths: Mapping[str, Task] = dataclasses.field(default_factory=dict)
    panel: str = ""

    def runs(self) -> list[tuple[float, int]]:
        """``(learning rate, seed)`` of each run, learning rate first."""
        return [(rate, seed) for rate in self.learning_rates for seed in self.seeds]

    def __post_init__(self) -> None:
        if self.train.steps % self.train.eval_every:
            raise ValueError(
                f"steps must be a multiple of eval_every = {self.train.eval_every}, "
                f"got {self.train.steps}"
            )

    def settings(self) -> dict[str, Any]:
        """All that decides the outcome of a run but its own learning rate and seed, as JSON data.

        Its siblings are among it where there are several learning rates: a run ends when another
        rate has solved the task with all seeds.
        """
        train = dataclasses.asdict(self.train)
        del train["learning_rate"], train["seed"]
        named = {"": self.task, **self.lengths}
        tasks = {n: {"name": type(t).__name__, **dataclasses.asdict(t)} for n, t in named.items()}
        data = {
            "task": tasks.pop(""),
            "lengths": tasks,
            "model": self.model.settings(),
            "training": train,
            "learning_rates": self.learning_rates,
        }
        if len(self.learning_rates) > 1:
            data["seeds"] = self.seeds
        return json.loads(json.dumps(data))

    def run_id(self, rate: float, seed: int) -> str:
        """Identifies a run by its settings."""
        settings = self.settings()
        settings["training"] |= {"learning_rate": rate, "seed": seed}
        return digest({"arm": self.arm, "panel": self.panel, **settings})

    @property
    def cell_id(self) -> str:
        """Identifies the cell by the settings of its runs."""
        return digest([self.run_id(*run) for run in self.runs()])

    def __str__(self) -> str:
        return " ".join(filter(None, (self.panel, self.arm, f"{self.setting:g}")))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A grid and how it is shown.

    Attributes:
      name: names the plot and the rows.
      presets: ``{name: () -> cells}``, in the order in which they are to be run.
      axis: label of ``Cell.setting``.
      published: ``{preset: {arm: {setting: accuracy}}}``, shown beside what is found.
      log_axis: whether the settings are drawn on a logarithmic axis.
      state_axis: presets of which accuracy is drawn over the size of the state too.
      direct: further presets that train nothing: functions of the directory.
    """

    name: str
    presets: Mapping[str, Callable[[], list[Cell]]]
    axis: str
    published: Mapping[str, Mapping[str, Mapping[float, float]]] = dataclasses.field(
        default_factory=dict
    )
    log_axis: bool = False
    state_axis: tuple[str, ...] = ()
    direct: Mapping[str, Callable[[pathlib.Path], None]] = dataclasses.field(default_factory=dict)


def smoke(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of another preset, small enough for seconds."""
    small = []
    for cell in cells:
        sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "ffn_dim": 16}
        train = dataclasses.replace(cell.train, steps=4, batch_size=4, eval_every=2, eval_batches=1)
        model = dataclasses.replace(cell.model, **sizes)
        seeds = cell.seeds[:2]
        small.append(dataclasses.replace(cell, train=train, model=model, seeds=seeds))
    return small


# --- training many runs at once -----------------------------------------------------------------


def _asked(task: Task, config: TrainConfig) -> int:
    """How many positions of a sequence have a weight: the same number in each."""
    counts = batch(task, config, TRAIN, 0).weights.sum(axis=1)
    return int(counts.max())


def _scores(graphdef: Any, asked: int, params: Any, data: Batch) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy over the positions that have a weight; logits are computed there only."""
    weights, at = jax.lax.top_k(data.weights, asked)
    targets = jnp.take_along_axis(data.targets, at, axis=1)
    logits = nnx.merge(graphdef, params)(data.inputs, at=at)
    weights = weights / jnp.sum(weights)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    hits = jnp.argmax(logits, axis=-1) == targets
    return jnp.sum(losses * weights), jnp.sum(hits * weights)


class Program:
    """The compiled functions of a cell; parameters have axes [learning rate, seed, ...]."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.rates = np.asarray(cell.learning_rates, np.float32)
        self.shape = (len(cell.learning_rates), len(cell.seeds))
        # Updates are proportional to the learning rate, which is therefore a factor.
        self._optimizer = dataclasses.replace(cell.train, learning_rate=1.0).optimizer()
        self._graphdef = nnx.graphdef(nnx.eval_shape(lambda: Model(cell.model, nnx.Rngs(0))))

    def compile(self) -> float:
        """Compiles everything; returns the seconds that it took."""
        start = time.perf_counter()
        cell = self.cell
        state = jax.eval_shape(self.init)
        active = jax.ShapeDtypeStruct(self.shape, bool)
        data = self._shapes(cell.task, cell.train.eval_every, cell.train.batch_size)
        self.chunk = (
            jax.jit(self._chunk, donate_argnums=0)
            .lower(state, active, data, jax.ShapeDtypeStruct(self.shape[:1], jnp.float32))
            .compile()
        )

        def evaluation(task, batches, rows):
            evaluate = jax.jit(functools.partial(self._evaluate, _asked(task, cell.train)))
            return evaluate.lower(state[0], self._shapes(task, batches, rows)).compile()

        self.validate = evaluation(cell.task, cell.train.eval_batches, cell.train.batch_size)
        self._tests = {}
        for name, task in {"": cell.task, **cell.lengths}.items():
            batches, rows = self._test_batches(name, task)
            self._tests[name] = (task, batches, rows, evaluation(task, batches, rows))
        return time.perf_counter() - start

    def _test_batches(self, name: str, task: Task) -> tuple[int, int]:
        """Batches and their rows: as many sequences as for 4 validations, a quarter if longer."""
        train = self.cell.train
        rows = max(1, train.batch_size * self.cell.task.length // task.length)
        rows = min(rows, train.batch_size)
        sequences = train.eval_batches * train.batch_size * (1 if name else 4)
        return max(1, sequences // rows), rows

    def _shapes(self, task: Task, batches: int, batch_size: int) -> Batch:
        shape = (batches, len(self.cell.seeds), batch_size, task.length)
        dtypes: tuple[Any, ...] = (jnp.int32, jnp.int32, jnp.float32)
        fields: list[Any] = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
        return Batch(*fields)

    def draw(self, task: Task, stream: int, first: int, batches: int, rows: int = 0) -> Batch:
        """Batches ``first`` and on of a stream, ``[batches, seed, B, T]``, as a single run's."""
        train = self.cell.train
        if rows:
            train = dataclasses.replace(train, batch_size=rows)
        configs = [dataclasses.replace(train, seed=seed) for seed in self.cell.seeds]
        drawn = [
            [batch(task, config, stream, first + i) for config in configs] for i in range(batches)
        ]
        return Batch(*(np.asarray(x) for x in _stack(drawn)))

    def init(self) -> Any:
        """Parameters and optimiser state of every run, a single run's for its seed."""

        def one(seed):
            params = nnx.state(Model(self.cell.model, nnx.Rngs(seed)), nnx.Param)
            return params, self._optimizer.init(params)

        states = [one(seed) for seed in self.cell.seeds]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
        return jax.tree.map(lambda x: jnp.stack([x] * self.shape[0]), stacked)

    def _chunk(self, state: Any, active: Any, data: Batch, rates: Any) -> Any:
        asked = _asked(self.cell.task, self.cell.train)
        gradient = jax.value_and_grad(
            functools.partial(_scores, self._graphdef, asked), has_aux=True
        )

        def one(params, opt_state, active, rate, data):
            scores, grads = gradient(params, data)
            updates, new_opt_state = self._optimizer.update(grads, opt_state, params)
            updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates)
            new = (optax.apply_updates(params, updates), new_opt_state)
            kept = jax.tree.map(lambda x, y: jnp.where(active, x, y), new, (params, opt_state))
            return *kept, jnp.stack(scores)

        seeds = jax.vmap(one, in_axes=(0, 0, 0, None, 0))
        every = jax.vmap(seeds, in_axes=(0, 0, 0, 0, None))

        def step(state, data):
            *state, scores = every(*state, active, rates, data)
            return tuple(state), scores

        state, scores = jax.lax.scan(step, tuple(state), data)
        return state, scores[-1]

    def _evaluate(self, asked: int, params: Any, data: Batch) -> jax.Array:
        """``[2, learning rate, seed]``: mean loss and accuracy over the batches."""
        seeds = jax.vmap(functools.partial(_scores, self._graphdef, asked))

        def rate(params):
            losses, hits = jax.lax.map(lambda data: seeds(params, data), data)
            return jnp.stack([jnp.mean(losses, axis=0), jnp.mean(hits, axis=0)])

        return jnp.moveaxis(jax.lax.map(rate, params), 0, 1)

    def test(self, params: Any, name: str) -> np.ndarray:
        """Scores on the test stream of the cell's task ("") or of one of its ``lengths``."""
        task, batches, rows, program = self._tests[name]
        return np.asarray(program(params, self.draw(task, TEST, 0, batches, rows)), np.float64)


def _stack(drawn: Sequence[Sequence[Batch]]) -> Iterable[np.ndarray]:
    for field in range(3):
        yield np.stack([np.stack([one[field] for one in row]) for row in drawn])


class OutOfTime(Exception):
    """The time limit has come; the state of the cell is saved."""


class Training:
    """A cell on its way: begun or resumed, trained to its end, tested.

    Args:
      program: compiled.
      partial: where its state is kept while it is under way.
    """

    def __init__(self, program: Program, partial: pathlib.Path):
        self.program, self.cell, self.path = program, program.cell, partial
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.ended = np.full(program.shape, "", object)
        self.ended_at = np.zeros(program.shape, int)
        self.state = program.init()
        self.untrained: list[Any] = []
        if partial.exists():
            try:
                self._load()
            except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
                print(f"{partial} is damaged ({said(error)}): {self.cell} begins anew",
                      file=sys.stderr, flush=True)  # fmt: skip

    def _load(self) -> None:
        with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            meta = json.loads(str(saved["meta"]))
            leaves = [saved[f"leaf{i}"] for i in range(len(jax.tree.leaves(self.state)))]
        structure = jax.tree.structure(self.state)
        self.state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
        self.step, self.seconds, self.history = meta["step"], meta["seconds"], meta["history"]
        self.untrained = meta["untrained"]
        self.ended = np.asarray(meta["ended"], object)
        self.ended_at = np.asarray(meta["ended_at"])

    def save(self) -> None:
        """Keeps everything that is needed to go on."""
        meta = {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "untrained": self.untrained,
            "ended": self.ended.tolist(),
            "ended_at": self.ended_at.tolist(),
        }
        leaves: dict[str, Any] = {
            f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self.state))
        }
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.asarray(json.dumps(meta)), **leaves)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            temporary.write_bytes(buffer.getvalue())

    def _validate(self) -> np.ndarray:
        return np.asarray(self.program.validate(self.state[0], self._held_out), np.float64)

    def train(self, stop: Callable[[], bool], save_every: float, bar: tqdm) -> None:
        """To the end of every run.

        Raises:
          OutOfTime: if ``stop`` says so before, after saving.
        """
        train, program = self.cell.train, self.program
        self._held_out = program.draw(self.cell.task, VALIDATION, 0, train.eval_batches)
        if not self.untrained:
            self.untrained = _finite(self._validate()[1])
        saved = time.perf_counter()
        data = None
        while not self._done():
            start = time.perf_counter()
            if data is None:
                data = program.draw(self.cell.task, TRAIN, self.step, train.eval_every)
            active = self.ended == ""
            self.state, last = program.chunk(self.state, active, data, program.rates)
            scores = program.validate(self.state[0], self._held_out)
            self.step += train.eval_every
            # While the device works, the data of the next chunk.
            data = program.draw(self.cell.task, TRAIN, self.step, train.eval_every)
            loss, accuracy = np.asarray(scores, np.float64)
            self._record(loss, accuracy, np.asarray(last, np.float64)[..., 0])
            self.seconds += time.perf_counter() - start
            bar.set_postfix_str(f"{self.cell}: step {self.step}, best {np.nanmax(accuracy):.3f}")
            bar.update(0)
            if self._done():
                return
            if stop():
                self.save()
                raise OutOfTime
            if time.perf_counter() - saved > save_every:
                self.save()
                saved = time.perf_counter()

    def _record(self, loss: np.ndarray, accuracy: np.ndarray, train_loss: np.ndarray) -> None:
        point = {"step": self.step, "accuracy": _finite(accuracy), "loss": _finite(loss)}
        point["train_loss"] = _finite(train_loss)
        self.history.append(point)
        open_ = self.ended == ""
        self._end(open_ & ~np.isfinite(loss), "diverged")
        self._end(open_ & (accuracy >= self.cell.train.target_accuracy), "target")
        if self.step >= self.cell.train.steps:
            self._end(self.ended == "", "steps")
        if np.any(np.all(self.ended == "target", axis=1)):
            self._end(self.ended == "", "another rate")

    def _end(self, which: np.ndarray, reason: str) -> None:
        which = which & (self.ended == "")
        self.ended[which] = reason
        self.ended_at[which] = self.step

    def _done(self) -> bool:
        return bool(np.all(self.ended != ""))

    def rows(self, experiment: str, preset: str, compile_seconds: float) -> list[Row]:
        """Tests every run; one row a run."""
        start = time.perf_counter()
        params, cell = self.state[0], self.cell
        loss, accuracy = self.program.test(params, "")
        longer = {name: self.program.test(params, name)[1] for name in cell.lengths}
        test_seconds = time.perf_counter() - start
        rows = []
        for i, rate in enumerate(cell.learning_rates):
            for j, seed in enumerate(cell.seeds):
                points = [
                    [p["step"], *(p[n][i][j] for n in ("accuracy", "loss", "train_loss"))]
                    for p in self.history
                    if p["step"] <= self.ended_at[i, j]
                ]
                rows.append(
                    {
                        "id": cell.run_id(rate, seed),
                        "experiment": experiment,
                        "preset": preset,
                        "panel": cell.panel,
                        "arm": cell.arm,
                        "setting": cell.setting,
                        "learning_rate": rate,
                        "seed": seed,
                        "seq_len": cell.task.length,
                        "steps": int(self.ended_at[i, j]),
                        "ended": self.ended[i, j],
                        "accuracy": _number(accuracy[i, j]),
                        "loss": _number(loss[i, j]),
                        "validation_accuracy": points[-1][1],
                        "untrained_accuracy": self.untrained[i][j],
                        "lengths": {n: _number(x[i, j]) for n, x in longer.items()},
                        "parameters": parameter_count(cell.model),
                        "state_floats": state_floats(cell.model, cell.task.length),
                        "train_seconds": round(self.seconds, 2),
                        "compile_seconds": round(compile_seconds, 2),
                        "test_seconds": round(test_seconds, 2),
                        "runs_together": len(cell.runs()),
                        "device": jax.devices()[0].device_kind,
                        "versions": versions(),
                        "settings": cell.settings(),
                        "history": points,
                    }
                )
        return rows


def versions() -> dict[str, str]:
    """Of everything that a figure depends on."""
    modules = {m.__name__: m.__version__ for m in (jax, flax, optax, np, vla_jax)}
    return {"python": platform.python_version(), **modules}


def _number(x: Any) -> float | None:
    x = float(x)
    return round(x, 6) if math.isfinite(x) else None


def _finite(x: np.ndarray) -> list[Any]:
    return [[_number(y) for y in row] for row in x]


# --- the directory ------------------------------------------------------------------------------


RUNS = Table(
    columns=("id", "learning_rate", "seed", "steps", "ended", "accuracy", "loss",
             "validation_accuracy", "untrained_accuracy", "lengths"),
    text=("id", "ended"),
)  # fmt: skip
_POINT = ("step", "accuracy", "loss", "train_loss")
_HISTORY = Table(columns=("id", *_POINT), text=("id",), name="history", shared=False)


def read_history(out_dir: pathlib.Path) -> dict[str, list[list[Any]]]:
    """The validations of each run, ``{id: [[step, accuracy, loss, train_loss], ...]}``."""
    runs: dict[str, dict[int, list[Any]]] = {}
    for point in _HISTORY.read(out_dir):  # a cell that a kill ended here is there twice
        runs.setdefault(point["id"], {})[point["step"]] = [point[name] for name in _POINT]
    return {run: list(points.values()) for run, points in runs.items()}


def append_rows(out_dir: pathlib.Path, rows: Sequence[Row]) -> None:
    """Adds runs as ``Training.rows`` makes them; a run counts once its row is there."""
    points = [
        {"id": row["id"], **dict(zip(_POINT, point, strict=True))}
        for row in rows
        for point in row["history"]
    ]
    _HISTORY.append(out_dir, points)
    RUNS.append(out_dir, [{n: x for n, x in row.items() if n != "history"} for row in rows])


@dataclasses.dataclass(frozen=True)
class Options:
    """How a grid is run, none of which changes what is found.

    Attributes:
      time_limit: seconds after which to stop between chunks of steps; None for never, 0 to only
        report what is there.
      compile_ahead: cells that are compiled in the background while one trains.
      save_every: seconds between checkpoints of the cell that trains.
      progress: whether to show a bar.
    """

    time_limit: float | None = None
    compile_ahead: int = 0
    save_every: float = 120
    progress: bool = True


def run(
    experiment: Experiment,
    preset: str,
    cells: Sequence[Cell],
    out_dir: str | os.PathLike[str],
    options: Options,
) -> bool:
    """Runs what is missing and reports; whether everything is there.

    Raises:
      Interrupted: after Ctrl-C or SIGTERM, once the cell under way is saved.
      ValueError: if the directory cannot be written to, is in use, or holds damaged rows.
    """
    begun = time.perf_counter()
    with locked(out_dir) as out_dir:
        return _locked_run(experiment, preset, cells, out_dir, options, begun)


@contextlib.contextmanager
def locked(out_dir: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A directory that can be written to, and that belongs to this process within.

    Raises:
      ValueError: if it cannot be.
    """
    path = directory(out_dir)
    lock = Lock(path)
    try:
        yield path
    finally:
        lock.release()


def _locked_run(experiment, preset, cells, out_dir, options, begun) -> bool:
    done = {row["id"] for row in RUNS.read(out_dir)}
    wanted = {cell.run_id(*r) for cell in cells for r in cell.runs()}
    missing = [left for cell in cells if (left := _left(cell, done)) is not None]
    complete = not missing

    def late() -> bool:
        limit = options.time_limit
        return limit is not None and time.perf_counter() - begun > limit

    if missing and options.time_limit != 0:
        with signals() as interrupted:
            stop = lambda: interrupted() or late()  # noqa: E731
            complete = _run(experiment, preset, missing, done, out_dir, stop, options)
            if number := interrupted():
                raise Interrupted(number)
    report(experiment, preset, [r for r in RUNS.read(out_dir) if r["id"] in wanted], out_dir)
    return complete


def _left(cell: Cell, done: set[str]) -> Cell | None:
    """What is to be run of a cell: all of it where runs depend on one another, or some seeds."""
    missing = [run for run in cell.runs() if cell.run_id(*run) not in done]
    if missing and len(cell.learning_rates) == 1:
        return dataclasses.replace(cell, seeds=tuple(seed for _, seed in missing))
    return cell if missing else None


def _run(experiment, preset, missing, done, out_dir, stop, options) -> bool:
    programs: dict[int, concurrent.futures.Future[tuple[Program, float]]] = {}

    def prepare(cell: Cell) -> tuple[Program, float]:
        program = Program(cell)
        return program, program.compile()

    bar = tqdm(total=len(missing), unit="cell", disable=not options.progress, file=sys.stderr)
    pool = concurrent.futures.ThreadPoolExecutor(max(1, options.compile_ahead))
    try:
        for i, cell in enumerate(missing):
            for j in range(i, min(i + options.compile_ahead + 1, len(missing))):
                if j not in programs:
                    programs[j] = pool.submit(prepare, missing[j])
            program, compile_seconds = programs.pop(i).result()
            if stop():
                return False
            partial = out_dir / "partial" / f"{cell.cell_id}.npz"
            training = Training(program, partial)
            try:
                training.train(stop, options.save_every, bar)
            except OutOfTime:
                return False
            rows = training.rows(experiment.name, preset, compile_seconds)
            append_rows(out_dir, [row for row in rows if row["id"] not in done])
            partial.unlink(missing_ok=True)
            bar.update()
            bar.write(f"{cell}: {_summary(rows)}", file=sys.stderr)
        return True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        bar.close()


def _summary(rows: Sequence[Row]) -> str:
    best = max(rows, key=lambda row: row["validation_accuracy"] or 0)
    return (
        f"best {best['accuracy']} at rate {best['learning_rate']:g} after {best['steps']} steps, "
        f"{best['train_seconds']} s for {best['runs_together']} runs "
        f"and {best['compile_seconds']} s to compile"
    )


# --- command ------------------------------------------------------------------------------------


def main(experiment: Experiment) -> None:
    """The command of an experiment: flags, then ``run``."""
    presets = [*experiment.presets, *experiment.direct]
    flags.DEFINE_enum("preset", presets[0], presets, "Which grid.")
    flags.DEFINE_string("out_dir", None, "Where everything is kept; runs/NAME-PRESET by default.")
    flags.DEFINE_list("arms", [], "Only these arms; all by default.")
    flags.DEFINE_list("settings", [], f"Only these values of: {experiment.axis}.")
    flags.DEFINE_list("panels", [], "Only these panels.")
    flags.DEFINE_list("seeds", [], "These seeds; those of the preset by default.")
    flags.DEFINE_integer("steps", None, "These steps at most; those of the preset by default.")
    flags.DEFINE_float(
        "time_limit", None, "Seconds after which to stop, to be resumed; 0: only report.", 0
    )
    flags.register_validator("time_limit", lambda x: x is None or x >= 0, "must be a number")
    flags.DEFINE_integer("compile_ahead", None, "Cells compiled while one trains.", 0)
    flags.DEFINE_bool("progress", True, "Show a progress bar.")
    for flag in flags.FLAGS.get_flags_for_module(__name__):  # for the --help of the script
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(functools.partial(_main, experiment))


def _choose(cells: Sequence[Cell], values: Any) -> list[Cell]:
    """The cells that the flags leave, changed as they say."""
    for name, of in (("arms", "arm"), ("panels", "panel"), ("settings", "setting")):
        chosen = list(getattr(values, name))
        if name == "settings":
            chosen = _numbers(name, chosen, float)
        unknown = set(chosen) - {getattr(cell, of) for cell in cells}
        if unknown:
            known = dict.fromkeys(str(getattr(cell, of)) for cell in cells)
            raise ValueError(f"--{name} must be among {', '.join(known)}; got {unknown.pop()!r}")
        if chosen:
            cells = [cell for cell in cells if getattr(cell, of) in chosen]
    if values.seeds:
        seeds = tuple(_numbers("seeds", values.seeds, int))
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"--seeds must differ, got {','.join(values.seeds)}")
        if not all(0 <= seed < 2**32 for seed in seeds):  # of which JAX makes keys that differ
            raise ValueError(f"--seeds must be from 0 to 2**32 - 1, got {','.join(values.seeds)}")
        cells = [dataclasses.replace(c, seeds=seeds) for c in cells]
    if values.steps is not None:
        cells = [
            dataclasses.replace(c, train=dataclasses.replace(c.train, steps=values.steps))
            for c in cells
        ]
    return list(cells)


def _numbers(name: str, words: Sequence[str], kind: type) -> list[Any]:
    try:
        return [kind(word) for word in words]
    except ValueError:
        raise ValueError(f"--{name} must be numbers, got {','.join(words)}") from None


def _one_cpu_thread() -> None:
    """On a CPU, computes in one thread: in two, jaxlib 0.10.2 can wait for ever.

    Each of two batched Cholesky factorisations that a program runs at once waits, in a thread of
    the pool, for threads of that pool. It has effect before JAX first looks for devices.
    """
    flag = "--xla_cpu_multi_thread_eigen"
    given = os.environ.get("XLA_FLAGS", "")
    if flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}=false".strip()


def direct(name: str, out_dir: str, function: Callable[[pathlib.Path], None]) -> None:
    """Runs what trains nothing in its directory; its rows are there whenever it is stopped."""
    with resumable(name), locked(out_dir) as path:
        function(path)


def _main(experiment: Experiment, argv: list[str]) -> None:
    name = experiment.name
    _one_cpu_thread()
    check_arguments(name, argv)
    values = flags.FLAGS
    out_dir = values.out_dir or f"runs/{name}-{values.preset}"
    if values.preset in experiment.direct:
        direct(name, out_dir, experiment.direct[values.preset])
        return
    ahead = values.compile_ahead
    if ahead is None:
        ahead = 0 if jax.default_backend() == "cpu" else 4
    options = Options(values.time_limit, ahead, progress=values.progress)
    with resumable(name):
        cells = _choose(experiment.presets[values.preset](), values)
        complete = run(experiment, values.preset, cells, out_dir, options)
    if not complete:
        print("Not all runs are there yet; the same command goes on from here.")
    print(RUNS.path(pathlib.Path(out_dir)))
