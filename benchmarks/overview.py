"""Draws the README's figure from kept rows: ``python benchmarks/overview.py``.

Left the time of attention by the length of a sequence, right the recall of the arms at their best
learning rate. Reads benchmarks/results, writes docs/images/overview.png, and measures nothing.
"""

import json
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import grid  # noqa: E402
import grid_report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "images" / "overview.png"
ARMS = {
    "softmax": ("softmax", "tab:gray"),
    "mesa": ("ridge regression", "tab:purple"),
    "deltanet": ("DeltaNet", "tab:green"),
    "vla no ratio rms": ('VLA, "recall"', "tab:blue"),
    "vla": ('VLA, "published" + conv.', "tab:cyan"),
}


def recall():
    """``{place: {arm: accuracies of the seeds}}``, all with a short convolution."""
    fair = grid_report.outcomes(grid.RUNS.read(RESULTS / "capacity-fair"))
    far = grid_report.outcomes(grid.RUNS.read(RESULTS / "long_context-fair"))
    long = {arm: found.accuracies("T=4096") for (_, arm, _), found in far.items()}
    places = {"8 pairs\n4096 tokens, trained on 512": long}
    for pairs in (16, 32):
        here = {
            arm: found.accuracies()
            for (panel, arm, setting), found in fair.items()
            if panel == "short convolution" and setting == pairs
        }
        places[f"{pairs} pairs\n{16 * pairs} tokens"] = here
    return places


def draw():
    """The figure."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    rows = json.loads((RESULTS / "h200-bfloat16.json").read_text("utf-8"))["rows"]
    for name, label, colour in (
        ("softmax", "softmax, cuDNN flash attention", "tab:gray"),
        ("pallas", "vla_attention", "tab:blue"),
    ):
        own = [r for r in rows if r["implementation"] == name and r["dim"] == 64 and r["both_ms"]]
        lengths = [r["length"] for r in own]
        nanoseconds = [1e6 * r["both_ms"] / (r["batch"] * r["length"]) for r in own]
        left.plot(lengths, nanoseconds, marker="o", color=colour, label=label)
    left.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="ns a token")
    left.set_title("Forward and backward, 16 heads of 64, H200", fontsize="medium")
    left.grid(alpha=0.3)
    left.legend(fontsize="small")

    places = recall()
    for i, (arm, (label, colour)) in enumerate(ARMS.items()):
        values = [here[arm] for here in places.values()]
        x = np.arange(len(places)) + 0.16 * (i - 2)
        means = [np.mean(v) for v in values]
        right.bar(x, means, 0.15, color=colour, label=label)
        seeds = np.concatenate([np.full(len(v), at) for v, at in zip(values, x, strict=True)])
        right.plot(seeds, np.concatenate(values), ".", color="black", markersize=4)
    right.set_xticks(range(len(places)), places)
    right.set(ylabel="test accuracy", ylim=(0, 1.3), yticks=np.arange(0, 1.1, 0.25))
    right.set_title("Recall, all with a short convolution (dots: seeds)", fontsize="medium")
    right.legend(fontsize="small", loc="upper left", ncols=3)
    return figure


if __name__ == "__main__":
    grid_report.save_figure(draw(), FIGURE)
