"""The delta rule's kernels against the float64 oracle: interpreted, or on a GPU where there is one.

``JAX_PLATFORMS=cuda`` runs them on the GPU, and then every entry of the table of parameters too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import support
import tolerances

from vla_jax import numerics
from vla_jax.bundles import Delta
from vla_jax.pallas import common
from vla_jax.pallas.triton import delta_rule


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    if common.gpu() is None:
        monkeypatch.setenv(common.INTERPRET, "1")


def draw(seed, batch, length, heads, groups, dim, value_dim, *, dtype=np.float32, segments=None):
    """Inputs and cotangents: positive keys, write keys near the unit keys, some tokens absent."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    key = np.exp(normal((batch, length, heads, dim)))
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    write = unit + 0.3 / np.sqrt(dim) * normal(key.shape)
    write /= np.linalg.norm(write, axis=-1, keepdims=True)
    key[:, length // 2], write[:, length // 2] = 0, 0
    query_heads = heads * groups
    tokens = dict(
        query=np.exp(normal((batch, length, query_heads, dim)) / 2),
        key=key,
        write_key=write,
        value=normal((batch, length, heads, value_dim)),
        d_out=normal((batch, length, query_heads, value_dim)),
    )
    state = dict(
        memory=normal((batch, heads, dim, value_dim)),
        key_sum=np.exp(normal((batch, heads, dim))),
        d_memory=normal((batch, heads, dim, value_dim)),
        d_key_sum=normal((batch, heads, dim)),
    )
    call = {n: jnp.asarray(x, dtype) for n, x in tokens.items()}
    call |= {n: jnp.asarray(x, jnp.float32) for n, x in state.items()}
    if segments is not None:
        starts = np.zeros((batch, length), np.int32)
        for b, at in segments:
            starts[b, at] = 1
        call["segment_ids"] = jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)
    return call


@functools.partial(jax.jit, static_argnames=("ratio", "normalize", "eps", "precision", "params"))
def run(call, *, ratio, normalize, eps=1e-6, precision=None, params=()):
    """Values and cotangents of the kernels by name; ``params`` override the table's."""
    options = delta_rule.Options(normalize, "ratio" if ratio else "none", eps, precision)
    if params:
        entry = delta_rule.TABLE_FLOAT32[64]
        options = options._replace(params=dataclasses.replace(entry, **dict(params)))
    extra = delta_rule.Extra(call["key_sum"] if ratio else None)
    tokens = [call[n] for n in ("query", "key", "write_key", "value")]
    inputs = Delta(*tokens, call["memory"], call.get("segment_ids"))
    given = delta_rule.Cotangents(
        call["d_out"], call["d_memory"], call["d_key_sum"] if ratio else None
    )
    swept = delta_rule.forward(inputs, options, extra)
    grads = delta_rule.backward(inputs, swept.residuals, given, options, extra)
    values = {"out": swept.out, "final memory": swept.memory, "final key_sum": swept.key_sum}
    values |= {f"d {n}": g for n, g in grads.inputs._asdict().items()}
    values |= {"d raw_key": grads.raw_key, "d key_sum": grads.key_sum}
    return {n: x for n, x in values.items() if x is not None}


def expected(call, *, ratio, normalize, eps=1e-6):
    """The same from the oracle."""
    segments = call.get("segment_ids")
    call = {n: np.asarray(x).astype(np.float64) for n, x in call.items() if n != "segment_ids"}
    unit = oracle.normalize(call["key"])[0] if normalize else call["key"]
    inputs = call["query"], unit, call["write_key"], call["value"]
    rule = dict(initial_memory=call["memory"], segment_ids=segments)
    out, memory = oracle.delta_rule(*inputs, **rule)
    values, d_out = {"final memory": memory}, call["d_out"]
    extra = {}
    if ratio:
        groups = functools.partial(oracle._groups, heads=call["key"].shape[2])
        key, query = call["key"], groups(call["query"])
        sums, _ = oracle.key_sums(key, initial=call["key_sum"], segment_ids=segments)
        weight = np.maximum(np.einsum("bthgd,bthd->bthg", query, sums), eps)
        d_numerator, d_query, d_sums = oracle._ratio_grad(
            groups(d_out), groups(out), query, sums, eps
        )
        d_sums[:, -1] += call["d_key_sum"]
        ones = np.ones(key.shape[:3])
        gate = {"weight": ones, "log_decay": 0 * ones, "initial": call["key_sum"]}
        d_sum = oracle.key_sums_grad(d_sums, key, segment_ids=segments, **gate)
        out = (groups(out) / weight[..., None]).reshape(out.shape)
        d_out = d_numerator.reshape(d_out.shape)
        extra = {"d raw_key": d_sum["key"], "d key_sum": d_sum["key_sum"]}
        values["final key_sum"] = sums[:, -1]
    grads = oracle.delta_rule_grad(d_out, call["d_memory"], *inputs, **rule)
    if ratio:
        grads["query"] = grads["query"] + d_query.reshape(grads["query"].shape)
    given = ("query", "key", "write_key", "value", "memory")
    values |= {"out": out} | {f"d {n}": grads[n] for n in given} | extra
    return values


def check(call, tolerance=tolerances.REORDERED32, compare=support.assert_close, **options):
    actual = run(call, **options)
    kwargs = {n: options[n] for n in ("ratio", "normalize", "eps") if n in options}
    want = expected(call, **kwargs)
    assert sorted(actual) == sorted(want)
    for name, x in want.items():
        compare(actual[name], x, tolerance, name)


