"""Baselines against token-by-token oracles in float64 NumPy, and their layers."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import assert_close, assert_rms_close

from vla_jax import baselines
from vla_jax.baseline_layers import BASELINES, BaselineAttention, SoftmaxAttention

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from model import (
    MIXERS,
    Model,
    ModelConfig,
    parameter_count,
    state_floats,
    with_parameter_count,
)

# --- oracles: analytic, so that a complex step differentiates them exactly ----------------------


def recurrent(kind, inputs, memory, key_sum, penalty, segment_ids, mask):
    """(out [B,T,Hq,E], memory, key_sum, penalty), one token after the other."""
    query, key, value = (oracle._masked(inputs[n], mask) for n in ("query", "key", "value"))
    batch, length, heads, dim = key.shape
    query = oracle._groups(query, heads)
    like = (*inputs.values(), memory, key_sum, penalty)
    out = np.zeros((*query.shape[:4], value.shape[-1]), np.result_type(*like))
    for t, restart in enumerate(oracle._restarts(segment_ids, batch, length)):
        memory, key_sum, penalty = (oracle._cleared(x, restart) for x in (memory, key_sum, penalty))
        here = np.ones(batch, bool) if mask is None else mask[:, t]
        q, k, v = query[:, t], key[:, t], value[:, t]
        unit, _ = oracle.normalize(k)
        beta = inputs["beta"][:, t][..., None] if "beta" in inputs else 1
        old = oracle._transpose_apply(memory, unit)
        if kind == "linear":
            new = memory + oracle._outer(k, v)
        elif kind in ("identity", "deltanet"):
            new = memory + oracle._outer(beta * unit, v - old)
        elif kind == "gated_deltanet":
            a = np.exp(inputs["log_decay"][:, t])[..., None]
            new = a[..., None] * memory + oracle._outer(beta * unit, v - a * old)
        elif kind == "published_deltanet":
            new = memory * inputs["gate"][:, t][:, :, None, :] + oracle._outer(unit, v - old)
        elif kind == "mesa":
            new = memory + oracle._outer(beta * unit, v)
            more = penalty + oracle._outer(beta * unit, unit)
            penalty = np.where(here[:, None, None, None], more, penalty)
            ridge = oracle._regularizer(inputs["lambda0"], heads, dim)
            q = np.swapaxes(np.linalg.inv(ridge + penalty) @ np.swapaxes(q, -1, -2), -1, -2)
        memory = np.where(here[:, None, None, None], new, memory)
        key_sum = key_sum + k
        read = q @ memory
        if kind in ("linear", "identity", "published_deltanet"):
            total = (q @ key_sum[..., None])[..., 0]
            read = read / np.where(total.real > 1e-6, total, 1e-6)[..., None]
        out[:, t] = np.where(here[:, None, None, None], read, 0)
    return out.reshape(batch, length, -1, value.shape[-1]), memory, key_sum, penalty


def softmax(inputs, segment_ids, mask):
    query, key, value = (inputs[n] for n in ("query", "key", "value"))
    length, heads, dim = key.shape[1:]
    group = query.shape[2] // heads
    out = np.zeros((*query.shape[:3], value.shape[-1]), np.result_type(*inputs.values()))
    for b, t, h in np.ndindex(*query.shape[:3]):
        seen = np.arange(length) <= t
        if segment_ids is not None:
            seen &= segment_ids[b] == segment_ids[b, t]
        if mask is not None:
            seen &= mask[b]
        if mask is None or mask[b, t]:
            weight = np.exp(key[b, seen, h // group] @ query[b, t, h] / np.sqrt(dim))
            out[b, t, h] = weight @ value[b, seen, h // group] / weight.sum()
    return out


FUNCTIONS = {
    "linear": baselines.linear_attention,
    "identity": baselines.identity_attention,
    "deltanet": baselines.delta_net,
    "gated_deltanet": baselines.gated_delta_net,
    "mesa": baselines.mesa_net,
    "published_deltanet": baselines.published_deltanet,
}
GATES = {
    "deltanet": ("beta",),
    "gated_deltanet": ("beta", "log_decay"),
    "mesa": ("beta", "lambda0"),
    "published_deltanet": ("gate",),
}
STATE = {
    "linear": ("memory", "key_sum"),
    "identity": ("memory", "key_sum"),
    "published_deltanet": ("memory", "key_sum"),
    "mesa": ("memory", "penalty"),
}
OPTIONS = {
    "gated_deltanet": [
        {"implementation": "reference"},
        {"implementation": "associative", "chunk_size": 4},
        {"chunk_size": 16},
    ],
    "published_deltanet": [{}],
}
COMPOSED = [{"chunk_size": 8}, {"implementation": "reference"}]
EACH = [(kind, o, True) for kind in FUNCTIONS for o in OPTIONS.get(kind, COMPOSED)]
EACH += [(kind, OPTIONS.get(kind, COMPOSED)[-1], False) for kind in FUNCTIONS]


def draw(kind, length=37, dim=6, value_dim=5, heads=2, group=2, seed=0):
    """Inputs of a function and a state to start from, float64."""
    rng = np.random.default_rng(seed)
    positive = lambda *shape: np.exp(rng.standard_normal(shape) / 2)  # noqa: E731
    tokens = (2, length, heads)
    inputs = {
        "query": positive(2, length, heads * group, dim),
        "key": positive(*tokens, dim),
        "value": rng.standard_normal((*tokens, value_dim)),
    }
    gates = {
        "beta": rng.uniform(0.1, 1, tokens),
        "log_decay": -rng.exponential(1, tokens) * rng.choice([0.01, 30], tokens, p=[0.9, 0.1]),
        "gate": rng.uniform(0.2, 0.8, (*tokens, value_dim)),
        "lambda0": rng.uniform(0.1, 1, heads),
    }
    inputs |= {n: gates[n] for n in GATES.get(kind, ())}
    half = rng.standard_normal((2, heads, dim, dim))
    state = {
        "memory": rng.standard_normal((2, heads, dim, value_dim)),
        "key_sum": positive(2, heads, dim),
        "penalty": half @ np.swapaxes(half, -1, -2),
    }
    return inputs, {n: state[n] for n in STATE.get(kind, ("memory",))}


def packing(segments, length=37):
    ids = np.sort(np.random.default_rng(3).integers(4, size=(2, length)), axis=1)
    mask = np.random.default_rng(4).random((2, length)) < 0.8
    return (ids, mask) if segments else (None, None)


@pytest.mark.parametrize(("kind", "options", "segments"), EACH, ids=str)
def test_values_and_gradients_equal_the_oracle(kind, options, segments, x64):
    inputs, state = draw(kind)
    segment_ids, mask = packing(segments)
    rng = np.random.default_rng(7)

    def expected(inputs, state):
        full = {"key_sum": np.zeros((2, 2, 6)), "penalty": np.zeros((2, 2, 6, 6))} | state
        out, *after = recurrent(kind, inputs, **full, segment_ids=segment_ids, mask=mask)
        after = dict(zip(("memory", "key_sum", "penalty"), after, strict=True))
        return out, {n: after[n] for n in state}

    def primal(inputs, state):
        out, after = FUNCTIONS[kind](
            **inputs, initial_state=baselines.BaselineState(**state),
            segment_ids=segment_ids, mask=mask, return_state=True, **options,
        )  # fmt: skip
        return out, {n: getattr(after, n) for n in state}

    values = expected(inputs, state)
    weights = jax.tree.map(lambda x: rng.standard_normal(x.shape), values)
    if "penalty" in state:  # a function of its symmetric part
        weights[1]["penalty"] += np.swapaxes(weights[1]["penalty"], -1, -2)

    @jax.jit
    def found(inputs, state, weights):
        primals, pullback = jax.vjp(primal, inputs, state)
        return primals, pullback(weights)

    primals, gradients = found(inputs, state, weights)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT64), primals, values)

    total = lambda values: sum(  # noqa: E731
        np.sum(w * x) for w, x in zip(*map(jax.tree.leaves, (weights, values)), strict=True)
    )
    for group, gradient in zip((inputs, state), gradients, strict=True):
        for name, x in group.items():
            tangent = rng.standard_normal(x.shape)
            if name == "penalty":
                tangent = tangent + np.swapaxes(tangent, -1, -2)
            moved = group | {name: x + 1e-30j * tangent}
            arguments = (moved, state) if group is inputs else (inputs, moved)
            slope = total(expected(*arguments)).imag / 1e-30
            assert_close(np.sum(gradient[name] * tangent), slope, 1e-8, name, floor=1e-3)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_bfloat16(kind):
    """Values near the oracle's, gradients near those of the same function in float32."""
    inputs, _ = draw(kind)
    inputs = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    exact = {n: np.asarray(x, np.float64) for n, x in inputs.items()}
    full = np.zeros((2, 2, 6, 5)), np.zeros((2, 2, 6)), np.zeros((2, 2, 6, 6))
    want, memory, *_ = recurrent(kind, exact, *full, segment_ids=None, mask=None)
    out, state = jax.jit(functools.partial(FUNCTIONS[kind], return_state=True))(**inputs)
    assert (out.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.float32)
    assert_rms_close(out, want, tolerances.BFLOAT16_RMS, "out")
    assert_rms_close(state.memory, memory, tolerances.BFLOAT16_RMS, "memory")

    weight = np.random.default_rng(1).standard_normal(want.shape)
    call = jax.jit(jax.grad(lambda x: jnp.sum(weight * FUNCTIONS[kind](**x).astype(jnp.float32))))
    wide = call({n: x.astype(jnp.float32) for n, x in inputs.items()})
    for name, gradient in call(inputs).items():
        assert gradient.dtype == jnp.bfloat16
        assert_rms_close(gradient, wide[name], tolerances.BFLOAT16_RMS, name)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_shard_map_with_its_check(kind):
    inputs, _ = draw(kind, length=5)
    call = functools.partial(FUNCTIONS[kind], **inputs, return_state=True)
    want = jax.tree.map(np.asarray, call())
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {n: P(*("data",) * (x.ndim > 1)) for n, x in inputs.items()}
    sharded = jax.shard_map(
        lambda x: FUNCTIONS[kind](**x, return_state=True),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P("data"),
    )
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), jax.jit(sharded)(inputs), want)


