"""Can a mixer keep a state that every token changes?

    python examples/state_tracking.py --preset=parity --out_dir=DIR

trains on words of a group of 64 elements (``tasks.Group``: parity, or the permutations of three
things with `--preset=s3`), one learning rate of three by validation and three seeds, without
positions, and tests at 2, 4 and 16 times the length. What a delta rule's ``beta`` up to 2 is worth
(`allow_neg_eigval`) is told by the arms "negative".
"""

from __future__ import annotations

import dataclasses

import grid
from arms import FAIR, SEEDS, model_of
from grid import Cell
from tasks import Group

_ARMS = (
    "deltanet negative", "deltanet", "gated_deltanet negative", "gated_deltanet",
    "vla", "vla no ratio rms", "vla gated read",
)  # fmt: skip


def _cell(arm: str, group: str, length: int = 64) -> Cell:
    task = Group(group, length)
    model = model_of(
        arm, match=True, vocab_size=task.vocab_size, max_length=None, d_model=64, num_heads=4,
        ffn_dim=128,
    )  # fmt: skip
    lengths = {f"{m}T": Group(group, m * length) for m in (2, 4, 16)}
    train = dataclasses.replace(FAIR, steps=2000)
    return Cell(arm, length, task, model, train, (1e-3, 3e-3, 1e-2), SEEDS, lengths)


EXPERIMENT = grid.Experiment(
    name="state_tracking",
    presets={
        "parity": lambda: [_cell(arm, "parity") for arm in _ARMS],
        "s3": lambda: [_cell(arm, "s3") for arm in _ARMS],
        "smoke": lambda: grid.smoke([_cell("deltanet negative", "s3", 8)]),
    },
    axis="elements of a word",
)

if __name__ == "__main__":
    grid.main(EXPERIMENT)
