"""What is each mixer worth on text of which no byte comes twice?

    python examples/text_arms.py --data=FOLDER --out_dir=DIR

trains the arms on one pass over the files of a folder, with equal parameters, bytes and tuning: of
each arm every learning rate goes to a third of the steps with the first seed, the best of them by
validation goes on to the end, and so do the other seeds at that rate. What is reported are bits per
byte of test files by length of the context, beside those of training and validation.

A run has a directory of its own under ``DIR``, as ``train_lm.py`` makes it. Stop and start the
command as you like (``--time_limit``); started twice, on two GPUs by ``CUDA_VISIBLE_DEVICES``, the
two share the work, for a run that is in use is passed over. ``DIR/runs.csv`` and ``cells.jsonl``
(``rows.py``) keep the finished runs, of which ``table.md`` and the plots are made.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from typing import Any

from absl import app, flags
from commands import check_arguments, directory, resumable
from text import Text
from text_grid import PRESETS, RUNS, TEXT_ARMS, Arm, keep, report

_DATA = flags.DEFINE_string("data", "", "A folder with more bytes than are trained on.")
_PATTERN = flags.DEFINE_string("pattern", "*.py", "Which files of the folder.")
_PRESET = flags.DEFINE_enum("preset", "h200", sorted(PRESETS), "Sizes and steps.")
_ARMS = flags.DEFINE_list("arms", list(TEXT_ARMS), f"Of {', '.join(TEXT_ARMS)}.")
_STEPS = flags.DEFINE_integer("steps", None, "Those of the preset by default.", lower_bound=3)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/text-arms", "Where everything is kept.")
_TIME_LIMIT = flags.DEFINE_float(
    "time_limit", None, "Seconds after which to stop, to be resumed; 0: only report.", 0
)
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def _train(out_dir: pathlib.Path) -> bool:
    """Whether everything is there."""
    preset = PRESETS[_PRESET.value]
    if _STEPS.value is not None:
        train = dataclasses.replace(preset.train, steps=_STEPS.value)
        preset = dataclasses.replace(preset, train=train)
    unknown = set(_ARMS.value) - set(TEXT_ARMS)
    if unknown:
        raise ValueError(f"--arms must be among {', '.join(TEXT_ARMS)}; got {unknown.pop()!r}")
    begun = time.perf_counter()
    limit = math.inf if _TIME_LIMIT.value is None else _TIME_LIMIT.value

    def late() -> bool:
        return time.perf_counter() - begun > limit

    task: Any = Text(_DATA.value, preset.seq_len, _PATTERN.value, once=True)
    print(task.describe(), flush=True)
    missing = 0
    for name in _ARMS.value:
        if late():
            return False
        rows = []
        for row in Arm(name, preset, task, out_dir, late, _PROGRESS.value).train():
            rows.append(row)
            keep(out_dir, [row])
            print(f"{name}, seed {row['seed']}: {row['bits_per_byte']} at rate "
                  f"{row['learning_rate']:g}", flush=True)  # fmt: skip
        missing += len(preset.seeds) - len(rows)
    return not missing


def main(argv: list[str]) -> None:
    """Trains what is missing and reports."""
    check_arguments("text_arms", argv)
    complete = True
    with resumable("text_arms"):
        out_dir = directory(_OUT_DIR.value)
        if _TIME_LIMIT.value != 0:
            complete = _train(out_dir)
        report(out_dir)
    if not complete:
        print("Not all runs are there yet; the same command goes on from here.")
    print(RUNS.path(out_dir))


if __name__ == "__main__":
    app.run(main)
