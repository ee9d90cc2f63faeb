"""The drop-ins for Flax's attention layers: masks, packed rows, decoding, refusals.

What the layer computes is compared with NumPy in `test_layers`; here with that, and with the layer.
"""

import contextlib
import dataclasses
import functools
import inspect
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from layers import IN, draw, pure
from support import assert_close, assert_rms_close
from test_layers import numpy_layer
from tolerances import BFLOAT16_RMS, FLOAT32, REORDERED32

from vla_jax import layer, linen, nnx, packing, presets

# Two documents and padding: at the start, inside a document, between the two and at the end.
IDS = np.array(
    [[1, 1, 1, 0, 2, 2, 2, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 0, 1, 1]]
)
PRESENT = IDS > 0
T = IDS.shape[1]
# A document each, with padding inside it: the ids that the data have there.
FILLED = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], IDS[1], [1] * 9])
ENDING = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]])

ones = np.ones_like(IDS)
causal = flax_linen.make_causal_mask(ones, dtype=bool)
documents = flax_linen.make_attention_mask(FILLED, FILLED, jnp.equal, dtype=bool)
padding = flax_linen.make_attention_mask(PRESENT, PRESENT, dtype=bool)
keys_only = flax_linen.make_attention_mask(ones, PRESENT, dtype=bool)
combine = functools.partial(flax_linen.combine_masks, dtype=bool)
LEGAL = {
    "causal": (causal, ones, ones),
    "padding": (combine(causal, padding), PRESENT, ones),
    "padding of keys": (combine(causal, keys_only), PRESENT, ones),
    "documents": (combine(causal, documents), ones, FILLED),
    "documents, padding": (combine(causal, documents, padding), PRESENT, FILLED),
    "documents, padding of keys": (combine(causal, documents, keys_only), PRESENT, FILLED),
    "zeros are a document": (
        combine(causal[:1], flax_linen.make_attention_mask(ENDING, ENDING, jnp.equal, dtype=bool)),
        ones[:1],
        [[1, 1, 1, 1, 2, 2, 2, 3, 3]],
    ),
    "nothing": (np.zeros((1, 1, T, T), bool), 0 * ones[:1], ones[:1]),
}


def make(kind="recall", **options):
    options = {"bias_init": jax.nn.initializers.normal(0.3), "preset": kind} | options
    return nnx.SelfAttention(4, IN, rngs=flax_nnx.Rngs(0), **options)


@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize("name", LEGAL)
def test_masks_become_ids_and_padding(name, dtype):
    mask, present, documents = (np.asarray(x) for x in LEGAL[name])
    checked = packing.from_attention_mask(mask.astype(dtype))
    ids, found = jax.jit(packing.from_attention_mask)(mask.astype(dtype))
    chex.assert_trees_all_equal(checked, (ids, found))
    assert (found == present).all()
    assert (np.diff(ids) >= 0).all()
    pairs = found[:, :, None] & found[:, None]
    same = np.equal(ids[:, :, None], ids[:, None]) & pairs
    assert (same == (documents[:, :, None] == documents[:, None]) & pairs).all()


def changed(value, *where):
    mask = np.array(causal, dtype=np.result_type(type(value), bool))
    mask[where] = value
    return mask


bad_masks = {
    "not causal": (np.ones((1, 1, T, T), bool), ValueError, "query 0 sees key 1, which comes"),
    "prefix": (changed(True, 0, 0, slice(3), slice(3)), ValueError, "query 0 sees key 1"),
    "window": (
        np.tril(np.ones((1, 1, T, T), bool)) & ~np.tril(np.ones((T, T), bool), -3),
        ValueError,
        r"query 3 sees key 1 .* Served are the causal mask",
    ),
    "strictly causal": (np.tril(np.ones((1, 1, T, T)), -1), ValueError, "query 1 sees key 0"),
    "hole": (changed(False, 0, 0, 6, 4), ValueError, r"query 6 hides key 4.*batch 0"),
    "padding that is seen": (changed(False, 1, 0, 4, 4), ValueError, "query 5 sees key 4"),
    "documents apart": (
        combine(causal, flax_linen.make_attention_mask(IDS % 2, IDS % 2, jnp.equal)),
        ValueError,
        "query 6 hides key 2, which is neither padding nor of another",
    ),
    "additive": (np.where(causal, 0, -1e9), ValueError, r"got -1000000000.0: of an additive mask"),
    "bias": (changed(0.5, 0, 0, 3, 3), ValueError, "booleans, or 0 .* got 0.5"),
    "not a number": (changed(np.nan, 0, 0, 3, 3), ValueError, "got nan"),
    "cross": (np.ones((1, 1, T, T + 1)), ValueError, r"\[B or 1, 1, T, T\]"),
    "of heads": (np.ones((1, 4, T, T)), ValueError, r"\[B or 1, 1, T, T\]"),
    "of tokens": (np.ones((1, T)), ValueError, r"\[B or 1, 1, T, T\]"),
    "other length": (np.tril(np.ones((1, 1, 4, 4))), ValueError, r"T = 9, got \[1, 1, 4, 4\]"),
    "other batch": (np.repeat(causal[:1], 2, 0), ValueError, "with B = 3"),
    "words": (np.full((1, 1, T, T), "x"), TypeError, "mask must be an array of numbers"),
    "list": ([[1]], TypeError, "mask must be an array"),
}


