"""Times vla_attention beside its peers: same shapes, same inputs, same run.

    python benchmarks/run.py                                  # what suits this machine
    python benchmarks/run.py --workloads=d64-T4096,d64-T16384 --dtype=bfloat16
    python benchmarks/run.py --gates=read --peers= --name=read
    python benchmarks/run.py --workloads=d64-T4096 --lengths=1024,4096,16384 --constant_tokens

Everything is compiled first, side by side. Every implementation of ours is then compared with the
float64 oracle of the tests, values and gradients, on a slice of the workload (one sequence, one
head, at most --check_length tokens); no time is printed for one that fails. A time is the median
over --repeats of the mean over enough back-to-back calls to fill --min_seconds, compiled and warmed
up before, waited for at the end (on a CPU, one by one).

Forward and backward is the gradient of every input from a cotangent that is given.

Peers: softmax attention (`jax.nn.dot_product_attention`, cuDNN flash attention on a GPU); where
`jla` (jax-linear-attention) can be imported, its DeltaNet and gated DeltaNet; where torch and fla
can be, fla's linear attention, DeltaNet and MesaNet, as CUDA graphs, so that launches from Python
do not count.

Writes OUT/NAME.json and OUT/NAME.png and prints the table.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the device
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import cases  # noqa: E402
import commands  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
from absl import app, flags  # noqa: E402

import vla_jax  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_list("workloads", None, "names in benchmarks/cases.py: WORKLOADS")
flags.DEFINE_list("lengths", [], "instead of the workload's own length, these")
flags.DEFINE_bool("constant_tokens", False, "with --lengths: shrink the batch as T grows")
flags.DEFINE_list("implementations", None, "of ours; default: those that suit the device")
PEERS = ("softmax", "jla_delta", "jla_gated", "fla_linear", "fla_delta", "fla_mesa")
flags.DEFINE_list("peers", None, f"{', '.join(PEERS)}; default: what is there")
flags.DEFINE_enum("gates", None, ["write", "read"], "ours: weights, decay and the inverse there")
flags.DEFINE_bool("cpu_time", False, "processor time of all threads: on a CPU that others use too")
flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "default: bfloat16 on a GPU")
flags.DEFINE_integer("repeats", 5, "timed repeats, the median of which counts", lower_bound=1)
flags.DEFINE_float("min_seconds", 0.05, "least duration of one repeat", lower_bound=0)
flags.DEFINE_integer("check_length", 1024, "most tokens of the comparison with the oracle")
flags.DEFINE_integer("softmax_length", 65536, "longest sequence that softmax is timed on")
flags.DEFINE_string("out_dir", str(ROOT / "benchmarks" / "results"), "where the results go")
flags.DEFINE_string("name", None, "of the result files; default: device and dtype")
flags.DEFINE_bool("only_plot", False, "time nothing and draw OUT/NAME.png from OUT/NAME.json")

NAMES = ("query", "key", "value", "direction")
GATES = ("beta", "log_decay")
PACKAGES = {"torch": "torch", "triton": "triton", "fla": "fla-core", "jla": "jax-linear-attention"}
# Names of curves.
LABELS = {
    "pallas": "VLA", "xla": "VLA, plain JAX", "associative": "VLA, associative scan",
    "reference": "VLA, token by token", "triton": "VLA, jax-triton", "softmax": "softmax",
    "jla_delta": "DeltaNet (jla)", "jla_gated": "gated DeltaNet (jla)",
    "fla_linear": "linear (fla)", "fla_delta": "DeltaNet (fla)", "fla_mesa": "MesaNet (fla)",
}  # fmt: skip
# Largest accepted error relative to the largest entry, values and gradients: float32 arithmetic at
# the condition numbers of these inputs, and twice the rounding that 16-bit operands bring.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclasses.dataclass
class Row:
    """One line of the table."""

    implementation: str
    workload: str
    batch: int
    length: int
    heads: int
    dim: int
    dtype: str
    error: float | None = None
    gradient_error: float | None = None
    forward_ms: float | None = None
    both_ms: float | None = None
    forward_tokens_per_s: float | None = None
    temporary_bytes: int | None = None
    peak_bytes: int | None = None  # of forward and backward: inputs, results and temporaries
    note: str = ""


def peer(row):
    """Whether the row is of something that is not ours."""
    return row.implementation in PEERS


def wall(call, wait):
    """Median seconds a call over the repeats; the first call compiles and is not counted."""
    clock = time.process_time if FLAGS.cpu_time else time.perf_counter
    wait(call())
    start = clock()
    wait(call())
    once = clock() - start
    count = max(1, int(FLAGS.min_seconds / max(once, 1e-6)))
    times = []
    for _ in range(FLAGS.repeats):
        start = clock()
        for _ in range(count):
            out = call()
            if jax.default_backend() == "cpu":  # calls in flight at once would share the cores
                wait(out)
        wait(out)
        times.append((clock() - start) / count)
    return statistics.median(times)


def draw(case, dtype):
    """Inputs on the device, made there: a fixed map of random keys gives the directions.

    With ``--gates`` weights up to 1 and a decay over 10 to 1000 tokens follow.
    """

    @jax.jit
    def make(rng):
        q, k, v, u = jax.random.split(rng, 4)
        shape = (case.batch, case.length, case.heads)
        raw = jax.random.normal(k, (*shape, case.dim))
        mixing = jax.random.normal(u, (case.heads, case.dim, case.dim))
        direction = jnp.einsum("bthd,hde->bthe", raw, mixing)
        direction /= jnp.linalg.norm(direction, axis=-1, keepdims=True)
        if FLAGS.gates != "read":
            direction /= case.dim**0.5
        query = jax.random.normal(q, (*shape[:2], case.heads * case.groups, case.dim))
        value = jax.random.normal(v, (*shape, case.value_dim))
        arrays = (vla_jax.feature_map(query), vla_jax.feature_map(raw), value, direction)
        arrays = tuple(x.astype(dtype) for x in arrays)
        if FLAGS.gates is None:
            return arrays
        beta, decay = jax.random.uniform(jax.random.fold_in(rng, 1), (2, *shape))
        return *arrays, beta, -(10 ** (-1 - 2 * decay))

    return jax.block_until_ready(make(jax.random.key(0)))


def relative_error(actual, expected):
    """Largest difference over the largest expected entry; infinite for NaN."""
    actual = np.asarray(actual, np.float64)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    return float(error) if np.isfinite(error) else float("inf")


@functools.lru_cache(maxsize=2)
def slice_of(case, dtype):
    """What one sequence and head of the workload should give: inputs, cotangent, out, gradients."""
    arrays = draw(case, dtype)
    wide = named(np.asarray(x, np.float64) for x in arrays)
    out, state, _ = oracle.attention(**wide, **options(case))
    # The ratio read-out fades like 1/t: weigh late tokens as much as early ones.
    cotangent = np.random.default_rng(0).standard_normal(out.shape)
    cotangent *= np.arange(1, case.length + 1)[:, None, None]
    cotangent = np.asarray(jnp.asarray(cotangent, dtype), np.float64)
    zeros = tuple(np.zeros_like(x) for x in state)
    gradients = oracle.attention_grad(cotangent, zeros, **wide, **options(case))
    return arrays, cotangent, out, gradients


def slice_case(case):
    """What of a workload is compared with the oracle: one sequence and head."""
    length = min(case.length, FLAGS.check_length)
    return dataclasses.replace(case, batch=1, heads=1, groups=1, length=length)


@functools.lru_cache
def check(implementation, case, dtype):
    """Errors of values and gradients of a ``slice_case`` against the oracle."""
    arrays, cotangent, out, gradients = slice_of(case, dtype)

    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(ours(implementation, case), *arrays)
        return out, pull(cotangent.astype(out.dtype))

    found, gradients_found = run(arrays, jnp.asarray(cotangent, jnp.float32))
    late = np.arange(1, case.length + 1)[:, None, None]
    errors = [relative_error(g, gradients[n]) for n, g in named(gradients_found).items()]
    return relative_error(np.asarray(found, np.float64) * late, out * late), max(errors)


def lowered(function, arrays):
    """The forward pass, and that with the gradients from a cotangent, before compilation."""

    def both(cotangent, *arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(cotangent)

    cotangent = jax.eval_shape(function, *arrays)
    return jax.jit(function).lower(*arrays), jax.jit(both).lower(cotangent, *arrays)


def time_jax(row, compiled, arrays):
    """Fills in the times and the memory of the forward pass and of its gradient."""
    forward, both = compiled
    cotangent = jax.block_until_ready(jnp.ones_like(forward(*arrays)))
    row.forward_ms = 1e3 * wall(lambda: forward(*arrays), jax.block_until_ready)
    row.both_ms = 1e3 * wall(lambda: both(cotangent, *arrays), jax.block_until_ready)
    if (m := both.memory_analysis()) is not None:
        row.temporary_bytes = m.temp_size_in_bytes
        row.peak_bytes = sum(
            (m.temp_size_in_bytes, m.argument_size_in_bytes, m.output_size_in_bytes)
        )


def named(arrays):
    """What ``draw`` made, as arguments."""
    return dict(zip(NAMES + GATES if FLAGS.gates else NAMES, arrays, strict=True))


def options(case):
    """The other arguments; at the read, where directions have length 1, λ₀ has its default."""
    if FLAGS.gates == "read":
        return {"inverse": "read", "lambda0": 1.0}
    return {"lambda0": case.lambda0}


def ours(implementation, case):
    """`vla_attention` of this workload."""

    def function(*arrays):
        return vla_jax.vla_attention(
            **named(arrays), **options(case), implementation=implementation
        )

    return function


def softmax(backend):
    """`jax.nn.dot_product_attention`, cuDNN flash attention on a GPU."""

    def function(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=backend)

    return function


def jla(kind, case):
    """DeltaNet or gated DeltaNet of jax-linear-attention, its kernels on a GPU.

    Without ``--gates`` all weights are 1 and nothing decays.
    """
    from jla import ops

    impl = "mosaic_gpu" if jax.default_backend() == "gpu" else "chunked"

    def function(q, k, v, beta, log_decay=None):
        k, v, beta = (jnp.repeat(x, case.groups, axis=2) for x in (k, v, beta))
        gates = {"beta": beta} if log_decay is None else {"beta": beta, "g": log_decay}
        return ops.linear_attention(kind, q, k, v, **gates, use_qk_l2norm=True, impl=impl)[0]

    return function


def jla_inputs(row, arrays):
    """What a row of jla takes of what ``draw`` made."""
    shape = arrays[1].shape[:3]
    beta, decay = arrays[4:] or (jnp.ones(shape), jnp.zeros(shape))
    inputs = (*arrays[:3], beta.astype(arrays[2].dtype))
    return inputs if row.implementation == "jla_delta" else (*inputs, decay)


def prepare(row, case, arrays):
    """What is to be compiled for a row: lowered programs and their inputs; None for fla's."""
    if row.implementation.startswith("fla_"):
        return None
    if row.implementation == "softmax":
        backend = "cudnn" if jax.default_backend() == "gpu" else "xla"
        row.note = f"jax.nn.dot_product_attention(implementation={backend!r})"
        if row.length > FLAGS.softmax_length:
            row.note = "not timed: its cost is quadratic (--softmax_length)"
            return None
        return lowered(softmax(backend), arrays[:3]), arrays[:3]
    if row.implementation.startswith("jla_"):
        kind = {"jla_delta": "deltanet", "jla_gated": "gated_deltanet"}[row.implementation]
        inputs = jla_inputs(row, arrays)
        try:
            return lowered(jla(kind, case), inputs), inputs
        except (ImportError, ValueError, NotImplementedError) as error:
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            return None
    try:
        return lowered(ours(row.implementation, case), arrays), arrays
    except NotImplementedError as error:
        row.note = str(error)
        return None


