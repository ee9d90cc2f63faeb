"""Many devices: data, tensor and context parallel against one device, on virtual CPU devices.

The suite has four of them; the case of eight runs in a process of its own.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import INPUTS, STATE, assert_close, split_call, value_and_pullback
from support import attention as whole_attention

import vla_jax
from benchmarks import multi_device
from benchmarks.cases import Case, draw
from vla_jax import layer, linen, sharding
from vla_jax.nnx import VariationalLinearAttention

ROOT = pathlib.Path(__file__).parent.parent
TOKENS = ("query", "key", "value", "direction", "segment_ids", "mask")

# Three devices' worth of one segment, borders on, before and after those of devices, one segment.
BORDERS = np.array([[0] * 3 + [1] * 9 + [2] * 4, [5] * 8 + [6] * 7 + [7], [3] * 16])
CASES = {
    "segments": Case(3, 16, 2, 2, 4, 3, mask="random", initial=True, per_head=True, chunk_size=2),
    "plain": Case(1, 24, 1, 1, 4, 5, initial=True, write_gain="projection", chunk_size=4),
    "key": Case(2, 8, 1, 2, 3, 3, direction="key", initial=True, readout="none", write_gain="rls"),
}


def mesh_of(**axes):
    count = math.prod(axes.values())
    if jax.device_count() < count:
        pytest.skip(f"needs {count} (virtual) devices")
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=auto, devices=jax.devices()[:count]
    )


def draw_call(name, dtype=np.float64):
    call = draw(CASES[name])
    if name == "segments":
        call["segment_ids"] = BORDERS
        call["mask"][0, 4:8] = False  # a device without a token
    floating = lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x  # noqa: E731
    return jax.tree.map(lambda x: floating(np.asarray(x)), call)


def options_of(name, implementation="xla"):
    case = CASES[name]
    return dict(
        implementation=implementation,
        chunk_size=case.chunk_size if implementation in ("xla", "associative") else None,
        write_gain=case.write_gain,
        readout=case.readout,
    )


def attention(inputs, rest, mesh, batch=None, check_vma=True, **options):
    """`context_parallel_attention` under shard_map: (out, (memory, penalty, key_sum))."""
    arguments = {**inputs, **rest}
    sharded = {n: P(batch, "context") for n in TOKENS} | {n: P(batch) for n in STATE}
    specs = {n: sharded.get(n, P()) for n in arguments}

    def local(arguments):
        arguments = dict(arguments)
        state = [arguments.pop(n, None) for n in STATE]
        if state[0] is not None:
            arguments["initial_state"] = vla_jax.VLAState(*state)
        out, state = sharding.context_parallel_attention(
            **arguments, axis_name="context", **options, return_state=True
        )
        return out, tuple(getattr(state, n) for n in STATE)

    out_specs = (P(batch, "context"), (P(batch),) * 3)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
    )(arguments)


def vjp_of(function):
    @jax.jit
    def run(inputs, rest, cotangents):
        primals, pullback = jax.vjp(lambda x: function(x, rest), inputs)
        return primals, pullback(cotangents)[0]

    return run


@functools.lru_cache(None)
def single_device(name, dtype):
    """Inputs, cotangents and what one device makes of them."""
    inputs, rest = split_call(draw_call(name, dtype))
    shapes = jax.eval_shape(lambda: whole_attention(inputs, rest, **options_of(name)))
    rng = np.random.default_rng(3)
    cotangents = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)
    wanted = value_and_pullback(**options_of(name))(inputs, rest, cotangents)
    return inputs, rest, cotangents, wanted


def check(name, mesh, dtype, tolerance, batch=None, implementation="xla"):
    inputs, rest, cotangents, wanted = single_device(name, dtype)
    options = options_of(name, implementation)
    run = vjp_of(lambda x, r: attention(x, r, mesh, batch, **options))
    primals, gradients = run(inputs, rest, cotangents)
    assert set(gradients) == {n for n in INPUTS if n in inputs}
    for label, actual, expected in (
        ("value", primals, wanted[0]),
        ("gradient", gradients, wanted[1]),
    ):
        jax.tree.map_with_path(
            lambda path, x, y, label=label: assert_close(x, y, tolerance, f"{label} of {path}"),
            actual,
            expected,
        )


@pytest.mark.parametrize(
    ("name", "devices"), [("key", 1), ("segments", 2), ("segments", 4), ("plain", 4)]
)
def test_context_parallel_equals_one_device(name, devices, x64):
    check(name, mesh_of(context=devices), np.float64, tolerances.FLOAT64)


def test_context_parallel_of_the_reference(x64):
    check("key", mesh_of(context=2), np.float64, tolerances.FLOAT64, implementation="reference")


def test_context_parallel_in_float32():
    check("key", mesh_of(context=4), np.float32, tolerances.FLOAT32)


def test_context_parallel_beside_data_parallel(x64):
    check("key", mesh_of(data=2, context=2), np.float64, tolerances.FLOAT64, batch="data")


def check_gates(inverse, mesh):
    """Values and gradients of every input, gates included, through the output and the state."""
    call = draw_call("segments")
    inputs, rest = split_call(call)
    rng = np.random.default_rng(3)
    shape = inputs["key"].shape[:3]
    inputs["beta"] = rng.uniform(0, 2, shape)
    inputs["log_decay"] = -rng.exponential(size=shape) * rng.choice([0, 0.1, 30], shape)
    inputs["log_decay"][:, ::6] = -1e30

    def apply(run, inputs):
        state = vla_jax.VLAState(*(inputs[n] for n in STATE))
        tokens = {n: x for n, x in inputs.items() if n not in STATE}
        out, state = run(
            **tokens, **rest, initial_state=state, inverse=inverse, implementation="xla",
            return_state=True,
        )  # fmt: skip
        return out, tuple(getattr(state, n) for n in STATE)

    parallel = functools.partial(sharding.sharded_attention, mesh=mesh, context_axis="context")

    @functools.partial(jax.jit, static_argnums=0)
    def pulled(run, inputs, cotangents):
        values, pullback = jax.vjp(functools.partial(apply, run), inputs)
        return values, pullback(cotangents)[0]

    values = jax.eval_shape(functools.partial(apply, vla_jax.vla_attention), inputs)
    cotangents = jax.tree.map(lambda x: rng.standard_normal(x.shape), values)
    actual = pulled(parallel, inputs, cotangents)
    wanted = pulled(vla_jax.vla_attention, inputs, cotangents)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-9), actual, wanted)
    assert jnp.abs(actual[1]["log_decay"]).max() > 0


EIGHT = dict(batch=8, heads=8, dim=4, value_dim=2, length=16)


def programs_of_eight():
    """The collectives of each kind of program over eight devices: {program: {name: [bytes]}}."""
    sizes = EIGHT
    shape = sizes["batch"], sizes["length"], sizes["heads"]
    rng = np.random.default_rng(4)
    dims = sizes["dim"], sizes["dim"], sizes["value_dim"]
    tokens = [rng.random((*shape, d), np.float32) for d in dims]
    attention = functools.partial(vla_jax.vla_attention, implementation="xla")

    def gradient(function):
        return jax.grad(lambda tokens: jnp.sum(jnp.sin(function(*tokens))))

    found = {}
    specs = {"data": P("a"), "tensor": P(None, None, "a"), "context": P(None, "a")}
    for name, spec in specs.items():
        mesh = mesh_of(a=8)
        function = attention
        if name == "context":
            local = functools.partial(
                sharding.context_parallel_attention, axis_name="a", implementation="xla"
            )
            function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        placed = jax.device_put(tokens, NamedSharding(mesh, spec))
        found[f"{name} forward"] = collectives(lambda x, f=function: f(*x), placed)
        found[f"{name} gradient"] = collectives(gradient(function), placed)
    return found


def check_programs_of_eight():
    """What each sends, as docs/multi_device.md says."""
    found = programs_of_eight()
    for name in ("data", "tensor"):  # flags of a byte: whether λ₀ is resolved everywhere
        for kind in ("forward", "gradient"):
            assert set(found[f"{name} {kind}"]) == {"all-reduce"}
            assert set(found[f"{name} {kind}"]["all-reduce"]) == {1}
    sizes = (8, EIGHT["batch"], EIGHT["heads"], EIGHT["dim"], EIGHT["value_dim"])
    forward, gradient = found["context forward"], found["context gradient"]
    assert set(forward) == set(gradient) == {"collective-permute"}
    assert sum(forward["collective-permute"]) == multi_device.forward_bytes(*sizes)
    assert sum(gradient["collective-permute"]) <= 2 * multi_device.forward_bytes(*sizes)


def test_context_parallel_over_eight_devices():
    """Without gates and with them, the inverse at the write and at the read.

    In a process of its own: the number of devices is set before JAX starts.
    """
    code = (
        "import jax, numpy as np\n"
        "import test_sharding as t, tolerances\n"
        "assert jax.device_count() == 8\n"
        "mesh = t.mesh_of(context=8)\n"
        "with jax.enable_x64(True):\n"
        "    t.check('segments', mesh, np.float64, tolerances.FLOAT64)\n"
        "    t.check_gates('write', mesh)\n"
        "    t.check_gates('read', mesh)\n"
        "t.check_programs_of_eight()\n"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUM_CPU_DEVICES": "8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def test_context_parallel_with_the_pallas_kernels(monkeypatch):
    """Without replication checks: Pallas' interpreter does not know them."""
    monkeypatch.setenv("VLA_JAX_PALLAS_INTERPRET", "1")
    inputs, rest = split_call(draw(Case(1, 8, 1, 1, 16, 16)))
    inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}
    mesh = mesh_of(context=2)
    run = jax.jit(lambda x: attention(x, rest, mesh, check_vma=False, implementation="pallas"))
    wanted = whole_attention(inputs, rest, implementation="xla")
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT32), run(inputs), wanted)