@pytest.mark.parametrize(("mask", "kind", "message"), bad_masks.values(), ids=list(bad_masks))
def test_other_masks_are_refused_by_name(mask, kind, message):
    with pytest.raises(kind, match=message):
        make()(draw(T, 3), mask=mask)


def test_ids_of_packed_rows_end_in_zeros():
    ids = np.array([[1, 1, 2, 0, 0], [0, 0, 3, 0, 4]])
    found, present = jax.jit(packing.from_packed_ids)(ids)
    chex.assert_trees_all_equal(packing.from_packed_ids(ids), (found, present))
    assert found.tolist() == [[1, 1, 2, 2, 2], [0, 0, 3, 3, 4]]
    assert present.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 1]]
    with pytest.raises(ValueError, match=r"must not decrease along T but to 0 .* got 1 after 2"):
        packing.from_packed_ids(np.array([[1, 2, 1]]))
    with pytest.raises(TypeError, match="segment_ids must be integers"):
        packing.from_packed_ids(np.ones((1, 3)))


# --- what is computed --------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["published", "recall"])
def test_packed_rows_equal_numpy(preset):
    """Every way to say which tokens belong together, eagerly and under jit, in both layers."""
    module, x = make(preset), draw(T, 2)
    other = linen.SelfAttention(4, preset=preset)
    params = pure(module)
    initial = jax.eval_shape(other.init, jax.random.key(1), x)["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(initial, params)

    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2]])
    mask = combine(
        flax_linen.make_causal_mask(ids),
        flax_linen.make_attention_mask(ids > 0, ids > 0),
        flax_linen.make_attention_mask(ids, ids, jnp.equal),
    )
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, -1, -1], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    out = module(x, mask=mask)
    exact = numpy_layer(module.config, params, x, ids > 0, np.maximum.accumulate(ids, 1))
    assert_close(out, exact, FLOAT32)
    run = jax.jit(lambda kwargs: other.apply({"params": params}, x, x, **kwargs))
    for kwargs in ({"mask": mask}, {"segment_ids": ids}, {"segment_pos": positions}):
        chex.assert_trees_all_equal(module(x, **kwargs), out)
        assert_close(run(kwargs), np.asarray(out), REORDERED32)
    assert_close(module(x, mask=mask[1:] & mask[:1]), module(x, mask=mask[:1] & mask[1:]), 0)
    not_causal = flax_linen.make_attention_mask(ids > 0, ids > 0)
    assert_close(
        module(x, mask=not_causal, is_causal=True),
        module(x, mask=combine(flax_linen.make_causal_mask(ids), not_causal)),
        0,
    )
    lower = np.tril(np.ones((T, T)))  # Flax broadcasts such masks too
    for alike in (flax_nnx.make_causal_mask(ids), lower, jnp.asarray(lower)[None]):
        chex.assert_trees_all_equal(module(x), module(x, mask=alike))
    assert_close(run({"mask": lower}), np.asarray(module(x)), REORDERED32)
    assert_close(module(x, mask=lower * 0 + 1, is_causal=True), module(x), 0)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_decoding_equals_one_call(preset):
    module, x = make(preset), draw(7)
    other = linen.SelfAttention(4, preset=preset, decode=True)
    whole, params = np.asarray(module(x)), pure(module)

    graph, variables, _ = flax_nnx.split(module, flax_nnx.Param, ...)
    module.init_cache(x.shape, dtype=jnp.bfloat16)
    fresh = flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Cache))["cache"]
    assert {a.dtype for a in jax.tree.leaves(fresh)} == {np.dtype("float32")}
    cache = other.init(jax.random.key(0), x)["cache"]  # reads nothing into it
    chex.assert_trees_all_equal(cache, fresh)

    decode = flax_nnx.jit(lambda module, x: module(x, decode=True))
    read = jax.jit(functools.partial(other.apply, mutable=["cache"]))
    for part in np.split(np.arange(7), [4, 5, 6]):  # a prompt, then one token a call
        out, changes = read({"params": params, "cache": cache}, x[:, part])
        cache = changes["cache"]
        assert_close(out, whole[:, part], REORDERED32)
        assert_close(decode(module, x[:, part]), whole[:, part], REORDERED32)
    chex.assert_trees_all_equal(module(x), flax_nnx.merge(graph, variables, {})(x))


