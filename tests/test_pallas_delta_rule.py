"""The delta rule's kernels against the float64 oracle, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import support
import tolerances

from vla_jax import numerics
from vla_jax.pallas import backend, delta_rule

CHUNK16 = {"chunk": 16}


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setenv(backend.INTERPRET, "1")


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
    """Values and cotangents of the kernels by name."""
    options = dict(
        normalize_key=normalize,
        readout="ratio" if ratio else "none",
        initial_key_sum=call["key_sum"] if ratio else None,
        eps=eps,
        precision=precision,
        params=dict(params),
    )
    inputs = [call[n] for n in ("query", "key", "write_key", "value", "memory")]
    inputs.append(call.get("segment_ids"))
    out, memory, key_sum, residuals = delta_rule.forward(*inputs, save_residuals=True, **options)
    d_key_sum = call["d_key_sum"] if ratio else None
    grads = delta_rule.backward(
        residuals, *inputs, call["d_out"], call["d_memory"], d_key_sum, **options
    )
    names = "query", "key", "raw_key", "write_key", "value", "memory", "key_sum"
    values = {"out": out, "final memory": memory, "final key_sum": key_sum}
    values |= {f"d {n}": g for n, g in zip(names, grads, strict=True)}
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
        heads = call["key"].shape[2]
        groups = functools.partial(oracle._groups, heads=heads)
        z, sums = call["key_sum"], np.zeros_like(call["key"])
        for t, restart in enumerate(oracle._restarts(segments, *call["key"].shape[:2])):
            z = sums[:, t] = oracle._cleared(z, restart) + call["key"][:, t]
        weight = np.maximum(np.einsum("bthgd,bthd->bthg", groups(call["query"]), sums), eps)
        d_numerator, d_query, d_raw_key, d_sum = oracle._ratio_grad(
            groups(d_out),
            groups(out),
            groups(call["query"]),
            call["key"],
            call["key_sum"],
            call["d_key_sum"],
            segments,
            eps,
        )
        out = (groups(out) / weight[..., None]).reshape(out.shape)
        d_out = d_numerator.reshape(d_out.shape)
        extra = {"d raw_key": d_raw_key, "d key_sum": d_sum}
        values["final key_sum"] = z
    grads = oracle.delta_rule_grad(d_out, call["d_memory"], *inputs, **rule)
    if ratio:
        grads["query"] = grads["query"] + d_query.reshape(grads["query"].shape)
    values |= {"out": out} | {f"d {n}": x for n, x in grads.items()} | extra
    return values


def check(call, tolerance=tolerances.REORDERED32, compare=support.assert_close, **options):
    actual = run(call, **options)
    kwargs = {n: options[n] for n in ("ratio", "normalize", "eps") if n in options}
    want = expected(call, **kwargs)
    assert sorted(actual) == sorted(want)
    for name, x in want.items():
        compare(actual[name], x, tolerance, name)


@pytest.mark.parametrize(("ratio", "normalize"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("segments", [None, [(0, [5, 6, 32, 50]), (1, [3, 16, 17, 64])]])
def test_values_and_gradients(ratio, normalize, segments):
    call = draw(0, 2, 77, 2, 2, 16, 32, segments=segments)
    if not normalize:
        call["key"] = numerics.normalize(call["key"])
    check(call, ratio=ratio, normalize=normalize)
