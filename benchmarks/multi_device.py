"""Several devices against one: agreement, training steps, one long sequence, memory, bytes.

    python benchmarks/multi_device.py                          # on a machine with two GPUs
    JAX_NUM_CPU_DEVICES=2 python benchmarks/multi_device.py --tiny

Parts, all of them by default (--parts):

agreement  data parallel (jit and pmap) and context parallel against one device, values and
           gradients, float32 and bfloat16; a disagreement ends the run with status 1
alone      the op under jit on one device of all, and in a process that sees no other
data       the op under jit, its batch over all devices, against one: time, memory, collectives,
           and how many of the program's calls are kernels
scaling    training steps of a 30M-parameter model, the same batch on one device and on all
context    one sequence over all devices against one device, forward and forward + backward: time,
           memory, errors, and the bytes of the program's collectives beside the formula
exchange   the time of one exchange of the memory's map with the neighbour

Writes --out as JSON and prints a line for each result. A time is the median over --repeats.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import commands  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

import vla_jax  # noqa: E402
from vla_jax import sharding  # noqa: E402

PARTS = ("agreement", "alone", "data", "scaling", "context", "exchange")
# What None means everywhere; by name, so that a machine without the kernels says so.
NAMED = "pallas" if jax.default_backend() == "gpu" else "xla"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Largest difference over the largest entry. bfloat16: the rounding of 16-bit operands, twice.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
KERNEL = re.compile(r'custom_call_target="[^"]*(?:triton|mosaic)[^"]*"')


def collectives(text):
    """The collectives of a compiled program: {operation: [bytes of each result]}, a device's."""
    found = {}
    pattern = rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\("
    for shapes, operation, start in re.findall(pattern, text):
        sizes = []
        for kind, bits, dims in re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", shapes):
            width = 1 if kind == "pred" else int(bits) / 8
            sizes.append(int(width * math.prod(int(n) for n in dims.split(",") if n)))
        if start and operation in ("collective-permute", "all-gather"):
            sizes = sizes[len(sizes) // 2 :] if len(sizes) == 2 else sizes[1:2]  # operand, result
        found.setdefault(operation, []).append(sum(sizes))
    return found


def forward_bytes(devices, batch, heads, dim, value_dim):
    """What a device sends in the forward pass without segments and state, float32."""
    rounds = max(0, math.ceil(math.log2(devices - 1))) if devices > 1 else 0
    numbers = (rounds + 1) * dim * (dim + 1 + value_dim) + max(0, rounds - 1) * dim * dim
    return 4 * batch * heads * numbers


def mesh_of(name, devices):
    """All devices along one axis."""
    return jax.make_mesh((len(devices),), (name,), devices=devices)


def draw(shape, dtype):
    """Query, key, value and direction ``[B, T, H, D]``, made where they are used."""

    @jax.jit
    def make(key):
        q, k, v, u = (jax.random.normal(r, shape) for r in jax.random.split(key, 4))
        u = vla_jax.numerics.normalize(u) / math.sqrt(shape[-1])
        tokens = vla_jax.feature_map(q), vla_jax.feature_map(k), v, u
        return tuple(x.astype(dtype) for x in tokens)

    return jax.block_until_ready(make(jax.random.key(0)))


def attention(*tokens):
    """`vla_attention` as it comes: `implementation=None`."""
    return vla_jax.vla_attention(*tokens)


def on_one_device(*tokens):
    """`vla_attention` where no compiler partitions it."""
    return vla_jax.vla_attention(*tokens, implementation=NAMED)


def over_context(mesh):
    """`vla_attention` with the sequence over the mesh."""
    spec = jax.P(None, mesh.axis_names[0])
    local = functools.partial(
        sharding.context_parallel_attention, axis_name=mesh.axis_names[0], implementation=NAMED
    )
    return jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)


def with_gradient(attention):
    """`(out, *gradients)` of the tokens, from a cotangent that does not depend on `out`.

    It weighs late tokens as much as early ones: the ratio read-out fades like 1/t.
    """

    def function(*tokens):
        out, pullback = jax.vjp(attention, *tokens)
        late = 1 + jnp.arange(out.shape[1], dtype=jnp.float32)[:, None, None]
        cotangent = jnp.sin(7 * tokens[2].astype(jnp.float32)) * late / out.shape[1]
        return (out, *pullback(cotangent.astype(out.dtype)))

    return function


def relative_error(actual, expected):
    """Largest difference over the largest expected entry; infinite for NaN."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    return float(error) if np.isfinite(error) else float("inf")


def agreement(options, devices):
    """Errors against one device: {dtype: {way: [out, d_query, d_key, d_value, d_direction]}}."""
    count, results = len(devices), {}
    shape = (count, 16 * count, 2, 16) if options.tiny else (2 * count, 2048, 8, 64)
    for name in TOLERANCE:
        tokens = draw(shape, name)
        wanted = jax.jit(with_gradient(on_one_device))(*tokens)
        data = jax.device_put(tokens, NamedSharding(mesh_of("data", devices), jax.P("data")))
        parts = [x.reshape(count, -1, *x.shape[1:]) for x in tokens]
        context = mesh_of("context", devices)
        whole = jax.device_put(tokens, NamedSharding(context, jax.P(None, "context")))
        replica = jax.pmap(with_gradient(on_one_device), devices=devices)
        ways = {
            "data": jax.jit(with_gradient(attention))(*data),
            "pmap": [x.reshape(-1, *x.shape[2:]) for x in replica(*parts)],
            "context": jax.jit(with_gradient(over_context(context)))(*whole),
        }
        results[name] = {
            way: [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]
            for way, found in ways.items()
        }
    return results


def timed(function, arguments, repeats):
    """Median seconds of a call."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def memory_of(compiled):
    """Bytes of a device while the program runs: arguments, results and temporaries."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes


def measured(function, arguments, repeats):
    """Seconds, memory, collectives and the number of kernels of a program."""
    program = jax.jit(function).lower(*arguments).compile()
    text = program.as_text()
    return {
        "seconds": timed(program, arguments, repeats), "memory": memory_of(program),
        "collectives": collectives(text), "kernels": len(KERNEL.findall(text)),
    }  # fmt: skip


def work(options, count):
    """The shape of tokens for the op: so many times 65,536 of them, 16 heads of 64."""
    return (2 * count, 32, 2, 16) if options.tiny else (16 * count, 4096, 16, 64)


def alone(options, devices):
    """Seconds of the op on the first device: in this process, and where it is the only one."""
    tokens = draw(work(options, 1), "bfloat16")
    both = lambda *x: with_gradient(attention)(*x)[1:]  # noqa: E731
    functions = {"forward": attention, "both": both}
    several = {n: measured(f, tokens, 4 * options.repeats) for n, f in functions.items()}
    result = {"several": several, "visible": jax.device_count()}
    if jax.device_count() > 1:
        out = pathlib.Path(options.out).with_suffix(".alone.json")
        command = [sys.executable, __file__, "--parts", "alone", "--devices=1", f"--out={out}"]
        command += [f"--repeats={options.repeats}", *(["--tiny"] if options.tiny else [])]
        one = {"CUDA_VISIBLE_DEVICES": "0", "JAX_NUM_CPU_DEVICES": "1"}
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.15"}  # beside what this process has
        environment = {n: x for n, x in os.environ.items() if n != "XLA_FLAGS"}
        subprocess.run(command, env=environment | one | memory, check=True, capture_output=True)
        result["one"] = json.loads(out.read_text("utf-8"))["alone"]["several"]
        out.unlink()
        for name in functions:
            seconds = result["one"][name]["seconds"]
            result[f"{name}_ratio"] = several[name]["seconds"] / seconds
    return result


def data(options, devices):
    """The op over the batch: seconds, memory and collectives, on one device and on all."""
    tokens = draw(work(options, len(devices)), "bfloat16")
    mesh = mesh_of("data", devices)
    placed = jax.device_put(tokens, NamedSharding(mesh, jax.P("data")))
    both = lambda *x: with_gradient(attention)(*x)[1:]  # noqa: E731
    result = {"shape": tokens[0].shape}
    for name, function in (("forward", attention), ("both", both)):
        one, several = (measured(function, x, options.repeats) for x in (tokens, placed))
        result[name] = {"one": one, "several": several}
        result[f"{name}_speedup"] = one["seconds"] / several["seconds"]
    return result


def scaling(options, devices):
    """Seconds of a training step on one device and on all."""
    import training
    from flax import nnx
    from model import Model, ModelConfig
    from tasks import Batch

    if options.tiny:
        batch, length, sizes = 2 * len(devices), 8, dict(vocab_size=16, d_model=8, num_layers=1)
        sizes.update(num_heads=2, ffn_dim=8)
    else:
        batch, length, sizes = 64, 1024, dict(vocab_size=4096, d_model=512, num_layers=9)
        sizes.update(num_heads=8, ffn_dim=2048)
    graphdef, params = nnx.split(Model(ModelConfig(max_length=length, **sizes), nnx.Rngs(0)))
    config = training.TrainConfig(batch_size=batch)
    opt_state = config.optimizer().init(params)
    rng = np.random.default_rng(0)
    inputs, targets = (
        rng.integers(0, sizes["vocab_size"], (batch, length), np.int32) for _ in range(2)
    )
    data = Batch(inputs, targets, np.ones((batch, length), np.float32))
    result = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)), "batch": batch,
        "length": length,
    }  # fmt: skip
    for count in (1, len(devices)):
        mesh = mesh_of("data", devices[:count])
        arguments = (
            *training.place((params, opt_state), mesh, jax.P()),
            training.place(data, mesh, training.tokens_spec(mesh)),
        )
        lowered = training.train_step.lower(*arguments, graphdef=graphdef, config=config, mesh=mesh)
        step = lowered.compile()
        result[f"seconds_{count}"] = timed(step, arguments, options.repeats)
        result[f"bytes_{count}"] = memory_of(step)
        del arguments
    result["speedup"] = result["seconds_1"] / result[f"seconds_{len(devices)}"]
    return result


def context(options, devices):
    """One sequence: seconds, memory and bytes sent, on one device and on all."""
    heads, dim = (2, 16) if options.tiny else (16, 64)
    dtype = "float32" if options.tiny else "bfloat16"
    results = []
    for length in options.lengths or ([64, 128] if options.tiny else [131072, 524288]):
        shape = (1, length, heads, dim)
        tokens = draw(shape, dtype)
        row = {"length": length, "heads": heads, "dim": dim, "dtype": dtype}
        row["forward_bytes_formula"] = forward_bytes(len(devices), 1, heads, dim, dim)
        mesh = mesh_of("context", devices)
        placed = jax.device_put(tokens, NamedSharding(mesh, jax.P(None, "context")))
        ways = (1, on_one_device, tokens), (len(devices), over_context(mesh), placed)
        for count, function, arguments in ways:
            gradient = with_gradient(function)
            both = lambda *x, f=gradient: f(*x)[1:]  # noqa: E731
            for name, run in (("forward", function), ("both", both)):
                found = measured(run, arguments, options.repeats)
                row |= {f"{name}_{count}_{what}": x for what, x in found.items()}
        wanted, found = (jax.jit(with_gradient(run))(*arguments) for _, run, arguments in ways)
        row["errors"] = [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]
        del wanted, found
        for name in ("forward", "both"):
            several = row[f"{name}_{len(devices)}_seconds"]
            row[f"{name}_speedup"] = row[f"{name}_1_seconds"] / several
            if row[f"{name}_1_memory"]:
                several = row[f"{name}_{len(devices)}_memory"]
                row[f"{name}_memory_ratio"] = several / row[f"{name}_1_memory"]
        results.append(row)
        del tokens, placed
    return results


def exchange(options, devices):
    """Seconds of one exchange of ``[F | G]`` with the neighbour."""
    heads, dim = (2, 16) if options.tiny else (16, 64)
    mesh = mesh_of("context", devices)
    send = jax.shard_map(
        lambda x: sharding.from_left(x, "context"), mesh=mesh, in_specs=jax.P("context"),
        out_specs=jax.P("context"),
    )  # fmt: skip
    message = jnp.zeros((len(devices), heads, dim, 2 * dim))
    message = jax.device_put(message, NamedSharding(mesh, jax.P("context")))
    seconds = timed(jax.jit(send), (message,), 10 * options.repeats)
    return {"bytes": message.nbytes // len(devices), "seconds": seconds}


def main(argv=None):
    """Runs the parts and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--devices", type=int, default=2, help="how many to use")
    parser.add_argument("--lengths", type=int, nargs="+", help="of the sequences of `context`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/multi_device.json"))
    options = parser.parse_args(argv)
    if options.devices > jax.device_count():
        sys.exit(f"multi_device: {options.devices} devices asked for, {jax.device_count()} here")
    devices = jax.devices()[: options.devices]
    try:
        commands.directory(pathlib.Path(options.out).parent, "out")
        out = commands.output(options.out, "out")
    except ValueError as error:
        sys.exit(f"multi_device: {error}")
    results = {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "implementation": NAMED,
        "versions": {
            "python": platform.python_version(), "jax": jax.__version__,
            "vla_jax": vla_jax.__version__,
        },
        "command": [pathlib.Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)],
    }  # fmt: skip
    for part in options.parts:
        results[part] = globals()[part](options, devices)
        print(part, json.dumps(results[part]), flush=True)
        if stats := devices[0].memory_stats():
            results["peak_bytes"] = stats.get("peak_bytes_in_use")
        out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    worst = {
        dtype: max(max(errors) for errors in ways.values())
        for dtype, ways in results.get("agreement", {}).items()
    }
    wrong = {dtype: error for dtype, error in worst.items() if error > TOLERANCE[dtype]}
    if wrong:
        sys.exit(f"multi_device: results disagree: {wrong}")


if __name__ == "__main__":
    main()
