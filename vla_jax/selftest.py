"""Compares every implementation with the reference on this machine: ``python -m vla_jax.selftest``.

A new GPU or compiler may give right values and wrong gradients. This runs each implementation that
can serve here over a few shapes and dtypes, compares the output, the returned state and the
gradient of every input with those of ``implementation="reference"`` (token by token, differentiated
by JAX), prints a table and says which implementation is safe. The exit status is 1 if the
implementation that ``implementation=None`` chooses is wrong, 0 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import implementations as known
from vla_jax import numerics, ops, primitives
from vla_jax.bundles import OPERATIONS
from vla_jax.types import Array, Inverse, VLAState

# Relative root mean square differences (values, gradients). float32: two orders of the same sums,
# amplified by a condition number of some tens. bfloat16: operands of the memory's products are
# rounded (2^-9 each) where the reference keeps float32, once in the forward and again in the
# backward.
TOLERANCES = {"float32": (1e-4, 5e-4), "bfloat16": (3e-2, 6e-2)}

ABSENT = "not available here"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      name: for the table.
      shape: B, T, Hq, H, D, E.
      direction: "random" (length 1/√D), "key" (None: k̂/√D, at the read k̂), or "unit key" (k̂).
      packed: whether there are a mask, segments and an initial state.
      write_gain, readout: as in ``vla_attention``.
      operation: "vla_attention", or one of its two primitives, which some implementations do not
        use inside it.
      dtypes: of query, key, value and direction: compiling is what takes the time here, so not
        every case is run in both.
      inverse: as in ``vla_attention``.
      gates: whether there are weights and a decay.
    """

    name: str
    shape: tuple[int, int, int, int, int, int]
    direction: str = "random"
    packed: bool = False
    write_gain: str | None = "unit"
    readout: str = "ratio"
    operation: str = "vla_attention"
    dtypes: tuple[str, ...] = ("float32",)
    inverse: Inverse = "write"
    gates: bool = False


