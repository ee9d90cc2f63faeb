"""Kernels under jit over several (virtual) devices: values, gradients, and no token gathered.

Most tests put plain functions where kernels are, which compile in a tenth of the time.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_close

import vla_jax
from vla_jax import pallas, partitioning, reference
from vla_jax.bundles import Attention, Delta, Solve
from vla_jax.pallas import common

HEADS = P("x", None, "y")
BATCH, LENGTH, KV_HEADS, GROUPS, DIM, VALUE_DIM = 4, 5, 2, 2, 3, 2


def mesh_of(*sizes):
    names = ("x", "y")[: len(sizes)]
    if jax.device_count() < np.prod(sizes):
        pytest.skip("needs more (virtual) devices")
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: np.prod(sizes)],
    )  # fmt: skip


def stand_in(kind):
    """A rule like those of kernels, of the reference; what it saves has batch and heads in one."""

    def plain(plan, inputs):
        if kind is Solve:
            inputs = inputs._replace(lambda0=inputs.lambda0[0])
        return reference.RULES[kind].forward(plan, inputs)[0]

    def forward(plan, inputs):
        outputs = plain(plan, inputs)
        return outputs, {"state": outputs[1].reshape(-1, *outputs[1].shape[2:])}

    def backward(plan, inputs, saved, cotangents):
        floating = inputs._replace(segment_ids=None)
        run = lambda x: plain(plan, x._replace(segment_ids=inputs.segment_ids))  # noqa: E731
        outputs, pull = jax.vjp(run, floating)
        (gradients,) = pull(cotangents)
        wrong = saved["state"].reshape(outputs[1].shape) - outputs[1]
        state = "penalty" if kind is Solve else "memory"
        found = {state: getattr(gradients, state) + wrong}
        return gradients._replace(**found)

    return common.rule(forward, backward)


@pytest.fixture
def plain_kernels(monkeypatch):
    monkeypatch.setattr(pallas, "unsupported", lambda bundle, chunk_size: None)
    monkeypatch.delitem(pallas.RULES, Attention)
    monkeypatch.setattr(pallas, "NORMALIZES", False)  # the stand-ins take unit keys
    for kind in (Solve, Delta):
        monkeypatch.setitem(pallas.RULES, kind, stand_in(kind))
    jax.clear_caches()
    yield
    jax.clear_caches()


def draw(batch=BATCH, heads=KV_HEADS, groups=GROUPS):
    rng = np.random.default_rng(1)
    sizes = (heads * groups, DIM), (heads, DIM), (heads, VALUE_DIM)
    return [rng.random((batch, LENGTH, *size), np.float32) for size in sizes]


def loss(*tokens, implementation="pallas"):
    query, key, value, lambda0 = tokens
    out, state = vla_jax.vla_attention(
        query, key, value, lambda0=lambda0, implementation=implementation, return_state=True
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(state.memory**2) + jnp.sum(state.penalty**2), out


def gradient(implementation="pallas"):
    run = functools.partial(loss, implementation=implementation)
    return jax.jit(jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True))


LAMBDA0 = np.array([0.5, 0.8], np.float32)


def operations(compiled):
    """The collectives of a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"= [^=]*? ({names})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("spec", [P("x"), P(("x", "y")), P(None, None, "x"), HEADS], ids=str)
def test_batch_and_heads(spec, plain_kernels):
    mesh, tokens = mesh_of(2, 2), draw()
    wanted = gradient("xla")(*tokens, LAMBDA0)
    placed = jax.device_put(tokens, NamedSharding(mesh, spec))
    compiled = gradient().lower(*placed, LAMBDA0).compile()
    found = compiled(*placed, LAMBDA0)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), found, wanted)
    assert operations(compiled) == {"all-reduce"}  # of the loss and d_lambda0
    assert found[0][1].sharding.is_equivalent_to(placed[0].sharding, 4)
    for x, y in zip(found[1], placed, strict=False):
        assert x.sharding.is_equivalent_to(y.sharding, 4)


