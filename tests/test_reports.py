"""What users of comparable libraries reported, on this one: the right behaviour of each input."""

import copy
import functools
import pickle
import stat

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import vla_jax
import vla_jax.linen
import vla_jax.nnx
from vla_jax import baseline_layers, baselines, generation, layer, packing, serialization

WIDTH = 8
X = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)


def vla(**options):
    return vla_jax.nnx.VariationalLinearAttention(2, WIDTH, **options, rngs=nnx.Rngs(0))


def baseline(kind):
    return baseline_layers.BaselineAttention(kind, 2, WIDTH, rngs=nnx.Rngs(0))


def softmax(**options):
    return baseline_layers.SoftmaxAttention(2, WIDTH, window=64, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "function", [vla_jax.vla_attention, baselines.delta_net, baselines.mesa_net]
)
def test_a_traced_return_state_is_named(function):
    gates = {"lambda0": 1.0} if function is baselines.mesa_net else {}
    x = jnp.ones((1, 3, 2, 4))
    call = functools.partial(function, x, x, x, **gates)
    with pytest.raises(TypeError, match=r"return_state must be a Python bool, got a traced value"):
        jax.jit(lambda flag: call(return_state=flag))(True)
    with pytest.raises(TypeError, match=r"return_state must be a bool, got 2"):
        call(return_state=2)


@pytest.mark.parametrize("kind", ["deltanet", "mesa", "softmax"])
def test_a_traced_return_state_of_a_baseline_layer_is_named(kind):
    with pytest.raises(TypeError, match=r"return_state must be a Python bool, got a traced value"):
        nnx.remat(lambda model, flag: model(X, return_state=flag))(NNX_LAYERS[kind](), True)


NNX_LAYERS = {
    "vla": vla,
    "vla short_conv": functools.partial(vla, short_conv=3),
    "vla silu": functools.partial(vla, feature_map=jax.nn.silu, readout="none"),
    "vla drawn otherwise": functools.partial(vla, kernel_init=jax.nn.initializers.normal(0.1)),
    "softmax": softmax,
    **{kind: functools.partial(baseline, kind) for kind in baseline_layers.BASELINES},
}


# --- export with symbols in the shape -------------------------------------------------------------


def exported(make, shape):
    """The layer exported for ``shape``, and the same function as it is."""
    graphdef, params = nnx.split(make())

    def call(params, x, mask, ids):
        return nnx.merge(graphdef, params)(x, mask=mask, segment_ids=ids, return_state=True)

    shape = export.symbolic_shape(shape)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    arrays += [jax.ShapeDtypeStruct(shape[:2], dtype) for dtype in (bool, jnp.int32)]
    return export.export(jax.jit(call))(params, *arrays), jax.jit(call), params


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vla short_conv", [(1, 1), (3, 40)]),
        ("softmax", [(3, 40)]),
        ("gated_deltanet", [(3, 40)]),
    ],
)
def test_a_layer_exports_with_symbols_for_batch_and_length(name, sizes):
    program, call, params = exported(NNX_LAYERS[name], f"b, t, {WIDTH}")
    rng = np.random.default_rng(1)
    for batch, length in sizes:
        x = rng.standard_normal((batch, length, WIDTH)).astype(np.float32)
        mask = rng.random((batch, length)) < 0.8
        ids = np.sort(rng.integers(0, 3, (batch, length)).astype(np.int32))
        found, expected = (f(params, x, mask, ids) for f in (program.call, call))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_decoding_exports_with_a_symbol_for_the_batch():
    model = vla()
    graphdef, params = nnx.split(model)
    (batch,) = export.symbolic_shape("b")
    state = jax.eval_shape(lambda: model.init_state(batch))
    assert state.memory.shape == (batch, 2, 4, 4)
    x_t = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    step = jax.jit(lambda params, *rest: nnx.merge(graphdef, params).step(*rest))
    program = export.export(step)(params, x_t, state)
    out, after = program.call(params, X[:, 0], model.init_state(2))
    expected = model.step(X[:, 0], model.init_state(2))
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(after.memory, expected[1].memory, atol=1e-5)