def test_a_padded_prompt_is_read_into_the_cache():
    module, x = make(), draw(6, 1)
    present = np.array([[0, 0, 1, 1, 1]], bool)
    mask = combine(
        flax_linen.make_causal_mask(present), flax_linen.make_attention_mask(present, present)
    )
    module.init_cache((1, 1, IN))
    module(x[:, 2:3], decode=True)  # what was read before is kept
    module(jnp.concatenate([x[:, :2], x[:, 3:]], 1), mask=mask, decode=True)
    state = {name: cached[...] for name, cached in module.cache.items()}
    module.init_cache((1, 1, IN))
    module(x[:, 2:], decode=True)
    for name in ("memory", "penalty", "conv"):
        assert_close(module.cache[name][...], np.asarray(state[name]), REORDERED32, name)


def cached(kind):
    """``read(x, **call)`` of one token a call, with a cache of two rows."""
    module = make()
    module.init_cache((2, 1, IN))
    if kind == "nnx":
        run = flax_nnx.jit(lambda module, x, call: module(x, decode=True, **call))
        return lambda x, **call: run(module, x, call)
    variables = {"params": pure(module)}
    other = linen.SelfAttention(4, decode=True)
    variables |= {"cache": other.init(jax.random.key(0), draw(1))["cache"]}
    run = jax.jit(lambda v, x, call: other.apply(v, x, mutable=["cache"], **call))

    def read(x, **call):
        out, changes = run(variables, x, call)
        variables.update(changes)
        return out

    return read


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_one_token_a_call_with_a_mask(kind):
    """A row that is masked reads nothing; a mask of the cache, as Flax's, is refused by name."""
    x, read, plain = draw(4), cached(kind), cached(kind)
    first = np.array([True, False])
    for t in (0, 1):
        out = read(x[:, t : t + 1], mask=jnp.array([True, t == 1])[:, None, None, None])
        assert bool(out[1].any()) == (t == 1)
    plain(jnp.where(first[:, None, None], x[:, :1], x[:, 1:2]))
    third, single = read(x[:, 2:3], mask=jnp.ones((1, 1, 1, 1))), plain(x[:, 2:3])
    assert_close(third[1], np.asarray(single[1]), REORDERED32)  # it has read one token less
    assert not np.allclose(third[0], single[0], atol=1e-3)
    for shape in ((2, 1, 1, 9), (1, 1, 1, 9)):
        with pytest.raises(ValueError, match=r"with T = 1, got .* No memory can hide what it has"):
            read(x[:, 3:], mask=jnp.ones(shape))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_document_that_starts_with_a_call_forgets_what_was_read(kind):
    x, read, fresh = draw(4), cached(kind), cached(kind)
    for t, positions in enumerate([[0, 3], [1, 4], [0, 5]]):
        out = read(x[:, t : t + 1], segment_pos=jnp.array(positions)[:, None])
    assert_close(out[0], np.asarray(fresh(x[:, 2:3])[0]), REORDERED32)
    assert_close(out[1], np.asarray(make()(x[:, :3])[1, 2:]), REORDERED32)


# --- a model whose attention is exchanged ------------------------------------------------------


class Block(flax_nnx.Module):
    def __init__(self, attention, rngs):
        self.norm = flax_nnx.LayerNorm(IN, rngs=rngs)
        self.attention = attention(
            num_heads=4, in_features=IN, qkv_features=8, dropout_rate=0.0, decode=False,
            normalize_qk=False, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x, mask):
        return x + self.attention(self.norm(x), mask=mask, deterministic=True, sow_weights=False)


