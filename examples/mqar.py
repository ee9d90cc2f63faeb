"""Trains a small model on multi-query associative recall and reports its held-out accuracy.

    python examples/mqar.py --model=vla --num_pairs=8 --out_dir=DIR

writes ``DIR/result.json`` and ``DIR/curve.png``. If it is interrupted, the same command resumes; if
it has finished, the same command reports what it found.

    python examples/mqar.py --mesh=data:4 --out_dir=DIR

trains on four devices, ``--mesh=data:2,context:2`` with the sequence over two of them each. Several
processes are started each with the same command and --coordinator, --num_processes, --process_id.
"""

from __future__ import annotations

import json
import os
import sys

import jax
from absl import app, flags
from commands import GATES, check_arguments, define_gates, said
from model import MIXERS, ModelConfig
from tasks import LAYOUTS, MQAR
from training import Run, TrainConfig, begin, make_mesh

from vla_jax.implementations import NAMES as IMPLEMENTATIONS
from vla_jax.layer import DIRECTIONS
from vla_jax.types import READOUTS, WRITE_GAINS

_T, _M = TrainConfig(), ModelConfig()
_VLA_ONLY = ("implementation", "direction", "lambda0", "write_gain", "readout", *GATES)

_MODEL = flags.DEFINE_enum("model", "vla", sorted(MIXERS), "The token mixer.")
_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 8, "Key-value pairs.", lower_bound=1)
_LAYOUT = flags.DEFINE_enum("layout", "published", LAYOUTS, "Layout of a sequence.")
_SEQ_LEN = flags.DEFINE_integer(
    "seq_len", 0, "Tokens of a sequence; 0 for what suits the layout.", lower_bound=0
)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 128, "Token ids.", lower_bound=4)
_D_MODEL = flags.DEFINE_integer("d_model", _M.d_model, "Width of the model.", lower_bound=1)
_NUM_HEADS = flags.DEFINE_integer("num_heads", _M.num_heads, "Heads.", lower_bound=1)
_NUM_LAYERS = flags.DEFINE_integer("num_layers", _M.num_layers, "Layers.", lower_bound=1)
_FFN_DIM = flags.DEFINE_integer("ffn_dim", _M.ffn_dim, "Feed-forward width.", lower_bound=1)
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, IMPLEMENTATIONS, "Of --model=vla; the fastest that serves by default."
)
_DIRECTION = flags.DEFINE_enum("direction", _M.direction, DIRECTIONS, "Of --model=vla.")
_LAMBDA0 = flags.DEFINE_float(
    "lambda0", None, "Of --model=vla; 0.1, or 1 with --inverse=read.", lower_bound=1e-12
)
_WRITE_GAIN = flags.DEFINE_enum("write_gain", None, WRITE_GAINS, "Of --model=vla.")
_READOUT = flags.DEFINE_enum("readout", None, READOUTS, "Of --model=vla.")
_GATES = define_gates("--model=vla")
_SHORT_CONV = flags.DEFINE_integer("short_conv", 0, "Of any model; 0 for none.", lower_bound=0)
_OUTPUT_NORM = flags.DEFINE_enum(
    "output_norm", _M.output_norm, ["layer", "rms_per_head", "none"], "Of any model."
)
_STEPS = flags.DEFINE_integer("steps", _T.steps, "Optimiser steps at most.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", _T.batch_size, "Sequences.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", _T.learning_rate, "Peak of the schedule.", lower_bound=1e-12
)
_WARMUP = flags.DEFINE_integer("warmup", _T.warmup, "Warm-up steps.", lower_bound=0)
_TARGET_ACCURACY = flags.DEFINE_float(
    "target_accuracy", _T.target_accuracy, "Stop at this held-out accuracy; above 1: never."
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", _T.checkpoint_every, "Steps between checkpoints.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and data.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "runs/mqar", "Where everything is written.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Train anew whatever --out_dir holds.")
_MESH = flags.DEFINE_string("mesh", "", "Devices: data:4, or data:2,context:2; one by default.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Of several processes: host:port of one.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Which of them this is.", lower_bound=0)
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def _run() -> Run:
    for name in _VLA_ONLY:
        if flags.FLAGS[name].present and not _MODEL.value.startswith("vla"):
            raise ValueError(f"--{name} needs --model=vla, got --model={_MODEL.value}")
    task = MQAR(_NUM_PAIRS.value, _VOCAB_SIZE.value, _LAYOUT.value, _SEQ_LEN.value)
    model = ModelConfig(
        mixer=_MODEL.value,
        vocab_size=task.vocab_size,
        max_length=task.length,
        d_model=_D_MODEL.value,
        num_heads=_NUM_HEADS.value,
        num_layers=_NUM_LAYERS.value,
        ffn_dim=_FFN_DIM.value,
        implementation=_IMPLEMENTATION.value,
        direction=_DIRECTION.value,
        lambda0=_LAMBDA0.value,
        write_gain=_WRITE_GAIN.value,
        readout=_READOUT.value,
        short_conv=_SHORT_CONV.value or None,
        output_norm=_OUTPUT_NORM.value,
        **{name: flag.value for name, flag in _GATES.items()},
    )
    training = TrainConfig(
        steps=_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        learning_rate=_LEARNING_RATE.value,
        warmup=_WARMUP.value,
        target_accuracy=_TARGET_ACCURACY.value,
        checkpoint_every=_CHECKPOINT_EVERY.value,
        seed=_SEED.value,
    )
    mesh = make_mesh(_MESH.value)
    if jax.process_count() > 1 and (mesh is None or mesh.size != jax.device_count()):
        raise ValueError(f"--mesh must take all {jax.device_count()} devices of the processes")
    return Run(task, model, training, _OUT_DIR.value, overwrite=_OVERWRITE.value, mesh=mesh)


def main(argv: list[str]) -> None:
    """Trains, or resumes, or reports a finished run."""
    check_arguments("mqar", argv)
    if _NUM_PROCESSES.value > 1:
        jax.distributed.initialize(
            _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value,
            heartbeat_timeout_seconds=10,
        )  # fmt: skip
    run = begin("mqar", _run)
    try:
        result = run.train(progress=_PROGRESS.value)
    except KeyboardInterrupt as error:
        print(f"\nInterrupted after step {run.step}; the same command goes on from the checkpoint.")
        sys.exit(getattr(error, "code", 130))
    except (FloatingPointError, OSError) as error:
        sys.exit(f"mqar: {said(error)}")
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # A collective that fails while it is started raises a ValueError.
        lost = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if jax.process_count() == 1 or not lost:
            raise
        print(
            f"mqar: process {jax.process_index()} lost another one after step {run.step}; started "
            f"anew, all of them go on from the checkpoint ({str(error).splitlines()[0]})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # leaving in order would wait for the lost one
    except NotImplementedError as error:
        sys.exit(f"mqar: {error}")
    finally:
        run.close()
    shown = ("model", "num_pairs", "seq_len", "steps", "eval_accuracy", "train_seconds")
    print(json.dumps({name: result[name] for name in shown}))
    print(run.result_path)


if __name__ == "__main__":
    app.run(main)
