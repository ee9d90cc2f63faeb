"""What ``state_norm.py`` found, from its rows: tables and a figure of four panels."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from grid_report import save_figure, style
from matplotlib.figure import Figure
from rows import Row

# What distinguishes rows of a part beside the arm and the seed.
_EXTRA = ("values", "directions", "inputs", "angle", "keys", "u")


def _select(rows: Sequence[Row], part: str, *also: str) -> dict[str, list[Row]]:
    """Rows of a part by arm and what else distinguishes them but the seed, ``also`` included."""
    chosen: dict[str, list[Row]] = {}
    for row in rows:
        if row["part"] == part:
            extra = [str(row[n]) for n in (*_EXTRA, *also) if n in row]
            chosen.setdefault(", ".join([row["arm"], *extra]), []).append(row)
    return chosen


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{np.mean([row[name] for row in rows]):.4g}"


def _range(rows: Sequence[Row], name: str) -> str:
    values = np.asarray([row[name] for row in rows])
    low, high = values[:, 0].min(), values[:, -1].max()
    middle = f"mean {values[:, 1].mean():.4f}, " if values.shape[1] == 3 else ""
    return f"{middle}{low:.4f} to {high:.4f}"


def table(rows: Sequence[Row]) -> str:
    """Markdown tables of what is there, means over the seeds."""
    lines: list[str] = []

    def add(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
        if body:
            lines.extend([f"**{title}**", "", "| " + " | ".join(head) + " |"])
            lines.append("| " + " | ".join("---" for _ in head) + " |")
            lines.extend("| " + " | ".join(row) + " |" for row in body)
            lines.append("")

    found = _select(rows, "norm")
    add(
        "Norm of the memory of one head at the last token",
        ("arm", "norm", "largest on the way"),
        [(arm, _mean(r, "norm"), _mean(r, "largest")) for arm, r in found.items()],
    )
    found = _select(rows, "jacobian")
    names = ("alignment", "norm", "radius")
    add(
        "One step I − k̂ α̂ᵀ, and the product of all",
        ("direction", "c = k̂·α̂", "spectral norm", "spectral radius", "peak", "at the end"),
        [
            (arm, *(_range(r, n) for n in names), _mean(r, "product_peak"), _mean(r, "product_end"))
            for arm, r in found.items()
        ],
    )
    add(
        "Without unit lengths: the largest step, and the product of all",
        ("arm, keys, u, dimensions", "spectral norm", "in units of d / λ₀", "product of 25"),
        [
            (
                arm,
                _mean(r, "largest"),
                f"{np.mean([row['largest'] * row['lambda0'] / row['dim'] for row in r]):.2g}",
                f"10^{np.mean([math.log10(row['product_end']) for row in r]):.1f}",
            )
            for arm, r in _select(rows, "amplification", "dim").items()
        ],
    )
    found = _select(rows, "energy")
    add(
        "tr(S M Sᵀ)",
        ("direction, values", "largest", "at the end", "steps that raise it, second half",
         "largest rise"),
        [
            (arm, *(_mean(r, n) for n in ("largest", "end", "rises_in_second_half",
                                          "largest_rise_in_second_half")))
            for arm, r in found.items()
        ],
    )  # fmt: skip
    body = []
    for t in ("25", "512", "1000", "4000"):
        fades = [r for r in _select(rows, "fading").get("learned", []) if t in r["variance"]]
        if fades:
            pair = [np.mean([r[n][t] for r in fades]) for n in ("variance", "layer_norm_gain")]
            body.append((t, *(f"{x:.2g}" for x in pair)))
    add("The ratio read-out fades", ("token", "variance", "gain of a LayerNorm, ε = 1e-5"), body)
    found = _select(rows, "drift")
    steps = list(dict.fromkeys(n for r in found.values() for n in r[0]["drift"]))
    add(
        "Drift of a float32 inverse",
        ("method, directions", *(f"{int(n):,} tokens" for n in steps)),
        [
            (arm, *(f"{r[0]['drift'][n]:.1e}" if n in r[0]["drift"] else "" for n in steps))
            for arm, r in found.items()
        ],
    )
    found = _select(rows, "stream")
    add(
        "Streams",
        ("arm, inputs", "tokens", "norm at the end", "largest"),
        [
            (arm, f"{r[0]['length']:,}", _mean(r, "norm"), _mean(r, "largest"))
            for arm, r in found.items()
        ],
    )
    body = []
    for arm, r in _select(rows, "adversary").items():
        curve = r[0]["curve"]
        body.append((arm, *(f"{y:.4g} at {t:,}" for t, y in curve[:: max(1, len(curve) // 6)][1:])))
        body[-1] = (arm, "; ".join(body[-1][1:]), _mean(r, "norm"))
    add("A greedy adversary (values of norm √32)", ("direction", "norm", "at the end"), body)
    add(
        "Two keys at an angle, opposite unit values",
        ("angle", "largest norm", "2 / angle"),
        [
            (str(r[0]["angle"]), _mean(r, "largest"), _mean(r, "two_over_angle"))
            for r in _select(rows, "two keys").values()
        ],
    )
    devices = ", ".join(sorted({row["device"] for row in rows}))
    jax_versions = ", ".join(sorted({row["versions"]["jax"] for row in rows}))
    seconds = sum(row["seconds"] for row in rows)
    lines.append(f"Device: {devices}; jax {jax_versions}; {seconds:.0f} s in all.\n")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Four panels, each for what there is of it."""
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    panels = (
        ("norm", "norm of the memory, one head", "‖S‖", axes[0]),
        ("jacobian", "product of the steps I − k̂ α̂ᵀ", "spectral norm", axes[1]),
        ("energy", "tr(S M Sᵀ)", "tr(S M Sᵀ)", axes[2]),
        ("stream", "streams, and a greedy adversary", "‖S‖", axes[3]),
    )
    for part, title, label, one in panels:
        shown = [row for row in rows if row.get("inputs") != "independent"]
        series = dict(_select(shown, part))
        if part == "stream":
            series |= {f"adversary, u {n}": r for n, r in _select(rows, "adversary").items()}
        for i, (name, group) in enumerate(series.items()):
            curves = np.asarray([row["curve"] for row in group])
            x, y = curves[0, :, 0], curves[:, :, 1].mean(axis=0)
            look = style(i) | {"markevery": max(1, len(x) // 8)}
            one.plot(x, y, label=name, **look)
        one.set(xlabel="token", ylabel=label, title=title, xscale="log", yscale="log")
        one.grid(alpha=0.3)
        if series:
            one.legend(fontsize="x-small")
    save_figure(figure, path)