def test_gates_out_of_range_are_refused():
    gated, mesa = draw("gated_deltanet")[0], draw("mesa")[0]
    for bad in (1.0, -np.inf, np.nan):
        gated["log_decay"][1, 3, 0] = bad
        with pytest.raises(ValueError, match=f"log_decay must be finite.*got {bad}"):
            baselines.gated_delta_net(**gated)
    mask = np.ones(gated["log_decay"].shape[:2], bool)
    mask[1, 3] = False
    baselines.gated_delta_net(**gated, mask=mask)  # an absent token's does not count
    mesa["beta"][0, 2, 1] = -1
    with pytest.raises(ValueError, match=r"beta must be finite and not negative, got -1"):
        baselines.mesa_net(**mesa)
    published = draw("published_deltanet")[0]
    published["gate"][1, 3, 0, 2] = 7
    with pytest.raises(ValueError, match=r"gate must be between 0 and 1, got 7"):
        baselines.published_deltanet(**published)


@pytest.mark.parametrize("kind", ["deltanet", "identity", "gated_deltanet"])
def test_16_bit_keys_do_not_reach_the_memory(kind):
    """The unit keys of 16-bit keys are float32: rounded ones are longer than 1 and diverge."""
    key = np.ones((1, 1024, 1, 48), np.float32)
    value = np.random.default_rng(0).standard_normal((1, 1024, 1, 4)).astype(np.float32)
    gates = {} if kind == "identity" else {"beta": np.full((1, 1024, 1), 2, np.float32)}
    inputs = {"query": key, "key": key, "value": value, **gates}
    narrow = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    same = {n: x.astype(jnp.float32) for n, x in narrow.items()}
    found, want = (FUNCTIONS[kind](**x, return_state=True)[1].memory for x in (narrow, same))
    assert_close(found, want, 1e-4)