def test_an_implementation_that_needs_a_number_says_so():
    with pytest.raises(NotImplementedError, match=r"'associative' needs a number for T, got t: .*"):
        exported(lambda: vla(implementation="associative"), f"2, t, {WIDTH}")


# --- strict promotion -----------------------------------------------------------------------------

TABLE = jax.random.normal(jax.random.key(2), (7, 7))


def read(ids, mask):
    return TABLE[ids], jnp.sum(jnp.where(mask, ids, 0), axis=1)


def step(token, state):
    return TABLE[token], state + token


def test_generation_under_strict_promotion():
    ids, mask = generation.left_pad([[1, 2], [3]])
    calls = [
        functools.partial(
            generation.generate, read, step, ids, mask, max_new=4, key=jax.random.key(0),
            temperature=temperature, top_k=top_k, top_p=top_p, stop=(3,),
        )
        for temperature, top_k, top_p in (
            (0, None, None), (0.7, 3, 0.9), (np.float64(0.7), np.int64(3), np.float64(0.9)),
        )
    ]  # fmt: skip
    expected = [call() for call in calls]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.clear_caches()
        for call, usual in zip(calls, expected, strict=True):
            found = call()
            assert found == usual
    np.testing.assert_array_equal(expected[1].tokens, expected[2].tokens)


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["2024"], TypeError, "prompts must be token ids, got the str '2024': encode it"),
        ([["2", "0"]], TypeError, "prompts must be sequences of integers"),
        ("2024", TypeError, "prompts must be a sequence of prompts, got one str"),
        (b"2024", TypeError, "prompts must be a sequence of prompts, got one bytes"),
        ([[1.5]], TypeError, "prompts must be sequences of integers"),
        ([[1.0]], TypeError, "prompts must be sequences of integers"),
        ([np.ones(3)], TypeError, "prompts must be sequences of integers"),
        ([[True, False]], TypeError, "prompts must be sequences of integers, got True"),
        ([np.ones(2, bool)], TypeError, "prompts must be sequences of integers, got True"),
        ([7], TypeError, "prompts must be sequences of integers, got 7"),
        ([[None]], TypeError, "prompts must be sequences of integers"),
        ([[2**31]], ValueError, "prompts must be token ids that fit in int32, got 2147483648"),
        ([np.array([2**40])], ValueError, "prompts must be token ids that fit in int32"),
        ([[3, -1]], ValueError, "prompts must be token ids, which are not negative, got -1"),
        (5, TypeError, "prompts must be a sequence of prompts, got 5"),
        (np.array(3), TypeError, r"prompts must be a sequence of prompts, got array\(3\)"),
        ([[]], ValueError, "prompts must be one or more, each of at least one token"),
    ],
)
def test_prompts_that_are_no_token_ids(prompts, error, message):
    with pytest.raises(error, match=message):
        generation.left_pad(prompts)


def test_whatever_is_a_sequence_of_integers_is_a_prompt():
    rows = [b"\2\4", (2, 4), np.array([2, 4]), jnp.array([2, 4]), range(2, 5, 2), [np.int8(2), 4]]
    ids, mask = generation.left_pad(rows, length=3)
    np.testing.assert_array_equal(ids, [[0, 2, 4]] * 6)
    np.testing.assert_array_equal(mask, [[False, True, True]] * 6)
    with pytest.raises(TypeError, match="length must be an integer"):
        generation.left_pad(rows, length=3.0)


@pytest.mark.parametrize("stop", ["3", (1.5,), ("3",), (True,), 3])
def test_stop_tokens_are_integers(stop):
    with pytest.raises(TypeError, match="stop must be"):
        generation.generate(read, step, np.ones((1, 1), np.int32), max_new=1, temperature=0,
                            stop=stop)  # fmt: skip


def test_prompts_wider_than_int32_are_not_narrowed():
    with pytest.raises(ValueError, match="prompts must be token ids that fit in int32"):
        generation.generate(read, step, np.array([[2**32]]), max_new=1, temperature=0)


# --- temperatures ---------------------------------------------------------------------------------

