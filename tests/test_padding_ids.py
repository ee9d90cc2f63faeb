"""The segment ids of masked tokens do not count: padding may hold any, such as 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from layers import draw as draw_x
from layers import make
from support import (
    ROOT,
    assert_matches,
    attention,
    cast,
    draw_cotangents,
    split_call,
    value_and_pullback,
)

from benchmarks.cases import Case, draw
from vla_jax import baseline_layers, baselines, diagnostics, layer
from vla_jax.nnx import declared

T, F = True, False
# Padding behind (grain's), before and among the tokens, a row without any, a segment of padding
# alone; over four devices of three tokens each some have none that is present.
GIVEN = np.array(
    [
        [1, 1, 2, 2, 3, 3, 3, 0, 0, 0, 0, 0],
        [9, -4, 0, 7, 7, 7, 5, 5, 8, 8, 8, 8],
        [1, 5, 1, 0, 2, 0, 2, 3, 2, 9, 9, 4],
        [3, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
)
MASK = np.array(
    [
        [T, T, T, T, T, T, T, F, F, F, F, F],
        [F, F, F, T, T, T, F, F, T, T, T, T],
        [T, F, T, F, T, F, T, F, T, T, F, F],
        [F, F, F, F, F, F, F, F, F, F, F, F],
    ]
)
FILLED = np.array(
    [
        [1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3],
        [7, 7, 7, 7, 7, 7, 7, 7, 8, 8, 8, 8],
        [1, 1, 1, 1, 2, 2, 2, 2, 2, 9, 9, 9],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
LENGTH = 12


def call():
    drawn = draw(Case(4, LENGTH, 2, 1, 4, 3, initial=True))
    return {**drawn, "segment_ids": GIVEN, "mask": MASK}


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_definition():
    """What the oracle compares, token by token, has the same borders as the ids filled by hand."""
    wanted = oracle._restarts(FILLED, 4, LENGTH)
    found = oracle._restarts(GIVEN, 4, LENGTH, MASK)
    np.testing.assert_array_equal(found, wanted & MASK.T)
    assert found.sum() == 5


def test_values_and_gradients(implementation, precision):
    given = call()
    cotangents = draw_cotangents(given)
    out, state, _ = oracle.attention(**given)
    gradients = oracle.attention_grad(*cotangents, **given)
    inputs, rest = split_call(given)
    run = value_and_pullback(implementation=implementation)
    primals, found = run(*cast((inputs, rest, cotangents), precision.dtype))
    wanted = (out, state), {n: gradients[n] for n in found}
    assert_matches(primals, found, wanted, precision.values, precision.gradients)


def test_eagerly_as_under_jit():
    inputs, rest = cast(split_call(call()), jnp.float32)
    found = attention(inputs, rest)
    same(found, jax.jit(attention)(inputs, rest))
    same(found, attention(inputs, rest | {"segment_ids": FILLED}))
    under = jax.jit(lambda mask: attention(inputs, {"segment_ids": GIVEN, "mask": mask}))
    same(under(MASK), found)
    batched = jax.vmap(lambda x, r: attention(x, r))
    wide = lambda x: x[None]  # noqa: E731
    out, _ = batched(jax.tree.map(wide, inputs), jax.tree.map(wide, rest))
    np.testing.assert_allclose(out[0], found[0], atol=1e-5)
    ids = np.where(FILLED == 9, 2, np.where(FILLED == 2, 3, FILLED))
    with pytest.raises(ValueError, match="got 3 then 2 at batch 2, position 9"):
        attention(inputs, {"segment_ids": ids, "mask": MASK})
    with pytest.raises(ValueError, match="got 3 then 0 at batch 0, position 7"):
        attention(inputs, {"segment_ids": GIVEN})
    attention(inputs, {"segment_ids": np.where(MASK, FILLED, 2**40), "mask": MASK})
    with pytest.raises(ValueError, match="must fit in int32, got 1099511627776 to"):
        attention(inputs, {"segment_ids": np.where(MASK, 2**40, 0), "mask": jnp.asarray(MASK)})


FUNCTIONS = {
    "delta_net": functools.partial(baselines.delta_net, return_state=True),
    "linear_attention": functools.partial(baselines.linear_attention, return_state=True),
    "softmax_attention": baselines.softmax_attention,
    "state_norm": lambda q, k, v, **packed: jnp.where(
        MASK[..., None], diagnostics.state_norm(k, v, **packed), 0
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_functions(name):
    x = jax.random.uniform(jax.random.key(0), (3, 4, LENGTH, 1, 4)) + 0.1
    function = jax.jit(lambda ids: FUNCTIONS[name](*x, segment_ids=ids, mask=jnp.asarray(MASK)))
    found, wanted = function(GIVEN), function(FILLED)
    same(found, wanted)
    assert not np.array_equal(
        *(jax.tree.leaves(f)[0] for f in (found, function(np.zeros_like(GIVEN))))
    )


LAYERS = {
    "vla": lambda: make(num_heads=1, num_kv_heads=1, short_conv=3, head_dim=4),
    "deltanet": lambda: baseline_layers.BaselineAttention(
        "deltanet", 1, 12, short_conv=3, rngs=_rngs()
    ),
    "softmax": lambda: baseline_layers.SoftmaxAttention(
        1, 12, short_conv=3, window=LENGTH, rngs=_rngs()
    ),
}


def _rngs():
    from flax import nnx

    return nnx.Rngs(0)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Outputs and the state of the last real token, the convolution's part too."""
    module, x = LAYERS[name](), draw_x(LENGTH, batch=4)
    run = jax.jit(lambda ids: module(x, mask=MASK, segment_ids=ids, return_state=True))
    same(run(GIVEN), run(FILLED))
    assert np.any(run(GIVEN)[0] != run(np.zeros_like(GIVEN))[0])


def test_over_devices():
    """Ids of padding do not count where the tokens that do are on another device."""
    module, x = LAYERS["vla"](), draw_x(LENGTH, batch=4)
    config, params = module.config, declared(module)
    tokens = jax.P(None, "context")

    def local(x, mask, ids, axis_name="context"):
        packed = {"mask": mask, "segment_ids": ids, "return_state": True}
        return layer.apply(config, params, x, **packed, axis_name=axis_name)

    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3, out_specs=(tokens, jax.P()))
    found = jax.jit(run)(x, MASK, GIVEN)
    wanted = jax.jit(functools.partial(local, axis_name=None))(x, MASK, GIVEN)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def test_strings_of_the_language_model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from flax import nnx
    from ngrams import NGrams

    table = NGrams(3, 6, 4, 8, rngs=nnx.Rngs(0))
    table.rows.embedding[...] = jax.random.normal(jax.random.key(0), table.rows.embedding.shape)
    ids = jnp.asarray(np.random.default_rng(0).integers(1, 9, GIVEN.shape))
    before = jnp.asarray([[3, 4]] * 4)
    found, kept = table(ids, jnp.asarray(MASK), jnp.asarray(GIVEN), before)
    wanted, last = table(ids, jnp.asarray(MASK), jnp.asarray(FILLED), before)
    np.testing.assert_array_equal(np.asarray(found)[MASK], np.asarray(wanted)[MASK])
    np.testing.assert_array_equal(kept, last)
    np.testing.assert_array_equal(kept[3], [3, 4])  # nothing read
