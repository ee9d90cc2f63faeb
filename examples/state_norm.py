"""What the memory does along a sequence, untrained: norms, Jacobians, energy, drift of the inverse.

    python examples/state_norm.py --preset=published --out_dir=DIR

measures at T = 1000 what the paper reports there, and decomposes it; `--preset=fair` streams up to
10⁵ tokens of several kinds of input, an adversary's among them. Neither trains anything, and both
run on a CPU in minutes. Each measurement is one line of ``DIR/runs.csv`` and is made once.
"""

from __future__ import annotations

import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grid
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from commands import check_arguments
from rows import Table
from state_norm_report import plot, table

import vla_jax
from vla_jax import baselines, diagnostics, layer, numerics, ops, primitives
from vla_jax.reference import published

_PRESET = flags.DEFINE_enum("preset", "published", ["published", "fair", "smoke"], "Which ones.")
_OUT_DIR = flags.DEFINE_string("out_dir", None, "Where they are kept; runs/state_norm by default.")

HEADS, DIM, WIDTH, LAMBDA0 = 4, 32, 128, 0.1
SEEDS = (0, 1, 2)
CHUNK = 1000  # tokens of one call while streaming

# What keeps the length that it comes with, in `amplification`; "unit" is VLA.
LENGTHS = ("unit", "raw keys", "raw gains", "raw keys and gains")

# Arms of the decomposition: from linear attention to VLA, one change at a time.
NORM_ARMS = (
    "linear attention",
    "linear, unit keys",
    "delta rule (A ≡ I)",
    "VLA, learned map",
    "VLA, u from the key",
)

TABLE = Table(
    columns=(
        "seed", "seconds", "norm", "largest", "value_norm", "alignment",
        "norm_against_closed_form", "radius", "product_peak", "product_end", "end",
        "rises_in_second_half", "largest_rise_in_second_half", "variance", "layer_norm_gain",
        "drift", "energy", "condition_number", "two_over_angle", "curve",
    )
)  # fmt: skip