# --- what is communicated ----------------------------------------------------------------------


def compiled(function, *arguments):
    """The compiled program's collectives, {operation: [bytes of each]}, and its results."""
    program = jax.jit(function).lower(*arguments).compile()
    return multi_device.collectives(program.as_text()), program(*arguments)


def collectives(function, *arguments):
    return compiled(function, *arguments)[0]


def test_what_context_parallel_communicates():
    mesh = mesh_of(context=4)
    batch, heads, dim, value_dim = 2, 3, 5, 4
    found = {}
    for length in (16, 64):
        inputs, rest = split_call(draw(Case(batch, length, heads, 1, dim, value_dim)))
        inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}

        def out(inputs, rest=rest):
            return attention(inputs, rest, mesh, implementation="xla")[0]

        gradient = jax.grad(lambda x: out(x).sum())
        found[length] = [collectives(f, inputs) for f in (out, gradient)]
    assert found[16] == found[64]
    forward, gradient = found[16]
    with_state = collectives(lambda x: attention(x, rest, mesh, implementation="xla"), inputs)

    # Two rounds of both scans, then the state alone to the neighbour; what the last round would
    # make of the memory's factors nobody reads, and the compiler drops it.
    penalty, memory = dim * (dim + 1), dim * value_dim
    numbers = 3 * penalty + 3 * memory + dim * dim
    assert list(forward) == ["collective-permute"]
    sent = sum(forward["collective-permute"])
    assert sent == 4 * batch * heads * numbers
    assert sent == multi_device.forward_bytes(4, batch, heads, dim, value_dim)
    state = dim * value_dim + dim * dim + dim
    assert with_state["collective-permute"] == forward["collective-permute"]
    assert sum(with_state["all-reduce"]) == 4 * batch * heads * state
    # Backward: the same exchanges, the other way, and the sum of d_lambda0 over the devices.
    assert set(gradient) == {"collective-permute", "all-reduce"}
    assert sum(gradient["collective-permute"]) <= 2 * sum(forward["collective-permute"])
    assert sum(gradient["all-reduce"]) == 4 * heads


