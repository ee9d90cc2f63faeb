"""Every implementation on this machine's GPU against the float64 oracle, and the pitfalls of GPUs.

    python tests/gpu/run.py [--parts cases,long,table,...] [--implementations ...]

Prints one line a check and ends with a non-zero status if any failed. Inputs are rounded to
bfloat16 once, so that float32 and bfloat16 runs share one oracle, which runs in other processes
while the kernels compile. An implementation that cannot run here is skipped, with the reason,
unless it was named on the command line.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402

STATE = ("memory", "penalty", "key_sum")
PARTS = ("cases", "long", "table", "decode", "transforms", "pitfalls", "timing")
# Relative root mean square: (values, gradients).
TOLERANCE = {"float32": (1e-4, 4e-4), "bfloat16": (2e-2, 2e-2)}
# The kernels' error in bfloat16 over that of plain JAX, at most.
AGAINST_XLA = 1.5


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. ``kind``: how keys and directions are drawn."""

    name: str
    length: int
    dim: int
    value_dim: int
    kind: str = "random"
    lambda0: float = 0.1
    batch: int = 1
    heads: int = 2
    groups: int = 1
    segments: bool = False
    initial: bool = False
    learned: bool = True
    write_gain: str = "unit"
    readout: str = "ratio"
    slack: float = 1.0  # multiplies the tolerances
    seed: int = 0

    @property
    def options(self):
        return {"write_gain": self.write_gain, "readout": self.readout}


PROBLEMS = (
    Problem("T1", 1, 16, 5, initial=True, batch=2),
    Problem("T17 groups segments", 17, 64, 32, groups=2, segments=True, initial=True, batch=2),
    Problem("T64 projection", 64, 128, 128, initial=True, write_gain="projection"),
    Problem("T64 rls no ratio", 64, 24, 40, learned=False, write_gain="rls", readout="none"),
    Problem("T1000 segments", 1000, 64, 64, segments=True, initial=True),
    Problem("T4096", 4096, 64, 64),
    Problem("T4096 d128", 4096, 128, 128, heads=1),
    # Each of the equal writes is off by the rounding of A k, where A's largest eigenvalue is 150
    # times k's own. No ratio: the gradient of its query would be zero.
    Problem("T1000 equal keys", 1000, 64, 64, "equal", learned=False, readout="none", slack=10),
    Problem("T1000 keys of one sign", 1000, 64, 64, "sign", learned=False),
    Problem("T1000 cond 1e4", 1000, 64, 64, "cond"),
    Problem("T1000 lambda0 1e-3", 1000, 64, 64, lambda0=1e-3),
    Problem("T1000 lambda0 1e3", 1000, 64, 64, lambda0=1e3),
)
# Of the chunkwise paths alone: one launch for all tokens is for short sequences.
LONG = (Problem("T65536", 65536, 64, 64, heads=1),)
CHUNKWISE = ("xla", "pallas")
KERNELS = ("pallas", "triton")


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def draw(p):
    """(inputs, cotangents, segment_ids): float64 numbers that bfloat16 holds."""
    rng = np.random.default_rng(p.seed)
    shape = (p.batch, p.length, p.heads, p.dim)
    raw = rng.standard_normal(shape)
    feature = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
    key, direction = feature(raw), None
    if p.kind == "equal":
        key = np.broadcast_to(key[:, :1], shape)
    if p.kind == "sign":
        key = 3 + 0.1 * raw
    if p.learned:
        direction = np.einsum("bthd,hde->bthe", raw, rng.standard_normal((p.heads, p.dim, p.dim)))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True) * np.sqrt(p.dim)
    if p.kind == "cond":  # cond(M) = (lambda0 + T) / lambda0
        common = rng.standard_normal(p.dim)
        direction = 0.01 * direction + common / np.linalg.norm(common)
    inputs = {
        "query": feature(rng.standard_normal((*shape[:2], p.heads * p.groups, p.dim))),
        "key": key,
        "value": rng.standard_normal((*shape[:3], p.value_dim)),
        "direction": direction,
    }
    inputs = {n: rounded(x) for n, x in inputs.items() if x is not None}
    state = (
        rng.standard_normal((p.batch, p.heads, p.dim, p.value_dim)),
        np.zeros((p.batch, p.heads, p.dim, p.dim)),
        feature(rng.standard_normal((p.batch, p.heads, p.dim))),
    )
    if p.initial:
        past = rng.standard_normal((p.batch, p.heads, 2 * p.dim, p.dim)) / np.sqrt(p.dim)
        penalty = rounded(np.einsum("bhnd,bhne->bhde", past, past))
        state = (state[0], (penalty + penalty.mT) / 2, state[2])
    inputs.update(zip(STATE, (x.astype(np.float32).astype(np.float64) for x in state), strict=True))
    if not p.initial:
        inputs.update({n: np.zeros_like(inputs[n]) for n in STATE})
    inputs["lambda0"] = np.full(p.heads, np.float64(np.float32(p.lambda0)))
    segment_ids = None
    if p.segments:
        segment_ids = np.cumsum(rng.random(shape[:2]) < 0.05, axis=1).astype(np.int32)
    cotangents = {"out": rounded(rng.standard_normal((*inputs["query"].shape[:3], p.value_dim)))}
    cotangents.update({n: rounded(rng.standard_normal(inputs[n].shape)) for n in STATE})
    return inputs, cotangents, segment_ids


