"""Repeating a sequence, each token predicted before it is seen.

    python examples/copy_task.py --preset=published --out_dir=DIR

The published copy task has the *current* input token as its target, which an untrained model with
tied embeddings solves if these are large beside what the layers add (PyTorch's default: standard
deviation 1). Here the target is the *next* token, and every row records the accuracy of the
untrained model, which is at chance. `--preset=untrained` measures that alone, for both targets and
for embeddings of standard deviation 1 and 0.02.
`--preset=fair` sweeps the learning rate, has a short convolution and no positions, and tests at
twice the trained length.
"""

from __future__ import annotations

import itertools
import pathlib

import grid
import jax
import numpy as np
from arms import FAIR, FAIR_RATES, PUBLISHED, PUBLISHED_RATES, SEEDS, model_of
from flax import nnx
from grid import Cell
from model import Model
from rows import Table
from tasks import Copy
from training import TEST, TrainConfig, batch

_ARMS = ("vla", "deltanet", "softmax", "linear", "gated_deltanet", "identity", "mesa", "vla key")


def _published(arm: str, tokens: int) -> Cell:
    task = Copy(tokens)
    model = model_of(arm, vocab_size=task.vocab_size, max_length=task.length)
    return Cell(arm, tokens, task, model, PUBLISHED, PUBLISHED_RATES, SEEDS)


def _fair(arm: str, tokens: int) -> Cell:
    task = Copy(tokens)
    model = model_of(arm, match=True, vocab_size=task.vocab_size, max_length=None, short_conv=4)
    lengths = {"2n": Copy(2 * tokens)}
    return Cell(arm, tokens, task, model, FAIR, FAIR_RATES, SEEDS, lengths)


STDS = (0.02, 1.0)
UNTRAINED = Table(
    columns=("seed", "embedding_std", "next_token_accuracy", "current_token_accuracy", "answers")
)
_UNTRAINED = ("vla", "deltanet", "published_deltanet", "softmax", "linear")


def _untrained(out_dir: pathlib.Path) -> None:
    """Accuracy of untrained models, with the right target and with the published one."""
    done = {(row["arm"], row["seed"], row["embedding_std"]) for row in UNTRAINED.read(out_dir)}
    task = Copy(16)
    for arm, seed, std in itertools.product(_UNTRAINED, SEEDS, STDS):
        if (arm, seed, std) in done:
            continue
        config = model_of(arm, vocab_size=task.vocab_size, max_length=task.length)
        data = batch(task, TrainConfig(seed=seed, batch_size=512), TEST, 0)
        model = Model(config, nnx.Rngs(seed))
        model.tokens.embedding[...] *= std / config.embedding_std
        guess = np.argmax(nnx.jit(lambda m, ids: m(ids))(model, data.inputs), axis=-1)
        asked = data.weights > 0
        row = {
            "experiment": "copy_task",
            "preset": "untrained",
            "arm": arm,
            "seed": seed,
            "embedding_std": std,
            "tokens": task.num_tokens,
            "chance": 1 / (task.vocab_size - 1),
            "next_token_accuracy": float(np.mean(guess[asked] == data.targets[asked])),
            "current_token_accuracy": float(np.mean(guess[asked] == data.inputs[asked])),
            "answers": int(asked.sum()),
            "device": jax.devices()[0].device_kind,
            "versions": grid.versions(),
            "model": config.settings(),
        }
        UNTRAINED.append(out_dir, [row])
    rows = UNTRAINED.read(out_dir)
    names = [f"{target} token, std {std:g}" for std in STDS for target in ("next", "current")]
    lines = ["| arm | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for arm in _UNTRAINED:
        means = [
            np.mean(
                [
                    row[f"{target}_token_accuracy"]
                    for row in rows
                    if row["arm"] == arm and row["embedding_std"] == std
                ]
            )
            for std in STDS
            for target in ("next", "current")
        ]
        lines.append(f"| {arm} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    text = "\n".join(lines) + f"\n\nChance: {rows[0]['chance']:.4f}. {len(SEEDS)} seeds.\n"
    (out_dir / "table.md").write_text(text, "utf-8")
    print(text)


EXPERIMENT = grid.Experiment(
    name="copy_task",
    presets={
        "published": lambda: [_published(arm, n) for n in (16, 64) for arm in _ARMS],
        "fair": lambda: [_fair(arm, n) for n in (64, 128) for arm in _ARMS],
        "smoke": lambda: grid.smoke([_published(arm, 4) for arm in ("vla", "linear")]),
    },
    axis="tokens to copy",
    log_axis=True,
    direct={"untrained": _untrained},
)

if __name__ == "__main__":
    grid.main(EXPERIMENT)