# --- the whole arrays' entry point and errors --------------------------------------------------


def test_sharded_attention():
    mesh = mesh_of(data=2, context=2)
    rng = np.random.default_rng(0)
    query, key, value = (rng.random((2, 6, 2, 3), np.float32) for _ in range(3))
    ids = np.array([[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3]])
    options = dict(lambda0=np.array([0.1, 0.2]), segment_ids=ids, return_state=True)
    wanted = vla_jax.vla_attention(query, key, value, **options)
    actual = sharding.sharded_attention(
        query, key, value, mesh=mesh, context_axis="context", model_axis="data", **options
    )
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), actual, wanted)


@pytest.mark.parametrize("ambient", [False, True])
def test_explicit_axes(ambient):
    """A mesh as ``jax.make_mesh`` makes it, whose arrays have their sharding in their type."""
    mesh_of(context=2, data=2)
    explicit = jax.make_mesh((2, 2), ("context", "data"), devices=jax.devices()[:4])
    if jax.sharding.AxisType.Explicit not in explicit.axis_types:
        explicit = jax.make_mesh(
            (2, 2), ("context", "data"), devices=jax.devices()[:4],
            axis_types=(jax.sharding.AxisType.Explicit,) * 2,
        )  # fmt: skip
    call = draw(Case(2, 8, 1, 2, 4, 3, initial=True, segments="random", mask="random"))
    inputs, rest = split_call(call)
    inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}
    state = vla_jax.VLAState(*(inputs.pop(n) for n in STATE))

    def run(function, **where):
        def loss(inputs, state):
            out, new = function(**inputs, **rest, initial_state=state, return_state=True, **where)
            return jnp.sum(jnp.sin(out)) + jnp.sum(new.memory**2), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(inputs, state)

    wanted = run(vla_jax.vla_attention)
    sharded = functools.partial(
        run, sharding.sharded_attention, mesh=explicit, context_axis="context", data_axis="data"
    )
    with jax.set_mesh(explicit) if ambient else contextlib.nullcontext():
        found = jax.jit(sharded)()
        out = sharding.sharded_attention(
            **inputs, **rest, initial_state=state, mesh=explicit, context_axis="context"
        )
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), found, wanted)
    assert_close(out, wanted[0][1], tolerances.REORDERED32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mesh": None}, "mesh must be a jax.sharding.Mesh, got NoneType"),
        ({"context_axis": ["context"]}, "context_axis must be a string, got list"),
        ({"data_axis": 0}, "data_axis must be a string, got int"),
        ({"data_axis": "context"}, "must differ"),
        ({"value": [1.0]}, "value must be an array, got list"),
        ({"direction": np.ones((1, 2, 1, 4), np.float32)}, "direction must have shape"),
        ({"mask": np.ones((1, 4), int)}, "mask must be boolean"),
        ({"initial_state": (1,)}, "initial_state must be a VLAState or None, got tuple"),
        ({"lambda0": np.zeros(1)}, "lambda0 must be positive"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"implementation": "triton"}, "'triton' has no parts"),
        ({"foo": 1}, "foo"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong, message):
    x = np.ones((1, 4, 1, 4), np.float32)
    arguments = {"query": x, "key": x, "value": x, "mesh": mesh_of(context=2)}
    arguments |= {"context_axis": "context"} | wrong
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        sharding.sharded_attention(**arguments)


