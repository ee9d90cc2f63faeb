"""Trains a language model on the bytes of files.

    python examples/train_lm.py --out_dir=runs/lm

learns the sources of Python's standard library (``--data`` names any other file or folder) and
writes ``metrics.jsonl`` as it goes, then ``result.json`` with the bits per byte on held-out files
beside what ``gzip -9`` needs for the same bytes. Interrupted or killed, the same command resumes.
``generate.py`` and ``stream.py`` use what it has learnt.

    python examples/train_lm.py --model=deltanet --out_dir=runs/lm-deltanet
    python examples/train_lm.py --layers=vla,vla,softmax --out_dir=runs/lm-hybrid

    python examples/train_lm.py --decay --beta --inverse=read --out_dir=runs/lm-read

are the same model with other mixers, and as many parameters: the feed-forward width makes up for
what a mixer has more or less than ``vla``. ``--preset=h200`` is a model of 30 million parameters
for a GPU, with the bits per byte at several contexts in its result:

    for model in vla deltanet softmax linear; do
      python examples/train_lm.py --preset=h200 --model=$model --out_dir=runs/$model
    done
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from absl import app, flags
from commands import GATES, append, check_arguments, define_gates, directory, output, said
from lm import PRESETS, LanguageRun
from model import MIXERS, ModelConfig, parameter_count, with_parameter_count
from text import Text
from training import TrainConfig, begin

from vla_jax.implementations import NAMES as IMPLEMENTATIONS
from vla_jax.layer import DIRECTIONS
from vla_jax.types import READOUTS

_DATA = flags.DEFINE_string("data", "", "A file or a folder; the standard library by default.")
_PATTERN = flags.DEFINE_string("pattern", "", "Which files of the folder, such as *.txt.")
_ONCE = flags.DEFINE_bool(
    "once", False, "Read no byte twice: one pass, without copies of files, split by content."
)
_M = PRESETS["cpu"]
# What --preset sets beside the model; a flag that is given goes before it.
_TRAINING: dict[str, dict[str, Any]] = {
    "cpu": {},
    "h200": {
        "seq_len": 2048,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "steps": 2000,
        "eval_every": 500,
        "checkpoint_every": 1000,
        "contexts": ["512", "2048", "8192", "32768"],
    },
}

_PRESET = flags.DEFINE_enum(
    "preset", "cpu", sorted(PRESETS), "Machine whose defaults the flags have."
)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 256, "Bytes of a row.", lower_bound=2)
_LAYERS = flags.DEFINE_list("layers", list(_M.mixers), f"Mixers, each of {', '.join(MIXERS)}.")
_MODEL = flags.DEFINE_enum("model", None, sorted(MIXERS), "The mixer of all layers.")
_EQUAL = flags.DEFINE_bool(
    "equal_parameters",
    True,
    "Choose the feed-forward width for as many parameters as layers of vla alone would have.",
)
_D_MODEL = flags.DEFINE_integer("d_model", _M.d_model, "Width of the model.", lower_bound=1)
_NUM_HEADS = flags.DEFINE_integer("num_heads", _M.num_heads, "Heads.", lower_bound=1)
_FFN_DIM = flags.DEFINE_integer("ffn_dim", _M.ffn_dim, "Feed-forward width.", lower_bound=1)
_NGRAMS = flags.DEFINE_integer(
    "ngrams",
    _M.ngrams,
    "Longest string of bytes with an embedding of its own; 0 for none.",
    lower_bound=0,
)
_NGRAM_BITS = flags.DEFINE_integer(
    "ngram_bits", _M.ngram_bits, "Rows of a table of strings, as a power of two.", 1, 24
)
_NGRAM_WIDTH = flags.DEFINE_integer("ngram_width", _M.ngram_width, "Of such a row.", lower_bound=1)
_SHORT_CONV = flags.DEFINE_integer(
    "short_conv", _M.short_conv or 0, "Of every layer; 0 for none.", lower_bound=0
)
_DIRECTION = flags.DEFINE_enum("direction", _M.direction, DIRECTIONS, "Of vla layers.")
_READOUT = flags.DEFINE_enum("readout", _M.readout, READOUTS, "Of vla layers.")
_LAMBDA0 = flags.DEFINE_float(
    "lambda0", None, "Of vla layers; 0.1, or 1 with --inverse=read.", lower_bound=1e-12
)
_GATES = define_gates("vla layers")
_IMPLEMENTATION = flags.DEFINE_enum("implementation", None, IMPLEMENTATIONS, "Of vla layers.")
_WINDOW = flags.DEFINE_integer(
    "window", 4096, "Bytes that softmax layers keep when they generate.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the computation; parameters are float32."
)
_STEPS = flags.DEFINE_integer("steps", 4500, "Optimiser steps.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "Rows of a step.", lower_bound=1)
_ACCUMULATE = flags.DEFINE_integer(
    "accumulate", 1, "Parts that a step is computed in, to save memory.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 3e-3, "Peak of the schedule.", lower_bound=1e-12
)
_B2 = flags.DEFINE_float("b2", 0.99, "Of AdamW, the memory of the second moment.", 0, 1)
_EVAL_EVERY = flags.DEFINE_integer("eval_every", 500, "Steps between validations.", lower_bound=1)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 500, "Steps between checkpoints.", lower_bound=1
)
_TEST_BYTES = flags.DEFINE_integer(
    "test_bytes", 0, "Held-out bytes of the result; 0 for all.", lower_bound=0
)
_CONTEXTS = flags.DEFINE_list(
    "contexts", [], "Bytes of context at which the result has bits per byte as well."
)
_TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Write TensorBoard events too.")
_APPEND = flags.DEFINE_string("append", None, "A file to which a line of the result is added.")
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and data.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/lm", "Where everything is written.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Train anew whatever --out_dir holds.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def _use_preset() -> None:
    model = PRESETS[_PRESET.value]
    values: dict[str, Any] = {"layers": list(model.mixers), "dtype": model.dtype or "float32"}
    for name in ("d_model", "num_heads", "ffn_dim", "short_conv", "ngrams"):
        values[name] = getattr(model, name) or 0
    for name, value in (values | _TRAINING[_PRESET.value]).items():
        if not flags.FLAGS[name].present:
            flags.FLAGS[name].value = value
    if _MODEL.value is not None:
        if flags.FLAGS["layers"].present and len(set(_LAYERS.value)) > 1:
            raise ValueError(
                f"--model={_MODEL.value} contradicts --layers={','.join(_LAYERS.value)}"
            )
        flags.FLAGS["layers"].value = [_MODEL.value] * len(_LAYERS.value)


def _model() -> ModelConfig:
    layers = tuple(_LAYERS.value)
    for name in ("lambda0", *GATES):
        if flags.FLAGS[name].present and not any(x.startswith("vla") for x in layers):
            raise ValueError(f"--{name} needs a layer of vla, got --layers={','.join(layers)}")
    model = ModelConfig(
        layers=layers,
        num_layers=len(layers),
        vocab_size=_M.vocab_size,
        max_length=None,
        d_model=_D_MODEL.value,
        num_heads=_NUM_HEADS.value,
        ffn_dim=_FFN_DIM.value,
        short_conv=_SHORT_CONV.value or None,
        direction=_DIRECTION.value,
        readout=_READOUT.value,
        lambda0=_LAMBDA0.value,
        implementation=_IMPLEMENTATION.value,
        window=_WINDOW.value,
        ngrams=_NGRAMS.value or None,
        ngram_bits=_NGRAM_BITS.value,
        ngram_width=_NGRAM_WIDTH.value,
        dtype=None if _DTYPE.value == "float32" else _DTYPE.value,
        **{name: flag.value for name, flag in _GATES.items()},
    )
    alike = dataclasses.replace(
        model, layers=("vla",) * len(layers), decay=False, beta=False, learn_lambda0=False
    )
    if _EQUAL.value and model != alike:
        model = with_parameter_count(model, parameter_count(alike))
        print(
            f"{parameter_count(model):,} parameters with ffn_dim = {model.ffn_dim}, "
            f"{parameter_count(alike):,} with vla alone and {alike.ffn_dim}",
            flush=True,
        )
    return model


def _run() -> LanguageRun:
    _use_preset()
    if not all(x.isdecimal() for x in _CONTEXTS.value):
        raise ValueError(f"--contexts must be whole numbers, got {','.join(_CONTEXTS.value)}")
    if any(int(x) < 2 for x in _CONTEXTS.value):
        raise ValueError(f"--contexts must be at least 2, got {','.join(_CONTEXTS.value)}")
    model = _model()
    directory(_OUT_DIR.value)  # before the text is read
    if _APPEND.value is not None:
        output(_APPEND.value, "append")
    task: Any = Text(_DATA.value, _SEQ_LEN.value, _PATTERN.value, _ONCE.value)
    print(task.describe(), flush=True)
    training = TrainConfig(
        steps=_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        learning_rate=_LEARNING_RATE.value,
        target_accuracy=2.0,
        eval_every=_EVAL_EVERY.value,
        eval_batches=16,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        seed=_SEED.value,
        b2=_B2.value,
        accumulate=None if _ACCUMULATE.value == 1 else _ACCUMULATE.value,
    )
    for size in map(int, _CONTEXTS.value):
        if size % min(2048, size):
            raise ValueError(f"--contexts above 2048 must be multiples of it, got {size}")
    run = LanguageRun(task, model, training, _OUT_DIR.value, overwrite=_OVERWRITE.value)
    run.test_bytes, run.contexts = _TEST_BYTES.value, [int(x) for x in _CONTEXTS.value]
    if _TENSORBOARD.value:
        run.log_to_tensorboard()
    return run


def main(argv: list[str]) -> None:
    """Trains, or resumes, or reports a finished run."""
    check_arguments("train_lm", argv)
    run = begin("train_lm", _run)
    try:
        result = run.train(progress=_PROGRESS.value)
    except KeyboardInterrupt as error:
        print(f"\nInterrupted after step {run.step}; the same command goes on from the checkpoint.")
        sys.exit(getattr(error, "code", 130))
    except (FloatingPointError, OSError) as error:
        sys.exit(f"train_lm: {said(error)}")
    except NotImplementedError as error:
        sys.exit(f"train_lm: {error}")
    finally:
        run.close()
    shown = ["model", "parameters", "steps", "trained_bytes", "train_seconds", "bytes_per_second"]
    shown += ["bits_per_byte", "gzip_bits_per_byte", "gzip_each_bits_per_byte", "scored_bytes"]
    shown += ["bits_per_byte_at_context"] * ("bits_per_byte_at_context" in result)
    print(json.dumps({name: result[name] for name in shown}))
    if _APPEND.value is not None:
        about = {name: result[name] for name in (*shown, "device", "versions", "settings")}
        try:
            append(_APPEND.value, about)
        except OSError as error:
            sys.exit(f"train_lm: {said(error)}; the result is in {run.result_path}")
    print(run.result_path)


if __name__ == "__main__":
    app.run(main)