def expected(p):
    """Values and gradients of the oracle: {name: array}."""
    inputs, cotangents, segment_ids = draw(p)
    call = {n: inputs.get(n) for n in ("query", "key", "value", "direction", "lambda0")}
    call |= {"initial_state": tuple(inputs[n] for n in STATE), "segment_ids": segment_ids}
    call |= p.options
    out, state, _ = oracle.attention(**call)
    gradients = oracle.attention_grad(
        cotangents["out"], tuple(cotangents[n] for n in STATE), **call
    )
    values = {"out": out} | dict(zip(STATE, state, strict=True))
    return values | {f"d_{n}": x for n, x in gradients.items() if x is not None}


# --- what follows needs the library, and so a GPU ------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--implementations", default="")
    parser.add_argument(
        "--only", default="", help="run problems and timings whose name contains this, or a|b"
    )
    parser.add_argument("--selftest", action="store_true", help="python -m vla_jax.selftest too")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: any of {','.join(PARTS)}")
    return Run(args, parts).everything()


class Run:
    """The checks and their outcome."""

    def __init__(self, args, parts):
        import jax

        import vla_jax
        from vla_jax import bundles, implementations, plan, triton
        from vla_jax.pallas import common
        from vla_jax.pallas.triton import decode, delta_rule, penalty_solve

        self.jax, self.np, self.vla = jax, jax.numpy, vla_jax
        self.bundles, self.implementation_of, self.plan = bundles, implementations.module, plan
        self.common, self.decode_kernel = common, decode
        tables = (
            penalty_solve.TABLE, delta_rule.TABLE, delta_rule.TABLE_FLOAT32, triton.TABLE,
        )  # fmt: skip
        self.dims = sorted({16}.union(*tables))
        self.args, self.parts = args, parts
        self.failures, self.checks, self.started = [], 0, time.time()
        device = jax.devices()[0]
        print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
        self.implementations = self.available()

    def say(self, *words):
        print(f"[{time.time() - self.started:5.0f}s]", *words, flush=True)

    def report(self, name, passed, detail=""):
        self.checks += 1
        if not passed:
            self.failures.append(name)
        self.say("PASS" if passed else "FAIL", name, detail)

    def wanted(self, name):
        return any(part in name for part in self.args.only.split("|"))

    def guarded(self, name, check, *args):
        """``check(*args)`` returns (passed, detail); an exception is a failure."""
        try:
            self.report(name, *check(*args))
        except Exception as error:
            self.report(name, False, f"{type(error).__name__}: {str(error)[:300]}")

    def available(self):
        named = [n for n in self.args.implementations.split(",") if n]
        found = []
        for name in named or ("xla", "pallas", "triton"):
            reason = self.unsupported(name, 64)
            if reason is None:
                found.append(name)
            elif named:
                self.report(name, False, reason)
            else:
                self.say("SKIP", name, reason[:200])
        return found

    def unsupported(self, name, dim):
        """Why the kernels of that name cannot serve this head dimension; None if they can."""
        if name not in KERNELS:
            return None
        x = self.jax.ShapeDtypeStruct((1, 1, 1, dim), self.np.float32)
        bundle = self.bundles.Attention(x, x, x, *[None] * 5)
        return self.implementation_of(name).unsupported(bundle, None)

    def everything(self):
        selftest = None
        if self.args.selftest:  # pitfall 25
            command = [sys.executable, "-m", "vla_jax.selftest"]
            selftest = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        problems = [*(PROBLEMS if "cases" in self.parts else ())]
        problems += LONG if "long" in self.parts else ()
        if "table" in self.parts:  # every entry of the kernels' tables of parameters
            problems += [
                Problem(f"table d{d}", 200, d, d, segments=True, initial=True) for d in self.dims
            ]
        problems = [p for p in problems if self.wanted(p.name)]
        self.compare(problems)
        for part in ("decode", "transforms", "pitfalls", "timing"):
            if part in self.parts:
                getattr(self, part)()
        if selftest is not None:
            text, _ = selftest.communicate(timeout=300)
            self.report("pitfall 25: selftest", selftest.returncode == 0, "\n" + text[-1500:])
        print(f"{self.checks} checks, {len(self.failures)} failed", *self.failures, sep="\n  ")
        return 1 if self.failures else 0

    # --- values and gradients against the oracle -------------------------------------------------

    def attention(self, implementation, p, inputs, segment_ids):
        """out and the state, keyed by name."""
        inputs = dict(inputs)
        state = self.vla.VLAState(*(inputs.pop(n) for n in STATE))
        out, state = self.vla.vla_attention(
            **inputs, initial_state=state, segment_ids=segment_ids, return_state=True,
            implementation=implementation, **p.options,
        )  # fmt: skip
        return {"out": out} | {n: getattr(state, n) for n in STATE}

    def function(self, implementation, p):
        """A function of (inputs, cotangents, segment_ids): values and gradients, keyed by name."""

        def run(inputs, cotangents, segment_ids):
            values, pull = self.jax.vjp(
                lambda x: self.attention(implementation, p, x, segment_ids), inputs
            )
            return values | {f"d_{n}": x for n, x in pull(cotangents)[0].items()}

        return run

    def arrays(self, p, dtype):
        inputs, cotangents, segment_ids = draw(p)
        wide = (*STATE, "lambda0")
        cast = lambda n, x: self.np.asarray(x, "float32" if n in wide else dtype)  # noqa: E731
        inputs = {n: cast(n, x) for n, x in inputs.items()}
        cotangents = {n: cast(n, x) for n, x in cotangents.items()}
        return inputs, cotangents, None if segment_ids is None else self.np.asarray(segment_ids)

    def compile(self, implementation, p, dtype):
        arrays = self.arrays(p, dtype)
        return self.jax.jit(self.function(implementation, p)).lower(*arrays).compile(), arrays

    def errors(self, actual, wanted, dtype, slack=1.0):
        """(worst error over its tolerance, description)."""
        worst, words = 0.0, []
        for name, want in wanted.items():
            got = np.asarray(actual[name]).astype(np.float64)
            norm = np.linalg.norm(want)
            if name == "d_lambda0":  # a sum of terms of both signs, of the size of d_penalty's
                norm = max(norm, np.linalg.norm(wanted["d_penalty"]))
            error = np.linalg.norm(got - want) / max(norm, 1e-30)
            ratio = error / TOLERANCE[dtype][name.startswith("d_")] / slack
            worst = max(worst, ratio if np.isfinite(ratio) else np.inf)
            words.append((ratio if np.isfinite(ratio) else np.inf, f"{name} {error:.1e}"))
        return worst, " ".join(w for _, w in sorted(words, reverse=True)[:4])

    def compare(self, problems):
        jobs = []
        for p in problems:
            for implementation in self.implementations:
                if self.unsupported(implementation, max(p.dim, p.value_dim)) is not None:
                    continue
                if p in LONG and implementation not in CHUNKWISE:
                    continue
                dtypes = ["float32", "bfloat16"]
                if implementation == "xla" and p not in LONG:  # tested elsewhere: for comparison
                    dtypes = ["bfloat16"]
                jobs += [(p, implementation, dtype) for dtype in dtypes]
        spawn = multiprocessing.get_context("spawn")
        with (
            concurrent.futures.ProcessPoolExecutor(8, mp_context=spawn) as oracles,
            concurrent.futures.ThreadPoolExecutor(8) as threads,
        ):
            slow_first = sorted(problems, key=lambda p: -p.length * p.dim**2)
            wanted = {p: oracles.submit(expected, p) for p in slow_first}
            compiled = {j: threads.submit(self.compile, j[1], j[0], j[2]) for j in jobs}
            found = {}
            for job in jobs:
                p, implementation, dtype = job

                def check(job=job, p=p, dtype=dtype):
                    function, arrays = compiled.pop(job).result()
                    worst, words = self.errors(
                        function(*arrays), wanted[p].result(), dtype, p.slack
                    )
                    found[job] = worst
                    return worst <= 1, f"{worst:7.3f} of tolerance: {words}"

                self.guarded(f"{implementation:9} {dtype:8} {p.name}", check)
        for p in problems:
            pair = [found.get((p, name, "bfloat16")) for name in ("pallas", "xla")]
            if None not in pair:
                ratio = pair[0] / pair[1]
                detail = f"{ratio:.2f} of the largest error of xla"
                self.report(f"pallas against xla, bfloat16 {p.name}", ratio <= AGAINST_XLA, detail)

    # --- decoding --------------------------------------------------------------------------------

    def decode(self):
        """22 tokens through the kernel, the inverse derived again on the way, and the jnp path."""
        if "pallas" not in self.implementations:
            return
        jax, jnp = self.jax, self.np
        for dim, value_dim, groups, learned in ((128, 128, 1, True), (12, 20, 2, False)):
            p = Problem("decode", 22, dim, value_dim, groups=groups, learned=learned, initial=True)
            inputs, _, _ = draw(p)
            out, state, _ = oracle.attention(
                **{n: inputs.get(n) for n in ("query", "key", "value", "direction", "lambda0")},
                initial_state=tuple(inputs[n] for n in STATE),
            )
            arrays = {n: jnp.asarray(x, "float32") for n, x in inputs.items()}
            state = (out, *state)

            def steps(kernel, arrays=arrays, p=p):
                start = self.vla.init_state(p.batch, p.heads, p.dim, p.value_dim)
                start = start.replace(**{n: arrays[n] for n in STATE})
                names = [n for n in ("query", "key", "value", "direction") if n in arrays]
                tokens = {n: jnp.moveaxis(arrays[n], 1, 0) for n in names}

                def step(carry, token):
                    token = [token.get(n) for n in ("query", "key", "value", "direction")]
                    if kernel:
                        out, carry = self.step(
                            p, *token, arrays["lambda0"], carry, rederive_every=7
                        )
                    else:
                        out, carry = self.vla.vla_step(*token, carry, lambda0=arrays["lambda0"])
                    return carry, out

                end, out = jax.lax.scan(step, start, tokens)
                return jnp.moveaxis(out, 0, 1), *(getattr(end, n) for n in STATE), end.inverse

            for kernel in (True, False):

                def check(kernel=kernel, want=state, steps=steps):
                    got = jax.jit(functools.partial(steps, kernel))()
                    errors = [
                        np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w)
                        for g, w in zip(got, want, strict=False)
                    ]
                    return max(errors) < 1e-5, f"largest error {max(errors):.1e}"

                which = "kernel" if kernel else "vla_step"
                self.guarded(f"decode d{dim} {which}", check)

    def step(self, p, *arrays, **params):
        """One step of the kernel, whose parameters those given override: (out, state)."""
        table = self.decode_kernel.TABLE
        entry = self.common.parameters(table, max(p.dim, p.value_dim))
        inputs = self.bundles.Step(*arrays)
        lambda0 = self.np.broadcast_to(inputs.lambda0, inputs.key.shape[:2])
        plan = self.plan.Plan("pallas", None, variant=self.plan.Variant(**p.options))
        return self.decode_kernel.forward(
            plan, inputs._replace(lambda0=lambda0), dataclasses.replace(entry, **params)
        )[0]

    # --- transformations --------------------------------------------------------------------------

    def transforms(self):
        for name in [n for n in self.implementations if n in KERNELS]:
            for check in (self.exported, self.mapped_over_devices, self.rematerialised):
                self.guarded(f"{check.__name__} {name}", check, name)

    def transformed(self, name, transform):
        """Whether values and gradients are those of the plain call, bit by bit: (passed, words)."""
        p = Problem("", 100, 32, 24, batch=2, segments=True)
        inputs, cotangents, segment_ids = self.arrays(p, "bfloat16")
        arrays = [inputs[n] for n in ("query", "key", "value", "direction")]
        cotangent = cotangents["out"].astype("bfloat16")

        def attend(*arrays):
            return self.vla.vla_attention(*arrays, segment_ids=segment_ids, implementation=name)

        def both(attend):
            def run(*arrays):
                out, pull = self.jax.vjp(attend, *arrays)
                return out, pull(cotangent)

            return run

        want = self.jax.jit(both(attend))(*arrays)
        got = transform(attend, both, arrays)
        equal = all(
            bool((g == w).all())
            for g, w in zip(self.jax.tree.leaves(got), self.jax.tree.leaves(want), strict=True)
        )
        return equal, "bitwise equal" if equal else "differs"

    def exported(self, name):
        """Written to bytes and read again, with the documented checks off."""
        from vla_jax.pallas import export_checks

        export = self.jax.export

        def transform(attend, both, arrays):
            function = self.jax.jit(both(attend))
            data = export.export(function, disabled_checks=export_checks())(*arrays).serialize()
            return export.deserialize(data).call(*arrays)

        return self.transformed(name, transform)

    def mapped_over_devices(self, name):
        """Inside shard_map, with its check of replication."""
        jax = self.jax
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("data")

        def transform(attend, both, arrays):
            sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
            return jax.jit(both(sharded))(*arrays)

        return self.transformed(name, transform)

    def rematerialised(self, name):
        """Under jax.checkpoint."""
        return self.transformed(
            name,
            lambda attend, both, arrays: self.jax.jit(both(self.jax.checkpoint(attend)))(*arrays),
        )

    # --- pitfalls --------------------------------------------------------------------------------

    def pitfalls(self):
        for name in [n for n in self.implementations if n in KERNELS]:
            for number, check in (
                (2, self.repeated_direction),
                (14, self.many_heads),
                (15, self.too_large),
                (19, self.float32_is_float32),
                (20, self.x64),
                (21, self.vmapped),
                (27, self.deterministic),
            ):
                self.guarded(f"pitfall {number} {name}", check, name)

    def repeated_direction(self, name):
        p = Problem("", 4096, 64, 64, "equal", learned=False)
        arrays = self.arrays(p, "bfloat16")
        got = self.jax.jit(self.function(name, p))(*arrays)
        finite = all(bool(self.np.isfinite(x).all()) for x in got.values())
        penalty = np.asarray(got["penalty"], np.float64)
        smallest = np.linalg.eigvalsh(np.linalg.inv(penalty + 0.1 * np.eye(64))).min()
        wide = got["penalty"].dtype == got["memory"].dtype == self.np.float32
        return finite and smallest > 0 and wide, f"smallest eigenvalue of A {smallest:.2e}"

    def many_heads(self, name):
        p = Problem("", 2, 16, 16, batch=32769, heads=2)
        arrays = self.arrays(p, "float32")
        got = self.jax.jit(self.function(name, p))(*arrays)
        inputs, _, _ = draw(p)
        last = {n: x if n == "lambda0" else x[-3:] for n, x in inputs.items() if n not in STATE}
        want, _, _ = oracle.attention(**last, **p.options)
        error = np.abs(np.asarray(got["out"][-3:]) - want).max() / np.abs(want).max()
        return error < 1e-5, f"65538 heads, error {error:.1e}"

    def too_large(self, name):
        size = self.jax.ShapeDtypeStruct((8, 65536, 65, 64), self.np.bfloat16)
        attend = functools.partial(self.vla.vla_attention, implementation=name)
        try:
            self.jax.jit(attend).trace(size, size, size)
        except NotImplementedError as error:
            return True, f"refused: {str(error)[:100]}"
        return False, "accepted 2**31 elements without a test"

    def float32_is_float32(self, name):
        p = Problem("", 256, 64, 64)
        got = self.jax.jit(self.function(name, p))(*self.arrays(p, "float32"))
        worst, words = self.errors(got, expected(p), "float32")
        return worst < 0.2, words

    def x64(self, name):
        p = Problem("", 40, 16, 24, segments=True, initial=True)
        with self.jax.enable_x64(False):
            arrays = self.arrays(p, "bfloat16")
            narrow = self.jax.jit(self.function(name, p))(*arrays)
        with self.jax.enable_x64(True):
            wide = self.jax.jit(self.function(name, p))(*arrays)
            equal = all(bool((narrow[n] == wide[n]).all()) for n in narrow)
            double = [self.np.ones((1, 3, 1, 16), "float64")] * 3
            try:
                self.vla.vla_attention(*double, implementation=name)
                refused = False
            except NotImplementedError:
                refused = True
            works = self.vla.vla_attention(*double, implementation="xla").dtype == "float64"
        return equal and refused and works, f"equal {equal}, float64 refused {refused}"

    def vmapped(self, name):
        jax, jnp = self.jax, self.np
        p = Problem("", 20, 16, 16, batch=2)
        x = self.arrays(p, "float32")[0]

        def loss(query, key, value, direction):
            out = self.vla.vla_attention(query, key, value, direction, implementation=name)
            return (out**2).sum()

        stacked = [jnp.stack([x[n], 2 * x[n]]) for n in ("query", "value")]
        mapped = jax.vmap(
            jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), in_axes=(0, None, 0, None)
        )
        arguments = stacked[0], x["key"], stacked[1], x["direction"]
        single = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        got = jax.jit(mapped)(*arguments)
        error = 0.0
        for i in range(2):
            want = single(stacked[0][i], x["key"], stacked[1][i], x["direction"])
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                error = max(error, float(jnp.abs(g[i] - w).max() / jnp.abs(w).max()))
        launches = [
            jax.jit(f).lower(*a).as_text().count("custom_call")
            for f, a in (
                (mapped, arguments),
                (single, (stacked[0][0], x["key"], stacked[1][0], x["direction"])),
            )
        ]
        return error < 1e-5 and launches[0] <= launches[1], f"error {error:.1e}, calls {launches}"

    def deterministic(self, name):
        p = Problem("", 500, 64, 64, batch=4, heads=8, segments=True, initial=True)
        arrays = self.arrays(p, "bfloat16")
        run = self.jax.jit(self.function(name, p))
        first, second = run(*arrays), run(*arrays)
        return all(bool((first[n] == second[n]).all()) for n in first), "bitwise equal"

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
        p = Problem("", count, dim, dim, batch=batch, heads=heads)
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
                        out, state = self.step(p, *token, lambda0, state, **params)
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
        p = Problem("", length, dim, dim, batch=64, heads=16)
        arrays = self.arrays(p, "bfloat16")
        words = []
        for name in self.implementations:
            both = self.jax.jit(self.function(name, p))

            def forward(x, name=name):
                return self.attention(name, p, x[0], x[2])["out"]

            def repeat(call):
                def calls(x):
                    out = [call(x) for _ in range(5)]
                    self.jax.block_until_ready(out)
                    return x

                return calls

            times = [
                self.median(repeat(f), arrays, repeats=5) / 5
                for f in (self.jax.jit(forward), lambda x, both=both: both(*x))
            ]
            words.append(f"{name} {times[0] * 1e3:.0f}/{times[1] * 1e3:.0f}")
        return True, "microseconds, 1024 heads, forward / both: " + ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