def test_context_parallel_errors():
    mesh = mesh_of(data=2, context=2)
    x = np.ones((2, 5, 1, 3), np.float32)
    run = functools.partial(sharding.sharded_attention, mesh=mesh, context_axis="context")
    with pytest.raises(ValueError, match="T = 5 is not divisible by the 2 devices"):
        run(x, x, x)
    with pytest.raises(ValueError, match="H = 1 is not divisible by the 2 devices"):
        run(x[:, :4], x[:, :4], x[:, :4], model_axis="data")
    with pytest.raises(ValueError, match="data_axis must be one of the mesh axes"):
        run(x[:, :4], x[:, :4], x[:, :4], data_axis="batch")
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        sharding.context_parallel_attention(x, x, x, axis_name="context")
    with pytest.raises(TypeError, match="axis_name must be a string"):
        sharding.context_parallel_attention(x, x, x, axis_name=0)
    with pytest.raises(NotImplementedError, match="triton"):
        run(x[:, :4], x[:, :4], x[:, :4], implementation="triton")


# --- layers ------------------------------------------------------------------------------------

LAYER = dict(num_heads=2, in_features=6, num_kv_heads=1, learn_lambda0=True)


@pytest.mark.parametrize("kind", ["neighbour", "masked"])
def test_layers_under_context_parallel(kind, x64):
    """The convolution sees across devices: from the neighbour, or past devices of padding."""
    mesh = mesh_of(context=2 if kind == "neighbour" else 4)
    width, length = (3, 4) if kind == "neighbour" else (5, 8)
    module = linen.VariationalLinearAttention(**LAYER, short_conv=width, param_dtype=jnp.float64)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, length, 6))
    rest = {}
    if kind == "masked":
        rest["mask"] = np.array([[1, 1, 1, 0, 0, 0, 1, 1], [1, 0, 1, 1, 0, 1, 1, 0]], bool)
        rest["segment_ids"] = np.array([[0] * 8, [0, 0, 1, 1, 1, 1, 1, 2]])
    params = module.init(jax.random.key(0), x)
    state = jax.tree.map(lambda s: 0.1 * rng.random(s.shape), module.init_state(2))
    penalty = jnp.broadcast_to(jnp.eye(3), state.vla.penalty.shape)
    state = layer.LayerState(state.vla.replace(penalty=penalty), state.conv)

    def run(axis_name, params, x, state, rest):
        out, state = module.apply(
            params, x, initial_state=state, return_state=True, axis_name=axis_name, **rest
        )
        return out, (state.vla.memory, state.penalty, state.key_sum, state.conv)

    sequence = P(None, "context")
    sharded = jax.shard_map(
        functools.partial(run, "context"),
        mesh=mesh,
        in_specs=(P(), sequence, P(), sequence),
        out_specs=(sequence, P()),
    )

    def loss(function, params, x, state):
        results = function(params, x, state, rest)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

    def value_and_gradients(function):
        function = functools.partial(loss, function)
        fields = (params, x, state)
        return jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(*fields)

    actual = value_and_gradients(sharded)
    wanted = value_and_gradients(functools.partial(run, None))
    jax.tree.map(lambda a, b: assert_close(a, b, tolerances.FLOAT64, floor=1e-3), actual, wanted)


