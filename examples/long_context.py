"""Does recall survive a long sequence?

    python examples/long_context.py --preset=published --out_dir=DIR

trains the published setting: 8 pairs and T = 49 … 512, of which all tokens after the pairs are
queries, so that nothing distracts. `--preset=fair` has fillers (the Zoology layout), trains at 512
tokens with four learning rates for every arm and tests at 1024, 2048 and 4096; `--preset=far` tests
at 8192 and 32,768, but for softmax attention, which would need the square of that.
"""

from __future__ import annotations

import dataclasses

import grid
from arms import (
    FAIR,
    FAIR_ARMS,
    FAIR_RATES,
    GATED_ARMS,
    PUBLISHED,
    PUBLISHED_RATES,
    SEEDS,
    model_of,
)
from grid import Cell
from tasks import MQAR

_PAIRS = 8
_FAR = (
    "vla no ratio rms", "vla", "vla gated read", "deltanet", "gated_deltanet", "linear",
)  # fmt: skip


def _published(arm: str, length: int) -> Cell:
    task = MQAR(_PAIRS, seq_len=length)
    model = model_of(arm, vocab_size=task.vocab_size, max_length=length)
    train = dataclasses.replace(PUBLISHED, steps=2000)
    return Cell(arm, length, task, model, train, PUBLISHED_RATES, SEEDS)


def _fair(arm: str, length: int = 512, multiples: tuple[int, ...] = (2, 4, 8)) -> Cell:
    task = MQAR(_PAIRS, 8192, "zoology", length)
    model = model_of(arm, match=True, vocab_size=task.vocab_size, max_length=None, short_conv=4)
    lengths = {f"T={m * length}": MQAR(_PAIRS, 8192, "zoology", m * length) for m in multiples}
    train = dataclasses.replace(FAIR, steps=2000)
    return Cell(arm, length, task, model, train, FAIR_RATES, SEEDS, lengths)


EXPERIMENT = grid.Experiment(
    name="long_context",
    presets={
        "published": lambda: [
            _published(arm, length)
            for length in (512, 49, 256, 128, 64)
            for arm in ("vla", "deltanet", "published_deltanet", "identity", "linear", "softmax")
        ],
        "fair": lambda: [
            _fair(arm)
            for arm in (*FAIR_ARMS, "vla no ratio", "vla no ratio rms", "linear", *GATED_ARMS)
        ],
        "far": lambda: [_fair(arm, multiples=(16, 64)) for arm in _FAR],
        "smoke": lambda: grid.smoke([_fair(arm, 32) for arm in ("vla", "softmax")]),
    },
    axis="tokens of a sequence",
    published={
        "published": {
            "vla": {49: 1.0, 64: 1.0, 128: 1.0, 256: 0.998, 512: 0.982},
            "published_deltanet": {49: 0.018, 64: 0.019, 128: 0.011, 256: 0.007, 512: 0.006},
            "softmax": dict.fromkeys((49, 64, 128, 256, 512), 0.15),
            "linear": dict.fromkeys((49, 64, 128, 256, 512), 0.15),
        },
    },
    log_axis=True,
)

if __name__ == "__main__":
    grid.main(EXPERIMENT)