LOGITS = np.array([1.0, 40.0, 39.5, -np.inf, -3.0], np.float32)


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-45, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_the_coldest_sample_is_the_argmax(temperature, options):
    draw = functools.partial(generation.sample, temperature=temperature, **options)
    keys = jax.random.split(jax.random.key(0), 20)
    for logits in (LOGITS, LOGITS * 1e30, LOGITS * 1e-20, np.float16(LOGITS)):
        tokens = jax.vmap(lambda key, logits=logits: draw(jnp.asarray(logits), key))(keys)
        np.testing.assert_array_equal(tokens, 1)
    # Of tokens that are equally likely, each: the limit of the softmax.
    tied, alike = jnp.array([2.0, 5.0, 5.0]), {1} if "top_p" in options else {1, 2}
    assert set(np.asarray(jax.vmap(lambda key: draw(tied, key))(keys)).tolist()) == alike


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e308, 10**300])
def test_the_hottest_sample_is_uniform_over_what_is_possible(temperature):
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.vmap(lambda key: generation.sample(LOGITS, key, temperature=temperature))
    counts = np.bincount(draw(keys), minlength=5)
    assert counts[3] == 0
    np.testing.assert_allclose(counts[[0, 1, 2, 4]], 1000, atol=5 * np.sqrt(750))


def test_a_logit_of_infinity_is_certain():
    logits = jnp.array([1.0, jnp.inf, 3.0])
    assert generation.sample(logits, jax.random.key(0)) == 1


def test_usual_temperatures_draw_from_the_softmax():
    logits, keys = jnp.array([0.0, 1.0, 2.0]), jax.random.split(jax.random.key(0), 4000)
    for temperature in (0.5, 2.0):
        draw = jax.vmap(lambda key, t=temperature: generation.sample(logits, key, temperature=t))
        expected = np.exp(np.arange(3) / temperature)
        expected *= 4000 / expected.sum()
        found = np.bincount(draw(keys), minlength=3)
        np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(expected.max()))