def test_checks_of_a_layer_need_whole_sequences():
    module = VariationalLinearAttention(2, 4, check_invariants=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="check_invariants"):
        module(jnp.ones((1, 2, 4)), axis_name="context")


# --- data and tensor parallel: JAX's own sharding ------------------------------------------------


def test_op_over_data_and_model():
    """Batch over data and heads over model: nothing is sent but flags, and the sum of d_lambda0.

    A flag, a byte: whether any device has a penalty that float32 does not resolve.
    """
    mesh = mesh_of(data=2, model=2)
    inputs, _ = split_call(draw(Case(2, 8, 2, 2, 4, 3)))
    inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}
    tokens = NamedSharding(mesh, P("data", None, "model"))
    placed = {
        n: jax.device_put(x, tokens if n in TOKENS else NamedSharding(mesh, P()))
        for n, x in inputs.items()
    }

    def forward(inputs):
        return vla_jax.vla_attention(**inputs, implementation="xla")

    def step(inputs):
        out, pullback = jax.vjp(forward, inputs)
        return out, pullback(jnp.cos(out))[0]

    found, out = compiled(forward, placed)
    assert set(found) == {"all-reduce"}
    assert set(found["all-reduce"]) == {1}
    assert out.sharding.spec == P("data", None, "model")
    found, actual = compiled(step, placed)
    assert set(found) <= {"all-reduce"}
    wanted = jax.jit(step)(inputs)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), actual, wanted)


