"""Faults reported against comparable libraries, one test each, numbered as in the project's list.

One file, because its order is the list's and most rows share one shape that compiles once.
Rows 15 (kernels), 19 (default precision on a GPU), 25 and 33 need a GPU for their full meaning:
what can be shown without one is shown here. Row 28 is in `test_scaling.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from support import (
    STATE,
    assert_close,
    assert_matches,
    assert_rms_close,
    attention,
    cast,
    chunks,
    draw_cotangents,
    oracle_value_and_gradients,
    split_call,
    value_and_pullback,
)

import vla_jax
import vla_jax.nnx
from benchmarks.cases import CASES, Case, draw
from examples import tasks
from vla_jax import selftest

# One shape for most rows, always with segments and mask, so that it compiles once for each
# implementation. E differs from D; a chunk is 8, so that 22 tokens cross two edges.
SMALL = Case(2, 22, 2, 2, 5, 4, initial=True, per_head=True)
LENGTH = 22


def small_call(**changes):
    call = draw(SMALL)
    call["segment_ids"] = np.zeros((2, LENGTH), np.int32)
    call["mask"] = np.ones((2, LENGTH), bool)
    return {**call, **changes}


def small_run(call, cotangents, implementation, precision, **options):
    """Values and all gradients in a precision."""
    run = value_and_pullback(**options, **chunks(implementation, 8))
    return run(*cast((*split_call(call), cotangents), precision.dtype))


def check(call, cotangents, implementation, precision, **options):
    """Values and all gradients against the oracle; returns the gradients."""
    primals, gradients = small_run(call, cotangents, implementation, precision, **options)
    wanted = oracle_value_and_gradients(call, cotangents, **options)
    assert_matches(primals, gradients, wanted, precision.values, precision.gradients)
    return gradients


def zeroed(cotangents, keep):
    """Cotangents of which only ``keep`` ("out" or a field of the state) is not zero."""
    out, state = cotangents
    return (
        out * (keep == "out"),
        tuple(x * (keep == name) for name, x in zip(STATE, state, strict=True)),
    )


@pytest.mark.parametrize("field", STATE)
def test_pitfall_01_loss_on_the_returned_state(field, implementation, precision):
    call = small_call()
    check(call, zeroed(draw_cotangents(call), field), implementation, precision)


def test_pitfall_02_repeated_direction(implementation):
    call = draw(Case(1, 4096, 1, 1, 16, 8))
    one = np.random.default_rng(3).standard_normal(16)
    call["direction"] = np.broadcast_to(one / np.linalg.norm(one) / 4, call["key"].shape)
    arrays = cast([call[n] for n in ("query", "key", "value", "direction")], jnp.bfloat16)
    out, state = vla_jax.vla_attention(*arrays, implementation=implementation, return_state=True)
    assert state.penalty.dtype == state.memory.dtype == jnp.float32
    u = np.asarray(arrays[3], np.float64)[0, 0, 0]
    assert_close(state.penalty[0, 0], 4096 * np.outer(u, u), tolerances.FLOAT32)
    inverse = np.linalg.inv(0.1 * np.eye(16) + np.asarray(state.penalty[0, 0], np.float64))
    assert np.linalg.eigvalsh(inverse).min() > 0
    assert jnp.isfinite(out).all()
    assert jnp.isfinite(state.memory).all()


def test_pitfall_03_large_keys_in_low_precision(implementation):
    call = draw(Case(1, 128, 1, 1, 16, 8))
    arrays = cast([call[n] for n in ("query", "key", "value", "direction")], jnp.bfloat16)
    arrays[1] = arrays[1] * 10_000
    out, state = vla_jax.vla_attention(*arrays, **chunks(implementation, 64), return_state=True)
    wanted, wanted_state, _ = oracle.attention(*(np.asarray(x, np.float64) for x in arrays))
    assert_rms_close(out, wanted, tolerances.BFLOAT16_RMS, "out")
    assert_rms_close(state.memory, wanted_state[0], tolerances.BFLOAT16_RMS, "memory")


def test_pitfall_04_keys_are_normalised_in_float32(implementation):
    """bfloat16 keys, whose unit keys would lose 3e-3 if they were rounded again."""
    rng = np.random.default_rng(4)
    key = cast(1 + 0.2 * rng.standard_normal((1, 256, 1, 16)), jnp.bfloat16)
    value = cast(rng.standard_normal((1, 256, 1, 8)), jnp.bfloat16)
    wide_key, wide_value = (np.asarray(x, np.float64) for x in (key, value))
    _, (wanted, *_), _ = oracle.attention(wide_key, wide_key, wide_value)

    def error(memory):
        return np.linalg.norm(np.asarray(memory, np.float64) - wanted) / np.linalg.norm(wanted)

    def run(key, value):
        _, state = vla_jax.vla_attention(
            key, key, value, implementation=implementation, return_state=True
        )
        return error(state.memory)

    assert run(key.astype(jnp.float32), value.astype(jnp.float32)) <= tolerances.FLOAT32
    assert run(key, value.astype(jnp.float32)) <= tolerances.FLOAT32
    assert run(key, value) <= tolerances.BFLOAT16_RMS  # products of operands that are rounded


class Layers:
    """A small layer with a short convolution, and what the rows on layers need of it."""

    def __init__(self, **options):
        options = {"num_kv_heads": 1, "value_dim": 3, "short_conv": 4, **options}
        layer = vla_jax.nnx.VariationalLinearAttention(2, 6, **options, rngs=nnx.Rngs(0))
        self.graph, self.parameters = nnx.split(layer)
        self.layer = layer

    def __call__(self, parameters, x, **options):
        return nnx.merge(self.graph, parameters)(x, **options)


def tokens(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_pitfall_05_left_padding_with_a_convolution(garbage):
    layer, x = Layers().layer, tokens(2, 9, 6)
    padded = np.concatenate([np.full((2, 3, 6), garbage, np.float32), x], axis=1)
    mask = np.broadcast_to(np.arange(12) >= 3, (2, 12))
    out, state = layer(padded, mask=mask, return_state=True)
    wanted, wanted_state = layer(x, return_state=True)
    assert not np.asarray(out[:, :3]).any()
    assert_close(out[:, 3:], wanted, tolerances.REORDERED32)
    for name in STATE:
        assert_close(
            getattr(state, name), getattr(wanted_state, name), tolerances.REORDERED32, name
        )


def test_pitfall_06_degenerate_tokens(implementation, precision):
    """Zero key; zero direction; both; and a key that underflows when squared."""
    call = small_call()
    key, direction = call["key"].copy(), call["direction"].copy()
    key[:, 3:6] = direction[:, 5:8] = 0
    key[:, 9] *= float(jnp.finfo(precision.dtype).tiny) ** 0.7
    call.update(key=key, direction=direction)
    cotangents = draw_cotangents(call)
    cotangents[0][:, 9] = 0  # its own gradient is as large as the key is small
    (out, state), gradients = small_run(call, cotangents, implementation, precision)
    (wanted, wanted_state), wanted_gradients = oracle_value_and_gradients(call, cotangents)
    assert_close(out, wanted, precision.values)
    assert_close(state[0], wanted_state[0], precision.values)
    tiny = np.arange(LENGTH) == 9
    for name, x in gradients.items():
        x, y = np.asarray(x), wanted_gradients[name]
        assert np.isfinite(x).all(), name
        if name == "key":
            assert_close(x[:, tiny], y[:, tiny], precision.gradients, name)
            x, y = x[:, ~tiny], y[:, ~tiny]
        assert_close(x, y, precision.gradients, name)
    assert not np.asarray(gradients["value"])[:, 3:6].any()
    assert not np.asarray(gradients["direction"])[:, 5:8].any()


@pytest.mark.parametrize("implementation", ["xla"], indirect=True)
@pytest.mark.parametrize("write_gain", ["projection", "rls"])
def test_pitfall_06_degenerate_tokens_other_gains(write_gain, implementation, precision):
    call = small_call()
    key, direction = call["key"].copy(), call["direction"].copy()
    key[:, 3:6] = direction[:, 5:8] = 0
    call.update(key=key, direction=direction)
    check(call, draw_cotangents(call), implementation, precision, write_gain=write_gain)


def test_pitfall_06_all_tokens_absent(implementation):
    """Nothing but zeros, in float32: zero output, zero and finite gradients."""
    zero = jnp.zeros((1, 5, 1, 4))

    def loss(q, k, v, u):
        out, state = vla_jax.vla_attention(
            q, k, v, u, implementation=implementation, return_state=True
        )
        return out.sum() + state.memory.sum()

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(zero, zero, zero, zero)
    assert value == 0
    assert all(not np.asarray(g).any() for g in gradients)


@pytest.mark.parametrize("garbage", [None, np.nan])
def test_pitfall_07_mask_and_segments(garbage, implementation, precision):
    rng = np.random.default_rng(6)
    mask = rng.random((2, LENGTH)) < 0.6
    mask[0, :4] = mask[1, -5:] = False
    ids = np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1).astype(np.int32)
    call = small_call(mask=mask, segment_ids=ids)
    cotangents = draw_cotangents(call)
    if garbage is None:
        gradients = check(call, cotangents, implementation, precision)
        for name in ("query", "key", "value", "direction"):
            assert not np.asarray(gradients[name])[~mask].any()
        return
    wanted = small_run(call, cotangents, implementation, precision)
    for name in ("query", "key", "value", "direction"):
        call[name] = np.where(mask[..., None, None], call[name], garbage)
    found = small_run(call, cotangents, implementation, precision)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_pitfall_08_short_segments_and_edges(implementation, precision):
    """One token; many boundaries in one chunk; boundaries on the edges of chunks of 8."""
    lengths = (1, 7, 1, 1, 1, 5, 6)
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    call = small_call(segment_ids=np.stack([ids, ids]))
    cotangent, cotangent_state = cotangents = draw_cotangents(call)
    (out, state), gradients = small_run(call, cotangents, implementation, precision)
    start = 0
    for i, length in enumerate(lengths):
        stop = start + length
        last = i == len(lengths) - 1
        part = {n: call[n][:, start:stop] for n in ("query", "key", "value", "direction")}
        options = {
            "lambda0": call["lambda0"],
            "initial_state": None if start else call["initial_state"],
        }
        wanted, wanted_state, _ = oracle.attention(**part, **options)
        wanted_gradients = oracle.attention_grad(
            cotangent[:, start:stop], cotangent_state if last else None, **part, **options
        )
        assert_close(out[:, start:stop], wanted, precision.values)
        for name in part:
            x = gradients[name][:, start:stop]
            assert_close(x, wanted_gradients[name], precision.gradients, name)
        start = stop
    for x, y in zip(state, wanted_state, strict=True):
        assert_close(x, y, precision.values)


def test_pitfall_09_prefill_in_pieces():
    layer, x = Layers().layer, tokens(2, LENGTH, 6)
    wanted, wanted_state = layer(x, return_state=True)
    for split in ((5, 21), (1, 6)):
        state, outs = layer.init_state(2), []
        for part in np.split(x, split, axis=1):
            out, state = layer(part, initial_state=state, return_state=True)
            outs.append(out)
        assert_close(jnp.concatenate(outs, 1), wanted, tolerances.REORDERED32)
        for name in STATE:
            x_, y = getattr(state, name), getattr(wanted_state, name)
            assert_close(x_, y, tolerances.REORDERED32, name)
    _, state = layer(x[:, :5], return_state=True)
    step = jax.jit(layer.step)
    for t in range(5, LENGTH):
        out, state = step(x[:, t], state)
        assert_close(out, wanted[:, t], tolerances.REORDERED32)


def test_pitfall_10_earlier_states_stay_valid():
    layer, x = Layers().layer, tokens(2, 12, 6)
    _, early = layer(x[:, :5], return_state=True)
    first = layer(x[:, 5:], initial_state=early, return_state=True)
    out, state = layer.step(x[:, 5], early)
    layer.step(x[:, 6], state)
    again = layer(x[:, 5:], initial_state=early, return_state=True)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.testing.assert_array_equal(layer.step(x[:, 5], early)[0], out)


@pytest.mark.parametrize("length", [1, 2])
def test_pitfall_11_fewer_tokens_than_the_convolution(length, x64):
    """Loss on output and state; gradients against central differences."""
    layers = Layers(param_dtype=jnp.float64)
    x = tokens(2, length, 6).astype(np.float64)

    @jax.jit
    def loss(parameters, x):
        out, state = layers(parameters, x, return_state=True)
        leaves = [state.memory, state.penalty, state.key_sum, state.conv]
        return jnp.sin(out).sum() + sum(jnp.sin(leaf).sum() for leaf in leaves)

    gradients = jax.jit(jax.grad(loss, (0, 1)))(layers.parameters, x)
    rng, step = np.random.default_rng(7), 1e-5
    arguments = (layers.parameters, x)
    draws = jax.tree.map(lambda y: rng.standard_normal(y.shape), arguments)

    def moved(h):
        return loss(*jax.tree.map(lambda y, d: y + h * d, arguments, draws))

    numeric = (moved(step) - moved(-step)) / (2 * step)
    exact = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(draws), strict=True)
    )
    np.testing.assert_allclose(exact, numeric, rtol=1e-7)


def test_pitfall_12_unusual_cotangents(implementation, x64):
    """Broadcast (from a sum), transposed, and absent cotangents."""
    call = draw(Case(2, 6, 1, 1, 5, 4))
    inputs, rest = split_call(call)
    weight = np.random.default_rng(8).standard_normal((4, 1, 6, 2))

    @jax.jit
    def run(inputs):
        def loss(x):
            out, state = attention(x, rest, **chunks(implementation, 4))
            return out.sum(), (out.T * weight).sum(), state[1].sum()

        return [jax.grad(lambda x, i=i: loss(x)[i])(inputs) for i in range(3)]

    ones, zeros = np.ones((2, 6, 1, 4)), [np.zeros((2, 1, *s)) for s in ((5, 4), (5, 5), (5,))]
    cotangents = (
        (ones, None),
        (weight.T, None),
        (None, (zeros[0], zeros[1] + 1, zeros[2])),
    )
    for gradients, cotangent in zip(run(inputs), cotangents, strict=True):
        wanted = oracle.attention_grad(*cotangent, **call)
        for name, x in gradients.items():
            assert_close(x, wanted[name], tolerances.FLOAT64, name)


@pytest.mark.parametrize("length", range(1, 18))
def test_pitfall_13_short_sequences(length, fast_implementation):
    if fast_implementation != "xla" and length not in (1, 2, 9, 17):
        pytest.skip("the same code as xla within a chunk")
    call = draw(Case(1, length, 1, 1, 8, 5))
    inputs, _ = cast(split_call(call), jnp.float32)
    out = vla_jax.vla_attention(**inputs, **chunks(fast_implementation, 8))
    assert_close(out, oracle.attention(**call)[0], tolerances.FLOAT32)


def test_pitfall_14_many_heads(implementation):
    call = draw(Case(32_769, 2, 2, 1, 2, 3))
    inputs, _ = cast(split_call(call), jnp.float32)
    out = jax.jit(functools.partial(vla_jax.vla_attention, implementation=implementation))(**inputs)
    wanted, *_ = oracle.attention(**call)
    np.testing.assert_allclose(out, wanted, atol=1e-2, rtol=1e-2)
    assert_rms_close(out, wanted, tolerances.FLOAT32)


def test_pitfall_15_more_than_2_to_the_31_elements(fast_implementation):
    """Traced and lowered only: 2^32 elements an array, which kernels refuse."""
    shape = jax.ShapeDtypeStruct((2, 2**24, 16, 8), jnp.bfloat16)
    run = jax.jit(functools.partial(vla_jax.vla_attention, implementation=fast_implementation))
    if fast_implementation in ("pallas", "triton"):
        with pytest.raises(NotImplementedError, match=r"2\*\*31 elements"):
            run.lower(shape, shape, shape, shape)
        return
    lowered = run.lower(shape, shape, shape, shape)
    assert lowered.out_info.shape == shape.shape


@pytest.mark.parametrize("lambda0", [1e8, 1e31])
def test_pitfall_16_huge_lambda0_is_the_delta_rule(implementation, lambda0):
    call = draw(Case(1, LENGTH, 1, 1, 5, 4))
    inputs, _ = cast(split_call(call), jnp.float32)
    inputs["lambda0"] = lambda0
    out, state = vla_jax.vla_attention(
        **inputs, readout="none", implementation=implementation, return_state=True
    )
    unit_key, _ = oracle.normalize(call["key"])
    wanted = oracle.delta_rule(call["query"], unit_key, unit_key, call["value"])
    assert_close(out, wanted[0], tolerances.HUGE_LAMBDA0)
    assert_close(state.memory, wanted[1], tolerances.HUGE_LAMBDA0)


def test_pitfall_17_floor_of_the_ratio(implementation, precision):
    """z.q is negative, below eps and above it at different tokens."""
    call = small_call()
    query = call["query"].copy()
    query[:, ::3] *= -1
    query[:, 1::3] *= 1e-9
    check(small_call(query=query), draw_cotangents(call), implementation, precision)


def test_pitfall_18_decode_compiles_once(compilations):
    call = draw(Case(1, 24, 2, 1, 5, 4))
    inputs, _ = cast(split_call(call), jnp.float32)
    arrays = [inputs[n] for n in ("query", "key", "value", "direction")]
    state = vla_jax.vla_attention(*(x[:, :16] for x in arrays), return_state=True)[1]
    steps = [[x[:, t] for x in arrays] for t in range(16, 24)]
    _, state = vla_jax.vla_step(*steps[0], state)
    compilations.clear()
    for step in steps[1:]:
        _, state = vla_jax.vla_step(*step, state)
    vla_jax.vla_step(*steps[0], vla_jax.init_state(1, 2, 5, 4))
    assert len(compilations) <= 4  # the zeros of init_state; none of a step
    compilations.clear()
    vla_jax.vla_step(*steps[0], vla_jax.init_state(1, 2, 5, 4))
    assert not compilations


@pytest.mark.parametrize("implementation", vla_jax.implementations.GATED, indirect=True)
def test_pitfall_19_float32_products_are_float32_accurate(implementation):
    """Every product of XLA asks for full precision, which makes a GPU leave tf32 alone."""
    shape = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)

    def loss(*arrays):
        return vla_jax.vla_attention(*arrays, implementation=implementation).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*[shape] * 4).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pitfall_20_x64_mode_changes_nothing(dtype, implementation):
    call = draw(Case(1, 17, 1, 1, 5, 4))
    arrays = cast([call[n] for n in ("query", "key", "value", "direction")], dtype)

    def run():
        def loss(*arrays):
            out, state = vla_jax.vla_attention(
                *arrays, **chunks(implementation, 8), return_state=True
            )
            return out.astype(jnp.float32).sum() + state.memory.sum(), (out, state.memory)

        (_, aux), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)
        return aux, gradients

    narrow = run()
    with jax.enable_x64(True):
        wide = run()

    def same(x, y):
        assert x.dtype == y.dtype
        tolerance = 2**-7 if x.dtype == jnp.bfloat16 else tolerances.REORDERED32
        assert_close(x, y, tolerance)

    jax.tree.map(same, narrow, wide)


def test_pitfall_21_vmap(implementation, precision):
    """vmap of the operation and of its gradient, some arguments unmapped, nested."""
    call = draw(Case(6, 5, 1, 1, 4, 3, direction="key"))
    query, value = (call[n].reshape(2, 3, 1, *call[n].shape[1:]) for n in ("query", "value"))
    key = call["key"][:1]
    lambda0 = np.array([0.1, 0.7])

    def loss(query, key, value, lambda0):
        out = vla_jax.vla_attention(query, key, value, lambda0=lambda0, **chunks(implementation, 4))
        return (out * out).sum() / 2, out

    gradient = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    inner = jax.vmap(gradient, in_axes=(0, None, 0, None))
    (_, out), gradients = jax.jit(jax.vmap(inner, in_axes=(0, None, 0, 0)))(
        *cast((query, key, value, lambda0), precision.dtype)
    )
    for i in range(2):
        for j in range(3):
            arguments = {"query": query[i, j], "key": key, "value": value[i, j]}
            wanted, *_ = oracle.attention(**arguments, lambda0=lambda0[i])
            assert_close(out[i, j], wanted, precision.values)
            wanted = oracle.attention_grad(wanted, None, **arguments, lambda0=lambda0[i])
            for name, x in zip(("query", "key", "value", "lambda0"), gradients, strict=True):
                assert_close(x[i, j], wanted[name], precision.gradients, name)


def test_pitfall_21_vmap_is_not_a_loop(fast_implementation):
    one = jax.ShapeDtypeStruct((1, 16, 1, 4), jnp.float32)
    many = jax.ShapeDtypeStruct((7, 1, 16, 1, 4), jnp.float32)

    def loss(*arrays):
        return vla_jax.vla_attention(*arrays, **chunks(fast_implementation, 4)).sum()

    gradient = jax.grad(loss, (0, 1, 2, 3))
    single, mapped = (
        jax.jit(f).lower(*[x] * 4).as_text()
        for f, x in ((gradient, one), (jax.vmap(gradient), many))
    )
    assert mapped.count("stablehlo.while") == single.count("stablehlo.while")
    assert mapped.count("custom_call") <= single.count("custom_call")  # launches


def test_pitfall_22_every_order_with_the_reference(x64):
    call = draw(Case(1, 3, 1, 1, 3, 2, direction="key"))

    def function(key):
        return vla_jax.vla_attention(call["query"], key, call["value"], implementation="reference")

    key = call["key"]
    forward, backward = (jax.jit(j(function))(key) for j in (jax.jacfwd, jax.jacrev))
    assert_close(forward, backward, tolerances.FLOAT64)
    hessian = jax.jit(jax.hessian(lambda k: function(k).sum()))(key)
    step = np.random.default_rng(9).standard_normal(key.shape)
    gradients = [
        oracle.attention_grad(np.ones((1, 3, 1, 2)), None, call["query"], k, call["value"])["key"]
        for k in (key + 1e-5 * step, key - 1e-5 * step)
    ]
    product = jnp.tensordot(hessian, step, 4)
    np.testing.assert_allclose(product, (gradients[0] - gradients[1]) / 2e-5, atol=1e-6)


def test_pitfall_22_others_name_the_reference(fast_implementation):
    x = jnp.ones((1, 3, 1, 2))
    loss = lambda k: vla_jax.vla_attention(x, k, x, implementation=fast_implementation).sum()  # noqa: E731
    for transform in (jax.jacfwd, jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            transform(loss)(x)


def test_pitfall_23_gradient_inside_shard_map(implementation, x64):
    """Batch over four devices, a weight and lambda0 replicated, replication checks on."""
    if jax.device_count() < 4:
        pytest.skip("needs four (virtual) devices")
    call = draw(Case(4, 6, 1, 1, 4, 3, direction="key"))
    query, key, value = (call[n] for n in ("query", "key", "value"))
    weight, lambda0 = np.eye(4) + 0.1, np.asarray(0.3)

    def loss(weight, lambda0, query, key, value):
        out = vla_jax.vla_attention(
            query, key @ weight, value, lambda0=lambda0, **chunks(implementation, 4)
        )
        return (out * out).sum()

    def local(*arguments):
        total, gradients = jax.value_and_grad(loss, (0, 1, 2))(*arguments)
        return jax.lax.psum(total, "data"), gradients

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(), *[P("data")] * 3),
        out_specs=(P(), (P(), P(), P("data"))),
        check_vma=True,
    )
    arguments = (weight, lambda0, query, key, value)
    actual = jax.jit(sharded)(*arguments)
    wanted = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arguments)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT64), actual, wanted)


@pytest.mark.parametrize("names", [("out",), ("vla_solution", "vla_memory"), ("vla_memory",)])
def test_pitfall_24_remat_with_a_names_policy(fast_implementation, names, x64):
    call = draw(Case(1, 6, 1, 1, 4, 3, direction="key"))

    def loss(key):
        key = checkpoint_name(jnp.exp(key), "key")
        out = vla_jax.vla_attention(
            call["query"], key, call["value"], **chunks(fast_implementation, 4)
        )
        return jnp.sin(checkpoint_name(out, "out")).sum()

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(loss, policy=policy)))(call["key"])
    plain = jax.jit(jax.value_and_grad(loss))(call["key"])
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT64), remat, plain)


def test_pitfall_25_selftest_command(monkeypatch, capsys):
    """Compares values and gradients on this machine and says which implementation is safe.

    The command with the two smallest of its cases; all of them take minutes to compile.
    """
    names = ("odd sizes", "penalty_solve")
    monkeypatch.setattr(selftest, "CASES", [c for c in selftest.CASES if c.name in names])
    assert selftest.main() == 0
    text = capsys.readouterr().out
    assert "xla          safe  <- implementation=None" in text
    assert all(name in text for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("distinct", [4096, 1], ids=["distinct", "one direction"])
def test_pitfall_26_long_decoding(distinct):
    """1e5 steps; one direction for ever is the worst case for the drift of the inverse."""
    rng, dim, count = np.random.default_rng(10), 32, 100_000
    u = rng.standard_normal((distinct, dim)) + 1
    u = (u / np.linalg.norm(u, axis=-1, keepdims=True) / np.sqrt(dim)).astype(np.float32)
    key = (rng.random(dim) + 0.5).astype(np.float32)
    k, v, us = jnp.asarray(key)[None, None], jnp.zeros((1, 1, 3)), jnp.asarray(u)

    @jax.jit
    def run(state):
        def step(i, state, v=v):
            return vla_jax.vla_step(k, k, v, us[i % distinct][None, None], state)[1]

        state = jax.lax.fori_loop(0, count - 1, step, state)
        return step(count - 1, state, v + 1)  # the first value written: memory is alpha_hat v^T

    state = run(vla_jax.init_state(1, 1, dim, 3))
    assert state.penalty.dtype == state.memory.dtype == jnp.float32
    times = np.bincount(np.arange(count) % distinct, minlength=distinct)
    wide = u.astype(np.float64)
    matrix = 0.1 * np.eye(dim) + (wide.T * times) @ wide
    alpha, _ = oracle.normalize(np.linalg.solve(matrix, key.astype(np.float64)))
    assert_close(state.memory[0, 0, :, 0], alpha, tolerances.DECODE_DRIFT)


def test_pitfall_27_the_same_call_twice(implementation, precision):
    call = small_call()
    cotangents = draw_cotangents(call)
    first, second = (small_run(call, cotangents, implementation, precision) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("layout", tasks.LAYOUTS)
def test_pitfall_29_data_is_reproducible(layout):
    """The same seed, the same data, fillers included; keys outside the range of the fillers."""
    task = tasks.MQAR(num_pairs=4, vocab_size=64, layout=layout)
    first, again = (task.sample(np.random.default_rng(3), 16) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.random.seed(0)  # the global generator plays no part
    jax.tree.map(np.testing.assert_array_equal, first, task.sample(np.random.default_rng(3), 16))
    other = task.sample(np.random.default_rng(4), 16)
    assert (first.inputs != other.inputs).any(axis=1).all()
    keys, rest = first.inputs[:, 0:8:2], first.inputs[:, 8:]
    asked = first.weights[:, 8:] > 0
    for row in range(16):
        assert len(set(keys[row])) == 4
        answers = dict(zip(keys[row], first.inputs[row, 1:8:2], strict=True))
        for query, target in zip(
            rest[row, asked[row]], first.targets[row, 8:][asked[row]], strict=True
        ):
            assert answers[query] == target
        assert not set(keys[row]) & set(rest[row, ~asked[row]])


def test_pitfall_30_values_and_keys_of_different_sizes(implementation, precision):
    """Where D = E a product from the wrong side has the right shape; nearly all cases differ."""
    assert all(case.dim != case.value_dim for case in CASES)
    call = small_call()
    check(call, draw_cotangents(call), implementation, precision)


def test_pitfall_31_copy_task_does_not_show_its_answer():
    """A model that returns its current input, which an untrained one may do, is at chance."""
    task = tasks.Copy(num_tokens=8, vocab_size=32)
    batch = task.sample(np.random.default_rng(5), 512)
    asked = batch.weights > 0
    assert (batch.inputs == batch.targets)[asked].mean() < 2 / 31
    np.testing.assert_array_equal(batch.targets[asked], batch.inputs[:, :8].reshape(-1))


def test_pitfall_32_unknown_keywords():
    x, step = jnp.ones((1, 3, 1, 2)), jnp.ones((1, 1, 2))
    layer = Layers().layer
    calls = (
        lambda **bad: vla_jax.vla_attention(x, x, x, **bad),
        lambda **bad: vla_jax.vla_step(
            step, step, step, step, vla_jax.init_state(1, 1, 2, 2), **bad
        ),
        lambda **bad: vla_jax.penalty_solve(x, x, lambda0=0.1, **bad),
        lambda **bad: vla_jax.delta_rule(x, x, x, x, **bad),
        lambda **bad: vla_jax.init_state(1, 1, 2, 2, **bad),
        lambda **bad: Layers(**bad),
        lambda **bad: layer(jnp.ones((1, 3, 6)), **bad),
    )
    for call in calls:
        call()
        with pytest.raises(TypeError, match="lambda_0"):
            call(lambda_0=0.1)