_HALF = ("bfloat16",)
CASES = (
    Case("odd sizes", (2, 17, 2, 2, 8, 5)),
    Case("grouped, packed", (2, 130, 4, 2, 32, 48), packed=True, dtypes=("float32", "bfloat16")),
    Case("projection", (1, 129, 2, 2, 64, 64), "key", False, "projection", "none", dtypes=_HALF),
    Case("rls, packed", (1, 100, 2, 2, 16, 32), "unit key", True, "rls", "none"),
    Case("large heads", (1, 70, 1, 1, 128, 128), dtypes=_HALF),
    Case("gates, packed", (2, 70, 4, 2, 32, 48), packed=True, gates=True),
    Case(
        "gates, read",
        (2, 70, 4, 2, 32, 48),
        "key",
        True,
        None,
        "none",
        dtypes=("float32", "bfloat16"),
        inverse="read",
        gates=True,
    ),
    Case("penalty_solve", (2, 70, 2, 2, 32, 32), packed=True, operation="penalty_solve"),
    Case("delta_rule", (2, 70, 4, 2, 32, 48), packed=True, operation="delta_rule", dtypes=_HALF),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
      implementation, case, dtype: what was compared with the reference.
      value_error, gradient_error: the largest relative root mean square difference over output and
        state, and over the gradients; infinite if something is not finite or an error was raised.
      worst: the gradient with that difference.
      chosen: whether ``implementation=None`` chooses it for this call.
      message: why there is no comparison: the implementation does not serve here (``served`` is
        False) or failed.
      served: whether the implementation accepted the call.
    """

    implementation: str
    case: str
    dtype: str
    value_error: float = float("inf")
    gradient_error: float = float("inf")
    worst: str = ""
    chosen: bool = False
    message: str = ""
    served: bool = True

    @property
    def passed(self) -> bool:
        """Whether the call was served and agrees with the reference within ``TOLERANCES``."""
        value, gradient = TOLERANCES[self.dtype]
        return self.served and self.value_error <= value and self.gradient_error <= gradient


def _draw(case: Case, dtype: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Every differentiable input, and the others."""
    batch, length, query_heads, heads, dim, value_dim = case.shape
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    tokens = {
        "query": numerics.feature_map(normal(batch, length, query_heads, dim)),
        "key": numerics.feature_map(normal(batch, length, heads, dim)),
        "value": normal(batch, length, heads, value_dim),
    }
    if case.operation != "vla_attention":
        tokens["key"] = numerics.normalize(tokens["key"])
    if case.direction == "random":
        tokens["direction"] = numerics.normalize(normal(batch, length, heads, dim)) / dim**0.5
    elif case.direction == "unit key":
        tokens["direction"] = numerics.normalize(tokens["key"])
    inputs = {name: x.astype(dtype) for name, x in tokens.items()}
    inputs["lambda0"] = jnp.linspace(0.1, 1, heads)
    rest: dict[str, Array] = {}
    if case.gates:
        gate = batch, length, heads
        inputs["beta"] = jnp.asarray(rng.random(gate), jnp.float32)
        decay = -rng.exponential(size=gate) * rng.choice([0, 0.01, 0.1, 1], gate)
        decay = np.where(rng.random(gate) < 0.05, -1e30, decay)  # some forget everything
        inputs["log_decay"] = jnp.asarray(decay, jnp.float32)
    if case.packed:
        half = normal(batch, heads, dim, 2 * dim) / dim
        inputs["memory"] = normal(batch, heads, dim, value_dim)
        inputs["penalty"] = jnp.einsum("bhij,bhkj->bhik", half, half)
        inputs["key_sum"] = numerics.feature_map(normal(batch, heads, dim))
        rest["mask"] = jnp.asarray(rng.random((batch, length)) > 0.1)
        rest["segment_ids"] = jnp.asarray(
            np.sort(rng.integers(0, 4, (batch, length)), axis=-1), jnp.int32
        )
    return inputs, rest


def _apply(case: Case, implementation: str, inputs: dict[str, Any], rest: dict[str, Any]) -> Any:
    """``(out, state)`` of the case's operation."""
    x = dict(inputs)
    options: dict[str, Any] = {"implementation": implementation}
    options["segment_ids"] = rest.get("segment_ids")
    if case.operation == "penalty_solve":
        return primitives.penalty_solve(
            x["key"], x["direction"], lambda0=x["lambda0"], initial_penalty=x["penalty"], **options
        )
    if case.operation == "delta_rule":
        write_key = x["direction"] * case.shape[4] ** 0.5
        return primitives.delta_rule(
            x["query"], x["key"], write_key, x["value"], initial_memory=x["memory"], **options
        )
    state = [x.pop(name, None) for name in ("memory", "penalty", "key_sum")]
    out, final = ops.vla_attention(
        **x,
        initial_state=None if state[0] is None else VLAState(*state),
        mask=rest.get("mask"),
        write_gain=case.write_gain,
        readout=case.readout,
        inverse=case.inverse,
        return_state=True,
        **options,
    )
    return out, (final.memory, final.penalty, final.key_sum)


def _compile(
    pool: futures.Executor, case: Case, implementation: str, drawn: Any
) -> futures.Future[Any]:
    """A program for ``((out, state), gradients)``: traced now, compiled beside others.

    What tracing raises, the future raises.
    """

    @jax.jit
    def run(inputs, rest):
        values, pullback = jax.vjp(lambda x: _apply(case, implementation, x, rest), inputs)
        keys = iter(jax.random.split(jax.random.key(0), 4))
        cotangents = jax.tree.map(lambda y: jax.random.normal(next(keys), y.shape, y.dtype), values)
        return values, pullback(cotangents)[0]

    try:
        return pool.submit(run.lower(*drawn).compile)
    except Exception as error:
        failed: futures.Future[Any] = futures.Future()
        failed.set_exception(error)
        return failed


def _chosen(case: Case, inputs: dict[str, Array]) -> str:
    """What ``implementation=None`` chooses for this call."""
    arrays = inputs | {"rhs": inputs["key"], "write_key": inputs.get("direction")}
    kind: Any = next(k for k, name in OPERATIONS.items() if name == case.operation)
    bundle = kind(*(arrays.get(name) for name in kind._fields))
    return known.choose(None, bundle, None, case.inverse)


def _difference(actual: Array, expected: Array) -> float:
    """Relative root mean square difference; infinite if ``actual`` is not finite."""
    wide, wanted = (np.asarray(x, np.float64) for x in (actual, expected))
    if not np.isfinite(wide).all():
        return float("inf")
    scale = np.linalg.norm(wanted)
    return float(np.linalg.norm(wide - wanted) / (scale if scale else 1.0))


def _compare(
    implementation: str,
    case: Case,
    dtype: str,
    drawn: Any,
    expected: Any,
    program: futures.Future[Any],
) -> Result:
    def result(**fields: Any) -> Result:
        chosen = implementation == _chosen(case, drawn[0])
        return Result(implementation, case.name, dtype, chosen=chosen, **fields)

    try:
        actual = jax.block_until_ready(program.result()(*drawn))
    except (NotImplementedError, ImportError) as error:
        return result(message=str(error), served=False)
    except Exception as error:  # a compiler or a kernel may fail in any way: that is a result
        return result(message=f"{type(error).__name__}: {error}")
    values = [
        _difference(a, e)
        for a, e in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(expected[0]), strict=True)
    ]
    gradients = {name: _difference(actual[1][name], g) for name, g in expected[1].items()}
    worst = max(gradients, key=gradients.__getitem__)
    return result(value_error=max(values), gradient_error=gradients[worst], worst=worst)


