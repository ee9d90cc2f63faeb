"""What a grid found, from its rows: the best learning rate, a table, plots."""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from arms import ARMS, QUESTIONS, TEXT_QUESTIONS
from matplotlib.figure import Figure
from PIL import Image
from rows import Row

from vla_jax.files import replacing

if TYPE_CHECKING:
    from grid import Experiment

Key = tuple[str, str, float]  # panel, arm, setting


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The runs of an arm in a setting at its best learning rate, chosen on validation data."""

    rate: float
    rows: tuple[Row, ...]

    def accuracies(self, length: str = "") -> list[float]:
        """Test accuracy of every seed; a run that diverged counts as 0."""
        found = [r["lengths"].get(length) if length else r["accuracy"] for r in self.rows]
        return [x or 0.0 for x in found]


def outcomes(rows: Iterable[Row]) -> dict[Key, Outcome]:
    """``{(panel, arm, setting): Outcome}``."""
    groups: dict[Any, dict[float, list[Row]]] = {}
    for row in rows:
        rates = groups.setdefault((row["panel"], row["arm"], row["setting"]), {})
        rates.setdefault(row["learning_rate"], []).append(row)

    def quality(item):
        # A rate that was cut short because another one solved the task does not win over it.
        runs = item[1]
        return (
            -sum(r["ended"] == "another rate" for r in runs),
            np.mean([r["validation_accuracy"] or 0 for r in runs]),
        )

    best = {key: max(rates.items(), key=quality) for key, rates in groups.items()}
    return {key: Outcome(rate, tuple(runs)) for key, (rate, runs) in best.items()}


def report(
    experiment: Experiment, preset: str, rows: Sequence[Row], out_dir: pathlib.Path
) -> str | None:
    """Writes ``table.md`` and the plots, prints the table; None if there is nothing to show."""
    if not rows:
        return None
    found = outcomes(rows)
    text = table(experiment, preset, found)
    with replacing(out_dir / "table.md") as temporary:
        temporary.write_text(text, "utf-8")
    stem = f"{experiment.name}-{preset}"
    plot_outcomes(experiment, preset, found, out_dir / f"{stem}.png")
    if any(row["lengths"] for row in rows):
        plot_lengths(experiment, preset, found, out_dir / f"{stem}-lengths.png")
    if preset in experiment.state_axis:
        plot_states(experiment, preset, found, out_dir / f"{stem}-states.png")
    print(text)
    return text


def _panels(found: Mapping[Key, Outcome]) -> list[str]:
    return list(dict.fromkeys(panel for panel, _, _ in found))


def _arms(
    found: Iterable[Key], panel: str | None = None, setting: float | None = None
) -> list[str]:
    here = (a for p, a, s in found if panel in (None, p) and setting in (None, s))
    return list(dict.fromkeys(here))


def table(experiment: Experiment, preset: str, found: Mapping[Key, Outcome]) -> str:
    """Markdown: an arm a line, a setting a column, mean (lowest–highest) of the seeds."""
    lines = []
    for panel in _panels(found):
        here = {(a, s): o for (p, a, s), o in found.items() if p == panel}
        settings = sorted({s for _, s in here})
        arms = list(dict.fromkeys(a for a, _ in here))
        published = experiment.published.get(preset, {})
        if panel:
            lines.append(f"**{panel}**\n")
        columns = [f"{s:g}" for s in settings]
        head = ["arm", "parameters", "state (floats)", *columns]
        lines.append(f"Columns: {experiment.axis}.\n")
        lines.append("| " + " | ".join(head) + " |")
        lines.append("| " + " | ".join("---" for _ in head) + " |")
        for arm in arms:
            outcome = [here.get((arm, s)) for s in settings]
            present = [o.rows[0] for o in outcome if o is not None]
            cells = [arm, _span(r["parameters"] for r in present)]
            cells.append(_span(r["state_floats"] for r in present))
            cells += ["" if o is None else _cell(o) for o in outcome]
            lines.append("| " + " | ".join(cells) + " |")
            values = published.get(arm, {})
            if values:
                beside = [f"{values[s]:.3f}" if s in values else "" for s in settings]
                lines.append("| " + " | ".join([f"*{arm}, published*", "", "", *beside]) + " |")
        lines.append("")
        names = dict.fromkeys(n for o in here.values() for r in o.rows for n in r["lengths"])
        if names:
            lines.append("| arm | trained on | " + " | ".join(names) + " |")
            lines.append("| --- | --- | " + " | ".join("---" for _ in names) + " |")
            for (arm, setting), o in here.items():
                spreads = [_spread(o.accuracies(n)) for n in names]
                lines.append("| " + " | ".join([arm, f"{setting:g}", *spreads]) + " |")
            lines.append("")
    lines.append(_legend(found))
    return "\n".join(lines)


def _legend(found: Mapping[Any, Outcome]) -> str:
    rows = [row for outcome in found.values() for row in outcome.rows]
    devices = ", ".join(sorted({row["device"] for row in rows}))
    jax_versions = ", ".join(sorted({row["versions"]["jax"] for row in rows}))
    chance = [row["untrained_accuracy"] for row in rows if row["untrained_accuracy"] is not None]
    untrained = f"{min(chance):.3f}–{max(chance):.3f}" if chance else "not finite"
    return (
        "Test accuracy, mean (lowest–highest) over the seeds, at the learning rate that is best on "
        "validation data; `@` names it where several were tried, and the number of seeds follows "
        f"where they are not three. Untrained: {untrained}. "
        f"Device: {devices}; jax {jax_versions}.\n"
    )


def _span(values: Iterable[int]) -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.3f}"
    if len(values) == 1 or max(values) - min(values) < 0.0005:
        return mean
    return f"{mean} ({min(values):.3f}–{max(values):.3f})"


def _cell(outcome: Outcome) -> str:
    text = _spread(outcome.accuracies())
    if len(outcome.rows[0]["settings"]["learning_rates"]) > 1:
        text += f" @{outcome.rate:g}"
    return text if len(outcome.rows) == 3 else f"{text} [{len(outcome.rows)}]"


# Okabe and Ito's colours, which differ in lightness too; the marker repeats the distinction.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_MARKERS = "osD^vPX*"
_MOST = 6  # lines of a plot


def style(index: int) -> dict[str, Any]:
    """Colour and marker of a series; no two of eight agree in either."""
    look = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
    return look | {"markersize": 5, "linewidth": 1.4}


@functools.cache
def _styles() -> dict[str, int]:
    """A style for each arm, that no arm has which is drawn beside it."""
    chosen: dict[str, int] = {}
    for arm in ARMS:
        beside = [g for g in (*QUESTIONS.values(), *TEXT_QUESTIONS.values()) if arm in g]
        taken = {chosen.get(other) for group in beside for other in group}
        chosen[arm] = next(i for i in range(len(_COLOURS)) if i not in taken)
    return chosen


def arm_style(arm: str) -> dict[str, Any]:
    """The style of an arm: the same in every plot."""
    return style(_styles().get(arm, 0))


def _views(panels: Mapping[str, Sequence[str]]) -> list[tuple[str, str, list[str]]]:
    """``{panel: arms}`` as plots ``(title, panel, arms)`` of six arms at most."""
    views = []
    for panel, arms in panels.items():
        groups = {"": list(arms)}
        if len(arms) > _MOST:
            groups = {
                q: [a for a in arms if a in members]
                for q, members in QUESTIONS.items()
                if members[0] in arms  # which it is about
            }
            groups = {
                q: here
                for q, here in groups.items()
                if len(here) > 1 and not any(set(here) < set(other) for other in groups.values())
            }
            rest = [a for a in arms if not any(a in here for here in groups.values())]
            for i in range(0, len(rest), _MOST):
                groups["others" + " again" * (i // _MOST)] = rest[i : i + _MOST]
        for question, here in groups.items():
            views.append((", ".join(filter(None, (panel, question))), panel, here))
    return views


def _figure(titles: Sequence[str]) -> tuple[Figure, list[Any]]:
    """A figure with axes of these titles, three in a line at most."""
    columns = min(len(titles), 3)
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(5.6 * columns, 0.4 + 3.6 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for one in axes[len(titles) :]:
        one.remove()
    for one, title in zip(axes, titles, strict=False):
        one.set(ylabel="test accuracy", ylim=(-0.03, 1.03), title=title)
        one.grid(alpha=0.3)
    return figure, axes[: len(titles)]


def _aside(arms: Sequence[str]) -> np.ndarray:
    """How far from its place each is drawn, so that what is equally good can be told apart."""
    return 0.03 * (np.arange(len(arms)) - (len(arms) - 1) / 2)


def _draw(
    axes: Any, arm: str, x: Sequence[float], values: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Means and the range of the seeds; returns where the line ends."""
    mean = np.asarray([np.mean(v) for v in values])
    below, above = mean - [min(v) for v in values], [max(v) for v in values] - mean
    spread = np.maximum([below, above], 0)  # the mean of equal numbers is off by its rounding
    axes.errorbar(x, mean, yerr=spread, capsize=2, **arm_style(arm))
    return x[-1], mean[-1]


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Names lines at their ends ``{arm: (x, y)}``, in their colours, no name over another."""
    low, high = axes.get_ylim()
    gap = 0.065 * (high - low)
    ranked = sorted(ends.items(), key=lambda item: item[1][1])
    places: list[float] = []
    for i, (_, (_, y)) in enumerate(ranked):
        room = high - gap * (len(ranked) - i - 0.5)  # for those above
        places.append(max(min(y, room), places[-1] + gap if places else -np.inf))
    for (arm, (x, y)), below in zip(ranked, places, strict=True):
        colour = arm_style(arm)["color"]
        axes.annotate(
            arm, (x, y), (1.02, below), textcoords=axes.get_yaxis_transform(), fontsize="small",
            va="center", color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "linestyle": ":"},
        )  # fmt: skip


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    """Writes a plot as a PNG of 128 colours: a third of the size, to be kept beside the rows."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    with replacing(path) as temporary:
        Image.open(drawn).convert("RGB").quantize(128).save(temporary, optimize=True)