class LinenBlock(flax_linen.Module):
    attention: type

    @flax_linen.compact
    def __call__(self, x, mask):
        y = flax_linen.LayerNorm()(x)
        return x + self.attention(
            num_heads=4,
            dtype=jnp.float32,
            qkv_features=8,
            kernel_init=flax_linen.initializers.xavier_uniform(),
            bias_init=flax_linen.initializers.normal(stddev=1e-6),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=0.0,
            deterministic=True,
            decode=False,
            normalize_qk=False,
        )(y, mask=mask, sow_weights=False)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_the_attention_of_a_flax_model_is_exchanged(kind):
    """Flax's layer and this one in the same lines: what a token sees is the same."""
    mask = jnp.asarray(combine(causal, documents, padding)[:1], jnp.float32)
    x = draw(T, 1)
    for flax, ours in ((True, False), (False, True)):
        if kind == "nnx":
            block = Block(nnx.SelfAttention if ours else flax_nnx.MultiHeadAttention,
                          flax_nnx.Rngs(0))  # fmt: skip
            run = flax_nnx.jit(lambda x, block=block: block(x, mask))
        else:
            attention = flax_linen.MultiHeadDotProductAttention if flax else linen.SelfAttention
            block = LinenBlock(attention)
            variables = block.init(jax.random.key(0), x, mask)
            run = jax.jit(lambda x, b=block, v=variables: b.apply(v, x, mask))
        before = run(x)
        after = run(x.at[:, 2, 0].add(1))  # of one feature: a norm takes away what all share
        moved = (np.abs(after - before).max((0, 2)) > 1e-6) & PRESENT[0]  # Flax's padding sees all
        assert moved.tolist() == [False, False, True] + 6 * [False]
        after = run(x.at[:, 4, 0].add(1))
        moved = (np.abs(after - before).max((0, 2)) > 1e-6) & PRESENT[0]  # Flax's padding sees all
        assert moved.tolist() == 4 * [False] + 3 * [True] + 2 * [False]


# --- transformations ---------------------------------------------------------------------------


def test_nnx_scan_over_layers_with_remat_in_bfloat16():
    @flax_nnx.vmap(in_axes=0)
    def stacked(key):
        return nnx.SelfAttention(4, IN, dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(key))

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry, None), out_axes=flax_nnx.Carry)
    @flax_nnx.remat
    def forward(module, x, mask):
        return x + module(x, mask=mask)

    module, x = stacked(jax.random.split(jax.random.key(0), 2)), draw(5).astype(jnp.bfloat16)
    mask = flax_nnx.make_causal_mask(x[..., 0])

    @flax_nnx.jit
    def loss(module, x):
        graph, params = flax_nnx.split(module)
        return jax.grad(lambda p: forward(flax_nnx.merge(graph, p), x, mask).sum().astype(float))(
            params
        )

    grads = loss(module, x)
    graph, params = flax_nnx.split(module)
    expected = np.asarray(x, np.float32)
    for i in range(2):
        one = jax.tree.map(lambda p, i=i: p[i], params)
        expected = expected + np.asarray(flax_nnx.merge(graph, one)(x if i == 0 else jnp.asarray(
            expected, jnp.bfloat16)), np.float32)  # fmt: skip
    assert_rms_close(forward(module, x, mask), expected, BFLOAT16_RMS)
    assert all(np.abs(np.asarray(g, np.float32)).max() > 0 for g in jax.tree.leaves(grads))


def test_linen_scan_over_layers_with_remat():
    attention = flax_linen.remat(linen.SelfAttention)

    class Layer(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x, mask):
            y = attention(4, name="attention")(x, mask=mask, deterministic=True, decode=False)
            return x + y, None

    stack = flax_linen.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=flax_linen.broadcast,
        length=2,
    )()
    x = draw(5)
    mask = flax_linen.make_causal_mask(x[..., 0])
    variables = stack.init(jax.random.key(0), x, mask)
    out, _ = stack.apply(variables, x, mask)
    expected = x
    for i in range(2):
        one = jax.tree.map(lambda p, i=i: p[i], variables["params"]["attention"])
        expected = expected + linen.SelfAttention(4).apply({"params": one}, expected)
    assert_close(out, np.asarray(expected), REORDERED32)
    grads = jax.grad(lambda v: (stack.apply(v, x, mask)[0] ** 2).sum())(variables)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_layers_pickle():
    x, module = draw(3), make("language")
    module.init_cache(x.shape)
    copies = pickle.loads(pickle.dumps((flax_nnx.split(module), linen.SelfAttention(4))))
    (graph, state), other = copies
    chex.assert_trees_all_equal(flax_nnx.merge(graph, state)(x), module(x))
    assert other == linen.SelfAttention(4)