def test_vmap_remat_scan_and_donation(plain_kernels):
    """Two layers under a scan, each checkpointed, a vmap over them all, and donated arrays."""
    mesh = mesh_of(2)
    query, key, value = (np.stack([x, x[::-1]]) for x in draw(batch=2, groups=1))
    scale = np.array([1.0, 0.5], np.float32)

    def model(scale, tokens, implementation):
        @jax.checkpoint
        def layer(x, scale):
            query, key, value = x
            out = vla_jax.vla_attention(
                query, key, scale * value, readout="none", implementation=implementation
            )
            return (query, key, jnp.tanh(out)), None

        (_, _, out), _ = jax.lax.scan(layer, tokens, scale)
        return jnp.sum(jnp.sin(out))

    def step(scale, tokens, implementation="pallas"):
        run = functools.partial(model, implementation=implementation)
        each = jax.vmap(jax.value_and_grad(run), in_axes=(None, 0))
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), each(scale, tokens)), tokens

    wanted = jax.jit(functools.partial(step, implementation="xla"))(scale, (query, key, value))
    placed = jax.device_put((query, key, value), NamedSharding(mesh, P(None, "x")))
    compiled = jax.jit(step, donate_argnums=1).lower(scale, placed).compile()
    found = compiled(scale, placed)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), found, wanted)
    assert all(x.is_deleted() for x in placed)
    assert operations(compiled) == {"all-reduce"}


def test_what_is_gathered_is_said(plain_kernels):
    mesh = mesh_of(4)
    query, key, value = draw(groups=2)
    delta = lambda *x: vla_jax.delta_rule(*x, implementation="pallas")  # noqa: E731
    arguments = query, key, key, value
    wanted = jax.jit(functools.partial(vla_jax.delta_rule, implementation="xla"))(*arguments)
    placed = jax.device_put(query, NamedSharding(mesh, P(None, None, "x")))
    with pytest.warns(UserWarning, match=r"\('x',\) does not divide the 2 key/value heads"):
        found = jax.jit(delta)(placed, key, key, value)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), found, wanted)
    cut = [x[:, :4] for x in arguments]
    placed = jax.device_put(cut, NamedSharding(mesh, P(None, "x")))
    with pytest.warns(UserWarning, match="over \\['x'\\].*sharded_attention"):
        found = jax.jit(delta)(*placed)
    assert_close(found[0], wanted[0][:, :4], tolerances.REORDERED32)


def test_inside_shard_map_over_some_axes(plain_kernels):
    """The batch is shard_map's, the heads are the partitioner's."""
    mesh, tokens = mesh_of(2, 2), draw()
    wanted = jax.jit(functools.partial(loss, implementation="xla"))(*tokens, LAMBDA0)[1]
    placed = jax.device_put(tokens, NamedSharding(mesh, HEADS))
    run = jax.shard_map(
        lambda *x: loss(*x, LAMBDA0)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        axis_names={"x"},
    )  # fmt: skip
    compiled = jax.jit(run).lower(*placed).compile()
    found = compiled(*placed)
    assert_close(found, wanted, tolerances.REORDERED32)
    assert found.sharding.is_equivalent_to(placed[0].sharding, 4)
    assert not operations(compiled)


def test_the_kernels_themselves(monkeypatch):
    """In Pallas' interpreter, both forward and backward: batch and heads over four devices."""
    monkeypatch.setenv(common.INTERPRET, "1")
    mesh = mesh_of(2, 2)
    rng = np.random.default_rng(2)
    arguments = [rng.random((2, 3, heads, 16), np.float32) / 4 for heads in (4, 2, 2, 2)]

    def run(*arguments, implementation="pallas"):
        def loss(*arguments):
            out, memory = vla_jax.delta_rule(*arguments, implementation=implementation)
            return jnp.sum(jnp.sin(out)) + jnp.sum(memory**2), out

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*arguments)

    wanted = jax.jit(functools.partial(run, implementation="xla"))(*arguments)
    placed = jax.device_put(arguments, NamedSharding(mesh, HEADS))
    compiled = jax.jit(run).lower(*placed).compile()
    found = compiled(*placed)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.REORDERED32), found, wanted)
    assert operations(compiled) == {"all-reduce"}


def test_one_device_has_no_rule(monkeypatch):
    """A program of one device has the function alone in it; the host may have more."""

    def double(x):
        return x._replace(query=2 * x.query)

    x = jnp.ones((1, 2, 1, 2))
    bundle = Delta(x, x, x, x, jnp.ones((1, 1, 2, 2)))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert "custom_partitioning" not in str(jax.make_jaxpr(partitioning.spread(double))(bundle))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    spread = partitioning.spread(double)
    assert "custom_partitioning" in str(jax.make_jaxpr(spread)(bundle))
    text = jax.jit(spread).lower(bundle).as_text()
    assert "custom_call" not in text
