"""The Flax layers: against an independent NumPy layer, against each other, and split anywhere."""

import dataclasses
import functools
import inspect
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import tolerances
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.test_util import check_grads
from support import assert_close

from vla_jax import layer, linen, nnx

IN = 12
FULL = dict(
    num_kv_heads=2,
    head_dim=6,
    value_dim=5,
    out_features=7,
    lambda0=(0.1, 0.3),
    learn_lambda0=True,
    short_conv=4,
    output_norm="rms_per_head",
)
OPTIONS = {
    "default": {},
    "full": FULL,
    "key": dict(direction="key", write_gain="projection", readout="none", output_norm=None),
    "plain": dict(num_kv_heads=1, use_bias=False, write_gain="rls", direction="key", lambda0=5.0),
    "width 1": dict(short_conv=1, norm_eps=1e-12),
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def make(seed=0, num_heads=4, **kwargs):
    """An NNX layer whose every parameter, biases included, is random."""
    random = jax.nn.initializers.normal(0.3)
    kwargs = dict(bias_init=random) | kwargs
    return nnx.VariationalLinearAttention(num_heads, IN, rngs=flax_nnx.Rngs(seed), **kwargs)


def pure(module):
    return flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))


def draw(length, batch=2, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, length, IN))


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
        direction = u / np.linalg.norm(u, axis=-1, keepdims=True) / math.sqrt(config.head_dim)
    lambda0 = np.exp(params["penalty"]["log_lambda0"]) if config.learn_lambda0 else config.lambda0
    out, _, _ = oracle.attention(
        *(np.where(p > 0, p + 1, np.exp(np.minimum(p, 0))) for p in (q, k)),
        v,
        direction,
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
@pytest.mark.parametrize("packed", [False, True])
def test_layer_equals_numpy(options, packed, x64):
    module = make(param_dtype=jnp.float64, **options)
    x = draw(21)
    rest = {}
    if packed:
        rng = np.random.default_rng(0)
        rest = dict(
            mask=jnp.asarray(rng.random((2, 21)) > 0.3),
            segment_ids=jnp.asarray(np.sort(rng.integers(0, 4, (2, 21)), axis=1)),
        )
    out, _ = call(module, x, **rest)
    expected = numpy_layer(module.config, pure(module), x, **rest)
    assert_close(out, expected, tolerances.FLOAT64)


# --- NNX and Linen -----------------------------------------------------------------------------


@options
def test_nnx_and_linen_have_equal_parameters_and_outputs(options):
    module = make(**options)
    other = linen.VariationalLinearAttention(4, IN, **options)
    x = draw(9)
    params = pure(module)
    initial = other.init(jax.random.key(1), x)["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(initial, params)

    mask = jnp.arange(9) > jnp.array([[2], [0]])
    expected, state = call(module, x, mask=mask)
    apply = jax.jit(lambda p, *a, **k: other.apply({"params": p}, *a, return_state=True, **k))
    out, other_state = apply(params, x, mask=mask)
    chex.assert_trees_all_equal(out, expected)
    chex.assert_trees_all_equal(other_state, state)

    later = jax.jit(lambda p, *a: other.apply({"params": p}, *a, method="step"))
    chex.assert_trees_all_equal(later(params, x[:, 0], state), step(module, x[:, 0], state))
    chex.assert_trees_all_equal(other.init_state(2), module.init_state(2))


def test_parameters_are_declared_once():
    config = layer.LayerConfig(num_heads=4, in_features=IN, **FULL)
    shapes = {g: {n: p.shape for n, p in m.items()} for g, m in layer.parameters(config).items()}
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


@options
@pytest.mark.parametrize("split", [(5, 16, 1), (1, 1, 20), (2, 20)])
def test_any_split_equals_one_call(options, split, x64):
    module = make(param_dtype=jnp.float64, **options)
    x = draw(22)
    expected = call(module, x)
    state, outs, start = None, [], 0
    for length in split:
        out, state = call(module, x[:, start : start + length], initial_state=state)
        outs.append(out)
        start += length
    assert_same((jnp.concatenate(outs, 1), state), expected, tolerances.REORDERED64)


@options
def test_decoding_equals_prefill(options, x64):
    module = make(param_dtype=jnp.float64, **options)
    x = draw(12)
    expected = call(module, x)
    prefill, state = call(module, x[:, :3])
    for prefix, outs, state in ((0, [], module.init_state(2)), (3, [prefill], state)):
        for t in range(prefix, 12):
            out, state = step(module, x[:, t], state)
            outs.append(out[:, None])
        assert_same((jnp.concatenate(outs, 1), state), expected, tolerances.REORDERED64)


def test_decoding_in_a_scan_and_compiled_once(compilations):
    module = make(**FULL)
    x = draw(10)
    graph, params = flax_nnx.split(module)

    @jax.jit
    def decode(params, x, state):
        def one(state, x_t):
            out, state = flax_nnx.merge(graph, params).step(x_t, state)
            return state, out

        state, out = jax.lax.scan(one, state, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(out, 0, 1), state

    expected = call(module, x)
    assert_same(decode(params, x, module.init_state(2)), expected, tolerances.FLOAT32)
    _, state = step(module, x[:, 0], module.init_state(2))
    x_t = x[:, 1] + 0
    before = len(compilations)
    for _ in range(3):
        _, state = step(module, x_t, state)
    assert len(compilations) == before


def test_an_earlier_state_stays_usable():
    module = make(**FULL)
    x = draw(6)
    _, early = call(module, x[:, :3])
    kept = jax.tree.map(np.asarray, early)
    first, later = step(module, x[:, 3], early)
    step(module, x[:, 4], later)
    again, _ = step(module, x[:, 3], early)
    chex.assert_trees_all_equal(first, again)
    chex.assert_trees_all_equal(kept, jax.tree.map(np.asarray, early))


# --- padding and packing -----------------------------------------------------------------------


@options
@pytest.mark.parametrize("where", ["left", "right", "scattered"])
def test_padding_is_absent(options, where, x64):
    """Values, state and gradients equal the unpadded run, whatever the padding holds."""
    module = make(param_dtype=jnp.float64, **options)
    x = draw(8)
    valid = {"left": range(3, 11), "right": range(8), "scattered": (0, 2, 3, 5, 6, 7, 9, 10)}
    valid = np.array(valid[where])
    padded = jnp.full((2, 11, IN), jnp.nan).at[:, valid].set(x)
    mask = jnp.zeros((2, 11), bool).at[:, valid].set(True)
    out, state = call(module, padded, mask=mask)
    expected = call(module, x)
    assert_same((out[:, valid], state), expected, tolerances.REORDERED64)
    assert not out[:, ~np.isin(np.arange(11), valid)].any()

    graph, params = flax_nnx.split(module)

    @jax.jit
    def loss(params, x, mask):
        out, state = flax_nnx.merge(graph, params)(x, mask=mask, return_state=True)
        return sum(jnp.sum(y**2) for y in (out, *defining(state)))

    gradient = jax.grad(loss, argnums=(0, 1))(params, padded, mask)
    expected = jax.grad(loss, argnums=(0, 1))(params, x, jnp.ones((2, 8), bool))
    assert not gradient[1][:, ~np.isin(np.arange(11), valid)].any()
    gradient = (gradient[0], gradient[1][:, valid])
    for actual, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert_close(actual, want, tolerances.FLOAT64)


def test_nothing_but_padding_changes_nothing():
    module = make(**FULL)
    x = draw(5)
    _, state = call(module, x)
    out, after = call(module, x, mask=jnp.zeros((2, 5), bool), initial_state=state)
    assert not out.any()
    chex.assert_trees_all_close(defining(after), defining(state), rtol=1e-6)


@options
def test_segments_equal_separate_calls(options, x64):
    """Boundaries after 1, 4 and 6 tokens; the initial state reaches the first segment only."""
    module = make(param_dtype=jnp.float64, **options)
    x = draw(12)
    _, initial = call(module, draw(5, seed=1))
    ends = (0, 1, 4, 6, 12)
    ids = jnp.broadcast_to(jnp.repeat(jnp.arange(4), jnp.diff(jnp.array(ends))), (2, 12))
    outs = []
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        out, state = call(module, x[:, start:end], initial_state=None if i else initial)
        outs.append(out)
    actual = call(module, x, segment_ids=ids, initial_state=initial)
    assert_same(actual, (jnp.concatenate(outs, 1), state), tolerances.REORDERED64)


def test_a_masked_token_still_changes_the_segment(x64):
    """Ids are honoured at masked tokens: a call that ends in a masked new segment ends fresh."""
    module = make(param_dtype=jnp.float64, **FULL)
    x = draw(6)
    ids = jnp.array([[0, 0, 0, 0, 0, 1]] * 2)
    mask = jnp.array([[True] * 5 + [False]] * 2)
    _, state = call(module, x, segment_ids=ids, mask=mask)
    assert not any(y.any() for y in defining(state))
    out, _ = call(module, x, segment_ids=ids[:, ::-1] * -1 + 1, mask=mask[:, ::-1])
    expected, _ = call(module, x[:, 1:])
    assert_close(out[:, 1:], expected, tolerances.REORDERED64)


@pytest.mark.parametrize("length", [1, 2])
def test_gradients_of_sequences_shorter_than_the_convolution(length, x64):
    """A loss on output and state, initial convolution cache included, by finite differences."""
    module = make(param_dtype=jnp.float64, **FULL)
    graph, params = flax_nnx.split(module)
    _, state = call(module, draw(3, seed=1))

    @jax.jit
    def loss(params, x, conv):
        initial = dataclasses.replace(state, conv=conv)
        out, final = flax_nnx.merge(graph, params)(x, initial_state=initial, return_state=True)
        return sum(jnp.sum(jnp.sin(y)) for y in (out, *defining(final)))

    x = draw(length)
    check_grads(loss, (params, x, state.conv), order=1, modes="rev", rtol=1e-6, atol=1e-6)


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
    """Outputs promote like `flax.nnx.Linear`; the state is float32; values agree to rounding."""
    module = make(**FULL, dtype=dtype, param_dtype=jnp.dtype(param_dtype))
    x = draw(16)
    out, state = call(module, x.astype(x_dtype))
    linear = flax_nnx.Linear(
        IN, 3, dtype=dtype, param_dtype=jnp.dtype(param_dtype), rngs=flax_nnx.Rngs(0)
    )
    assert out.dtype == out_dtype == linear(x.astype(x_dtype)).dtype
    assert all(p.dtype == param_dtype for p in jax.tree.leaves(pure(module)))
    assert {y.dtype for y in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    decoded, _ = step(module, x[:, 0].astype(x_dtype), module.init_state(2))
    assert decoded.dtype == out_dtype
    exact = numpy_layer(module.config, pure(module), np.asarray(x, np.float64))
    tolerance = tolerances.FLOAT32 if x_dtype == out_dtype == "float32" else 0.1
    assert_close(out, exact, tolerance)
    assert_close(decoded, exact[:, 0], tolerance)


def test_float64_input_to_a_float32_layer(x64):
    module = make(**FULL)
    x = draw(7)
    out, state = call(module, x, initial_state=module.init_state(2))
    assert out.dtype == state.memory.dtype == state.conv.dtype == jnp.float64
    assert_close(out, numpy_layer(module.config, pure(module), x), tolerances.FLOAT64)


CHANGES = dict(
    num_kv_heads=2,
    head_dim=4,
    value_dim=4,
    out_features=IN + 1,
    lambda0=1.0,
    direction="key",
    write_gain="projection",
    readout="none",
    short_conv=3,
    output_norm="rms_per_head",
    norm_eps=0.1,
    use_bias=False,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
    kernel_init=jax.nn.initializers.normal(1.0),
    bias_init=jax.nn.initializers.ones,
)


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_has_an_effect(name):
    x = draw(6)
    base, _ = call(make(), x)
    changed, _ = call(make(**{name: CHANGES[name]}), x)
    alike = base.shape == changed.shape and base.dtype == changed.dtype
    assert not (alike and np.allclose(base, changed, atol=1e-4))


def test_precision_and_implementation_are_passed_on():
    x = draw(6)
    outs = [call(make(implementation=i), x)[0] for i in (None, "reference", "xla", "associative")]
    for out in outs[1:]:
        assert_close(out, outs[0], tolerances.REORDERED32)
    with pytest.raises(NotImplementedError, match="triton"):
        make(implementation="triton")(x)
    module = make(precision="default")
    text = str(jax.make_jaxpr(lambda x: layer.apply(module.config, pure(module), x))(x))
    assert "HIGHEST" not in str(text.split("dot_general")[1])


def test_learned_lambda0():
    fixed, learned = make(lambda0=0.7), make(lambda0=0.7, learn_lambda0=True)
    x = draw(9)
    assert_close(call(learned, x)[0], call(fixed, x)[0], tolerances.REORDERED32)

    def loss(module):
        return jnp.sum(module(x) ** 3)

    gradient = flax_nnx.grad(loss)(learned)["penalty"]["log_lambda0"]
    assert gradient.shape == (4,)
    assert (jnp.abs(gradient[...]) > 0).all()
    learned.penalty.log_lambda0[...] = jnp.full(4, -50.0)  # stays positive, so finite
    assert jnp.isfinite(learned(x)).all()


def test_training_steps_in_both_apis():
    """jit, grad and optax: the loss falls, and alike in the two."""
    x, target = draw(8), draw(8, seed=1)
    module = make()
    params = pure(module)
    other = linen.VariationalLinearAttention(4, IN)
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
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4)


def test_vmap_and_remat():
    module = make(**FULL)
    graph, params = flax_nnx.split(module)
    x = draw(5)

    def loss(params, x):
        return jnp.sum(flax_nnx.merge(graph, params)(x) ** 2)

    plain = jax.jit(jax.grad(loss))(params, x)
    kept = jax.jit(jax.grad(jax.checkpoint(loss)))(params, x)
    chex.assert_trees_all_close(kept, plain, rtol=1e-4, atol=1e-5)
    each = jax.jit(jax.vmap(lambda y: flax_nnx.merge(graph, params)(y[None])[0]))(x)
    assert_close(each, call(module, x)[0], tolerances.REORDERED32)


# --- invariants and partitioning ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_check_invariants(dtype):
    module = make(check_invariants=True, dtype=dtype, **FULL)
    x = draw(6)
    mask = jnp.arange(6) > jnp.array([[2], [0]])
    ids = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    expected, state = call(make(dtype=dtype, **FULL), x, mask=mask, segment_ids=ids)
    out = module(x, mask=mask, segment_ids=ids)  # eager
    assert_close(out, expected, 2e-2)
    with pytest.raises(RuntimeError, match="chexify"):
        call(module, x)

    graph, params = flax_nnx.split(module)

    def loss(params, x, state):
        out, state = flax_nnx.merge(graph, params)(x, initial_state=state, return_state=True)
        out_t, _ = flax_nnx.merge(graph, params).step(x[:, 0], state)
        return jnp.sum(out) + jnp.sum(out_t)

    checked = chex.chexify(jax.jit(jax.value_and_grad(loss)), async_check=False)
    value, gradient = checked(params, x, state)
    assert jnp.isfinite(value)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))
    with pytest.raises(AssertionError, match="unit length"):
        checked(params, x.at[0, 2].set(jnp.nan), state)
    with pytest.raises(AssertionError, match="unit length"):
        module(x.at[0, 2].set(jnp.nan))


def test_logical_axes_need_no_mesh():
    plain, named = make(**FULL), make(logical_axes=True, **FULL)
    x = draw(4)
    chex.assert_trees_all_equal(pure(named), pure(plain))
    chex.assert_trees_all_equal(named(x), plain(x))
    specs = flax_nnx.to_pure_dict(flax_nnx.get_partition_spec(flax_nnx.state(named)))
    assert specs["q_proj"]["kernel"] == jax.P("embed", "heads", "head_dim")
    other = linen.VariationalLinearAttention(4, IN, logical_axes=True, **FULL)
    variables = other.init(jax.random.key(0), x)
    assert flax_linen.get_partition_spec(variables)["params"] == specs
    chex.assert_trees_all_equal(
        other.apply(variables, x), other.apply(flax_linen.unbox(variables), x)
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_logical_axes_on_a_mesh():
    x = draw(4)
    expected = make(num_heads=4)(x)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=auto, devices=jax.devices()[:2])
    names = ("heads", "kv_heads")
    rules = [("embed", None), ("head_dim", None), *((n, "model") for n in names)]
    with jax.set_mesh(mesh), flax_nnx.logical_axis_rules(rules):
        module = make(num_heads=4, logical_axes=True)
        assert module.q_proj.kernel[...].sharding.spec == jax.P(None, "model", None)
        out, _ = call(module, x)
    assert_close(out, expected, tolerances.REORDERED32)


# --- bad arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (dict(num_heads=0), ValueError),
        (dict(num_heads=2.0), TypeError),
        (dict(in_features=-1), ValueError),
        (dict(num_heads=5), ValueError),  # does not divide in_features: head_dim is named
        (dict(num_kv_heads=3), ValueError),
        (dict(head_dim=0), ValueError),
        (dict(value_dim="8"), TypeError),
        (dict(out_features=0), ValueError),
        (dict(lambda0=0.0), ValueError),
        (dict(lambda0=(0.1, 0.2, 0.3)), ValueError),
        (dict(lambda0="big"), TypeError),
        (dict(learn_lambda0=1), TypeError),
        (dict(direction="none"), ValueError),
        (dict(write_gain="none"), ValueError),
        (dict(readout="mean"), ValueError),
        (dict(short_conv=0), ValueError),
        (dict(short_conv=True), TypeError),
        (dict(output_norm="batch"), ValueError),
        (dict(norm_eps=0), ValueError),
        (dict(use_bias=None), TypeError),
        (dict(dtype=jnp.int32), TypeError),
        (dict(param_dtype=None), TypeError),
        (dict(kernel_init=0.1), TypeError),
        (dict(bias_init=None), TypeError),
        (dict(implementation="cuda"), ValueError),
        (dict(check_invariants="yes"), TypeError),
        (dict(logical_axes=None), TypeError),
        (dict(heads=4), TypeError),
    ],
    ids=str,
)
def test_wrong_options_are_named(wrong, error):
    (name,) = wrong
    fields = dict(num_heads=4, in_features=IN) | wrong
    for build in (
        lambda: nnx.VariationalLinearAttention(**fields, rngs=flax_nnx.Rngs(0)),
        lambda: linen.VariationalLinearAttention(**fields),
    ):
        with pytest.raises(error, match=name):
            build()


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        nnx.VariationalLinearAttention(4, IN, 2, rngs=flax_nnx.Rngs(0))
    with pytest.raises(TypeError):
        linen.VariationalLinearAttention(4, IN, 2)