def test_a_temperature_beyond_float64_is_refused():
    with pytest.raises(ValueError, match="temperature must be finite"):
        generation.sample(LOGITS, jax.random.key(0), temperature=10**400)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_is_never_a_token(temperature):
    logits = jnp.array([[1.0, jnp.nan, 2.0], [1.0, 3.0, 2.0]])
    draw = functools.partial(generation.sample, temperature=temperature)
    with pytest.raises(ValueError, match="logits must not be NaN, got NaN in 1 of their rows"):
        draw(logits, jax.random.key(0))
    assert jax.jit(draw)(logits, jax.random.key(0))[0] == generation.NO_TOKEN

    def broken(token, state):
        return jnp.full((1, 3), jnp.nan), state

    with pytest.raises(ValueError, match="logits of the model must not be NaN"):
        generation.generate(
            lambda ids, mask: (jnp.ones((1, 3)), jnp.zeros(1)), broken, np.ones((1, 1), np.int32),
            max_new=3, temperature=temperature, key=jax.random.key(0),
        )  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o664, 0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_mode(mode, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(mode)
    serialization.save(path, jnp.ones(3))
    assert stat.S_IMODE(path.stat().st_mode) == mode
    np.testing.assert_array_equal(serialization.load(path, jnp.zeros(3)), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_new_file_obeys_the_umask_and_a_link_stays_one(tmp_path):
    (tmp_path / "reference").touch()
    serialization.save(tmp_path / "new", jnp.ones(3))
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "reference").stat().st_mode
    link = tmp_path / "link"
    link.symlink_to("new")
    serialization.save(link, jnp.zeros(3))
    assert link.is_symlink()
    np.testing.assert_array_equal(serialization.load(tmp_path / "new", jnp.ones(3)), 0)


# --- copies ---------------------------------------------------------------------------------------

COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("name", NNX_LAYERS)
def test_nnx_layers_are_copied(name):
    made = NNX_LAYERS[name]()
    expected = made(X)
    for copied in (c(made) for c in COPIES.values()):
        assert nnx.graphdef(copied) == nnx.graphdef(made)
        assert hash(nnx.graphdef(copied)) == hash(nnx.graphdef(made))
        assert copied.config == made.config
        np.testing.assert_array_equal(copied(X), expected)


def test_layers_that_were_drawn_otherwise_are_alike():
    drawn = [vla(kernel_init=jax.nn.initializers.normal(scale)) for scale in (0.1, 0.2)]
    assert nnx.graphdef(drawn[0]) == nnx.graphdef(drawn[1])


FEATURE_MAPS = {
    "default": vla_jax.feature_map,
    "jitted": jax.nn.silu,
    "partial": functools.partial(jax.nn.elu, alpha=0.5),
    "tree partial": jax.tree_util.Partial(jax.nn.leaky_relu),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linen_layers_and_configurations_are_copied(feature_map, how):
    options = {"feature_map": FEATURE_MAPS[feature_map], "dtype": jnp.bfloat16}
    config = layer.LayerConfig(num_heads=2, in_features=WIDTH, lambda0=[0.1, 0.2], **options)
    module = vla_jax.linen.VariationalLinearAttention(2, WIDTH, **options)
    for made in (config, module):
        copied = COPIES[how](made)
        if isinstance(made.feature_map, functools.partial):  # equal to nothing but itself
            assert copied.feature_map.func is made.feature_map.func
            assert copied.feature_map.keywords == made.feature_map.keywords
        else:
            assert copied == made
            assert hash(copied) == hash(made)
        assert copied.num_heads == 2
    variables = module.init(jax.random.key(0), X)
    copied = COPIES[how](module)
    np.testing.assert_array_equal(copied.apply(variables, X), module.apply(variables, X))


def local_map(x):
    return x * x + 1


def test_a_function_that_pickle_cannot_find_is_refused_as_by_pickle():
    config = layer.LayerConfig(num_heads=1, in_features=2, feature_map=lambda x: x)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(config)
    config = layer.LayerConfig(num_heads=1, in_features=2, feature_map=local_map)
    assert pickle.loads(pickle.dumps(config)) == config


def states():
    one = vla_jax.init_state(1, 2, 4, 4)
    read = vla(short_conv=3)(X, return_state=True)[1]
    generated = generation.Generation(*(jnp.arange(i + 1) for i in range(4)), one)
    kinds = {type(x).__name__: x for x in (one, read, generated)}
    for make in (softmax, functools.partial(baseline, "mesa")):
        state = make()(X, return_state=True)[1]
        kinds[type(state).__name__] = state
    kinds["BaselineState"] = state.core
    kinds["shapes"] = jax.eval_shape(lambda: one)
    return kinds


def test_states_compare_and_hash():
    for name, state in states().items():
        for copied in (c(state) for c in COPIES.values()):
            assert copied == state, name
            assert hash(copied) == hash(state), name
            assert {state: 1}[copied] == 1
        assert state != "other"
        if name != "shapes":
            leaves, structure = jax.tree.flatten(state)
            for i, leaf in enumerate(leaves):
                changed = [*leaves[:i], leaf.at[(0,) * leaf.ndim].add(1), *leaves[i + 1 :]]
                assert state != jax.tree.unflatten(structure, changed), name
    one, wide = vla_jax.init_state(1, 2, 4, 4), vla_jax.init_state(1, 2, 4, 5)
    assert one != wide
    assert one != one.replace(inverse=None)
    unknown = one.replace(memory=one.memory.at[0].set(jnp.nan))
    assert unknown == copy.deepcopy(unknown)
    assert unknown != one


# --- remat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [flax.linen.remat, flax.linen.jit])
def test_linen_transformations_leave_return_state_alone(transform):
    plain = vla_jax.linen.VariationalLinearAttention(2, WIDTH)
    variables = plain.init(jax.random.key(0), X)
    lifted = transform(vla_jax.linen.VariationalLinearAttention)(2, WIDTH)
    out, state = lifted.apply(variables, X, return_state=True)
    expected, end = plain.apply(variables, X, return_state=True)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(state.memory, end.memory, atol=1e-6)
    assert lifted.apply(variables, X, return_state=False).shape == expected.shape
    mask = jnp.arange(5)[None] < jnp.array([[3], [5]])
    options = {"mask": mask, "initial_state": end, "return_state": True}
    found, expected = (m.apply(variables, X, **options) for m in (lifted, plain))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)

    def loss(variables, module):
        out, state = module.apply(variables, X, return_state=True)
        return jnp.sum(out**2) + jnp.sum(state.memory)

    found, expected = (jax.grad(loss)(variables, module) for module in (lifted, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), found, expected)


class Stack(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, return_state=False):
        layer = flax.linen.remat(vla_jax.linen.VariationalLinearAttention)(2, WIDTH, name="one")
        return layer(x, return_state=return_state)


def test_remat_inside_a_module_and_around_it():
    variables = Stack().init(jax.random.key(0), X)
    out, state = Stack().apply(variables, X, return_state=True)
    assert out.shape == X.shape
    assert state.memory.shape == (2, 2, 4, 4)
    around = flax.linen.remat(Stack, static_argnums=(2,))
    np.testing.assert_allclose(around().apply(variables, X, True)[0], out, atol=1e-6)
    with pytest.raises(TypeError, match=r"return_state must be a Python bool, got a traced value"):
        flax.linen.remat(Stack)().apply(variables, X, return_state=True)


def test_nnx_remat():
    model = vla()

    def call(model, x):
        return model(x, return_state=True)

    (out, state), (expected, end) = nnx.remat(call)(model, X), call(model, X)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(state.memory, end.memory, atol=1e-6)
    gradients = [
        nnx.grad(lambda model, f=f: jnp.sum(f(model, X)[1].memory))(model)
        for f in (nnx.remat(call), call)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *gradients)
    with pytest.raises(TypeError, match=r"return_state must be a Python bool, got a traced value"):
        nnx.jit(lambda model, flag: model(X, return_state=flag))(model, True)


# --- packing --------------------------------------------------------------------------------------


def test_positions_become_segments_and_a_mask():
    positions = [
        [0, 1, 2, 0, 1, 0, -1, -1],
        [-1, -1, 0, 1, -1, 2, 0, 0],
        [5, 6, 0, 1, 2, 3, 4, 5],
        [-1] * 8,
    ]
    expected = [
        [1, 1, 1, 2, 2, 3, 3, 3],
        [0, 0, 1, 1, 1, 1, 2, 3],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [0] * 8,
    ]
    for convert in (np.asarray, jnp.asarray, functools.partial(np.asarray, dtype=np.int8)):
        ids, mask = packing.from_positions(convert(positions))
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(mask, np.asarray(positions) >= 0)
        assert ids.dtype == jnp.int32
    ids, mask = jax.jit(packing.from_positions)(jnp.asarray(positions))
    np.testing.assert_array_equal(ids, expected)


def test_a_packed_row_is_its_documents():
    positions = np.array([[0, 1, 2, 0, 1, -1]])
    ids, mask = packing.from_positions(positions)
    q, k, v = np.random.default_rng(0).random((3, 1, 6, 2, 4)).astype(np.float32)
    out, state = vla_jax.vla_attention(q, k, v, segment_ids=ids, mask=mask, return_state=True)
    first = vla_jax.vla_attention(q[:, :3], k[:, :3], v[:, :3])
    rest = (q[:, 3:5], k[:, 3:5], v[:, 3:5])
    second, end = vla_jax.vla_attention(*rest, return_state=True)
    np.testing.assert_allclose(out[:, :5], jnp.concatenate([first, second], axis=1), atol=1e-5)
    np.testing.assert_array_equal(out[:, 5], 0)
    np.testing.assert_allclose(state.memory, end.memory, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (np.zeros((2, 3)), TypeError, "segment_pos must be integers, got dtype float"),
        ([[0, 1]], TypeError, "segment_pos must be an array, got list"),
        (np.zeros(3, int), ValueError, r"segment_pos must have shape \[B, T\]"),
        (np.array([[0, -2]]), ValueError, "segment_pos must be -1 .* or more, got -2"),
    ],
)
def test_positions_that_are_none(positions, error, message):
    with pytest.raises(error, match=message):
        packing.from_positions(positions)