def test_a_weight_of_zero_has_its_gradient():
    """Of a saturated gate; √0 would have none."""
    inputs = {n: np.asarray(x, np.float32) for n, x in draw("mesa")[0].items()}
    inputs["beta"][:, 2] = 0
    weight = np.random.default_rng(1).standard_normal((*inputs["value"].shape[:2], 4, 5))

    def loss(beta):
        return jnp.sum(weight * baselines.mesa_net(**inputs | {"beta": beta}))

    gradient = jax.grad(loss)(inputs["beta"])
    step = np.zeros_like(inputs["beta"])
    step[0, 2, 0] = 1e-2
    slope = (-3 * loss(inputs["beta"]) + 4 * loss(inputs["beta"] + step)) / 2e-2
    slope -= loss(inputs["beta"] + 2 * step) / 2e-2  # one-sided, of second order
    assert abs(gradient[0, 2, 0] - slope) < 2e-2 * abs(slope)
    layer = BaselineAttention("mesa", 4, 32, rngs=nnx.Rngs(0))
    out = layer(100 * jax.random.normal(jax.random.key(0), (2, 20, 32)))
    assert np.isfinite(out).all()


def test_a_token_that_forgets_all_hides_nothing():
    inputs, _ = draw("gated_deltanet", length=40)
    inputs["log_decay"][:] = -0.01
    inputs["log_decay"][:, 3] = -1e5
    inputs["log_decay"][:, 9] = -3e38
    inputs["log_decay"][1, 12:14] = -3e38
    inputs = {n: np.asarray(x, np.float32) for n, x in inputs.items()}
    call = lambda x, how: baselines.gated_delta_net(**x, implementation=how)  # noqa: E731
    results = [jax.vjp(lambda x, h=how: call(x, h), inputs) for how in ("xla", "reference")]
    (found, pull), (want, pull_want) = results
    assert_close(found, want, 2e-5)
    gradients = (p(jnp.ones_like(want)) for p in (pull, pull_want))
    jax.tree.map(lambda x, y: assert_close(x, y, 2e-5), *gradients)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_shard_map_where_only_segments_vary(kind):
    inputs, _ = draw(kind, length=5)
    inputs = {n: x[:1] if x.ndim > 1 else x for n, x in inputs.items()}
    ids = np.asarray([[0, 0, 1, 1, 1]])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for gates in ((), ("beta", "log_decay", "gate")):
        specs = {n: P("data") if n in gates else P() for n in inputs}
        sharded = jax.shard_map(
            lambda x, ids: FUNCTIONS[kind](**x, segment_ids=ids, return_state=True),
            mesh=mesh,
            in_specs=(specs, P("data")),
            out_specs=P("data"),
        )
        want = FUNCTIONS[kind](**inputs, segment_ids=ids, return_state=True)
        found = jax.jit(sharded)(inputs, ids)
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), found, want)


