"""Arms on text that is read once: how each is trained, kept, and reported.

``text_arms.py`` is the command.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from arms import SEEDS, TEXT_QUESTIONS, model_of
from commands import InUse, Lock, said
from grid_report import arm_style, label_ends, save_figure
from lm import LanguageRun
from matplotlib.figure import Figure
from model import ModelConfig, parameter_count, state_floats
from rows import Row, Table, digest
from training import TrainConfig

TEXT_ARMS = tuple(dict.fromkeys(arm for arms in TEXT_QUESTIONS.values() for arm in arms))


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the models and how they are trained.

    Attributes:
      sizes: of the model, as ``ModelConfig`` has them; equal parameters for all arms.
      train: rate and seed of it do not count.
      seq_len: T.
      contexts: bytes of context at which the test is read.
      rates: learning rates that are tried.
      seeds: the first one tries the rates.
      test_bytes: of the result; 0 for all.
    """

    sizes: dict[str, Any]
    train: TrainConfig
    seq_len: int
    contexts: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    test_bytes: int = 0

    @property
    def trial(self) -> int:
        """Steps after which the learning rates are compared."""
        every = self.train.eval_every
        return max(self.train.steps // 3 // every, 1) * every

    def model(self, arm: str) -> ModelConfig:
        """The model of an arm."""
        return model_of(arm, match=True, vocab_size=256, max_length=None, **self.sizes)

    def config(self, rate: float, seed: int) -> TrainConfig:
        """How a run is trained."""
        return dataclasses.replace(self.train, learning_rate=rate, seed=seed)


PRESETS = {
    "h200": Preset(
        sizes={
            "d_model": 512, "num_heads": 8, "num_layers": 8, "ffn_dim": 2560, "short_conv": 4,
            "dtype": "bfloat16", "output_norm": "rms_per_head",
        },
        train=TrainConfig(
            steps=2000, batch_size=16, warmup=100, target_accuracy=2.0, eval_every=100,
            eval_batches=16, checkpoint_every=500, b2=0.99,
        ),
        seq_len=2048,
        contexts=(512, 2048, 8192, 32768),
        rates=(1e-3, 5e-4, 2e-3),
        seeds=SEEDS,
        test_bytes=2**21,
    ),
    "smoke": Preset(
        sizes={"d_model": 16, "num_heads": 2, "num_layers": 4, "ffn_dim": 64, "short_conv": 3},
        train=TrainConfig(
            steps=6, batch_size=2, warmup=1, target_accuracy=2.0, eval_every=1, eval_batches=1,
            checkpoint_every=3, log_every=1, b2=0.99,
        ),
        seq_len=16,
        contexts=(8, 16),
        rates=(1e-2, 1e-3),
        seeds=(0, 1),
        test_bytes=64,
    ),
}  # fmt: skip

RUNS = Table(
    columns=("id", "learning_rate", "seed", "bits_per_byte", "contexts", "validation", "train",
             "gzip", "bytes_per_second", "train_seconds", "curve"),
    text=("id",),
)  # fmt: skip


class Arm:
    """An arm on its way.

    Args:
      name: in ``ARMS``.
      preset: its sizes and training.
      task: the text.
      out_dir: of all arms.
      stop: says when to stop, to be resumed.
      progress: whether to show a bar.
    """

    def __init__(
        self, name: str, preset: Preset, task: Any, out_dir: pathlib.Path,
        stop: Callable[[], bool], progress: bool,
    ):  # fmt: skip
        self.name, self.preset, self.task = name, preset, task
        self.out_dir, self.stop, self.progress = out_dir, stop, progress

    def train(self) -> Iterator[Row]:
        """Trains what nobody else trains, until ``stop``; yields the finished runs."""
        preset = self.preset
        trials = {rate: self._run(rate, preset.seeds[0], preset.trial) for rate in preset.rates}
        if any(x is None for x in trials.values()):
            return
        best = min(trials, key=lambda rate: trials[rate]["validation"])  # type: ignore[index]
        for seed in preset.seeds:
            row = self._run(best, seed, preset.train.steps)
            if row is not None and "bits_per_byte" in row:
                yield row

    def _run(self, rate: float, seed: int, to: int) -> Row | None:
        """Takes a run to a step: its row, a trial's with ``validation`` alone; None if it cannot.

        A run whose loss is not finite has an infinite validation, and is not tried again.
        """
        path = self.out_dir / self.name.replace(" ", "-") / f"rate-{rate:g}-seed-{seed}"
        diverged = path / "diverged.txt"
        if diverged.exists():
            return {"validation": math.inf}
        model, config = self.preset.model(self.name), self.preset.config(rate, seed)
        try:
            run = LanguageRun(self.task, model, config, path)
        except InUse:
            return None
        run.test_bytes, run.contexts = self.preset.test_bytes, self.preset.contexts
        try:
            if not run.finished:
                if self.stop() and run.step < to:
                    return None
                if not run.advance(to, self.stop, self.progress):
                    return None
            if to < config.steps:
                history = (run.result() or {"history": run.history})["history"]
                return {"validation": _at(history, to)["eval_bits_per_byte"]}
            return self._row(run.train(self.progress), rate, seed)
        except FloatingPointError as error:
            diverged.write_text(f"{said(error)}\n", "utf-8")
            return {"validation": math.inf}
        finally:
            run.close()

    def _row(self, result: dict[str, Any], rate: float, seed: int) -> Row:
        model, history = self.preset.model(self.name), result["history"]
        tested = [point for point in history if "eval_bits_per_byte" in point]
        last = [x["bits_per_byte"] for x in history if "bits_per_byte" in x][-10:]
        settings = result["settings"]
        return {
            "id": digest(settings),
            "arm": self.name,
            "learning_rate": rate,
            "seed": seed,
            "bits_per_byte": round(result["bits_per_byte"], 5),
            "contexts": {n: round(x, 5) for n, x in result["bits_per_byte_at_context"].items()},
            "validation": round(tested[-1]["eval_bits_per_byte"], 5),
            "train": round(statistics.mean(last), 5),
            "gzip": round(result["gzip_bits_per_byte"], 5),
            "bytes_per_second": result["bytes_per_second"],
            "train_seconds": result["train_seconds"],
            "curve": [[int(x["bytes"]), round(x["eval_bits_per_byte"], 4)] for x in tested],
            "parameters": parameter_count(model),
            "state_floats": state_floats(model, self.preset.seq_len),
            "device": result["device"],
            "versions": result["versions"],
            "settings": {
                group: {n: x for n, x in values.items() if n not in ("learning_rate", "seed")}
                for group, values in settings.items()
            },
        }


def _at(history: Sequence[dict[str, float]], step: int) -> dict[str, float]:
    return next(point for point in history if point["step"] == step)


def keep(out_dir: pathlib.Path, rows: Sequence[Row]) -> None:
    """Adds rows that are not there; of two processes one at a time."""
    while True:
        try:
            lock = Lock(out_dir)
            break
        except InUse:
            time.sleep(0.1)
    try:
        known = {row["id"] for row in RUNS.read(out_dir)}
        RUNS.append(out_dir, [row for row in rows if row["id"] not in known])
    finally:
        lock.release()


# --- report --------------------------------------------------------------------------------------


def by_arm(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their arm, in the order of ``TEXT_ARMS``."""
    found = {arm: [row for row in rows if row["arm"] == arm] for arm in TEXT_ARMS}
    return {arm: here for arm, here in found.items() if here}


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f}–{max(values):.3f})"


def table(rows: Sequence[Row]) -> str:
    """Markdown: an arm a line, mean (lowest–highest) of the seeds."""
    contexts = sorted({int(n) for row in rows for n in row["contexts"]})
    head = ["arm", "parameters", "rate", "seeds", "train", "validation", "test"]
    head += [f"test, context {n:,}" for n in contexts] + ["million bytes a second"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for arm, here in by_arm(rows).items():
        cells = [arm, f"{here[0]['parameters']:,}", f"{here[0]['learning_rate']:g}"]
        cells.append(str(len(here)))
        cells += [_spread([x[n] for x in here]) for n in ("train", "validation", "bits_per_byte")]
        cells += [_spread([x["contexts"][str(n)] for x in here]) for n in contexts]
        speeds = [x["bytes_per_second"] for x in here if x["bytes_per_second"]]
        cells.append(f"{statistics.median(speeds) / 1e6:.2f}" if speeds else "")
        lines.append("| " + " | ".join(cells) + " |")
    devices = ", ".join(sorted({row["device"] for row in rows}))
    jax_versions = ", ".join(sorted({row["versions"]["jax"] for row in rows}))
    task = rows[0]["settings"]["task"]
    lines += [
        "",
        "Bits per byte, mean (lowest–highest) over the seeds, each arm at the best of its rates by "
        "validation at a third of the steps. `train`: the last ten points of the log. "
        f"`gzip -9` needs {rows[0]['gzip']:.3f} for the test bytes. Text: {task['train_bytes']:,} "
        f"bytes to train on, digest {task['digest']}. Device: {devices}; jax {jax_versions}.",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Validation over the bytes read and over the time that they took; a line a question."""
    found = by_arm(rows)
    panels = {name: [a for a in arms if a in found] for name, arms in TEXT_QUESTIONS.items()}
    panels = {name: arms for name, arms in panels.items() if arms}
    figure = Figure(figsize=(12, 4.2 * len(panels)), layout="constrained")
    grid_of_axes = figure.subplots(len(panels), 2, squeeze=False)
    for (name, arms), line in zip(panels.items(), grid_of_axes, strict=True):
        for axes, label in zip(line, ("million bytes read", "seconds"), strict=True):
            ends = {}
            for arm in arms:
                x, low, mean, high = _curve(found[arm], label == "seconds")
                look = arm_style(arm) | {"marker": ""}
                axes.plot(x, mean, **look)
                axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
                ends[arm] = (x[-1], mean[-1])
            label_ends(axes, ends)
            axes.set(xlabel=label, ylabel="bits per byte, validation", title=name)
            axes.grid(alpha=0.3)
    save_figure(figure, path)


def _curve(rows: Sequence[Row], timed: bool) -> tuple[list[float], ...]:
    """``(x, lowest, mean, highest)`` of the seeds; x in million bytes, or in seconds."""
    points = list(zip(*(row["curve"] for row in rows), strict=True))
    speeds = [row["bytes_per_second"] for row in rows if row["bytes_per_second"]]
    unit = statistics.median(speeds) if timed and speeds else 1e6
    x = [same[0][0] / unit for same in points]
    values = [[bits for _, bits in same] for same in points]
    return x, *([f(v) for v in values] for f in (min, statistics.mean, max))


def report(out_dir: pathlib.Path) -> None:
    """Writes the table and the plots of what is there."""
    rows = RUNS.read(out_dir)
    if not rows:
        return
    text = table(rows)
    (out_dir / "table.md").write_text(text, "utf-8")
    plot(rows, out_dir / "text_arms.png")
    print(text)
