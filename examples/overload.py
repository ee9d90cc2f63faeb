"""More pairs than the memory has dimensions.

    python examples/overload.py --preset=published --out_dir=DIR

trains the published setting beyond its last point (32 pairs at 32 dimensions a head). And, without
any training,

    python examples/overload.py --preset=recall --out_dir=DIR

writes n random keys with random values, once each, and reads every one back: what a write rule
keeps by itself, before a model learns to make its keys easy.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import capacity
import grid
import jax
import jax.numpy as jnp
import numpy as np
from arms import SEEDS
from grid_report import Row, style
from matplotlib.figure import Figure

import vla_jax
from vla_jax import baselines, numerics
from vla_jax.files import replacing

DIM, TRIALS, LAMBDA0 = 32, 256, 0.1
RECALL_PAIRS = (4, 8, 16, 24, 32, 48, 64, 96)


def _vla(direction: str, write_gain: str, key: Any, value: Any, u: Any) -> Any:
    if direction == "unit key":  # of length 1, with which "rls" is recursive least squares
        u = numerics.normalize(key)
    _, state = vla_jax.vla_attention(
        key, key, value, None if direction == "key" else u,
        lambda0=LAMBDA0, write_gain=write_gain, return_state=True,
    )  # fmt: skip
    return _read(state.memory, numerics.normalize(key))


def _read(memory: Any, query: Any) -> Any:
    return jnp.einsum("bhde,bthd->bthe", memory, query, precision="highest")


def _linear(key: Any, value: Any, u: Any) -> Any:
    return _read(baselines.linear_attention(key, key, value, return_state=True)[1].memory, key)


def _delta(key: Any, value: Any, u: Any) -> Any:
    return _read(baselines.delta_net(key, key, value, return_state=True)[1].memory, key)


def _ridge(key: Any, value: Any, u: Any) -> Any:
    state = baselines.mesa_net(key, key, value, lambda0=LAMBDA0, return_state=True)[1]
    ridge = state.penalty + LAMBDA0 * jnp.eye(DIM)
    query = jnp.linalg.solve(ridge[:, None], numerics.normalize(key)[..., None])[..., 0]
    return _read(state.memory, query)


RECALL_ARMS: dict[str, Callable[..., Any]] = {
    "linear attention": _linear,
    "delta rule (A ≡ I)": _delta,
    "VLA, random map, unit": functools.partial(_vla, "map", "unit"),
    "VLA, u = k̂ / √D, unit": functools.partial(_vla, "key", "unit"),
    "VLA, u = k̂ / √D, projection": functools.partial(_vla, "key", "projection"),
    "VLA, u = k̂ / √D, rls": functools.partial(_vla, "key", "rls"),
    "VLA, u = k̂, rls": functools.partial(_vla, "unit key", "rls"),
    "exact ridge regression": _ridge,
}


@functools.partial(jax.jit, static_argnums=0)
def _accuracy(arm: str, raw: Any, value: Any, u_map: Any) -> Any:
    """Share of the keys whose own value is the nearest (by cosine) to what is read back."""
    key = numerics.feature_map(raw)
    u = numerics.normalize(raw @ u_map) / DIM**0.5
    out = RECALL_ARMS[arm](key, value, u)[:, :, 0]
    near = jnp.einsum("bte,bse->bts", out, numerics.normalize(value[:, :, 0]))
    return jnp.mean(jnp.argmax(near, axis=-1) == jnp.arange(raw.shape[1]))


def _recall(out_dir: pathlib.Path) -> None:
    path = out_dir / "runs.jsonl"
    rows = grid.read_rows(path)
    for pairs in RECALL_PAIRS:
        for arm in RECALL_ARMS:
            for seed in SEEDS:
                what = {"preset": "recall", "arm": arm, "pairs": pairs, "seed": seed}
                if any(row.items() >= what.items() for row in rows):
                    continue
                rng = np.random.default_rng([seed, pairs])
                shape = (TRIALS, pairs, 1, DIM)
                raw, value = rng.standard_normal((2, *shape)).astype(np.float32)
                u_map = rng.standard_normal((DIM, DIM)).astype(np.float32)
                start = time.perf_counter()
                accuracy = float(_accuracy(arm, raw, value, u_map))
                row = {"experiment": "overload", "dim": DIM, "trials": TRIALS, "lambda0": LAMBDA0}
                row |= what | {"accuracy": accuracy}
                row |= {"seconds": round(time.perf_counter() - start, 3)}
                row |= {"device": jax.devices()[0].device_kind, "versions": grid.versions()}
                grid.append_rows(path, [row])
                rows.append(row)
    _report(rows, out_dir)


def _report(rows: list[Row], out_dir: pathlib.Path) -> None:
    found = {
        (arm, n): [r["accuracy"] for r in rows if r["arm"] == arm and r["pairs"] == n]
        for arm in RECALL_ARMS
        for n in RECALL_PAIRS
    }
    lines = ["| write rule | " + " | ".join(f"{n}" for n in RECALL_PAIRS) + " |"]
    lines.append("| --- |" + " --- |" * len(RECALL_PAIRS))
    for arm in RECALL_ARMS:
        means = [f"{np.mean(found[arm, n]):.3f}" for n in RECALL_PAIRS]
        lines.append(f"| {arm} | " + " | ".join(means) + " |")
    lines.append("| *chance* | " + " | ".join(f"{1 / n:.3f}" for n in RECALL_PAIRS) + " |")
    text = "\n".join(lines) + "\n"
    (out_dir / "table.md").write_text(text, "utf-8")
    print(text)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, arm in enumerate(RECALL_ARMS):
        mean = [np.mean(found[arm, n]) for n in RECALL_PAIRS]
        axes.plot(RECALL_PAIRS, mean, label=arm, **style(i))
    axes.plot(RECALL_PAIRS, [1 / n for n in RECALL_PAIRS], color="0.6", label="chance")
    axes.axvline(DIM, color="0.8", zorder=0)
    axes.set(xlabel="key-value pairs (32 dimensions)", ylabel="recalled", ylim=(-0.03, 1.03))
    axes.set_xscale("log", base=2)
    axes.set_xticks(RECALL_PAIRS, [str(n) for n in RECALL_PAIRS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.suptitle("One pass, no training")
    with replacing(out_dir / "recall.png") as temporary:
        figure.savefig(temporary, dpi=200)


ARMS = ("vla", "vla key", "identity", "deltanet", "mesa", "vla key projection")

EXPERIMENT = grid.Experiment(
    name="overload",
    presets={
        "published": lambda: [
            capacity.published_cell(arm, n) for n in (32, 48, 40, 64, 96) for arm in ARMS
        ],
        "fair": lambda: [
            capacity.fair_cell(arm, n, 512, 4, 128, "short convolution")
            for n in (64, 96, 128)
            for arm in ARMS
        ],
        "smoke": lambda: grid.smoke([capacity.published_cell(arm, 3) for arm in ("vla", "mesa")]),
    },
    axis="key-value pairs",
    published={"published": {"vla": {32: 0.62}}},
    log_axis=True,
    direct={"recall": _recall},
)

if __name__ == "__main__":
    grid.main(EXPERIMENT)