@pytest.mark.parametrize("segments", [False, True], ids=["plain", "segments_and_mask"])
def test_softmax_equals_the_oracle(segments, x64):
    inputs, _ = draw("softmax")
    segment_ids, mask = packing(segments)
    call = jax.jit(lambda **x: baselines.softmax_attention(**x, segment_ids=segment_ids, mask=mask))
    # dot_product_attention computes the softmax in float32 whatever its inputs are.
    assert_close(call(**inputs), softmax(inputs, segment_ids, mask), 2e-6)
    weight = np.random.default_rng(1).standard_normal(call(**inputs).shape)
    gradients = jax.grad(lambda x: jnp.sum(weight * call(**x)))(inputs)
    for name, x in inputs.items():
        tangent = np.random.default_rng(2).standard_normal(x.shape)
        moved = inputs | {name: x + 1e-30j * tangent}
        slope = np.sum(weight * softmax(moved, segment_ids, mask)).imag / 1e-30
        assert_close(np.sum(gradients[name] * tangent), slope, 1e-5, name)


def test_decay_that_underflows_neither_overflows_nor_divides(x64):
    """A rescaled delta rule would divide by exp(-4000)."""
    inputs, state = draw("gated_deltanet", length=64)
    inputs["log_decay"] = np.full_like(inputs["log_decay"], -100.0)
    call = lambda x: baselines.gated_delta_net(  # noqa: E731
        **x, initial_state=baselines.BaselineState(**state), chunk_size=64
    )
    out, pullback = jax.vjp(call, inputs)
    rest = (np.zeros((2, 2, 6)), np.zeros((2, 2, 6, 6)), None, None)
    values = recurrent("gated_deltanet", inputs, state["memory"], *rest)
    assert_close(out, values[0], tolerances.FLOAT64)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(pullback(jnp.ones_like(out))))


