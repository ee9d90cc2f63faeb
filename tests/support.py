"""What several test files need: calling the library like the oracle, and comparing."""

import functools
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import vla_jax

ROOT = pathlib.Path(__file__).parent.parent
STATE = ("memory", "penalty", "key_sum")
INPUTS = ("query", "key", "value", "direction", "lambda0", *STATE)


class Precision(NamedTuple):
    """A dtype, and the tolerances of values and of gradients in it."""

    dtype: Any
    values: float
    gradients: float


def assert_close(actual, expected, tolerance, name="", floor=0):
    """Largest difference at most ``tolerance`` times the largest expected entry (or ``floor``)."""
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    assert np.isfinite(actual).all(), f"{name}: not finite"
    error = np.abs(actual - expected).max(initial=0)
    scale = np.abs(expected).max(initial=floor)
    assert error <= tolerance * scale + 1e-300, (
        f"{name}: error {error:.2e}, largest entry {scale:.2e}"
    )


def rms_error(actual, expected, floor=0):
    """Norm of the difference over that of ``expected`` (or ``floor``); infinite if not finite."""
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    if not np.isfinite(actual).all():
        return np.inf
    error, scale = np.linalg.norm(actual - expected), max(np.linalg.norm(expected), floor)
    return error / scale if error else 0.0


def assert_rms_close(actual, expected, tolerance, name=""):
    """Root mean square of the difference at most ``tolerance`` times that of ``expected``."""
    error = rms_error(actual, expected)
    assert error <= tolerance, f"{name}: relative error {error:.2e} (root mean square)"


def chunks(implementation, chunk_size):
    """The options that name an implementation; the reference and the kernels choose no chunks."""
    if implementation not in ("xla", "associative"):
        chunk_size = None
    return {"implementation": implementation, "chunk_size": chunk_size}


def split_call(call):
    """A `cases.draw` dictionary as (differentiable inputs, the rest)."""
    differentiable = {n: call[n] for n in INPUTS[:5] if call[n] is not None}
    if call["initial_state"] is not None:
        differentiable.update(zip(STATE, call["initial_state"], strict=True))
    rest = {n: call[n] for n in ("segment_ids", "mask") if call[n] is not None}
    return differentiable, rest


def attention(inputs, rest, **options):
    """`vla_jax.vla_attention` on flat inputs: (out, (memory, penalty, key_sum))."""
    inputs = dict(inputs)
    state = [inputs.pop(n, None) for n in STATE]
    if state[0] is not None:
        inputs["initial_state"] = vla_jax.VLAState(*state)
    out, state = vla_jax.vla_attention(**inputs, **rest, **options, return_state=True)
    return out, tuple(getattr(state, n) for n in STATE)


@functools.lru_cache(None)
def value_and_pullback(**options):
    """jit of (inputs, rest, cotangents) -> (primals, gradients) for these static options."""

    @jax.jit
    def run(inputs, rest, cotangents):
        primals, pullback = jax.vjp(lambda x: attention(x, rest, **options), inputs)
        return primals, pullback(cotangents)[0]

    return run


def oracle_value_and_gradients(call, cotangents, **options):
    """The same from the oracle, keyed and arranged like the library's."""
    differentiable, _ = split_call(call)
    out, state, _ = oracle.attention(**call, **options)
    gradients = oracle.attention_grad(*cotangents, **call, **options)
    return (out, state), {n: gradients[n] for n in differentiable}


def options_of(case):
    """The static options of a case."""
    return {"write_gain": case.write_gain, "readout": case.readout}


def draw_cotangents(call, seed=1):
    """Random cotangents of (out, (memory, penalty, key_sum))."""
    rng = np.random.default_rng(seed)
    batch, length, heads, dim = call["key"].shape
    value_dim = call["value"].shape[-1]
    shapes = ((dim, value_dim), (dim, dim), (dim,))
    out = rng.standard_normal((batch, length, call["query"].shape[2], value_dim))
    return out, tuple(rng.standard_normal((batch, heads, *s)) for s in shapes)


def cast(tree, dtype):
    """Floating arrays of a tree in ``dtype``; the rest unchanged."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if np.issubdtype(np.asarray(x).dtype, np.floating) else x,
        tree,
    )


def assert_matches(primals, gradients, expected, tolerance, gradient_tolerance=None):
    """Compares (out, state) and a dictionary of gradients with `oracle_value_and_gradients`."""
    (out, state), (expected_values, expected_gradients) = primals, expected
    assert_close(out, expected_values[0], tolerance, "out")
    for name, x, y in zip(STATE, state, expected_values[1], strict=True):
        assert_close(x, y, tolerance, f"state {name}")
    assert gradients.keys() == expected_gradients.keys()
    for name, expected_gradient in expected_gradients.items():
        floor = 0
        if name == "lambda0" and "penalty" in expected_gradients:
            # It is the trace of the other, whose terms (5 in one case) may cancel (to 0.006).
            floor = np.abs(expected_gradients["penalty"]).max()
        assert_close(
            gradients[name],
            expected_gradient,
            gradient_tolerance or tolerance,
            f"gradient of {name}",
            floor,
        )


def example(name, *arguments):
    """A command of the examples, run to its end in a process of its own on the CPU."""
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=False,
    )