RATIO = {"ratio": True, "normalize": True}
SEGMENTS = [(0, [5, 6, 32, 50]), (1, [3, 16, 17, 64])]  # one token, a chunk's edge, several a chunk
SMALL = (("chunk", 16),)


@pytest.mark.parametrize(
    ("ratio", "normalize", "segments", "chunk"),
    [(False, False, SEGMENTS, 32), (False, True, None, 64), (True, True, SEGMENTS, 16)],
)
def test_values_and_gradients(ratio, normalize, segments, chunk):
    call = draw(0, 2, 77, 2, 2, 16, 32, segments=segments)
    if not normalize:
        call["key"] = numerics.normalize(call["key"])
    check(call, ratio=ratio, normalize=normalize, params=(("chunk", chunk),))


def test_super_chunks():
    """Few heads: the sweep is cut in super-chunks, found by an associative scan."""
    params = (*SMALL, ("min_span", 1))
    table = dataclasses.replace(delta_rule.TABLE_FLOAT32[64], **dict(params))
    assert delta_rule.super_chunks(4, 1, 10, table) == 8
    segments = [(0, [5, 33, 130])]  # the second sequence is one segment
    check(draw(1, 2, 150, 2, 1, 16, 8, segments=segments), params=params, **RATIO)


@pytest.mark.parametrize(
    ("length", "dim", "value_dim", "more"), [(1, 5, 3, ()), (33, 24, 20, (("unroll", True),))]
)
def test_odd_sizes(length, dim, value_dim, more):
    """Padding; several blocks of columns; the substitution as it is on a GPU."""
    widths = tuple((f"{n}_width", 16) for n in ("sweep", "read", "pull", "grads"))
    slabs = tuple((f"{n}_slab", 16) for n in ("solve", "pull", "grads"))
    params = (("chunk", 32), *more, *widths, *slabs)
    check(draw(2, 1, length, 1, 2, dim, value_dim), params=params, **RATIO)


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (jnp.bfloat16, None, tolerances.BFLOAT16_RMS),
        (jnp.bfloat16, "highest", tolerances.BFLOAT16_RMS / 4),  # the rounding of what is returned
        (jnp.float16, None, tolerances.BFLOAT16_RMS / 4),
    ],
)
def test_sixteen_bits(dtype, precision, tolerance):
    call = draw(3, 1, 40, 2, 1, 16, 16, dtype=dtype, segments=[(0, [21])])
    compare = support.assert_rms_close
    check(call, tolerance, compare, precision=precision, params=SMALL, **RATIO)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dim", [16, *delta_rule.TABLE])
def test_table(dim, dtype):
    """Right shapes and wrong numbers are what a compiler's fault looks like."""
    if common.interpret():
        pytest.skip("needs a GPU")
    call = draw(9, 2, 300, 2, 2, dim, dim, dtype=dtype, segments=[(0, [5, 6, 64, 149]), (1, [17])])
    tolerance = tolerances.REORDERED32 if dtype == jnp.float32 else tolerances.BFLOAT16_RMS
    check(call, tolerance, support.assert_rms_close, **RATIO)
    again, first = (run(call, **RATIO) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, again[name], name)


def test_ratio_below_its_floor():
    """A weight ``z·q`` under ``eps`` is constant: no cotangent reaches the key sum through it."""
    call = draw(4, 1, 40, 1, 2, 16, 16)
    call["query"] = call["query"].at[:, ::3].multiply(1e-3)
    check(call, eps=10.0, params=SMALL, **RATIO)


def test_absent_tokens():
    call = draw(5, 1, 32, 1, 1, 16, 16)
    for name in ("query", "key", "write_key", "value"):
        call[name] = call[name].at[:, 8:24].set(0)
    values = run(call, params=SMALL, **RATIO)
    for name, x in values.items():
        assert np.isfinite(x).all(), name
    assert not np.asarray(values["out"])[:, 8:24].any()
    assert not np.asarray(values["d value"])[:, 8:24].any()
    for name, x in run(call | {"key": call["key"] * 1e-42}, params=SMALL, **RATIO).items():
        assert np.isfinite(x).all(), name


def test_key_scale_changes_nothing():
    """Keys are scaled by their largest entry before they are squared."""
    call = draw(6, 1, 32, 1, 1, 16, 16)
    options = {"ratio": False, "normalize": True, "params": SMALL}
    plain = run(call, **options)
    for scale in (2.0**-100, 2.0**100):
        scaled = run(call | {"key": call["key"] * scale}, **options)
        for name, x in plain.items():
            support.assert_close(scaled[name], x, tolerances.REORDERED32, name)


def test_x64_changes_nothing():
    call = draw(7, 1, 20, 1, 1, 16, 16)
    with jax.enable_x64(True):
        check(call, params=SMALL, **RATIO)
        assert {x.dtype for x in run(call, params=SMALL, **RATIO).values()} == {
            jnp.dtype("float32")
        }


def test_refusals():
    def forward(length, readout="none"):
        token = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16)
        inputs = Delta(*[token] * 4, jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32))
        options = delta_rule.Options(readout=readout)
        return jax.eval_shape(lambda x: delta_rule.forward(x, options, delta_rule.Extra()), inputs)

    with pytest.raises(NotImplementedError, match=r"2\*\*31 elements"):
        forward(2**25)
    with pytest.raises(ValueError, match="normalize_key=True"):
        forward(16, "ratio")
