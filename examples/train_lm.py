"""Trains a language model on the bytes of files.

    python examples/train_lm.py --out_dir=runs/lm

learns the sources of Python's standard library (``--data`` names any other file or folder) and
writes ``metrics.jsonl`` as it goes, then ``result.json`` with the bits per byte on held-out files
beside what ``gzip -9`` needs for the same bytes. Interrupted or killed, the same command resumes.
``generate.py`` and ``stream.py`` use what it has learnt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from absl import app, flags, logging
from lm import LanguageRun
from model import MIXERS, ModelConfig
from text import Text
from training import SettingsError, TrainConfig

from vla_jax.layer import DIRECTIONS
from vla_jax.primitives import IMPLEMENTATIONS
from vla_jax.types import READOUTS

_DATA = flags.DEFINE_string("data", "", "A file or a folder; the standard library by default.")
_PATTERN = flags.DEFINE_string("pattern", "", "Which files of the folder, such as *.txt.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 256, "Bytes of a row.", lower_bound=2)
_LAYERS = flags.DEFINE_list("layers", ["vla", "vla"], f"Mixers, each of {', '.join(MIXERS)}.")
_D_MODEL = flags.DEFINE_integer("d_model", 192, "Width of the model.", lower_bound=1)
_NUM_HEADS = flags.DEFINE_integer("num_heads", 6, "Heads.", lower_bound=1)
_FFN_DIM = flags.DEFINE_integer("ffn_dim", 512, "Feed-forward width.", lower_bound=1)
_SHORT_CONV = flags.DEFINE_integer("short_conv", 4, "Of every layer; 0 for none.", lower_bound=0)
_DIRECTION = flags.DEFINE_enum("direction", "key", DIRECTIONS, "Of vla layers.")
_READOUT = flags.DEFINE_enum("readout", "ratio", READOUTS, "Of vla layers.")
_IMPLEMENTATION = flags.DEFINE_enum("implementation", None, IMPLEMENTATIONS, "Of vla layers.")
_WINDOW = flags.DEFINE_integer(
    "window", 4096, "Bytes that softmax layers keep when they generate.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the computation; parameters are float32."
)
_STEPS = flags.DEFINE_integer("steps", 1200, "Optimiser steps.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Rows of a step.", lower_bound=1)
_ACCUMULATE = flags.DEFINE_integer(
    "accumulate", 1, "Parts that a step is computed in, to save memory.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 3e-3, "Peak of the schedule.", lower_bound=1e-12
)
_EVAL_EVERY = flags.DEFINE_integer("eval_every", 200, "Steps between validations.", lower_bound=1)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 200, "Steps between checkpoints.", lower_bound=1
)
_TEST_BYTES = flags.DEFINE_integer(
    "test_bytes", 2**18, "Held-out bytes of the result; 0 for all.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and data.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/lm", "Where everything is written.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Train anew whatever --out_dir holds.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def _run() -> LanguageRun:
    task: Any = Text(_DATA.value, _SEQ_LEN.value, _PATTERN.value)
    print(task.describe(), flush=True)
    layers = tuple(_LAYERS.value)
    model = ModelConfig(
        layers=layers,
        num_layers=len(layers),
        vocab_size=task.vocab_size,
        max_length=None,
        d_model=_D_MODEL.value,
        num_heads=_NUM_HEADS.value,
        ffn_dim=_FFN_DIM.value,
        short_conv=_SHORT_CONV.value or None,
        direction=_DIRECTION.value,
        readout=_READOUT.value,
        implementation=_IMPLEMENTATION.value,
        window=_WINDOW.value,
        dtype=None if _DTYPE.value == "float32" else _DTYPE.value,
    )
    training = TrainConfig(
        steps=_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        learning_rate=_LEARNING_RATE.value,
        target_accuracy=2.0,
        eval_every=_EVAL_EVERY.value,
        eval_batches=4,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        seed=_SEED.value,
        accumulate=None if _ACCUMULATE.value == 1 else _ACCUMULATE.value,
    )
    run = LanguageRun(task, model, training, _OUT_DIR.value, overwrite=_OVERWRITE.value)
    run.test_bytes = _TEST_BYTES.value
    return run


def main(argv: list[str]) -> None:
    """Trains, or resumes, or reports a finished run."""
    if len(argv) > 1:
        sys.exit(f"train_lm: unexpected argument {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax is talkative
    try:
        run = _run()
    except SettingsError as error:
        sys.exit(f"train_lm: {error} with --overwrite")
    except ValueError as error:
        sys.exit(f"train_lm: {error}")
    if run.finished:
        print(f"{run.out_dir} holds the finished run; --overwrite trains it anew.")
    elif run.step:
        print(f"Resuming {run.out_dir} after step {run.step}.", flush=True)
    try:
        result = run.train(progress=_PROGRESS.value)
    except KeyboardInterrupt:
        print(f"\nInterrupted after step {run.step}; the same command goes on from the checkpoint.")
        sys.exit(130)
    except NotImplementedError as error:
        sys.exit(f"train_lm: {error}")
    finally:
        run.close()
    shown = ["model", "parameters", "steps", "trained_bytes", "train_seconds", "bits_per_byte"]
    shown += ["gzip_bits_per_byte", "gzip_each_bits_per_byte", "scored_bytes"]
    print(json.dumps({name: result[name] for name in shown}))
    print(run.result_path)


if __name__ == "__main__":
    app.run(main)