# --- partitioning ------------------------------------------------------------------------------


def test_partitioning_is_that_of_flax():
    mesh = jax.make_mesh((2, 2), ("e", "h"), devices=jax.devices()[:4])
    spec, out_spec = ("e", "h", None), ("h", None, "e")
    normal = jax.nn.initializers.lecun_normal()
    x = draw(4)

    boxed = {
        "kernel_init": flax_linen.with_partitioning(normal, spec),
        "out_kernel_init": flax_linen.with_partitioning(normal, out_spec),
    }
    ours, theirs = (
        flax_linen.get_partition_spec(
            jax.eval_shape(cls(4, **boxed).init, jax.random.key(0), x)["params"]
        )
        for cls in (linen.SelfAttention, flax_linen.MultiHeadDotProductAttention)
    )
    for our, their in zip("qkvo", ("query", "key", "value", "out"), strict=True):
        assert ours[f"{our}_proj"]["kernel"] == theirs[their]["kernel"]
    assert tuple(ours["u_proj"]["kernel"]) == ("h", None, None)
    assert tuple(ours["q_conv"]["kernel"]) == (None, "h", None)

    given = {
        "kernel_init": flax_nnx.with_partitioning(normal, spec),
        "out_kernel_metadata": {"out_sharding": out_spec},
        "out_kernel_init": normal,
        "bias_metadata": {"out_sharding": ("h", None)},
        "out_bias_metadata": {"out_sharding": ("e",)},
    }
    with jax.set_mesh(mesh):
        module = nnx.SelfAttention(4, IN, preset="language", rngs=flax_nnx.Rngs(0), **given)
        flax = flax_nnx.MultiHeadAttention(4, IN, rngs=flax_nnx.Rngs(0), **given)
        pairs = (
            (module.q_proj, flax.query),
            (module.v_proj, flax.value),
            (module.o_proj, flax.out),
        )
        for mine, others in pairs:
            for name in ("kernel", "bias"):
                mine_sharding = mine[name][...].sharding
                assert mine_sharding == getattr(others, name)[...].sharding
        assert tuple(module.beta_proj["kernel"][...].sharding.spec) == ("e", "h")
        out = module(x)
    plain = flax_nnx.merge(flax_nnx.graphdef(make("language")), flax_nnx.state(make("language")))
    flax_nnx.update(plain, jax.device_get(flax_nnx.state(module, flax_nnx.Param)))
    assert_close(out, np.asarray(plain(x)), REORDERED32)


