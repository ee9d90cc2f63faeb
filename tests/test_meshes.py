"""A mesh as ``jax.make_mesh`` makes it, of Explicit axes, inside and outside ``jax.set_mesh``."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_close

import vla_jax
from vla_jax import baselines, diagnostics, generation, linen
from vla_jax.baseline_layers import BaselineAttention, SoftmaxAttention
from vla_jax.nnx import VariationalLinearAttention

BATCH, LENGTH, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 5, 4, 2, 3, 8, 7
TOKENS = P("x", None, "y", None)


def explicit_mesh():
    if jax.device_count() < 4:
        pytest.skip("needs four (virtual) devices")
    return jax.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])


def draw():
    rng = np.random.default_rng(0)
    sizes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM)
    return [rng.random((BATCH, LENGTH, *size), np.float32) for size in sizes]


def placed(mesh, x, spec=TOKENS):
    return jax.device_put(x, NamedSharding(mesh, spec))


def functions(query, key, value):
    """A result of every kind of public function of arrays."""
    out, state = vla_jax.vla_attention(query, key, value, return_state=True)
    token = (x[:, -1] for x in (query, key, value))
    solution, penalty = vla_jax.penalty_solve(query, key, lambda0=1.0)
    read, memory = vla_jax.delta_rule(solution, key, key, value)
    step, after = vla_jax.vla_step(*token, None, state)
    mixers = {
        name: getattr(baselines, name)(query, key, value)
        for name in ("softmax_attention", "linear_attention", "identity_attention", "mesa_net")
    }
    return {
        "tokens": {"out": out, "solution": solution, "read": read} | mixers,
        "token": step,
        "state": [penalty, memory, after.memory, after.penalty],
        "head": [diagnostics.lyapunov(state), diagnostics.penalty_condition_number(penalty)],
        "per token": [diagnostics.state_norm(key, value), diagnostics.alignment(key, key)],
    }


SPECS = {
    "tokens": TOKENS,
    "token": P("x", "y", None),
    "state": P("x", "y", None, None),
    "head": P("x", "y"),
    "per token": P("x", None, "y"),
}


@pytest.fixture(scope="module")
def wanted():
    return jax.jit(functions)(*draw()), jax.jit(jax.grad(squares, (0, 1, 2)))(*draw())


def squares(*tokens):
    return jnp.sum(jnp.sin(vla_jax.vla_attention(*tokens)))


@pytest.mark.parametrize("ambient", [False, True])
def test_functions(ambient, wanted):
    """Values, gradients and shardings, which are the inputs' in batch and heads."""
    mesh = explicit_mesh()
    tokens = [placed(mesh, x) for x in draw()]
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        found = jax.jit(functions)(*tokens)
        gradients = jax.jit(jax.grad(squares, (0, 1, 2)))(*tokens)
        eager = vla_jax.delta_rule(tokens[0], tokens[1], tokens[1], tokens[2])[0]
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT32), (found, gradients), wanted)
    for kind, spec in SPECS.items():
        for x in jax.tree.leaves(found[kind]):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), kind
    for x in (*gradients, eager):
        assert x.sharding.spec == TOKENS


@pytest.mark.parametrize("axis", [1, 3])
def test_axes_that_are_whole(axis):
    mesh = explicit_mesh()
    x = np.ones((2, 4, 2, 4), np.float32)
    x = placed(mesh, x, P(*[None] * axis, "x"))
    with pytest.raises(ValueError, match=f"whole along {'?T?D'[axis]}.*sharded_attention"):
        jax.jit(vla_jax.vla_attention)(x, x, x)


@pytest.mark.parametrize("ambient", [False, True])
def test_layers(ambient):
    """The batch over one axis, the heads' parameters of the NNX layer over the other."""
    mesh = explicit_mesh()
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    options = dict(num_kv_heads=KV_HEADS)
    ours = VariationalLinearAttention(HEADS, WIDTH, short_conv=2, rngs=nnx.Rngs(0), **options)
    mesa = BaselineAttention("mesa", KV_HEADS, WIDTH, rngs=nnx.Rngs(0))
    softmax = SoftmaxAttention(KV_HEADS, WIDTH, window=8, rngs=nnx.Rngs(0))
    graph, params = nnx.split((ours, mesa, softmax))
    other = linen.VariationalLinearAttention(HEADS, WIDTH, **options)
    variables = other.init(jax.random.key(0), x[:1])

    @jax.jit
    def run(params, variables, x):
        ours, mesa, softmax = nnx.merge(graph, params)
        out, state = ours(x, return_state=True)
        step, state = ours.step(x[:, 0], state)
        _, baseline = mesa(x, return_state=True)
        token, _ = mesa.step(x[:, 0], baseline)
        whole = [out, other.apply(variables, x), mesa(x), softmax(x, return_state=True)[0]]
        return whole, [step, token], [state.memory], [state.conv]

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)[0](x) ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    expected = run(params, variables, x), gradient(params, x)

    def over_heads(path, param):
        name = jax.tree_util.keystr(path)
        sharded = name.startswith("[0]") and any(f"{p}_proj'" in name for p in "qkv")
        return placed(mesh, param, P(None, "y")) if sharded and param.ndim == 3 else param

    params = jax.tree_util.tree_map_with_path(over_heads, params)
    assert sum(x.sharding.num_devices > 1 for x in jax.tree.leaves(params)) == 3
    x = placed(mesh, x, P("x"))
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        found = run(params, variables, x), gradient(params, x)
    close = lambda x, y: assert_close(x, y, tolerances.FLOAT32_GRADIENT)  # noqa: E731
    jax.tree.map(close, found, expected)
    specs = P("x", None, None), P("x", None), P("x", "y", None, None), P("x", None, None)
    for kind, spec in zip(found[0], specs, strict=True):
        for y in kind:
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
    assert found[1][1].sharding.spec == P("x", None, None)


@pytest.mark.parametrize("ambient", [False, True])
def test_generation(ambient):
    mesh = explicit_mesh()
    layer = VariationalLinearAttention(2, WIDTH, rngs=nnx.Rngs(0))
    table = np.random.default_rng(2).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    graph, params = nnx.split(layer)

    def prefill(params, ids, mask):
        embedded = jax.nn.one_hot(ids, VOCABULARY) @ table
        out, state = nnx.merge(graph, params)(embedded, mask=mask, return_state=True)
        return out @ table.T, state

    def step(params, token, state):
        embedded = jax.nn.one_hot(token, VOCABULARY) @ table
        out, state = nnx.merge(graph, params).step(embedded, state)
        return out @ table.T, state

    prompts = np.array([[1, 2, 3], [4, 5, 6]], np.int32)

    def run(prompts):
        model = (jax.tree_util.Partial(f, params) for f in (prefill, step))
        return generation.generate(*model, prompts, max_new=3, key=jax.random.key(0))

    expected = run(prompts)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        found = run(placed(mesh, prompts, P("x")))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert_close(found.state.memory, expected.state.memory, tolerances.FLOAT32)
    assert found.tokens.sharding.spec == P("x", None)
    assert found.state.memory.sharding.spec == P("x", None, None, None)