# --- byte order -----------------------------------------------------------------------------------


SWAPPED, NATIVE = np.ones((1, 3, 1, 4), ">f4"), np.ones((1, 3, 1, 4), "<f4")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: vla()(X.astype(">f4"))),
        ("mask", lambda: vla()(X, mask=np.ones((2, 5), ">i4"))),
        ("segment_ids", lambda: vla()(X, segment_ids=np.ones((2, 5), ">i4"))),
        ("query", lambda: vla_jax.vla_attention(SWAPPED, NATIVE, NATIVE)),
        ("value", lambda: vla_jax.vla_attention(NATIVE, NATIVE, SWAPPED)),
        ("logits", lambda: generation.sample(SWAPPED, jax.random.key(0))),
        ("prompts", lambda: generation.generate(
            read, step, np.ones((1, 2), ">i4"), max_new=1, temperature=0)),
    ],
)  # fmt: skip
def test_the_other_byte_order_is_explained(name, call):
    message = rf"{name} must be in this machine's byte order, got dtype >[fi]4: "
    with pytest.raises(TypeError, match=message + rf"{name}\.astype\('\w+'\) converts it"):
        call()


def test_a_state_in_the_other_byte_order_is_saved(tmp_path):
    serialization.save(tmp_path / "state", np.arange(3, dtype=">f4"))
    found = serialization.load(tmp_path / "state", np.zeros(3, "<f4"))
    np.testing.assert_array_equal(found, [0, 1, 2])