def _save(figure: Figure, title: str, path: pathlib.Path) -> None:
    figure.suptitle(title)
    save_figure(figure, path)


def plot_outcomes(
    experiment: Experiment,
    preset: str,
    found: Mapping[Key, Outcome],
    path: pathlib.Path,
) -> None:
    """Accuracy over the settings, a panel beside the other; hollow markers are published."""
    views = _views({p: _arms(found, p) for p in _panels(found)})
    figure, axes = _figure([title for title, _, _ in views])
    for (_, panel, arms), one in zip(views, axes, strict=True):
        here = {(a, s): o for (p, a, s), o in found.items() if p == panel and a in arms}
        ends = {}
        for arm, aside in zip(arms, _aside(arms), strict=True):
            settings = sorted(s for a, s in here if a == arm)
            x = [s * 2 ** (aside / 2) if experiment.log_axis else s + aside for s in settings]
            ends[arm] = _draw(one, arm, x, [here[arm, s].accuracies() for s in settings])
            published = experiment.published.get(preset, {}).get(arm)
            if published:
                look = arm_style(arm) | {"linestyle": "none", "markerfacecolor": "none"}
                one.plot(*zip(*published.items(), strict=True), **look | {"markersize": 9})
        one.set_xlabel(experiment.axis)
        if experiment.log_axis:
            one.set_xscale("log", base=2)
        ticks = sorted({s for _, s in here})
        one.set_xticks(ticks, [f"{s:g}" for s in ticks])
        one.minorticks_off()
        label_ends(one, ends)
    title = f"{experiment.name}, {preset} preset"
    if experiment.published.get(preset):
        title += " (hollow: as published)"
    _save(figure, title, path)


