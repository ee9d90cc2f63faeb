"""How many key-value pairs does a mixer of a given size recall?

    python examples/capacity.py --preset=published --out_dir=DIR

trains the published setting (n = 4 … 48 pairs, vocabulary 128, T = 3n + 1, learned positions) with
three seeds; `--preset=ablation` takes VLA's options one by one in it. `--preset=fair` has the
Zoology layout (vocabulary 8192, separate keys and values, fillers), four learning rates for every
arm, a short convolution for all arms or for none, equal parameter counts, and tests beyond the
trained length; `--preset=recall` is that with 32 to 128 pairs, gates, λ₀ from .01 to 10 and
learned, and two controls; `--preset=scales` is the published setting with embeddings of standard
deviation 1 instead of .02; `--preset=zoology` is that literature's own comparison over T and
model width.
Stop it and start it as you like: it goes on where it was (`--time_limit`, `--help`).
"""

from __future__ import annotations

import grid
from arms import (
    ABLATIONS,
    FAIR,
    FAIR_ARMS,
    FAIR_RATES,
    GATED_ARMS,
    LAMBDA_ARMS,
    PUBLISHED,
    PUBLISHED_ARMS,
    PUBLISHED_RATES,
    SCALED_ARMS,
    SEEDS,
    model_of,
)
from grid import Cell
from tasks import MQAR

# What decides first: where the published arms part, then the end of the scale, then the rest.
PAIRS = (24, 8, 32, 48, 16, 4, 12)


def published_cell(arm: str, pairs: int) -> Cell:
    """An arm in the published setting."""
    task = MQAR(pairs)
    model = model_of(arm, vocab_size=task.vocab_size, max_length=task.length)
    return Cell(arm, pairs, task, model, PUBLISHED, PUBLISHED_RATES, SEEDS)


def fair_cell(
    arm: str, pairs: int, length: int, short_conv: int | None, d_model: int, panel: str
) -> Cell:
    """An arm in the Zoology layout; without a convolution the order comes from positions."""
    task = MQAR(pairs, 8192, "zoology", length)
    model = model_of(
        arm,
        match=True,
        vocab_size=task.vocab_size,
        max_length=None if short_conv else length,
        d_model=d_model,
        num_heads=d_model // 32,
        ffn_dim=2 * d_model,
        short_conv=short_conv,
    )
    lengths = {}
    if short_conv:  # positions have no meaning beyond the trained length
        lengths = {f"{m}T": MQAR(pairs, 8192, "zoology", m * length) for m in (2, 4)}
    return Cell(arm, pairs, task, model, FAIR, FAIR_RATES, SEEDS, lengths, panel)


def _fair() -> list[Cell]:
    panels = (("short convolution", 4), ("no convolution", None))
    order = [
        (arm, pairs, panel, conv)
        for arms in (FAIR_ARMS, ABLATIONS, GATED_ARMS)
        for panel, conv in panels
        for pairs in (16, 32, 64, 8)
        for arm in arms
    ]
    return [
        fair_cell(arm, pairs, min(16 * pairs, 512), conv, 128, panel)
        for arm, pairs, panel, conv in order
    ]


def _recall() -> list[Cell]:
    """What the fair grid leaves open: gates, lambda0, controls, and 128 pairs in 1024 tokens."""
    arms = ("softmax", "deltanet", "gated_deltanet", "vla no ratio rms", *GATED_ARMS, *LAMBDA_ARMS)
    return [
        fair_cell(arm, pairs, min(16 * pairs, 1024), 4, 128, "short convolution")
        for pairs in (32, 64, 128)
        for arm in arms
    ]


def _zoology() -> list[Cell]:
    return [
        fair_cell(arm, pairs, length, 4, width, f"d_model {width}")
        for width in (64, 128)
        for length, pairs in ((512, 64), (256, 16), (128, 8), (64, 4))
        for arm in ("vla", "deltanet", "gated_deltanet", "softmax", "vla no ratio rms")
    ]


EXPERIMENT = grid.Experiment(
    name="capacity",
    presets={
        "published": lambda: [published_cell(arm, n) for n in PAIRS for arm in PUBLISHED_ARMS],
        "ablation": lambda: [published_cell(a, n) for n in (32, 24, 48) for a in _ablation_arms()],
        "fair": _fair,
        "recall": _recall,
        "scales": lambda: [published_cell(arm, n) for n in (48, 32) for arm in SCALED_ARMS],
        "zoology": _zoology,
        "smoke": lambda: grid.smoke([published_cell(arm, 2) for arm in ("vla", "deltanet")]),
    },
    axis="key-value pairs",
    published={
        "published": {
            "softmax": {4: 0.255, 8: 0.146, 12: 0.109, 16: 0.100, 24: 0.074},
            "linear": {4: 0.260, 8: 0.143, 12: 0.109, 16: 0.097, 24: 0.075},
            "published_deltanet": {4: 0.989, 8: 0.734, 12: 0.097, 16: 0.038, 24: 0.010},
            "vla": {4: 1.0, 8: 1.0, 12: 1.0, 16: 1.0, 24: 1.0, 32: 0.62},
        },
    },
    log_axis=True,
    state_axis=("zoology",),
)


def _ablation_arms() -> list[str]:
    return ["vla key", "mesa", *(arm for arm in ABLATIONS if arm.startswith("vla"))]


if __name__ == "__main__":
    grid.main(EXPERIMENT)