# --- 35: donated states --------------------------------------------------------------------------


def test_every_state_can_be_donated():
    """No two fields share an array: JAX refuses to give one away twice."""
    token, sequence = jnp.ones((1, 2, 4)), jnp.ones((1, 3, 2, 4))
    step = jax.jit(lambda s: vla_jax.vla_step(token, token, token, None, s)[1], donate_argnums=0)
    step(step(vla_jax.init_state(1, 2, 4, 4)))
    _, state = vla_jax.vla_attention(sequence, sequence, sequence, return_state=True)
    step(state.replace(penalty=state.penalty + 1))
    for mixer in (vla(short_conv=3), softmax(), baseline("mesa"), baseline("linear")):
        run = jax.jit(
            lambda s, mixer=mixer: mixer(X, initial_state=s, return_state=True)[1],
            donate_argnums=0,
        )
        run(run(mixer.init_state(2)))


# --- 37: values under jit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("lambda0", -1.0),
        ("lambda0", np.float32(0)),
        ("lambda0", [0.1, -1.0]),
        ("lambda0", jnp.array([0.1, jnp.nan])),
        ("segment_ids", np.array([[0, 1, 0]])),
        ("log_decay", np.full((1, 3, 2), 0.5, np.float32)),
        ("beta", np.full((1, 3, 2), -0.5, np.float32)),
        ("eps", -1.0),
    ],
    ids=str,
)
def test_concrete_values_are_checked_under_jit(name, bad):
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match=name):
        jax.jit(lambda x: vla_jax.vla_attention(x, x, x, **{name: bad}))(x)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", ["beta", "log_decay"])
@pytest.mark.parametrize("function", [vla_jax.vla_attention, baselines.gated_delta_net])
def test_gates_of_absent_tokens_do_not_count(function, name, as_array):
    """Whatever padding holds, in NumPy arrays and in JAX's, called directly and under jit."""
    x, mask = jnp.ones((1, 3, 2, 4)), np.array([[True, False, True]])
    gate = np.full((1, 3, 2), -0.5 if name == "log_decay" else 0.5, np.float32)
    clean = function(x, x, x, **{name: gate}, mask=mask)
    gate[:, 1] = np.nan
    call = functools.partial(function, **{name: as_array(gate)}, mask=mask)
    np.testing.assert_array_equal(call(x, x, x), clean)
    np.testing.assert_allclose(jax.jit(call)(x, x, x), clean, rtol=1e-6)
    gate[:, 2] = np.nan
    with pytest.raises(ValueError, match=f"{name} must be finite and not .*, got nan"):
        jax.jit(functools.partial(function, **{name: gate}, mask=mask))(x, x, x)


def test_concrete_gates_of_baselines_are_checked_under_jit():
    x = jnp.ones((1, 3, 2, 4))
    gate = np.full((1, 3, 2, 4), 7, np.float32)
    with pytest.raises(ValueError, match="gate must be between 0 and 1, got 7"):
        jax.jit(lambda x: baselines.published_deltanet(x, x, x, gate))(x)
    with pytest.raises(ValueError, match="log_decay must be finite and not positive, got 7"):
        jax.jit(lambda x: baselines.mesa_net(x, x, x, log_decay=gate[..., 0], lambda0=1.0))(x)