def test_layer_over_data_and_model():
    """A user's rules place the parameters by their metadata; no activation is gathered."""
    mesh = mesh_of(data=2, model=2)
    rules = (("embed", None), ("heads", "model"), ("kv_heads", "model"), ("head_dim", None))
    module = VariationalLinearAttention(4, 8, num_kv_heads=2, logical_axes=True, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    with nnx.logical_axis_rules(rules):
        specs = nnx.get_partition_spec(params)
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)

    def loss(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    step = jax.value_and_grad(loss)
    wanted = jax.jit(step)(params, x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        assert placed.q_proj["kernel"][...].sharding.spec == P(None, "model", None)
        found, actual = compiled(step, placed, x)
    assert set(found) == {"all-reduce"}
    jax.tree.map(lambda a, b: assert_close(a, b, tolerances.REORDERED32), actual, wanted)


def test_op_under_pmap():
    mesh_of(data=4)
    inputs, _ = split_call(draw(Case(4, 5, 1, 1, 3, 2)))
    tokens = [np.asarray(inputs[n], np.float32) for n in TOKENS[:4]]

    def step(*tokens):
        loss = lambda x: jnp.sum(jnp.sin(vla_jax.vla_attention(*x, implementation="xla")))  # noqa: E731
        return jax.value_and_grad(loss)(tokens)

    def replica(*tokens):
        loss, gradients = step(*tokens)
        return jax.lax.psum(loss, "data"), gradients

    split = [x[:, None] for x in tokens]
    loss, gradients = jax.pmap(replica, "data", devices=jax.devices()[:4])(*split)
    wanted_loss, wanted = jax.jit(step)(*tokens)
    assert_close(loss, np.full(4, wanted_loss), tolerances.REORDERED32)
    for x, y in zip(gradients, wanted, strict=True):
        assert_close(np.asarray(x)[:, 0], y, tolerances.REORDERED32)


def test_layer_under_pmap():
    """Data parallel training: parameters on every device, gradients averaged over them."""
    mesh_of(data=4)
    module = VariationalLinearAttention(2, 6, short_conv=2, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(module)
    x = jax.random.normal(jax.random.key(1), (4, 1, 5, 6))  # [device, batch, time, features]

    def step(params, x):
        return jax.value_and_grad(lambda p: jnp.mean(nnx.merge(graphdef, p)(x) ** 2))(params)

    def replica(params, x):
        return jax.lax.pmean(step(params, x), "data")

    parallel = jax.pmap(replica, "data", in_axes=(None, 0), devices=jax.devices()[:4])
    found = jax.tree.map(lambda x: x[2], parallel(params, x))
    wanted = jax.jit(step)(params, x.reshape(4, 5, 6))
    jax.tree.map(lambda a, b: assert_close(a, b, tolerances.REORDERED32), found, wanted)


def test_linen_metadata_on_a_mesh():
    """The boxes' names, a user's rules, and the parameters lie where these say."""
    mesh = mesh_of(data=2, model=2)
    module = linen.VariationalLinearAttention(4, 8, logical_axes=True)
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    rules = (("embed", None), ("heads", "model"), ("kv_heads", "model"), ("head_dim", None))
    boxed = jax.eval_shape(module.init, jax.random.key(1), x)
    specs = flax.linen.get_partition_spec(boxed)
    shardings = flax.linen.logical_to_mesh_sharding(specs, mesh, rules)
    plain = flax.linen.unbox(module.init(jax.random.key(1), x))
    placed = jax.device_put(plain, shardings)
    kernel = placed["params"]["q_proj"]["kernel"]
    assert kernel.sharding.spec == P(None, "model", None)

    def step(params, x):
        return jax.value_and_grad(lambda p: jnp.mean(module.apply(p, x) ** 2))(params)

    x_placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    found, actual = compiled(step, placed, x_placed)
    assert set(found) == {"all-reduce"}
    wanted = jax.jit(step)(plain, x)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerances.REORDERED32), actual, wanted)


def test_the_benchmark_runs(tmp_path):
    mesh_of(data=2)
    arguments = ["--parts", "context", "exchange", "--lengths=16", "--tiny", "--repeats=1"]
    multi_device.main([*arguments, f"--out={tmp_path / 'out.json'}"])
    results = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert results["exchange"]["seconds"] > 0
    row = results["context"][0]
    assert sum(row["forward_2_collectives"]["collective-permute"]) == row["forward_bytes_formula"]