def plot_lengths(
    experiment: Experiment, preset: str, found: Mapping[Key, Outcome], path: pathlib.Path
) -> None:
    """Accuracy over the lengths that were tested, of what was trained on one."""
    tested = {key: o for key, o in found.items() if o.rows[0]["lengths"]}
    groups = list(dict.fromkeys((p, s) for p, _, s in sorted(tested, key=lambda k: (k[0], k[2]))))
    titled = {", ".join(filter(None, (p, f"{experiment.axis}: {s:g}"))): (p, s) for p, s in groups}
    views = _views({title: _arms(tested, *g) for title, g in titled.items()})
    figure, axes = _figure([title for title, _, _ in views])
    for (_, group, arms), one in zip(views, axes, strict=True):
        here = {a: o for (p, a, s), o in tested.items() if (p, s) == titled[group] and a in arms}
        ends = {}
        names = ["", *dict.fromkeys(n for o in here.values() for n in o.rows[0]["lengths"])]
        for (arm, o), aside in zip(here.items(), _aside(list(here)), strict=True):
            x = np.arange(len(names)) + aside
            ends[arm] = _draw(one, arm, list(x), [o.accuracies(n) for n in names])
        lowest = min(min(o.accuracies(n)) for o in here.values() for n in names)
        one.set_ylim(lowest - 0.05 * (1.02 - lowest), 1 + 0.05 * (1.02 - lowest))
        one.set_xticks(range(len(names)), ["as trained", *names[1:]])
        one.set_xlabel("tested at")
        label_ends(one, ends)
    _save(figure, f"{experiment.name}, {preset} preset: lengths", path)


def plot_states(
    experiment: Experiment, preset: str, found: Mapping[Key, Outcome], path: pathlib.Path
) -> None:
    """Accuracy over the size of the state, a setting beside the other; a panel is a point."""
    settings = {f"{s:g} {experiment.axis}": s for s in sorted({s for _, _, s in found})}
    views = _views({title: _arms(found, setting=s) for title, s in settings.items()})
    figure, axes = _figure([title for title, _, _ in views])
    for (_, setting, arms), one in zip(views, axes, strict=True):
        here = [(a, o) for (_, a, s), o in found.items() if s == settings[setting] and a in arms]
        ends = {}
        for arm in dict.fromkeys(a for a, _ in here):
            mine = [o for a, o in here if a == arm]
            mine.sort(key=lambda o: o.rows[0]["state_floats"])
            sizes = [o.rows[0]["state_floats"] for o in mine]
            ends[arm] = _draw(one, arm, sizes, [o.accuracies() for o in mine])
        one.set_xlabel("state of a sequence (numbers)")
        one.set_xscale("log", base=2)
        powers = np.log2([o.rows[0]["state_floats"] for _, o in here])
        ticks = 2 ** np.arange(np.floor(powers.min()), np.ceil(powers.max()) + 1)
        one.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        one.minorticks_off()
        label_ends(one, ends)
    _save(figure, f"{experiment.name}, {preset} preset: state", path)
