"""The Flax layers: against an independent NumPy layer, against each other, and split anywhere.

One file, because both layers share each compiled call. Bad arguments: `test_layer_arguments`.
"""

import copy
import dataclasses
import functools
import inspect
import math

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import tolerances
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from layers import FULL, IN, draw, make, pure
from support import assert_close, assert_rms_close

import vla_jax
from vla_jax import layer, linen, nnx, ops, presets

KEY = {"direction": "key", "write_gain": "projection", "readout": "none", "output_norm": None}
PLAIN = {"num_kv_heads": 1, "use_bias": False, "write_gain": "rls", "direction": "key"}
OPTIONS = {
    "full": FULL,
    "key": KEY,
    "plain": PLAIN | {"lambda0": 5.0},
    "layer norm": {"short_conv": 1, "norm_eps": 1e-12},
    "features": {"feature_map": jax.nn.silu, "readout": "none", "output_norm": "rms_per_head"},
    "language": presets.options("language"),
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


@functools.partial(jax.jit, static_argnums=0)
def run(graph, params, x, **kwargs):
    return flax_nnx.merge(graph, params)(x, return_state=True, **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def run_step(graph, params, x_t, state):
    return flax_nnx.merge(graph, params).step(x_t, state)


def call(module, x, **kwargs):
    """(out, state) of a jitted call."""
    return run(*flax_nnx.split(module), x, **kwargs)


def step(module, x_t, state):
    return run_step(*flax_nnx.split(module), x_t, state)


def defining(state):
    """What a state means: the cached inverse aside."""
    return [x for x in (state.memory, state.penalty, state.key_sum, state.conv) if x is not None]


def assert_same(actual, expected, tolerance):
    """(out, state) against (out, state)."""
    assert_close(actual[0], expected[0], tolerance, "out")
    for i, (x, y) in enumerate(zip(defining(actual[1]), defining(expected[1]), strict=True)):
        assert_close(x, y, tolerance, f"state {i}")


# --- an independent layer in NumPy -------------------------------------------------------------


def numpy_layer(config, params, x, mask=None, segment_ids=None):
    """The layer in float64 NumPy, token by token, from its description alone."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x = np.asarray(x, np.float64)
    batch, length, _ = x.shape
    mask = np.ones((batch, length), bool) if mask is None else np.asarray(mask)
    ids = np.zeros((batch, length), int) if segment_ids is None else np.asarray(segment_ids)
    x = np.where(mask[..., None], x, 0)
    parts = []
    for name in "qkv":
        group = params[f"{name}_proj"]
        part = np.tensordot(x, group["kernel"], 1) + group.get("bias", 0)
        if config.short_conv:
            kernel, source = params[f"{name}_conv"]["kernel"], part
            part = np.zeros_like(source)
            for b in range(batch):
                for t in range(length):
                    seen = [s for s in range(t + 1) if mask[b, s] and ids[b, s] == ids[b, t]]
                    for back, s in enumerate(seen[::-1][: config.short_conv]):
                        part[b, t] += kernel[config.short_conv - 1 - back] * source[b, s]
        parts.append(part)
    q, k, v = parts
    direction = None
    if config.direction == "learned":
        u = np.einsum("bthd,hde->bthe", k, params["u_proj"]["kernel"])
        norm = np.linalg.norm(u, axis=-1, keepdims=True)
        direction = u / np.where(norm == 0, 1, norm) / math.sqrt(config.head_dim)
    lambda0 = np.exp(params["penalty"]["log_lambda0"]) if config.learn_lambda0 else config.lambda0
    if config.feature_map is jax.nn.silu:
        q, k = (p / (1 + np.exp(-p)) for p in (q, k))
    else:
        q, k = (np.where(p > 0, p + 1, np.exp(np.minimum(p, 0))) for p in (q, k))
    gates = {}
    if config.beta:
        logits = np.tensordot(x, params["beta_proj"]["kernel"], 1) + params["beta_proj"]["bias"]
        gates["beta"] = 1 / (1 + np.exp(-logits))
    if config.decay:
        group = params["decay_proj"]
        logits = np.tensordot(x, group["kernel"], 1) + group["bias"]
        gates["log_decay"] = -np.exp(group["log_rate"]) * np.log1p(np.exp(logits))
    out, _, _ = oracle.attention(
        q,
        k,
        v,
        direction,
        **gates,
        inverse=config.inverse,
        lambda0=lambda0,
        segment_ids=ids,
        mask=mask,
        write_gain=config.write_gain,
        readout=config.readout,
    )
    if config.output_norm == "layer":
        flat = out.reshape(batch, length, -1)
        centred = flat - flat.mean(-1, keepdims=True)
        out = (centred / np.sqrt(flat.var(-1, keepdims=True) + config.norm_eps)).reshape(out.shape)
    elif config.output_norm == "rms_per_head":
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + config.norm_eps)
    if config.output_norm:
        out = out * params["norm"]["scale"] + params["norm"].get("bias", 0)
    out = np.tensordot(out, params["o_proj"]["kernel"], 2) + params["o_proj"].get("bias", 0)
    return np.where(mask[..., None], out, 0)


@options
def test_both_layers_equal_numpy_and_each_other(options):
    """Mask, segments and every part of the layer; equal parameters, equal bits."""
    module = make(**options)
    other = linen.VariationalLinearAttention(4, IN, **options)
    x, params = draw(9), pure(module)
    initial = jax.eval_shape(other.init, jax.random.key(1), x)["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(initial, params)

    mask = jnp.array([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0, 1, 0]], bool)
    ids = jnp.array([[0, 0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 2, 2, 2, 2, 2, 2]])
    packed = {"mask": mask, "segment_ids": ids, "return_state": True}
    out, state = module(x, **packed)
    exact = numpy_layer(module.config, params, x, mask, ids)
    assert_close(out, exact, tolerances.FLOAT32)
    chex.assert_trees_all_equal(other.apply({"params": params}, x, **packed), (out, state))

    first = module.step(x[:, 0], module.init_state(2))
    exact = numpy_layer(module.config, params, x[:, :1])[:, 0]
    assert_close(first[0], exact, tolerances.FLOAT32)
    variables, fresh = {"params": params}, other.init_state(2)
    chex.assert_trees_all_equal(other.apply(variables, x[:, 0], fresh, method="step"), first)


def test_gradients_of_the_preset_for_text_equal_differences_of_the_numpy_layer(x64):
    """Of every parameter, along one random direction each, in float64."""
    module = make(param_dtype=jnp.float64, **presets.options("language"))
    x, params = draw(7).astype(float), pure(module)
    mask, ids = np.ones((2, 7), bool), np.array([[0] * 7, [0] * 4 + [1] * 3])
    mask[:, 2] = False
    weights = np.random.default_rng(0).normal(size=(2, 7, IN))

    @jax.jit
    def gradient(params):
        return jax.grad(
            lambda p: (layer.apply(module.config, p, x, mask=mask, segment_ids=ids) * weights).sum()
        )(params)

    gradients = gradient(params)
    rng, step = np.random.default_rng(1), 1e-5
    for group, members in params.items():
        for name, value in members.items():
            towards = rng.normal(size=value.shape)

            def loss(t, group=group, name=name, towards=towards):
                moved = params[group] | {name: params[group][name] + t * towards}
                out = numpy_layer(module.config, params | {group: moved}, x, mask, ids)
                return (out * weights).sum()

            expected = (loss(step) - loss(-step)) / (2 * step)
            found = (gradients[group][name] * towards).sum()
            np.testing.assert_allclose(
                found, expected, rtol=1e-6, atol=1e-7, err_msg=f"{group}/{name}"
            )


def test_parameters_are_declared_once():
    config = layer.LayerConfig(num_heads=4, in_features=IN, **FULL)
    declared = layer.parameters(config)
    shapes = {g: {n: p.shape for n, p in members.items()} for g, members in declared.items()}
    assert shapes == jax.tree.map(jnp.shape, pure(make(**FULL)))
    drawn = layer.init_parameters(config, jax.random.key(0))
    assert shapes == jax.tree.map(jnp.shape, drawn)
    for members in layer.parameters(config).values():
        assert all(len(p.shape) == len(p.axes) for p in members.values())


def test_options_agree_in_all_three_places():
    fields = {f.name: f.default for f in dataclasses.fields(layer.LayerConfig)}
    required = {"num_heads", "in_features"}
    signature = inspect.signature(nnx.VariationalLinearAttention.__init__).parameters
    in_nnx = {n: p.default for n, p in signature.items() if n not in ("self", "rngs")}
    in_linen = {f.name: f.default for f in dataclasses.fields(linen.VariationalLinearAttention)}
    assert set(fields) == set(in_nnx) == set(in_linen) - {"parent", "name"}
    for name in set(fields) - required:
        assert fields[name] == in_nnx[name] == in_linen[name], name
        assert signature[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_initial_values_have_the_right_scale():
    module = nnx.VariationalLinearAttention(8, 256, value_dim=16, rngs=flax_nnx.Rngs(0))
    params = pure(module)
    for name, fan_in in (("q_proj", 256), ("v_proj", 256), ("u_proj", 32), ("o_proj", 128)):
        assert float(jnp.var(params[name]["kernel"]) * fan_in) == pytest.approx(1, abs=0.1), name
    assert not jnp.array_equal(params["u_proj"]["kernel"][0], params["u_proj"]["kernel"][1])
    for name in ("q_proj", "o_proj"):
        assert not params[name]["bias"].any()


# --- split, resume, compare --------------------------------------------------------------------


def test_any_split_equals_one_call(x64):
    """22 tokens at once, as 5 + 16 + 1, as 1 + 5 + 16, and one by one, from the start or later."""
    module = make(param_dtype=jnp.float64, **FULL)
    x = draw(22)
    fresh = module.init_state(2)
    expected = call(module, x, initial_state=fresh)
    assert_close(expected[0], numpy_layer(module.config, pure(module), x), tolerances.FLOAT64)
    for split in ((5, 16, 1), (1, 5, 16)):
        state, outs = fresh, []
        for part in np.split(np.arange(22), np.cumsum(split)[:-1]):
            out, state = call(module, x[:, part], initial_state=state)
            outs.append(out)
        assert_same((jnp.concatenate(outs, 1), state), expected, tolerances.FLOAT64)
    for prefix in (0, 1, 5):
        outs, state = [], fresh
        if prefix:
            out, state = call(module, x[:, :prefix], initial_state=fresh)
            outs.append(out)
        for t in range(prefix, 22):
            out, state = step(module, x[:, t], state)
            outs.append(out[:, None])
        assert_same((jnp.concatenate(outs, 1), state), expected, tolerances.FLOAT64)


def test_decoding_in_a_scan_and_compiled_once(compilations):
    module = make(**FULL)
    x = draw(6)
    graph, params = flax_nnx.split(module)

    @jax.jit
    def decode(params, x, state):
        def one(state, x_t):
            out, state = flax_nnx.merge(graph, params).step(x_t, state)
            return state, out

        state, out = jax.lax.scan(one, state, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(out, 0, 1), state

    state = module.init_state(2)
    out, _ = decode(params, x, state)
    expected = []
    for t in range(6):
        if t == 1:
            compilations.clear()
        x_t = jax.device_put(np.asarray(x)[:, t])
        out_t, state = step(module, x_t, state)
        expected.append(out_t)
    assert not compilations
    assert_close(out, jnp.stack(expected, 1), tolerances.REORDERED32)


def test_an_earlier_state_stays_usable():
    module = make(**FULL)
    x = draw(6)
    early = module.init_state(2)
    for t in range(3):
        _, early = step(module, x[:, t], early)
    kept = jax.tree.map(np.array, early)
    first, later = step(module, x[:, 3], early)
    step(module, x[:, 4], later)
    again, _ = step(module, x[:, 3], early)
    chex.assert_trees_all_equal(first, again)
    chex.assert_trees_all_equal(kept, jax.tree.map(np.array, early))


# --- padding and packing -----------------------------------------------------------------------


def test_padding_is_absent(x64):
    """Values, state and gradients equal the unpadded run, wherever and whatever the padding is."""
    graph, params = flax_nnx.split(make(param_dtype=jnp.float64, **FULL))
    x = draw(8)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradient(params, x, mask):
        out, state = flax_nnx.merge(graph, params)(x, mask=mask, return_state=True)
        return sum(jnp.sum(y**2) for y in (out, *defining(state))), (out, state)

    (d_params, d_x), expected = gradient(params, x, None)
    for valid in (range(3, 11), range(8), (0, 2, 3, 5, 6, 7, 9, 10)):
        valid = np.array(valid)
        absent = ~np.isin(np.arange(11), valid)
        padded = jnp.full((2, 11, IN), jnp.nan).at[:, valid].set(x)
        mask = jnp.zeros((2, 11), bool).at[:, valid].set(True)
        (actual_params, actual_x), (out, state) = gradient(params, padded, mask)
        assert_same((out[:, valid], state), expected, tolerances.FLOAT64)
        assert_close(actual_x[:, valid], d_x, tolerances.FLOAT64)
        assert not out[:, absent].any()
        assert not actual_x[:, absent].any()
        leaves = map(jax.tree.leaves, (actual_params, d_params))
        for actual, want in zip(*leaves, strict=True):
            assert_close(actual, want, tolerances.FLOAT64)


def test_nothing_but_padding_changes_nothing():
    module = make(**FULL)
    x, ids = draw(9), jnp.zeros((2, 9), int)
    module = functools.partial(module, x, segment_ids=ids, return_state=True)
    _, state = module(mask=jnp.ones((2, 9), bool))
    out, after = module(mask=jnp.zeros((2, 9), bool), initial_state=state)
    assert not out.any()
    chex.assert_trees_all_close(defining(after), defining(state), rtol=1e-6)


def test_a_masked_token_changes_no_segment(x64):
    """A masked last token of another segment does not end the one before: the state goes on."""
    module = make(param_dtype=jnp.float64, **FULL)
    x = draw(6)
    ids = jnp.array([[0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1]])
    mask = jnp.array([[True] * 5 + [False], [False] + [True] * 5])
    _, initial = call(module, x)
    actual = call(module, x, segment_ids=ids, mask=mask, initial_state=initial)
    filled = ids.at[0, 5].set(0).at[1, 0].set(1)
    expected = call(module, x, segment_ids=filled, mask=mask, initial_state=initial)
    chex.assert_trees_all_equal(actual, expected)
    assert all(y[0].any() for y in defining(actual[1]))
    ended, _ = call(module, x, segment_ids=ids, initial_state=initial)  # with no mask it ends
    assert_close(
        ended[0, 5], numpy_layer(module.config, pure(module), x[:1, 5:])[0, 0], tolerances.FLOAT64
    )


@pytest.mark.parametrize("length", [1, 2])
def test_gradients_of_sequences_shorter_than_the_convolution(length, x64):
    """A loss on output and state, initial convolution cache included, by finite differences."""
    graph, params = flax_nnx.split(make(param_dtype=jnp.float64, **FULL))
    state = jax.tree.map(
        lambda p: jax.random.uniform(jax.random.key(1), p.shape, p.dtype),
        flax_nnx.merge(graph, params).init_state(2),
    )
    penalty = state.penalty @ jnp.swapaxes(state.penalty, -1, -2)  # positive semidefinite
    state = dataclasses.replace(
        state, vla=vla_jax.VLAState(state.memory, penalty, state.vla.key_sum)
    )

    @jax.jit
    @jax.value_and_grad
    def loss(inputs):
        params, x, state = inputs
        out, final = flax_nnx.merge(graph, params)(x, initial_state=state, return_state=True)
        return sum(jnp.sum(jnp.sin(y)) for y in (out, *defining(final)))

    inputs = (params, draw(length), state)
    flat, unflatten = jax.flatten_util.ravel_pytree(inputs)
    gradient = jax.flatten_util.ravel_pytree(loss(inputs)[1])[0]
    assert np.isfinite(gradient).all()
    for seed in range(3):
        way = jax.random.normal(jax.random.key(seed), flat.shape)
        ahead, behind = (loss(unflatten(flat + h * way))[0] for h in (1e-5, -1e-5))
        np.testing.assert_allclose((ahead - behind) / 2e-5, gradient @ way, rtol=1e-6)


# --- dtypes, transformations, options ----------------------------------------------------------


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "out_dtype"),
    [
        ("float32", None, "float32", "float32"),
        ("bfloat16", None, "float32", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("float32", "float16", "float32", "float16"),
    ],
)
def test_dtypes(x_dtype, dtype, param_dtype, out_dtype):
    """Outputs promote like those of `flax.nnx.Linear`; the state is float32 throughout."""
    param_dtype = jnp.dtype(param_dtype)
    options = {"num_heads": 4, "in_features": IN, "dtype": dtype, "param_dtype": param_dtype}
    config = layer.LayerConfig(**FULL, **options)

    def everything():
        x, params = draw(6).astype(x_dtype), layer.init_parameters(config, jax.random.key(0))
        linear = flax_nnx.Linear(IN, 3, dtype=dtype, param_dtype=param_dtype, rngs=flax_nnx.Rngs(0))
        whole = layer.apply(config, params, x, return_state=True)
        return params, linear(x), whole, layer.step(config, params, x[:, 0], whole[1])

    params, expected, *results = jax.eval_shape(everything)
    assert {p.dtype for p in jax.tree.leaves(params)} == {param_dtype}
    for out, state in results:
        assert out.dtype == out_dtype == expected.dtype
        assert {y.dtype for y in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_bfloat16_equals_float64_up_to_rounding():
    module = make(**FULL, dtype=jnp.bfloat16)
    x = draw(21)
    out, _ = call(module, x)
    expected = numpy_layer(module.config, pure(module), x)
    assert_rms_close(out, expected, tolerances.BFLOAT16_RMS * 2)  # two projections more
    decoded, _ = step(module, x[:, 0], module.init_state(2))
    assert_rms_close(decoded, expected[:, 0], tolerances.BFLOAT16_RMS * 2)


def test_float64_input_to_a_float32_layer(x64):
    config = layer.LayerConfig(num_heads=4, in_features=IN, **FULL)
    state = layer.init_state(config, 2)
    assert state.memory.dtype == state.conv.dtype == jnp.float32

    def everything():
        params = layer.init_parameters(config, jax.random.key(0))
        return layer.apply(config, params, draw(7), initial_state=state, return_state=True)

    out, state = jax.eval_shape(everything)
    assert out.dtype == state.memory.dtype == state.conv.dtype == jnp.float64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lambda0", 1.0),
        ("direction", "key"),
        ("write_gain", "projection"),
        ("readout", "none"),
        ("feature_map", jax.nn.silu),
        ("short_conv", 3),
        ("output_norm", "layer"),
        ("output_norm", None),
        ("norm_eps", 0.1),
        ("kernel_init", jax.nn.initializers.normal(1.0)),
        ("bias_init", jax.nn.initializers.ones),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_every_option_has_an_effect(name, value):
    x = draw(6)
    base, changed = make(**FULL)(x), make(**FULL | {name: value})(x)
    assert base.shape == changed.shape
    assert not np.allclose(base, changed, atol=1e-4)


def test_options_of_size_and_dtype():
    def outcome(**options):
        config = layer.LayerConfig(num_heads=4, in_features=IN, **options)

        def everything():
            params = layer.init_parameters(config, jax.random.key(0))
            return params, *layer.apply(config, params, draw(6), return_state=True)

        params, out, state = jax.eval_shape(everything)
        params = jax.tree.map(lambda p: (p.shape, p.dtype), params)
        return params, (out.shape, out.dtype), state.memory.shape

    params, out, memory = outcome()
    assert out == ((2, 6, IN), jnp.float32)
    assert memory == (2, 4, 3, 3)
    assert outcome(num_kv_heads=2)[2] == (2, 2, 3, 3)
    assert outcome(head_dim=8)[2] == (2, 4, 8, 8)
    assert outcome(value_dim=8)[2] == (2, 4, 3, 8)
    assert outcome(out_features=5)[1] == ((2, 6, 5), jnp.float32)
    assert outcome(dtype=jnp.bfloat16)[1] == ((2, 6, IN), jnp.bfloat16)
    wide = outcome(param_dtype=jnp.bfloat16)[0]["o_proj"]["kernel"]
    assert wide == (params["o_proj"]["kernel"][0], jnp.bfloat16)
    assert "bias" in params["q_proj"]
    assert "bias" in params["norm"]
    assert not any("bias" in group for group in outcome(use_bias=False)[0].values())


def test_precision_and_implementation_are_passed_on():
    x = draw(6)
    assert_close(make(implementation="reference")(x), make()(x), tolerances.REORDERED32)
    lowered = [
        jax.jit(make(implementation=i)).lower(x).as_text() for i in ("reference", "xla", None)
    ]
    assert lowered[0] != lowered[1] == lowered[2]
    asked = (str(jax.make_jaxpr(make(precision=p))(x)).count("HIGHEST") for p in ("default", None))
    assert next(asked) < next(asked)


def test_the_implementation_of_a_step(monkeypatch):
    """The kernel is named, not passed over; every other name has the step without chunks."""
    asked = []

    def step(*arguments, implementation, **options):
        asked.append(implementation)
        return vla_step(*arguments, **options)

    vla_step = ops.vla_step
    monkeypatch.setattr(ops, "vla_step", step)
    for implementation in (None, "xla", "reference", "associative", "triton", "pallas"):
        module = make(implementation=implementation)
        module.step(draw(1)[:, 0], module.init_state(2))
    assert asked == [None] * 5 + ["pallas"]


def test_learned_lambda0():
    fixed, learned = make(lambda0=0.7), make(lambda0=0.7, learn_lambda0=True)
    x = draw(6)
    assert_close(learned(x), fixed(x), tolerances.REORDERED32)

    learned.penalty.log_lambda0[...] = jnp.full(4, -5.0)  # any value serves
    assert jnp.isfinite(learned(x)).all()
    assert not jnp.array_equal(learned(x), fixed(x))


def test_training_steps_in_both_apis():
    """jit, grad and optax: the loss falls, and alike in the two."""
    x, target = draw(8), draw(8, seed=1)
    module = make(learn_lambda0=True)
    before = params = pure(module)
    other = linen.VariationalLinearAttention(4, IN, learn_lambda0=True)
    optimizer = flax_nnx.Optimizer(module, optax.adam(1e-2), wrt=flax_nnx.Param)

    @flax_nnx.jit
    def train(module, optimizer):
        loss, gradient = flax_nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(module)
        optimizer.update(module, gradient)
        return loss

    adam = optax.adam(1e-2)

    @jax.jit
    def train_linen(params, moments):
        def loss(params):
            return jnp.mean((other.apply({"params": params}, x) - target) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradient, moments)
        return optax.apply_updates(params, updates), moments, value

    moments, losses = adam.init(params), []
    for _ in range(3):
        params, moments, value = train_linen(params, moments)
        losses.append((float(train(module, optimizer)), float(value)))
    assert losses[-1][0] < losses[0][0]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(pure(module)), strict=True):
        assert (jnp.abs(old - new) > 0).any()
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4)


def test_vmap():
    module = make(**FULL)
    x = draw(6)
    each = jax.jit(jax.vmap(lambda y: module(y[None])[0]))(x)
    assert_close(each, module(x), tolerances.REORDERED32)


# --- invariants and partitioning ---------------------------------------------------------------


def test_check_invariants():
    options = {"num_kv_heads": 2}
    module = make(check_invariants=True, **options)
    x = draw(6)
    mask = jnp.arange(6) > jnp.array([[2], [0]])
    packed = {"mask": mask, "segment_ids": jnp.array([[0, 0, 0, 1, 1, 1]] * 2)}
    chex.assert_trees_all_equal(module(x, **packed), make(**options)(x, **packed))
    bad = x.at[0, 2].set(jnp.nan)
    module(bad, **packed)  # it is masked there
    packed["mask"] = jnp.ones((2, 6), bool)
    with pytest.raises(AssertionError, match="unit length"):
        module(bad, **packed)
    with pytest.raises(AssertionError, match="unit length"):
        module.step(bad[:, 2], module.init_state(2))
    with pytest.raises(RuntimeError, match="chexify"):
        call(module, x)

    def loss(params, x):
        return jnp.sum(layer.apply(module.config, params, x))

    checked = chex.chexify(jax.jit(jax.value_and_grad(loss)), async_check=False)
    value, gradient = checked(pure(module), x)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves((value, gradient)))
    with pytest.raises(AssertionError, match="unit length"):
        checked(pure(module), bad)


def test_logical_axes_need_no_mesh():
    plain, named = make(**FULL), make(logical_axes=True, **FULL)
    x = draw(6)
    chex.assert_trees_all_equal(pure(named), pure(plain))
    chex.assert_trees_all_equal(named(x), plain(x))
    specs = flax_nnx.to_pure_dict(flax_nnx.get_partition_spec(flax_nnx.state(named)))
    assert specs["q_proj"]["kernel"] == jax.P("embed", "heads", "head_dim")
    other = linen.VariationalLinearAttention(4, IN, logical_axes=True, **FULL)
    variables = jax.jit(other.init)(jax.random.key(0), x)
    assert flax_linen.get_partition_spec(variables)["params"] == specs
    chex.assert_trees_all_equal(
        other.apply(variables, x), other.apply(flax_linen.unbox(variables), x)
    )


def test_logical_axes_of_ones_own():
    names = {"heads": "model", "kv_heads": "model", "embed": None}
    made = make(logical_axes=names, **FULL)
    assert made.q_proj.kernel.out_sharding == (None, "model", "head_dim")
    assert made.k_proj.kernel.out_sharding == (None, "model", "head_dim")
    assert hash(made.config) == hash(copy.deepcopy(made).config)
    other = linen.VariationalLinearAttention(4, IN, logical_axes=names, **FULL)
    boxed = jax.eval_shape(other.init, jax.random.key(0), draw(6))
    specs = flax_linen.get_partition_spec(boxed)["params"]
    assert specs["k_proj"]["kernel"] == jax.P(None, "model", "head_dim")
    assert make(logical_axes={}, num_heads=4).config.logical_axes is True
    with pytest.raises(ValueError, match="an axis in logical_axes must be one of 'embed'"):
        make(logical_axes={"head": "model"})
    with pytest.raises(TypeError, match=r"logical_axes\['heads'\] must be a str or None, got 1"):
        make(logical_axes={"heads": 1})


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_logical_axes_on_a_mesh():
    x = draw(6)
    expected = make(num_heads=4)(x)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    names = ("heads", "kv_heads")
    rules = [("embed", None), ("head_dim", None), *((n, "model") for n in names)]
    with jax.set_mesh(mesh), flax_nnx.logical_axis_rules(rules):
        module = make(num_heads=4, logical_axes=True)
        assert module.q_proj.kernel[...].sharding.spec == jax.P(None, "model", None)
        out = jax.jit(lambda x: module(x))(x)
    assert_close(out, expected, tolerances.REORDERED32)


@pytest.mark.parametrize("log", [-60.0, 200.0])
def test_a_learned_penalty_that_runs_away_stays_finite(log):  # gradients: from 1e-30 on
    made = make(learn_lambda0=True)
    made.penalty.log_lambda0[...] = jnp.full(4, log)
    graph, params = flax_nnx.split(made)
    loss = lambda p: jnp.sum(flax_nnx.merge(graph, p)(draw(6)) ** 2)  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    chex.assert_tree_all_finite((value, flax_nnx.to_pure_dict(gradients)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_feature_map_may_compute_in_another_dtype(dtype):
    seen = []

    def wide(raw):
        seen.append((raw.shape, raw.dtype))
        return vla_jax.feature_map(raw.astype(jnp.float32))

    mapped = jax.eval_shape(make(feature_map=wide, dtype=dtype, num_kv_heads=2), draw(9))
    assert mapped == jax.ShapeDtypeStruct((2, 9, IN), dtype)
    assert seen == [((2, 9, 4, 3), dtype), ((2, 9, 2, 3), dtype)]


def test_a_copy_of_a_layer_has_an_equal_configuration():
    """Whatever the copy of its functions is: averages of parameters go over two layers' trees."""
    made = make(feature_map=jax.nn.silu, readout="none")
    copied = copy.deepcopy(made)
    assert copied.config == made.config
    chex.assert_trees_all_equal(jax.tree.map(lambda a, b: (a + b) / 2, made, copied), made)


def test_a_feature_map_without_a_derivative_at_zero_and_padding():
    def unit(raw):
        return raw / jnp.linalg.norm(raw, axis=-1, keepdims=True)

    made = make(feature_map=unit, bias_init=jax.nn.initializers.zeros, readout="none")
    mask = jnp.arange(6)[None] < jnp.array([[6], [4]])
    graph, params = flax_nnx.split(made)
    loss = lambda p: jnp.sum(flax_nnx.merge(graph, p)(draw(6), mask=mask) ** 2)  # noqa: E731
    chex.assert_tree_all_finite(flax_nnx.to_pure_dict(jax.grad(loss)(params)))