Measurement = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def inputs(seed: int, length: int, kind: str = "random", start: int = 0) -> Any:
    """``(query, key, value, direction)`` of a fresh layer, one sequence, tokens ``start`` and on.

    Args:
      seed: of the layer and the tokens.
      length: T.
      kind: ``"random"`` for independent normal inputs of the layer, ``"zipf"`` for 128 fixed ones,
        of which the r-th most frequent is drawn with probability ∝ 1/r, ``"independent"`` for
        normal raw queries, keys and values that know nothing of one another.
      start: how many tokens came before, in multiples of which the tokens are drawn.
    """
    config = layer.LayerConfig(num_heads=HEADS, in_features=WIDTH, lambda0=LAMBDA0)
    params = layer.init_parameters(config, jax.random.key(seed))
    rng = np.random.default_rng([seed, start])
    if kind == "independent":
        query, key, value = rng.standard_normal((3, 1, length, HEADS, DIM)).astype(np.float32)
        return _mapped(params["u_proj"]["kernel"], query, key, value)
    if kind == "random":
        x = rng.standard_normal((1, length, WIDTH))
    else:
        tokens = np.random.default_rng([seed]).standard_normal((128, WIDTH))
        p = 1 / np.arange(1, 129)
        x = tokens[rng.choice(128, (1, length), p=p / p.sum())]
    return _projected(config, params, x.astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _projected(config, params, x):
    return layer.attention_inputs(config, params, x, None, None, None)[:4]


@jax.jit
def _mapped(u_map, query, key, value):
    direction = numerics.normalize(jnp.einsum("bthd,hde->bthe", key, u_map)) / math.sqrt(DIM)
    return numerics.feature_map(query), numerics.feature_map(key), value, direction


@jax.jit
def memory_norms(read_key: Any, write_key: Any, value: Any) -> Any:
    """``‖S_t‖ [T, H]`` of ``S ← S + (v − S read_key) write_keyᵀ``, one sequence."""

    def step(memory, token):
        k, a, v = token
        memory = memory + a[..., :, None] * (v - jnp.einsum("hde,hd->he", memory, k))[:, None]
        return memory, jnp.linalg.norm(memory, axis=(-2, -1))

    memory = jnp.zeros((HEADS, DIM, DIM), value.dtype)
    return jax.lax.scan(step, memory, (read_key[0], write_key[0], value[0]))[1]


def gains(key: Any, direction: Any) -> tuple[Any, Any]:
    """``(k̂, α̂)``, both ``[1, T, H, D]``; ``direction=None`` for ``u = k̂ / √D``."""
    unit = numerics.normalize(key)
    u = unit / math.sqrt(DIM) if direction is None else direction
    solution, _ = primitives.penalty_solve(unit, u, lambda0=LAMBDA0)
    return unit, numerics.normalize(solution)


def _log_spaced(length: int, count: int = 60) -> np.ndarray:
    return np.unique(np.geomspace(1, length, count).astype(int))


def _curve(values: Any) -> list[list[float]]:
    """``[[t, value], ...]`` at logarithmically spaced t, from ``[T]`` or ``[T, H]`` (mean)."""
    values = np.asarray(values, np.float64)
    values = values.reshape(len(values), -1).mean(axis=1)
    return [[int(t), float(f"{values[t - 1]:.5g}")] for t in _log_spaced(len(values))]


# --- T = 1000, as published ----------------------------------------------------------------------


def norm(arm: str, seed: int, length: int, kind: str = "random") -> dict[str, Any]:
    """The Frobenius norm of the memory of one head."""
    _, key, value, direction = inputs(seed, length, kind)
    unit = numerics.normalize(key)
    if arm == "linear attention":
        norms = memory_norms(jnp.zeros_like(key), key, value)
    elif arm == "linear, unit keys":
        norms = memory_norms(jnp.zeros_like(key), unit, value)
    elif arm == "delta rule (A ≡ I)":
        norms = memory_norms(unit, unit, value)
    else:
        direction = direction if arm == "VLA, learned map" else None
        norms = diagnostics.state_norm(key, value, direction, lambda0=LAMBDA0)[0]
    norms = np.asarray(norms)
    return {
        "norm": float(norms[-1].mean()),
        "largest": float(norms.max()),
        "value_norm": float(jnp.linalg.norm(value, axis=-1).mean()),
        "curve": _curve(norms),
    }


def jacobian(direction: str, seed: int, length: int) -> dict[str, Any]:
    """Norm and radius of every step ``I − k̂ α̂ᵀ`` and the norm of their product."""
    _, key, _, u = inputs(seed, length)
    unit, gain = gains(key, u if direction == "learned" else None)
    c = np.asarray(diagnostics.alignment(unit, gain))
    each = np.asarray(diagnostics.step_jacobian_norm(unit, gain))
    radius = np.asarray(diagnostics.step_jacobian_radius(unit, gain))
    closed = np.asarray(diagnostics.closed_form_norm(c))
    products = np.asarray(_products(unit[0], gain[0]))
    return {
        "alignment": [float(c.min()), float(c.mean()), float(c.max())],
        "norm": [float(each.min()), float(each.mean()), float(each.max())],
        "norm_against_closed_form": float(np.abs(each - closed).max()),
        "radius": [float(radius.min()), float(radius.max())],
        "product_peak": float(products.max()),
        "product_end": float(products[-1].mean()),
        "curve": _curve(products),
    }


@jax.jit
def _products(unit, gain):
    def step(product, token):
        k, a = token
        product = product - jnp.einsum("hij,hj,hk->hik", product, k, a)
        return product, jnp.linalg.norm(product, ord=2, axis=(-2, -1))

    identity = jnp.broadcast_to(jnp.eye(DIM), (HEADS, DIM, DIM))
    return jax.lax.scan(step, identity, (unit, gain))[1]


def amplification(
    lengths: str, keys: str, u: str, seed: int, dim: int, length: int
) -> dict[str, Any]:
    """Steps ``I − k αᵀ`` where k and α need not have length 1, and the norm of their product.

    Float64 NumPy, one head.

    Args:
      lengths: one of ``LENGTHS``: which of key and gain keep the length that they come with.
      keys: ``"elu + 1"`` of normal numbers, or ``"normal"`` for these themselves.
      u: ``"map"`` for a random one of the raw key, ``"key"`` for ``k̂ / √D``.
      seed: of keys and map.
      dim: D.
      length: T.
    """
    rng = np.random.default_rng([seed, dim])
    raw = rng.standard_normal((length, dim))
    key = raw
    if keys == "elu + 1":
        key = np.where(raw > 0, raw + 1, np.exp(np.minimum(raw, 0)))
    unit = key / np.linalg.norm(key, axis=1, keepdims=True)
    direction = raw @ rng.standard_normal((dim, dim)) if u == "map" else unit
    direction = direction / np.linalg.norm(direction, axis=1, keepdims=True) / math.sqrt(dim)
    if lengths in ("raw keys", "raw keys and gains"):
        unit = key
    penalty, product, largest = LAMBDA0 * np.eye(dim), np.eye(dim), 0.0
    for k, u_t in zip(unit, direction, strict=True):
        penalty = penalty + np.outer(u_t, u_t)
        gain = np.linalg.solve(penalty, k)
        if lengths in ("unit", "raw keys"):
            gain = gain / np.linalg.norm(gain)
        step = np.eye(dim) - np.outer(k, gain)
        largest = max(largest, float(np.linalg.norm(step, 2)))
        product = product @ step
    return {"largest": largest, "product_end": float(np.linalg.norm(product, 2))}


def energy(direction: str, values: str, seed: int, length: int) -> dict[str, Any]:
    """``tr(S M Sᵀ)`` along a run; with ``values="zero"`` from the middle of it on."""
    query, key, value, u = inputs(seed, length)
    if values == "zero":
        value = value.at[:, length // 2 :].set(0)
    with jax.enable_x64(True):
        tokens = [None if x is None else np.asarray(x, np.float64) for x in (query, key, value, u)]
        if direction == "key":
            tokens[3] = None
        found = np.asarray(_energies(*tokens))
    after = found[length // 2 - 1 :]
    rises = np.diff(after, axis=0) > 1e-12 * after[:-1]
    return {
        "end": float(found[-1].mean()),
        "largest": float(found.max()),
        "rises_in_second_half": float(rises.mean()),
        "largest_rise_in_second_half": float(np.max(after[1:] / after[:-1] - 1)),
        "curve": _curve(found),
    }


@jax.jit
def _energies(query, key, value, direction):
    def step(state, token):
        _, state = ops.vla_step(*token, state, lambda0=LAMBDA0)
        return state, diagnostics.lyapunov(state, lambda0=LAMBDA0)[0]

    state = vla_jax.init_state(1, HEADS, DIM, DIM, dtype=key.dtype)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (query, key, value, direction))
    return jax.lax.scan(step, state, tokens)[1]


def fading(seed: int, length: int) -> dict[str, Any]:
    """Variance of the ratio read-out over a head's channels, and the gain of a LayerNorm on it."""
    query, key, value, direction = inputs(seed, length)
    out = vla_jax.vla_attention(query, key, value, direction, lambda0=LAMBDA0)
    variance = np.asarray(jnp.var(out.reshape(length, -1), axis=-1), np.float64)
    at = sorted({min(t, length) for t in (25, 512, 1000, 4000)})
    near = {t: float(variance[max(0, t - 12) : t + 12].mean()) for t in at}
    gain = {str(t): float(np.sqrt(v / (v + 1e-5))) for t, v in near.items()}
    return {"variance": {str(t): v for t, v in near.items()}, "layer_norm_gain": gain}


# --- the inverse ---------------------------------------------------------------------------------


def drift(method: str, directions: str, seed: int, lengths: Sequence[int]) -> dict[str, Any]:
    """``‖A − M⁻¹‖ / ‖M⁻¹‖`` of a float32 inverse against the float64 inverse of the exact penalty.

    Args:
      method: ``"rank one"`` (Sherman–Morrison from the start), ``"refresh"`` (the same, and 1e-3·I
        added every 20 tokens, as the published code does) or ``"vla_step"`` (this library's).
      directions: ``"random"`` or ``"fixed"``.
      seed: of the directions.
      lengths: numbers of tokens after which it is measured.
    """
    rng = np.random.default_rng(seed)
    inverse: Any = jnp.eye(DIM) / np.float32(LAMBDA0)
    state = vla_jax.init_state(1, 1, DIM, DIM)
    penalty = np.zeros((DIM, DIM))
    fixed = rng.standard_normal(DIM)
    found, done = {}, 0
    for length in lengths:
        u = rng.standard_normal((length - done, DIM))
        if directions == "fixed":
            u = np.broadcast_to(fixed, u.shape)
        u = (u / np.linalg.norm(u, axis=-1, keepdims=True) / math.sqrt(DIM)).astype(np.float32)
        penalty = penalty + u.astype(np.float64).T @ u.astype(np.float64)
        if method == "vla_step":
            state = _steps(state, u)
            inverse = state.inverse[0, 0]
        else:
            every = 20 if method == "refresh" else 0
            inverse = _rank_one(inverse, u, done, every)
        exact = np.linalg.inv(LAMBDA0 * np.eye(DIM) + penalty)
        error = np.linalg.norm(np.asarray(inverse, np.float64) - exact) / np.linalg.norm(exact)
        found[str(length)] = float(error)
        done = length
    return {"drift": found}


@functools.partial(jax.jit, static_argnums=3)
def _rank_one(inverse, directions, done, every):
    def step(carry, u):
        inverse, index = carry
        inverse = published.sherman_morrison(inverse, u)
        if every:
            due = (index + 1) % every == 0
            inverse = inverse + jnp.where(due, 1e-3, 0.0) * jnp.eye(DIM)
        return (inverse, index + 1), None

    return jax.lax.scan(step, (inverse, done), directions)[0][0]


@jax.jit
def _steps(state, directions):
    key = jnp.ones((1, 1, DIM))

    def step(state, u):
        _, state = ops.vla_step(key, key, key, u[None, None], state, lambda0=LAMBDA0)
        return state, None

    return jax.lax.scan(step, state, directions)[0]


# --- long streams --------------------------------------------------------------------------------


def stream(arm: str, kind: str, seed: int, length: int) -> dict[str, Any]:
    """Norm of the memory every ``CHUNK`` tokens, with a state that is carried from call to call."""
    state, curve, energies = None, [], []
    for start in range(0, length, CHUNK):
        tokens = inputs(seed, min(CHUNK, length - start), kind, start)
        state = _stream_chunk(arm, tokens, state)
        norms = jnp.linalg.norm(state.memory, axis=(-2, -1))
        curve.append([start + tokens[1].shape[1], float(f"{float(norms.mean()):.5g}")])
        if isinstance(state, vla_jax.VLAState):
            energies.append(float(diagnostics.lyapunov(state, lambda0=LAMBDA0).mean()))
    result = {"norm": curve[-1][1], "largest": max(y for _, y in curve), "curve": curve}
    if energies:
        condition = diagnostics.penalty_condition_number(state.penalty, lambda0=LAMBDA0)
        result |= {"energy": energies[-1], "condition_number": float(condition.max())}
    return result


@functools.partial(jax.jit, static_argnums=0)
def _stream_chunk(arm, tokens, state):
    query, key, value, direction = tokens
    if arm == "linear attention":
        call: Any = baselines.linear_attention
    elif arm == "delta rule (A ≡ I)":
        call = baselines.identity_attention
    else:
        direction = direction if arm == "VLA, learned map" else None
        call = functools.partial(vla_jax.vla_attention, direction=direction, lambda0=LAMBDA0)
    return call(query, key, value, initial_state=state, return_state=True)[1]


def adversary(direction: str, seed: int, length: int, candidates: int = 32) -> dict[str, Any]:
    """Greedy: of some positive keys the one, and the value of norm √D, that make ``‖S‖`` largest.

    Float64 NumPy, one head. A lower bound of what an adversary can do.
    """
    rng = np.random.default_rng(seed)
    inverse, memory = np.eye(DIM) / LAMBDA0, np.zeros((DIM, DIM))  # S is [E, D]
    u_map = rng.standard_normal((DIM, DIM))
    norms = []
    for _ in range(length):
        raw = rng.standard_normal((candidates, DIM))
        keys = np.where(raw > 0, raw + 1, np.exp(np.minimum(raw, 0)))
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        u = unit if direction == "key" else raw @ u_map.T
        u = u / np.linalg.norm(u, axis=1, keepdims=True) / math.sqrt(DIM)
        w = u @ inverse
        denominator = 1 + np.sum(u * w, axis=1)
        alpha = unit @ inverse - w * (np.sum(unit * w, axis=1) / denominator)[:, None]
        gain = alpha / np.linalg.norm(alpha, axis=1, keepdims=True)
        seen = unit @ memory.T
        size = np.linalg.norm(seen, axis=1, keepdims=True)
        # ‖S + (v − S k̂) α̂ᵀ‖² = ‖S‖² + 2 (v − S k̂)·S α̂ + ‖v − S k̂‖².
        value = np.where(size > 0, -seen / np.where(size > 0, size, 1), DIM**-0.5) * DIM**0.5
        residual = value - seen
        growth = np.sum(residual * (2 * gain @ memory.T + residual), axis=1)
        i = int(np.argmax(growth))
        memory = memory + np.outer(residual[i], gain[i])
        inverse = inverse - np.outer(w[i], w[i]) / denominator[i]
        norms.append(np.linalg.norm(memory))
    return {"norm": float(norms[-1]), "value_norm": math.sqrt(DIM), "curve": _curve(norms)}


def two_keys(angle: float) -> dict[str, Any]:
    """The largest norm with two keys at an angle and opposite unit values, u from the key."""
    keys = np.zeros((2, DIM))
    keys[:, 0], keys[1, 1] = 1, math.tan(angle)
    key = np.tile(keys, (100_000, 1))[:, None].astype(np.float64)
    value = np.zeros_like(key)
    value[..., 0] = np.tile([1.0, -1.0], 100_000)[:, None]
    with jax.enable_x64(True):
        norms = diagnostics.state_norm(
            jnp.asarray(key[None]), jnp.asarray(value[None]), lambda0=LAMBDA0
        )
        return {"largest": float(jnp.max(norms)), "two_over_angle": 2 / angle}


# --- what is measured ----------------------------------------------------------------------------


def measurements(preset: str) -> Iterator[Measurement]:
    """``(what identifies it, how to make it)``."""
    small = preset == "smoke"
    seeds = SEEDS[:1] if small else SEEDS
    length = 40 if small else 1000
    if preset in ("published", "smoke"):
        for seed in seeds:
            for kind in ("random", "independent"):
                for arm in NORM_ARMS:
                    call: Any = functools.partial(norm, arm, seed, length, kind)
                    what = {"arm": arm, "inputs": kind, "seed": seed, "length": length}
                    yield {"part": "norm"} | what, call
            for direction in ("learned", "key"):
                what = {"arm": direction, "seed": seed, "length": length}
                call = functools.partial(jacobian, direction, seed, length)
                yield {"part": "jacobian"} | what, call
                for values in ("random", "zero"):
                    call = functools.partial(energy, direction, values, seed, length)
                    yield {"part": "energy", "values": values} | what, call
            for dim in (DIM,) if small else (DIM, 96):
                for keys in ("elu + 1", "normal"):
                    for u in ("map", "key"):
                        for arm in LENGTHS:
                            case: Any = (arm, keys, u, seed, dim, 25)
                            what = {"arm": arm, "keys": keys, "u": u, "seed": seed, "dim": dim}
                            call = functools.partial(amplification, *case)
                            yield {"part": "amplification", "length": 25} | what, call
            long = length if small else 4000
            call = functools.partial(fading, seed, long)
            yield {"part": "fading", "arm": "learned", "seed": seed, "length": long}, call
        lengths = (20, 40) if small else (1000, 10_000, 100_000)
        for method in ("rank one", "refresh", "vla_step"):
            for directions in ("random", "fixed"):
                call = functools.partial(drift, method, directions, 0, lengths)
                what = {"part": "drift", "arm": method, "directions": directions}
                yield what | {"seed": 0, "length": lengths[-1]}, call
    if preset in ("fair", "smoke"):
        length = 40 if small else 100_000
        for kind in ("random", "zipf"):
            for arm in ("linear attention", *NORM_ARMS[2:]):
                call = functools.partial(stream, arm, kind, 0, length)
                what = {"part": "stream", "arm": arm, "inputs": kind, "seed": 0, "length": length}
                yield what, call
        steps = 40 if small else 10_000
        for direction in ("learned", "key"):
            call = functools.partial(adversary, direction, 0, steps)
            yield {"part": "adversary", "arm": direction, "seed": 0, "length": steps}, call
        if not small:
            for angle in (0.5, 0.1, 0.02):
                call = functools.partial(two_keys, angle)
                yield {"part": "two keys", "arm": "key", "angle": angle, "length": 200_000}, call


def run(preset: str, out_dir: pathlib.Path) -> None:
    """Makes what is missing, then the table and the plot of all that is there."""
    rows = TABLE.read(out_dir)
    device = {"device": jax.devices()[0].device_kind, "versions": grid.versions()}
    for what, measure in measurements(preset):
        what = {"experiment": "state_norm", "preset": preset, "dim": DIM, "lambda0": LAMBDA0} | what
        if any(row.items() >= what.items() for row in rows):
            continue
        start = time.perf_counter()
        found = measure()
        seconds = round(time.perf_counter() - start, 2)
        row = what | found | {"seconds": seconds} | device
        TABLE.append(out_dir, [row])
        rows.append(row)
        print(" ".join(str(x) for x in list(what.values())[4:]), f"{seconds} s", flush=True)
    text = table(rows)
    (out_dir / "table.md").write_text(text, "utf-8")
    print(text)
    plot(rows, out_dir / "state_norm.png")


def main(argv: list[str]) -> None:
    """Runs a preset."""
    check_arguments("state_norm", argv)
    out_dir = _OUT_DIR.value or "runs/state_norm"
    grid.direct("state_norm", out_dir, functools.partial(run, _PRESET.value))


if __name__ == "__main__":
    app.run(main)