@pytest.mark.parametrize("named", [True, False], ids=["shardings", "names"])
def test_a_partitioning_may_name_the_first_axes_alone(named):
    """As in Flax: with names under a mesh, or with shardings that hold it."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"),
        devices=jax.devices()[:4],
    )  # fmt: skip
    kernel, bias = jax.P(None, "model"), jax.P("model")
    if named:
        kernel, bias = (jax.sharding.NamedSharding(mesh, spec) for spec in (kernel, bias))
    given = {
        "kernel_init": flax_nnx.with_partitioning(jax.nn.initializers.lecun_normal(), kernel),
        "bias_init": flax_nnx.with_partitioning(jax.nn.initializers.zeros, bias),
    }
    with contextlib.nullcontext() if named else jax.set_mesh(mesh):
        module = nnx.SelfAttention(4, 16, rngs=flax_nnx.Rngs(0), **given)
        flax = flax_nnx.MultiHeadAttention(4, 16, rngs=flax_nnx.Rngs(0), **given)
    for mine, other in ((module.q_proj, flax.query), (module.o_proj, flax.out)):
        for name in ("kernel", "bias"):
            found, wanted = mine[name][...], getattr(other, name)[...]
            assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
            assert not found.sharding.is_fully_replicated
    assert not module.u_proj["kernel"][...].sharding.is_fully_replicated


# --- arguments ---------------------------------------------------------------------------------


def test_the_two_drop_ins_and_the_layer_have_the_same_options():
    fields = {f.name: f.default for f in dataclasses.fields(linen.SelfAttention)}
    signature = inspect.signature(nnx.SelfAttention.__init__).parameters
    in_nnx = {name: p.default for name, p in signature.items()}
    nnx_only = {"self", "in_features", "rngs", "keep_rngs", *(n for n in in_nnx if "metadata" in n)}
    assert set(in_nnx) - nnx_only == set(fields) - {"parent", "name"}
    for name in set(in_nnx) - nnx_only - {"num_heads"}:
        assert in_nnx[name] == fields[name], name
    # Those of the layer: head_dim follows from qkv_features, Flax's boxes replace logical_axes.
    assert set(layer.OPTIONS) - {"head_dim", "logical_axes"} <= set(in_nnx)
    for values in presets.PRESETS.values():
        assert {name for name, value in in_nnx.items() if value == "preset"} == set(values)


def test_every_option_of_a_preset_can_be_overridden():
    base = {"num_heads": 4, "in_features": IN}
    plain = layer.LayerConfig(**base)
    assert layer.LayerConfig(**base, **presets.options("published")) == plain
    for preset, values in presets.PRESETS.items():
        config = make(preset).config
        for name, value in values.items():
            assert getattr(config, name) == value, name
    config = make("language", inverse="write", short_conv=None, readout=None, lambda0=2.0).config
    assert (config.inverse, config.short_conv, config.readout) == ("write", None, "ratio")
    assert (config.decay, config.lambda0) == (True, 2.0)
    assert presets.options("recall", short_conv=3, beta="preset")["beta"] is False
    with pytest.raises(ValueError, match="preset must be one of 'published', 'recall', 'language'"):
        make("best")


CALLS = {
    "other keys": ({"inputs_k": draw(T, 3, seed=1)}, ValueError, "inputs_k must be None or the"),
    "other values": ({"inputs_v": draw(T, 3, seed=1)}, ValueError, "inputs_v must be None or"),
    "two": ({"mask": causal, "segment_ids": IDS}, ValueError, "only one may be given of mask, seg"),
    "ids": ({"segment_ids": IDS[:1]}, ValueError, r"segment_ids must have shape \[B, T\]"),
    "no cache": ({"decode": True}, ValueError, "call init_cache"),
    "no bool": ({"decode": 1}, TypeError, "decode must be a bool"),
    "weights": ({"sow_weights": True}, NotImplementedError, "sow_weights must be False"),
    "weights, no bool": ({"sow_weights": 0}, TypeError, "sow_weights must be a bool"),
    "unknown": ({"input_positions": IDS}, TypeError, "input_positions"),
    "a mask by position": ({"inputs_k": causal}, ValueError, "a mask is given by name, mask="),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), CALLS.values(), ids=list(CALLS))
def test_bad_calls_are_refused_by_name(arguments, kind, message):
    with pytest.raises(kind, match=message):
        make()(draw(T, 3), **arguments)


OPTIONS = {
    "dropout": ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate must be 0, got 0.1"),
    "dropout, no number": ({"dropout_rate": "0"}, TypeError, "dropout_rate must be a number"),
    "norms": ({"normalize_qk": True}, NotImplementedError, "normalize_qk must be False: keys"),
    "features": ({"qkv_features": 10}, ValueError, "qkv_features = 10 must be a multiple"),
    "decode": ({"decode": "yes"}, TypeError, "decode must be a bool"),
    "read": ({"preset": "language", "readout": "ratio"}, ValueError, "readout"),
    "unknown": ({"attention_fn": None}, TypeError, "attention_fn"),
}


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS.values(), ids=list(OPTIONS))
def test_bad_options_are_refused_by_name(options, kind, message):
    with pytest.raises(kind, match=message):
        make(**options)
    with pytest.raises(kind, match=message):
        linen.SelfAttention(4, **options).init(jax.random.key(0), draw(2))


def test_other_faults_are_refused_by_name():
    module = make()
    module.init_cache((3, 1, IN))
    with pytest.raises(ValueError, match="the batch of the cache, 3, got 2"):
        module(draw(1), decode=True)
    with pytest.raises(ValueError, match=r"input_shape must be \[B, T, in_features\], got \[3\]"):
        module.init_cache((3,))
    with pytest.raises(ValueError, match="inputs_q must have shape"):
        module(draw(1)[0])
    names = flax_linen.with_partitioning(jax.nn.initializers.lecun_normal(), tuple("ehde"))
    with pytest.raises(ValueError, match="kernel_init must name at most 3 axes, got"):
        linen.SelfAttention(4, kernel_init=names).init(jax.random.key(0), draw(2))
    viewed = flax_nnx.view(make(), decode=True, batch_size=2, max_length=8, deterministic=True)
    assert viewed(draw(1)).shape == (2, 1, IN)