def measure(row, case, arrays, programs):
    """Checks the row if it is one of ours, and times it; what cannot be done is noted."""
    if row.implementation.startswith("fla_"):
        try:
            time_fla(row, case, arrays)
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        return
    if programs is None:
        return
    compiled, inputs = programs
    if not peer(row):
        row.error, row.gradient_error = check(row.implementation, slice_case(case), row.dtype)
        if max(row.error, row.gradient_error) > TOLERANCE[row.dtype]:
            row.note = "refused: the check against the oracle failed"
            return
    time_jax(row, compiled, inputs)


def time_fla(row, case, arrays):
    """The Triton kernels of flash-linear-attention under PyTorch, on the same inputs."""
    import torch  # ty: ignore
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.mesa_net import chunk_mesa_net

    q, k, v = (
        torch.tensor(
            np.asarray(x, np.float32), dtype=getattr(torch, row.dtype), device="cuda"
        ).requires_grad_()
        for x in arrays[:3]
    )
    shape = q.shape[:3]
    beta = torch.rand(shape, device="cuda", dtype=q.dtype).requires_grad_()
    calls = {
        "fla_linear": (lambda: chunk_linear_attn(q, k, v)[0], (q, k, v)),
        "fla_delta": (
            lambda: chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)[0],
            (q, k, v, beta),
        ),
    }
    if row.implementation == "fla_mesa":
        gate = torch.zeros(shape, device="cuda").requires_grad_()
        lamb = torch.full((shape[2], q.shape[-1]), 0.25, device="cuda").requires_grad_()

        def mesa():
            return chunk_mesa_net(q, k, v, gate, beta, lamb, use_qk_l2norm_in_kernel=True)[0]

        calls["fla_mesa"] = (mesa, (q, k, v, gate, beta, lamb))
    call, inputs = calls[row.implementation]
    with torch.no_grad():
        cotangent = torch.ones_like(call())

    def both():
        return torch.autograd.grad(call(), inputs, cotangent)

    def wait(_):
        torch.cuda.synchronize()

    def graphed(call):
        """One launch of all kernels, like a jitted program; they are tuned before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        except RuntimeError as error:
            row.note = f"launched from Python, no CUDA graph: {str(error).splitlines()[0][:60]}"
            return call
        return graph.replay

    both()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    both()
    row.temporary_bytes = torch.cuda.max_memory_allocated() - held
    row.peak_bytes = torch.cuda.max_memory_allocated()
    with torch.no_grad():
        row.forward_ms = 1e3 * wall(graphed(call), wait)
    row.both_ms = 1e3 * wall(graphed(both), wait)


def selected():
    """The workloads asked for, with their lengths."""
    gpu = jax.default_backend() == "gpu"
    names = FLAGS.workloads or (
        [n for n in cases.WORKLOADS if n.startswith("d")] if gpu else ["cpu-d32-T4096"]
    )
    for name in names:
        if name not in cases.WORKLOADS:
            raise app.UsageError(f"--workloads: {name!r} is none of {', '.join(cases.WORKLOADS)}")
        case = cases.WORKLOADS[name]
        for length in map(int, FLAGS.lengths or [case.length]):
            tokens = case.batch * case.length
            batch = max(1, tokens // length) if FLAGS.constant_tokens else case.batch
            yield name, dataclasses.replace(case, length=length, batch=batch)


def versions():
    """What a reader needs to place the figures."""
    device = jax.devices()[0]
    found = {
        "device": device.device_kind
        if device.platform == "gpu"
        else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "vla_jax": vla_jax.__version__,
    }
    for name in ("GLIBC_TUNABLES", "XLA_FLAGS"):
        if name in os.environ:
            found[name] = os.environ[name]
    for name, package in PACKAGES.items():
        if name in sys.modules:
            found[name] = importlib.metadata.version(package)
    return found


def table(rows):
    """The rows as text."""
    lines = [
        f"{'implementation':<16}{'workload':<18}{'B':>4}{'T':>8}{'error':>10}{'grad':>10}"
        f"{'forward ms':>12}{'fwd+bwd ms':>12}{'peak MiB':>10}  note"
    ]
    show = lambda x, form: "-" if x is None else format(x, form)  # noqa: E731
    for r in rows:
        memory = None if r.peak_bytes is None else r.peak_bytes / 2**20
        lines.append(
            f"{r.implementation:<16}{r.workload:<18}{r.batch:>4}{r.length:>8}"
            f"{show(r.error, '.1e'):>10}{show(r.gradient_error, '.1e'):>10}"
            f"{show(r.forward_ms, '.3f'):>12}{show(r.both_ms, '.3f'):>12}"
            f"{show(memory, '.0f'):>10}  {r.note}"
        )
    return "\n".join(lines)


def plot(rows, path):
    """Time of a token against T, log-log, one line an implementation: level is linear in T."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    kinds = sorted({(r.implementation, r.dim) for r in rows if r.both_ms is not None})
    for index, (name, dim) in enumerate(kinds):
        timed = [r for r in rows if (r.implementation, r.dim) == (name, dim) and r.both_ms]
        times = ((r.forward_ms, r.both_ms, 1e6 / (r.batch * r.length), r.length) for r in timed)
        mine = sorted((t, forward * each, both * each) for forward, both, each, t in times)
        style = {"marker": "os^Dv<>pX*"[index % 10], "color": f"C{index % 10}"}
        for axis, column in zip(axes, (1, 2), strict=True):
            axis.plot([m[0] for m in mine], [m[column] for m in mine], **style)
        axes[0].lines[-1].set_label(f"{LABELS.get(name, name)}, D = {dim}")
    for axis, title in zip(axes, ("forward", "forward + backward"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="T (tokens)", ylabel="ns a token", title=title)
        axis.grid(alpha=0.3, which="both")
    if kinds:
        axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def save(rows, found, path):
    """Writes what there is so far: a run that is stopped keeps its rows."""
    content = {
        "command": " ".join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "versions": found,
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv):
    """Times what the flags select, prints the table, writes the files."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    gpu = jax.default_backend() == "gpu"
    dtype = FLAGS.dtype or ("bfloat16" if gpu else "float32")
    names = FLAGS.implementations
    if names is None:
        names = ["pallas", "xla"] if gpu else ["reference", "xla"]
    peers = FLAGS.peers
    if peers is None:
        peers = PEERS if gpu else ["softmax"]
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise app.UsageError(f"--peers: {unknown[0]!r} is none of {', '.join(PEERS)}")
    found = versions()
    try:
        out = commands.directory(FLAGS.out_dir)
        stem = out / (FLAGS.name or f"{found['device'].replace(' ', '-') or 'cpu'}-{dtype}")
        for suffix in (".json", ".png"):
            commands.output(stem.with_name(stem.name + suffix), "name")
    except ValueError as error:
        sys.exit(f"run: {error}")
    if FLAGS.only_plot:
        kept = json.loads(stem.with_name(stem.name + ".json").read_text())["rows"]
        plot([Row(**row) for row in kept], stem.with_name(stem.name + ".png"))
        return
    jobs = []
    for name, case in selected():
        arrays = draw(case, dtype)
        for implementation in [*names, *peers]:
            row = Row(implementation, name, case.batch, case.length, case.heads, case.dim, dtype)
            jobs.append((row, case, arrays, prepare(row, case, arrays)))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # all is compiled before any is timed
        futures = [j[3] and [pool.submit(p.compile) for p in j[3][0]] for j in jobs]
        mine = [(row, case) for row, case, _, programs in jobs if programs]
        mine = {(r.implementation, slice_case(c), r.dtype) for r, c in mine if not peer(r)}
        for job in mine:  # kept; what fails is raised where the row is measured
            pool.submit(check, *job)
    rows = []
    for (row, case, arrays, programs), compiled in zip(jobs, futures, strict=True):
        if programs is not None:
            programs = [c.result() for c in compiled], programs[1]
        measure(row, case, arrays, programs)
        if row.forward_ms is not None:
            row.forward_tokens_per_s = 1e3 * case.batch * case.length / row.forward_ms
        rows.append(row)
        print(table([row]).splitlines()[1], flush=True)
        found = versions()  # those of torch and fla are known once they have been called
        save(rows, found, stem.with_name(stem.name + ".json"))
    print(f"\n{found}\n{table(rows)}")
    plot(rows, stem.with_name(stem.name + ".png"))


if __name__ == "__main__":
    app.run(main)