def test_identity_is_vla_with_a_huge_lambda0(x64):
    import vla_jax

    inputs, _ = draw("identity")
    expected = vla_jax.vla_attention(**inputs, lambda0=1e12)
    assert_close(baselines.identity_attention(**inputs), expected, 1e-8)


def test_mesa_is_recursive_least_squares(x64):
    """What VLA computes with write_gain='rls' and u = k̂, by another recurrence."""
    import vla_jax

    inputs, _ = draw("mesa")
    del inputs["beta"]
    unit, _ = oracle.normalize(inputs["key"])
    lambda0 = inputs.pop("lambda0")
    expected = vla_jax.vla_attention(
        **inputs, direction=unit, lambda0=lambda0, write_gain="rls", readout="none"
    )
    assert_close(baselines.mesa_net(**inputs, lambda0=lambda0), expected, 1e-8)


def test_what_vla_with_gates_becomes(x64):
    """MesaNet, and with a huge λ₀ gated DeltaNet: the printed loops, the baselines, VLA's kinds."""
    import vla_jax

    inputs, _ = draw("gated_deltanet", length=19, group=1)
    tokens = [inputs[n] for n in ("query", "key", "value")]
    gates = {n: inputs[n] for n in ("beta", "log_decay")}
    unit, _ = oracle.normalize(inputs["key"])
    lambda0 = np.array([0.3, 0.7])
    call = functools.partial(vla_jax.vla_attention, *tokens, implementation="reference")

    wanted = oracle.mesa_net(
        tokens[0], unit, tokens[2], *gates.values(), np.repeat(lambda0[:, None], 6, 1)
    )
    assert_close(baselines.mesa_net(*tokens, **gates, lambda0=lambda0), wanted, 1e-9)
    assert_close(call(**gates, lambda0=lambda0, inverse="read"), wanted, 1e-9)

    wanted = oracle.gated_delta_net(tokens[0], unit, tokens[2], *gates.values())
    assert_close(baselines.gated_delta_net(*tokens, **gates), wanted, 1e-9)
    for write_gain in ("unit", "projection"):
        options = {"lambda0": 1e12, "readout": "none", "write_gain": write_gain}
        assert_close(call(**gates, **options), wanted, 1e-9)

    weights = {"beta": gates["beta"], "lambda0": lambda0}
    read = call(**weights, inverse="read")
    write = call(unit, **weights, write_gain="rls", readout="none")
    assert_close(write, np.asarray(read), 1e-9)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_split_anywhere_and_resume(kind, x64):
    inputs, _ = draw(kind, length=22)
    whole, end = FUNCTIONS[kind](**inputs, return_state=True)
    state, parts = None, []
    for part in (slice(0, 5), slice(5, 21), slice(21, 22)):
        tokens = {n: x if x.ndim == 1 else x[:, part] for n, x in inputs.items()}
        out, state = FUNCTIONS[kind](**tokens, initial_state=state, return_state=True)
        parts.append(out)
    assert_close(jnp.concatenate(parts, axis=1), whole, tolerances.FLOAT64)
    jax.tree.map(lambda x, y: assert_close(x, y, tolerances.FLOAT64), state, end)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"beta": np.ones((2, 37, 3))}, ValueError, r"beta must have shape \[B, T, H\]"),
        ({"implementation": "pallas"}, NotImplementedError, "its kernels have no log_decay"),
        ({"readout": "mean"}, ValueError, "readout must be one of"),
        ({"initial_state": np.ones(3)}, TypeError, "must be a BaselineState or None"),
        ({"log_decay": np.ones((2, 37, 2), int)}, TypeError, "log_decay must be a floating"),
    ],
)
def test_a_bad_argument_is_named(change, error, message):
    inputs, _ = draw("gated_deltanet")
    with pytest.raises(error, match=message):
        baselines.gated_delta_net(**(inputs | change))