def test_an_annotated_initialiser_is_refused_with_the_remedy():
    annotated = flax_nnx.with_partitioning(layer.default_kernel_init, ("embed", "heads"))
    with pytest.raises(TypeError, match="kernel_init.*logical_axes"):
        make(kernel_init=annotated)


def _state(**changes):
    return dataclasses.replace(make(**FULL).init_state(2), **changes)


@pytest.mark.parametrize(
    ("wrong", "error", "name"),
    [
        (dict(x=jnp.zeros((2, IN))), ValueError, "x"),
        (dict(x=jnp.zeros((2, 5, IN + 1))), ValueError, "x"),
        (dict(x=jnp.zeros((2, 0, IN))), ValueError, "x"),
        (dict(x=jnp.zeros((2, 5, IN), int)), TypeError, "x"),
        (dict(x=[[0.0]]), TypeError, "x"),
        (dict(mask=jnp.ones((2, 4), bool)), ValueError, "mask"),
        (dict(mask=jnp.ones((2, 5))), TypeError, "mask"),
        (dict(segment_ids=jnp.ones((2, 5))), TypeError, "segment_ids"),
        (dict(segment_ids=jnp.array([[1, 0, 0, 0, 0]] * 2)), ValueError, "segment_ids"),
        (dict(initial_state=_state().vla), TypeError, "initial_state"),
        (dict(initial_state=_state(conv=None)), ValueError, "initial_state.conv"),
        (dict(initial_state=_state(conv=jnp.zeros((2, 2, 1)))), ValueError, "initial_state.conv"),
        (dict(initial_state=make(**FULL).init_state(3)), ValueError, "initial_state"),
        (dict(positions=None), TypeError, "positions"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, name):
    arguments = dict(x=draw(5)) | wrong
    module = make(**FULL)
    with pytest.raises(error, match=name):
        module(**arguments)


def test_wrong_steps_are_named():
    module = make(**FULL)
    state = module.init_state(2)
    with pytest.raises(ValueError, match="x_t"):
        module.step(draw(5), state)
    with pytest.raises(TypeError, match="state"):
        module.step(draw(5)[:, 0], None)
    with pytest.raises(ValueError, match="conv"):
        make().step(draw(5)[:, 0], _state())
    with pytest.raises(ValueError, match="batch_size"):
        module.init_state(0)