def run(
    implementations: Sequence[str] | None = None,
    *,
    cases: Iterable[Case] | None = None,
    dtypes: Iterable[str] | None = None,
) -> list[Result]:
    """Compares implementations with the reference.

    Args:
      implementations: names; None for all but the reference itself.
      cases: the calls to compare; None for ``CASES``.
      dtypes: names of ``TOLERANCES``; None for each case's own.

    Returns:
      One ``Result`` for each implementation, case and dtype.

    Raises:
      ValueError: for an unknown implementation or dtype.
    """
    if implementations is None:
        implementations = [i for i in known.NAMES if i != "reference"]
    cases = CASES if cases is None else cases
    dtypes = None if dtypes is None else tuple(dtypes)
    for name in implementations:
        if name not in known.NAMES:
            raise ValueError(f"implementation must be one of {known.NAMES}, got {name!r}")
    for dtype in dtypes or ():
        if dtype not in TOLERANCES:
            raise ValueError(f"dtype must be one of {tuple(TOLERANCES)}, got {dtype!r}")
    results = []
    with futures.ThreadPoolExecutor() as pool:
        calls = []
        for case in cases:
            for dtype in case.dtypes if dtypes is None else dtypes:
                drawn = _draw(case, dtype)
                programs = {
                    name: _compile(pool, case, name, drawn)
                    for name in ("reference", *implementations)
                }
                calls.append((case, dtype, drawn, programs))
        for case, dtype, drawn, programs in calls:  # one after the other: only compiling is slow
            expected = programs["reference"].result()(*drawn)
            results += [
                _compare(name, case, dtype, drawn, expected, programs[name])
                for name in implementations
            ]
    return results


def verdicts(results: Iterable[Result]) -> dict[str, str]:
    """``{implementation: "safe" | "wrong" | "not available here"}``.

    Safe: serves at least one case and agrees with the reference in every case that it serves.
    """
    found: dict[str, str] = {}
    for r in results:
        before = found.setdefault(r.implementation, ABSENT)
        if r.served and before != "wrong":
            found[r.implementation] = "safe" if r.passed else "wrong"
    return found


def report(results: Sequence[Result]) -> str:
    """The results as a table, one line each, sorted by implementation."""
    row = "{:<12} {:<16} {:<9} {:>9} {:>9} {:<10} {}"
    lines = [row.format("", "case", "dtype", "values", "gradients", "worst", "")]
    absent = {name for name, verdict in verdicts(results).items() if verdict == ABSENT}
    for r in sorted(results, key=lambda r: r.implementation):
        message = " ".join(r.message.split())
        if r.implementation in absent:
            line = row.format(r.implementation, "", "", "", "", "", f"not served: {message}")
            lines += [] if line in lines else [line]
            continue
        if message:
            state = "FAILED" if r.served else "not served"
            lines.append(
                row.format(r.implementation, r.case, r.dtype, "", "", "", f"{state}: {message}")
            )
            continue
        errors = f"{r.value_error:.1e}", f"{r.gradient_error:.1e}"
        state = "ok" if r.passed else "WRONG"
        lines.append(row.format(r.implementation, r.case, r.dtype, *errors, r.worst, state))
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Runs the comparison, prints it, and returns the exit status."""
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind} ({device.platform})")
    print("compiling some two dozen programs: minutes on a CPU", flush=True)
    print("largest relative rms difference to implementation='reference':\n")
    results = run()
    print(report(results), end="\n\n")
    found = {"reference": "safe"} | verdicts(results)
    chosen = {r.implementation for r in results if r.chosen}
    for name, verdict in found.items():
        print(f"{name:<12} {verdict}{'  <- implementation=None' if name in chosen else ''}")
    if any(r.chosen and not r.passed for r in results):
        safe = next((n for n in ("xla", "associative") if found.get(n) == "safe"), "reference")
        print(f"\nimplementation=None is not safe here: pass implementation={safe!r}")
        return 1
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m vla_jax.selftest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    sys.exit(main())