# --- layers -----------------------------------------------------------------------------------


def make(kind, **options):
    options = {"num_heads": 4, "in_features": 12, "num_kv_heads": 2, "rngs": nnx.Rngs(0)} | options
    if kind == "softmax":
        return SoftmaxAttention(window=16, **options)
    return BaselineAttention(kind, **options)


@pytest.mark.parametrize("kind", [*BASELINES, "softmax"])
def test_a_layer_decodes_what_it_computes(kind):
    layer = make(kind, short_conv=3)
    call = nnx.jit(lambda layer, x, **options: layer(x, **options), static_argnames="return_state")
    step = nnx.jit(lambda layer, x, state: layer.step(x, state))
    x = jax.random.normal(jax.random.key(0), (2, 9, 12))
    whole = call(layer, x)
    assert whole.shape == x.shape
    _, state = call(layer, x[:, :5], return_state=True)
    fresh = layer.init_state(2)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, state)
    for t in range(5, 9):
        out, state = step(layer, x[:, t], state)
        assert_close(out, whole[:, t], 1e-4)
    # Padding with NaN on the left is absent, and a segment begins afresh.
    mask = jnp.arange(12)[None].repeat(2, axis=0) >= 3
    ids = jnp.asarray([[0] * 7 + [2] * 5] * 2)
    padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)), constant_values=jnp.nan)
    out = call(layer, padded, mask=mask, segment_ids=ids)
    assert_close(out[:, 3:7], whole[:, :4], 1e-4)
    assert np.all(out[:, :3] == 0)
    assert_close(out[:, 7:], call(layer, x[:, 4:]), 1e-4)


