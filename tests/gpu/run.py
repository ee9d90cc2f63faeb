"""Every implementation on this machine's GPU against the float64 oracle: the suite's cases, larger.

    python tests/gpu/run.py [--parts cases,long,table,...] [--cases ...] [--implementations ...]

Prints one line a check and ends with a non-zero status if any failed. Inputs are rounded to
bfloat16 once, so that float32 and bfloat16 runs share one oracle, which runs in other processes
while the kernels compile. An implementation that cannot serve a case here leaves it out, with its
own reason; one that was named and serves nothing fails. VLA_JAX_PALLAS_INTERPRET=1 tries this file
without a GPU, on few and small cases.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # one oracle a process
    os.environ.setdefault(name, "1")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import tolerances  # noqa: E402
from support import (  # noqa: E402
    STATE,
    Precision,
    attention,
    cast,
    draw_cotangents,
    options_of,
    oracle_value_and_gradients,
    rms_error,
    split_call,
    value_and_pullback,
)

from benchmarks.cases import CASES, GPU_CASES, LONG, Case, draw, table_case  # noqa: E402

PARTS = ("cases", "long", "table", "decode", "transforms", "pitfalls", "timing")
KERNELS = ("pallas", "triton")
# Of values and of gradients, root mean square.
TOLERANCE = {
    "float32": (tolerances.FLOAT32, tolerances.FLOAT32_GRADIENT),
    "bfloat16": (tolerances.BFLOAT16_RMS, tolerances.BFLOAT16_RMS),
}


# --- what the oracle's processes run: no array of JAX --------------------------------------------


def rounded(tree, dtype):
    """Floating arrays of nested tuples and dictionaries: float64 numbers that ``dtype`` holds."""
    if isinstance(tree, dict):
        return {n: rounded(x, dtype) for n, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(rounded(x, dtype) for x in tree)
    if np.issubdtype(np.asarray(tree).dtype, np.floating):
        return np.asarray(tree, dtype).astype(np.float64)
    return tree


def problem(case):
    """(call, cotangents): tokens that bfloat16 holds; a state that float32 holds, never None."""
    call = draw(case)
    if call["initial_state"] is None:
        tail = ((case.dim, case.value_dim), (case.dim, case.dim), (case.dim,))
        call["initial_state"] = tuple(np.zeros((case.batch, case.heads, *s)) for s in tail)
    wide = {n: rounded(call[n], np.float32) for n in ("lambda0", "initial_state")}
    return rounded(call, ml_dtypes.bfloat16) | wide, rounded(
        draw_cotangents(call), ml_dtypes.bfloat16
    )


def by_name(primals, gradients):
    """Values and gradients: {name: array}."""
    out, state = primals
    values = {"out": out} | dict(zip(STATE, state, strict=True))
    return values | {f"d_{n}": x for n, x in gradients.items()}


def expected(case):
    return by_name(*oracle_value_and_gradients(*problem(case), **options_of(case)))


# --- what follows needs the device ---------------------------------------------------------------


def arrays(case, dtype):
    """(inputs, the rest, cotangents) of one call, tokens in ``dtype``."""
    call, (out, state) = problem(case)
    inputs, rest = split_call(call)
    wide = (*STATE, "lambda0")
    inputs = {n: cast(x, "float32" if n in wide else dtype) for n, x in inputs.items()}
    return inputs, rest, (cast(out, dtype), cast(state, "float32"))


def function(implementation, case):
    """jit of ``arrays`` -> (primals, gradients)."""
    return value_and_pullback(implementation=implementation, **options_of(case))


def errors(actual, wanted, dtype, slack=1.0):
    """(worst error over its tolerance, the four worst in words)."""
    ratios = []
    for name, want in wanted.items():
        # That of lambda0 is a sum of terms of both signs, of the size of the penalty's.
        floor = np.linalg.norm(wanted["d_penalty"]) if name == "d_lambda0" else 0
        error = rms_error(actual[name], want, floor)
        ratios.append((error / TOLERANCE[dtype][name[:2] == "d_"] / slack, f"{name} {error:.1e}"))
    ratios.sort(reverse=True)
    return ratios[0][0], " ".join(words for _, words in ratios[:4])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--implementations", default="", help="of xla, pallas and triton")
    parser.add_argument("--cases", default="", help="those whose name contains this, or a|b")
    parser.add_argument("--dtypes", default=",".join(TOLERANCE), help="of the cases")
    parser.add_argument("--selftest", action="store_true", help="python -m vla_jax.selftest too")
    args = parser.parse_args()
    args.parts, args.dtypes = args.parts.split(","), set(args.dtypes.split(","))
    for option, known in (("parts", PARTS), ("dtypes", TOLERANCE)):
        if set(getattr(args, option)) - set(known):
            parser.error(f"--{option}: any of {','.join(known)}")
    return Run(args).everything()


class Run:
    """The checks and their outcome."""

    def __init__(self, args):
        import jax

        import vla_jax
        from vla_jax import bundles, implementations, plan, triton
        from vla_jax.pallas import common
        from vla_jax.pallas.triton import decode, delta_rule, penalty_solve

        self.jax, self.np, self.vla = jax, jax.numpy, vla_jax
        self.bundles, self.choose, self.plan = bundles, implementations.choose, plan
        self.common, self.decode_kernel = common, decode
        tables = penalty_solve.TABLE, delta_rule.TABLE, delta_rule.TABLE_FLOAT32, triton.TABLE
        self.dims = sorted({16}.union(*tables))
        self.args, self.failures, self.checks, self.started = args, [], 0, time.time()
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
        self.implementations, named = [], [n for n in args.implementations.split(",") if n]
        for name in named or ("xla", *KERNELS):
            if self.serves(name, Case(1, 1, 1, 1, 64, 64)):
                self.implementations.append(name)
            elif named:
                self.report(name, False, "was named and cannot run here")

    def say(self, *words):
        print(f"[{time.time() - self.started:5.0f}s]", *words, flush=True)

    def report(self, name, passed, detail=""):
        self.checks += 1
        if not passed:
            self.failures.append(name)
        self.say("PASS" if passed else "FAIL", name, detail)

    def guarded(self, name, check, *args):
        """``check(*args)`` returns (passed, detail), or None; an exception is a failure."""
        try:
            self.report(name, *(check(*args) or (True,)))
        except Exception as error:
            self.report(name, False, f"{type(error).__name__}: {str(error)[:300]}")

    def wanted(self, name):
        return any(part in name for part in self.args.cases.split("|"))

    def serves(self, name, case):
        """Whether an implementation serves a case; if not, says why."""
        token, value = (
            self.jax.ShapeDtypeStruct((1, 1, 1, n), self.np.float32)
            for n in (case.dim, case.value_dim)
        )
        try:
            self.choose(name, self.bundles.Attention(token, token, value, *[None] * 5), None)
        except NotImplementedError as error:
            self.say("LEFT OUT", case, str(error)[:200])
            return False
        return True

    def everything(self):
        parts, selftest = self.args.parts, None
        if self.args.selftest:  # pitfall 25
            command = [sys.executable, "-m", "vla_jax.selftest"]
            selftest = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        cases = [*CASES, *GPU_CASES] if "cases" in parts else []
        cases += [LONG] if "long" in parts else []
        if "table" in parts:  # every entry of the kernels' tables of parameters
            cases += map(table_case, self.dims)
        self.compare([case for case in cases if self.wanted(str(case))])
        for part in ("decode", "transforms", "pitfalls", "timing"):
            if part in parts:
                getattr(self, part)()
        if selftest is not None:
            text, _ = selftest.communicate(timeout=300)
            self.report("pitfall 25: selftest", selftest.returncode == 0, "\n" + text[-1500:])
        print(f"{self.checks} checks, {len(self.failures)} failed", *self.failures, sep="\n  ")
        return 1 if self.failures or not self.checks else 0

    # --- values and gradients against the oracle -------------------------------------------------

    def compare(self, cases):
        jobs = []
        for case in cases:
            for name in self.implementations:
                if (name == "triton" and case == LONG) or not self.serves(name, case):
                    continue
                # The suite has xla in float32: here it is what bfloat16 is compared with.
                both = name in KERNELS or case == LONG
                dtypes = self.args.dtypes if both else {"bfloat16"} & self.args.dtypes
                jobs += [(case, name, dtype) for dtype in sorted(dtypes)]
        spawn, found = multiprocessing.get_context("spawn"), {}
        workers = min(8, os.cpu_count() or 1)
        with (
            concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as oracles,
            concurrent.futures.ThreadPoolExecutor(workers) as threads,
        ):
            slow_first = sorted(cases, key=lambda case: -case.length * case.dim**2)
            wanted = {case: oracles.submit(expected, case) for case in slow_first}

            def compiled(case, name, dtype):
                inputs = arrays(case, dtype)
                return function(name, case).lower(*inputs).compile(), inputs

            programs = {job: threads.submit(compiled, *job) for job in jobs}

            def check(job):
                case, _, dtype = job
                program, inputs = programs.pop(job).result()
                slack = tolerances.EQUAL_KEYS if case.keys == "equal" else 1
                actual = by_name(*program(*inputs))
                found[job], words = errors(actual, wanted[case].result(), dtype, slack)
                return found[job] <= 1, f"{found[job]:7.3f} of tolerance: {words}"

            for job in jobs:
                case, name, dtype = job
                self.guarded(f"{name:9} {dtype:8} {case}", check, job)
        for case in cases:
            pair = [found.get((case, name, "bfloat16")) for name in ("pallas", "xla")]
            if None not in pair:
                ratio = pair[0] / pair[1]
                detail = f"{ratio:.2f} of the largest error of xla"
                passed = ratio <= tolerances.AGAINST_XLA
                self.report(f"pallas against xla, bfloat16 {case}", passed, detail)

    # --- decoding --------------------------------------------------------------------------------

    def decode(self):
        """22 tokens through the kernel, the inverse derived again on the way, and the jnp path."""
        if "pallas" not in self.implementations:
            return
        for case in (
            Case(1, 22, 2, 1, 128, 128, initial=True),
            Case(1, 22, 2, 2, 12, 20, direction="key", initial=True),
        ):
            for kernel in (True, False):
                which = "kernel" if kernel else "vla_step"
                self.guarded(f"decode d{case.dim} {which}", self.decoded, case, kernel)

    def decoded(self, case, kernel):
        jax, jnp = self.jax, self.np
        inputs, _, _ = arrays(case, "float32")
        start = self.vla.init_state(case.batch, case.heads, case.dim, case.value_dim)
        start = start.replace(**{n: inputs[n] for n in STATE})
        names = ("query", "key", "value", "direction")
        tokens = {n: jnp.moveaxis(inputs[n], 1, 0) for n in names if n in inputs}

        def step(state, token):
            token = [token.get(n) for n in names]
            if kernel:
                out, state = self.step(case, *token, inputs["lambda0"], state, rederive_every=7)
            else:
                out, state = self.vla.vla_step(*token, state, lambda0=inputs["lambda0"])
            return state, out

        end, out = jax.jit(lambda s, t: jax.lax.scan(step, s, t))(start, tokens)
        wanted = expected(case)
        found = {n: getattr(end, n) for n in STATE} | {"out": jnp.moveaxis(out, 0, 1)}
        error = max(rms_error(x, wanted[n]) for n, x in found.items())
        return error < tolerances.DECODE32, f"largest error {error:.1e}"

    def step(self, case, *tokens, **params):
        """One step of the kernel, whose parameters those given override: (out, state)."""
        table = self.decode_kernel.TABLE
        entry = self.common.parameters(table, max(case.dim, case.value_dim))
        inputs = self.bundles.Step(*tokens)
        lambda0 = self.np.broadcast_to(inputs.lambda0, inputs.key.shape[:2])
        plan = self.plan.Plan("pallas", None, variant=self.plan.Variant(**options_of(case)))
        return self.decode_kernel.forward(
            plan, inputs._replace(lambda0=lambda0), dataclasses.replace(entry, **params)
        )[0]

    # --- transformations --------------------------------------------------------------------------

    def transforms(self):
        for name in [n for n in self.implementations if n in KERNELS]:
            for check in (self.exported, self.mapped_over_devices, self.rematerialised):
                self.guarded(f"{check.__name__} {name}", self.transformed, name, check)

    def transformed(self, name, transform):
        """Whether values and gradients are those of the plain call, bit by bit."""
        inputs, rest, (cotangent, _) = arrays(
            Case(2, 100, 2, 1, 32, 24, segments="random"), "bfloat16"
        )
        tokens = [inputs[n] for n in ("query", "key", "value", "direction")]

        def attend(*tokens):
            return self.vla.vla_attention(*tokens, **rest, implementation=name)

        def both(attend):
            def run(*tokens):
                out, pull = self.jax.vjp(attend, *tokens)
                return out, pull(cotangent)

            return self.jax.jit(run)

        pair = transform(attend, both, tokens), both(attend)(*tokens)
        self.jax.tree.map(np.testing.assert_array_equal, *pair)

    def exported(self, attend, both, tokens):
        """Written to bytes and read again, with the documented checks off."""
        from vla_jax.pallas import export_checks

        export = self.jax.export
        data = export.export(both(attend), disabled_checks=export_checks())(*tokens).serialize()
        return export.deserialize(data).call(*tokens)

    def mapped_over_devices(self, attend, both, tokens):
        """Inside shard_map, with its check of replication."""
        jax = self.jax
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("data")
        return both(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))(*tokens)

    def rematerialised(self, attend, both, tokens):
        """Under jax.checkpoint."""
        return both(self.jax.checkpoint(attend))(*tokens)

    # --- pitfalls --------------------------------------------------------------------------------

    def pitfalls(self):
        """The rows of the suite that need a GPU for their full meaning, and two in larger sizes."""
        import pytest
        import test_pitfalls as rows

        def row(check, *args):
            try:
                check(*args)
            except pytest.fail.Exception as error:  # no Exception
                raise AssertionError(str(error)) from None

        jnp = self.np
        precision = Precision(jnp.float32, *TOLERANCE["float32"])
        for name in [n for n in self.implementations if n in KERNELS]:
            for check, *args in (
                (rows.test_pitfall_02_repeated_direction, name),
                (rows.test_pitfall_14_many_heads, name),
                (rows.test_pitfall_15_more_than_2_to_the_31_elements, name),
                (rows.test_pitfall_20_x64_mode_changes_nothing, jnp.float32, name),
                (rows.test_pitfall_20_x64_mode_changes_nothing, jnp.bfloat16, name),
                (rows.test_pitfall_21_vmap, name, precision),
                (rows.test_pitfall_21_vmap_is_not_a_loop, name),
                (self.deterministic, name),
            ):
                self.guarded(f"{check.__name__} {name}", row, check, *args)

    def deterministic(self, name):
        """Pitfall 27 with many programs at a time."""
        case = Case(4, 500, 8, 1, 64, 64, segments="random", initial=True)
        inputs = arrays(case, "bfloat16")
        self.jax.tree.map(
            np.testing.assert_array_equal, *(function(name, case)(*inputs) for _ in range(2))
        )

    # --- timing ----------------------------------------------------------------------------------

    def timing(self):
        checks = {}
        if "pallas" in self.implementations:
            checks["timing: decoding step"] = (self.time_decode,)
        for dim in (64, 128):
            for length in (16, 64):
                checks[f"timing: d{dim} T{length}"] = (self.time_short, dim, length)
        for name, check in checks.items():
            if self.wanted(name):
                self.guarded(name, *check)

    def median(self, call, arguments, repeats=7):
        """Milliseconds of ``arguments = call(arguments)``, after two warm-up calls."""
        times = []
        for i in range(repeats + 2):
            start = time.perf_counter()
            arguments = self.jax.block_until_ready(call(arguments))
            if i > 1:
                times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[len(times) // 2]

    def time_decode(self):
        jax, jnp = self.jax, self.np
        batch, heads, dim, count = 64, 16, 128, 40
        case = Case(batch, count, heads, 1, dim, dim)
        rng = np.random.default_rng(0)
        shape = (count, batch, heads, dim)
        tokens = [jnp.asarray(rng.random(shape), "float32") for _ in range(4)]
        lambda0 = jnp.full(heads, 0.1)
        moved = 2 * 4 * batch * heads * (4 * dim * dim + dim)
        floor = moved / 4.3e12 * 1e3
        results = {}
        for warps in (None, 4, 8, 16):
            params = {} if warps is None else {"num_warps": warps}

            def steps(carry, params=params, kernel=warps is not None):
                def step(state, token):
                    if kernel:
                        out, state = self.step(case, *token, lambda0, state, **params)
                    else:
                        out, state = self.vla.vla_step(*token, state, lambda0=lambda0)
                    return state, out[0, 0, 0]

                state, out = jax.lax.scan(step, carry[0], tokens)
                return state, carry[1] + out.sum()

            run = jax.jit(steps, donate_argnums=0)
            state = self.vla.init_state(batch, heads, dim, dim)
            state = jax.tree.map(jnp.copy, state)  # no buffer twice: all are given away
            results[warps] = self.median(run, (state, jnp.float32(0))) / count
        best = min(v for k, v in results.items() if k)
        words = ", ".join(f"{k or 'vla_step'}: {v * 1e3:.0f}" for k, v in results.items())
        default = self.common.parameters(self.decode_kernel.TABLE, dim).num_warps
        return results[default] < 1.5 * floor, (
            f"microseconds a step, floor {floor * 1e3:.0f}; by warps {words}; "
            f"best {best / floor:.2f} of the floor"
        )

    def time_short(self, dim, length):
        case, words = Case(64, length, 16, 1, dim, dim), []
        inputs, rest, cotangents = arrays(case, "bfloat16")
        for name in self.implementations:
            forward = self.jax.jit(functools.partial(attention, implementation=name))
            both = function(name, case)
            times = []
            for call in (
                lambda x, forward=forward: [forward(x, rest) for _ in range(5)],
                lambda x, both=both: [both(x, rest, cotangents) for _ in range(5)],
            ):

                def calls(x, call=call):
                    self.jax.block_until_ready(call(x))
                    return x

                times.append(self.median(calls, inputs, repeats=5) / 5)
            words.append(f"{name} {times[0] * 1e3:.0f}/{times[1] * 1e3:.0f}")
        return True, "microseconds, 1024 heads, forward / both: " + ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