def test_arms_share_the_scaffold():
    from vla_jax.nnx import VariationalLinearAttention

    options = {"num_heads": 2, "in_features": 8, "short_conv": 3}
    vla = VariationalLinearAttention(**options, rngs=nnx.Rngs(0))
    expected = {n: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(getattr(vla, n))))
                for n in ("q_proj", "k_proj", "v_proj", "q_conv", "norm", "o_proj")}  # fmt: skip
    for kind in (*BASELINES, "softmax"):
        other = make(kind, **options, num_kv_heads=None)
        for name, shapes in expected.items():
            found = nnx.to_pure_dict(nnx.state(getattr(other, name)))
            assert jax.tree.map(jnp.shape, found) == shapes


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("mesa", {"readout": "ratio"}),
        ("published_deltanet", {"implementation": "xla"}),
        ("mesa", {"allow_neg_eigval": True}),
    ],
)
def test_an_option_that_a_kind_lacks_is_refused(kind, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make(kind, **option)


@pytest.mark.parametrize("kind", ["deltanet", "gated_deltanet"])
def test_beta_up_to_two_is_twice_the_sigmoid(kind):
    x = jax.random.normal(jax.random.key(0), (2, 9, 12))
    doubled, plain = (make(kind, allow_neg_eigval=allow) for allow in (True, False))
    for layer, bias in ((doubled, -1.0), (plain, np.log(2 / (np.e - 1)))):
        layer.beta.kernel[...] *= 0
        layer.beta.bias[...] += bias
    assert_close(doubled(x), plain(x), 1e-5)
    doubled.beta.bias[...] += 9  # nearly a reflection at each step
    assert np.all(np.isfinite(doubled(jnp.tile(x, (1, 30, 1)))))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_state_of_another_layer_is_refused(kind):
    layer, x = make(kind, short_conv=3), jnp.ones((2, 5, 12))
    _, state = layer(x, return_state=True)
    _, wider = make(kind, short_conv=4)(x, return_state=True)
    _, plain = make(kind)(x, return_state=True)
    for other in (wider, plain):
        with pytest.raises((TypeError, ValueError), match=r"initial_state\.conv"):
            layer(x, initial_state=other)
    with pytest.raises(ValueError, match=r"initial_state\.conv must be None"):
        make(kind)(x, initial_state=state)
    with pytest.raises(ValueError, match=r"initial_state\.conv must have shape"):
        layer(x[:1], initial_state=state)
    with pytest.raises(TypeError, match="initial_state must be a"):
        layer(x, initial_state={})
    with pytest.raises(TypeError, match=r"state must be a \w+, got NoneType"):
        layer.step(x[:, 0], None)
    with pytest.raises(ValueError, match=r"x_t must have shape \[B, in_features\]"):
        layer.step(x, state)
    with pytest.raises(TypeError, match="rngs must be a Rngs"):
        make(kind, rngs=None)
    with pytest.raises(ValueError, match="batch_size"):
        layer.init_state(0)
    if kind == "linear":
        with pytest.raises(TypeError, match=r"initial_state\.core"):
            layer(x, initial_state=dataclasses.replace(state, core=None))
        with pytest.raises(ValueError, match="readout"):
            make(kind, readout="")
    else:
        with pytest.raises(ValueError, match=r"initial_state\.key must have shape"):
            layer(x, initial_state=dataclasses.replace(state, key=state.key[:, :3]))


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_counts(mixer):
    config = ModelConfig(mixer, max_length=None, window=10, d_model=16, num_heads=2, short_conv=3)
    model = Model(config, nnx.Rngs(0))
    assert parameter_count(config) == sum(
        x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    )
    state = model.init_state(1).layers
    if mixer in ("vla", "vla_silu"):  # the inverse and what goes with it is a cache
        ratio = mixer == "vla"  # without it, the sum of the keys decides nothing
        state = [(s.memory, s.penalty, s.key_sum if ratio else None, s.conv) for s in state]
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert state_floats(config, 10) == sum(x.size for x in floats)
    target = parameter_count(ModelConfig("vla", max_length=None, d_model=16, num_heads=2))
    matched = with_parameter_count(config, target)
    assert abs(parameter_count(matched) - target) <= config.d_model * 2 + 1


def test_logits_at_some_positions():
    model = Model(ModelConfig("deltanet", max_length=9, d_model=16, num_heads=2), nnx.Rngs(0))
    ids, at = jnp.arange(18).reshape(2, 9), jnp.asarray([[1, 8], [0, 3]])
    expected = jnp.take_along_axis(model(ids), at[..., None], axis=1)
    np.testing.assert_allclose(model(ids, at=at), expected, rtol=1e-5, atol=1e-6)
