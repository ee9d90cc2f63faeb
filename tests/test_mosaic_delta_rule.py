"""The delta rule's kernels for Hopper GPUs: interpreted against the oracle, and lowered for CUDA.

``JAX_PLATFORMS=cuda`` on a Hopper GPU compiles and runs them instead of interpreting.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import support
import tolerances

from vla_jax import implementations, numerics, pallas, reference
from vla_jax.bundles import Attention, Delta, DeltaOutputs
from vla_jax.pallas import common, mosaic
from vla_jax.pallas.mosaic import backend, delta_rule
from vla_jax.plan import Plan

BF16 = jnp.bfloat16
ON_DEVICE = jax.default_backend() == "gpu"
TOKENS = ("query", "key", "write_key", "value")


def draw(batch, length, heads, groups, dim, value_dim, *, unit=True, seed=0):
    """Correlated keys, write keys near them but not along them, one token absent."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    key = 3 * normal((batch, length, heads, dim)) + 1
    unit_key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    write = unit_key * rng.uniform(0.05, 0.95, (batch, length, heads, 1))
    write += 0.3 / np.sqrt(dim) * normal(key.shape)
    key = unit_key if unit else key
    key[:, length // 2], write[:, length // 2] = 0, 0
    query_heads = heads * groups
    call = dict(
        query=normal((batch, length, query_heads, dim)) / np.sqrt(dim),
        key=key,
        write_key=write,
        value=normal((batch, length, heads, value_dim)),
        d_out=normal((batch, length, query_heads, value_dim)),
    )
    call = {name: jnp.asarray(x, BF16) for name, x in call.items()}
    call["rest"] = jnp.asarray(write - np.asarray(call["write_key"], np.float64), BF16)
    for name in ("memory", "d_memory"):
        call[name] = jnp.asarray(normal((batch, heads, dim, value_dim)), jnp.float32)
    call["log_decay"] = jnp.asarray(-np.exp(normal((batch, length, heads)) - 2), jnp.float32)
    return call


def wide(x):
    return np.asarray(x).astype(np.float64)


def forward(call, normalize=False, **options):
    return delta_rule.forward(
        **{name: call[name] for name in TOKENS},
        initial_memory=call["memory"],
        normalize_key=normalize,
        interpret=not ON_DEVICE,
        **options,
    )


def check(call, *, gated=True, segment_ids=None, rest=False, normalize=False, pieces=None):
    """Values and all cotangents, also through the returned memory."""
    inputs = {name: call[name] for name in TOKENS}
    decay = dict(log_decay=call["log_decay"] if gated else None, segment_ids=segment_ids)
    extra = dict(write_rest=call["rest"] if rest else None)
    out, memory, residuals = forward(
        call, normalize, pieces=pieces, solve_rest=rest, **decay, **extra
    )
    cotangents = delta_rule.backward(
        residuals,
        **inputs,
        d_out=call["d_out"],
        d_memory=call["d_memory"],
        interpret=not ON_DEVICE,
        **decay,
        **extra,
    )
    expected = {name: wide(x) for name, x in inputs.items()}
    if normalize:
        expected["key"] = oracle.normalize(expected["key"])[0]
    if rest:
        expected["write_key"] += wide(call["rest"])
    options = dict(
        log_decay=wide(decay["log_decay"]) if gated else None,
        initial_memory=wide(call["memory"]),
        segment_ids=None if segment_ids is None else np.asarray(segment_ids),
    )
    tolerance = tolerances.BFLOAT16_RMS
    expected_out, expected_memory = oracle.delta_rule(**expected, **options)
    support.assert_rms_close(out, expected_out, tolerance, "out")
    support.assert_rms_close(memory, expected_memory, tolerance, "memory")
    gradients = oracle.delta_rule_grad(
        wide(call["d_out"]), wide(call["d_memory"]), **expected, **options
    )
    names = (*TOKENS, "memory", "log_decay")
    for name, cotangent in zip(names, cotangents, strict=True):
        if cotangent is None:
            assert (name, gated) == ("log_decay", False)
            continue
        support.assert_rms_close(cotangent, gradients[name], tolerance, "d " + name)


def test_without_decay():
    check(draw(1, 64, 1, 1, 64, 64), gated=False)


def test_decay_segments_and_normalised_keys_over_an_odd_length():
    ids = np.zeros((1, 100), np.int32)
    for start in (2, 40, 64, 99):
        ids[:, start:] += 1
    check(
        draw(1, 100, 1, 1, 64, 64, unit=False),
        segment_ids=jnp.asarray(ids),
        normalize=True,
    )


def test_groups_of_queries_and_write_keys_of_more_than_16_bits():
    check(draw(1, 64, 1, 2, 64, 64), rest=True)


@pytest.mark.slow
def test_pieces_are_the_whole():
    check(draw(1, 190, 1, 1, 64, 64), pieces=3)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 128), (128, 64), (128, 128)])
def test_wide(dim, value_dim):
    check(draw(1, 100, 2, 2, dim, value_dim, unit=False), normalize=True, rest=True)


def test_decays_that_forget_everything():
    """Given as log decays, not as segments; the cotangent of such a decay is zero."""
    call = draw(1, 64, 1, 1, 64, 64)
    hard = np.array(call["log_decay"])
    hard[:, ::5] = -1e30
    hard[:, 1::5] = -30
    call["log_decay"] = jnp.asarray(hard)
    check(call)


def test_the_rest_of_a_write_key_reaches_the_memory():
    """Tokens that no later key reaches: only the rest can make the sum this accurate."""
    call = draw(1, 64, 1, 1, 64, 64)
    call["key"] = jnp.zeros_like(call["key"])
    call["memory"] = jnp.zeros_like(call["memory"])
    call["value"] = jnp.round(call["value"])  # no rounding in the residual
    write = wide(call["write_key"]) + wide(call["rest"])
    expected = np.einsum("bthd,bthe->bhde", write, wide(call["value"]))
    _, exact, _ = forward(call, write_rest=call["rest"], save_residuals=False)
    _, rounded, _ = forward(call, save_residuals=False)
    support.assert_rms_close(exact, expected, 2e-5, "memory")
    with pytest.raises(AssertionError):
        support.assert_rms_close(rounded, expected, 2e-4, "memory")


def lowered(dim, value_dim, groups, *, gated, normalize):
    shape = jax.ShapeDtypeStruct
    batch, length, heads = 2, 256, 2
    inputs = dict(
        query=shape((batch, length, heads * groups, dim), BF16),
        key=shape((batch, length, heads, dim), BF16),
        write_key=shape((batch, length, heads, dim), BF16),
        value=shape((batch, length, heads, value_dim), BF16),
    )
    decay = shape((batch, length, heads), jnp.float32) if gated else None
    d_out = shape((batch, length, heads * groups, value_dim), BF16)

    def both(inputs, decay, d_out):
        residuals = delta_rule.forward(**inputs, log_decay=decay, normalize_key=normalize)[2]
        return delta_rule.backward(residuals, **inputs, d_out=d_out, log_decay=decay)

    traced = jax.jit(both).trace(inputs, decay, d_out)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dim", "value_dim", "groups", "gated"),
    [(64, 64, 1, True), (64, 128, 2, False), (128, 64, 2, True), (128, 128, 1, True)],
)
def test_lowers_for_cuda_without_a_gpu(dim, value_dim, groups, gated):
    if jax.__version_info__ < backend.FIRST_JAX:
        with pytest.raises(NotImplementedError, match=r"need jax 0\.11 or later"):
            lowered(dim, value_dim, groups, gated=gated, normalize=gated)
        return
    text = lowered(dim, value_dim, groups, gated=gated, normalize=gated)
    for kernel in ("invert", "sweep", "back", "grads"):
        assert "vla_hopper_delta_" + kernel in text
    with jax.enable_x64(True):
        assert "vla_hopper_delta_grads" in lowered(
            dim, value_dim, groups, gated=gated, normalize=gated
        )


def test_refuses_what_it_cannot_do():
    call = draw(1, 64, 1, 1, 64, 64)
    with pytest.raises(NotImplementedError, match="key must be bfloat16, got float32"):
        forward(call | dict(key=call["key"].astype(jnp.float32)))
    with pytest.raises(NotImplementedError, match="value dimension must be 64 or 128, got 48"):
        forward(call | dict(value=call["value"][..., :48]))


# --- as implementation="pallas" ----------------------------------------------------------------


def test_the_rule_of_the_primitive(monkeypatch):
    """Write keys in float32, keys normalised inside: the cotangent of the key as given."""
    if not ON_DEVICE:
        monkeypatch.setenv(common.INTERPRET, "1")
    call = draw(1, 64, 1, 1, 64, 64, unit=False)
    write_key = call["write_key"].astype(jnp.float32) + call["rest"].astype(jnp.float32)
    inputs = Delta(
        call["query"], call["key"], write_key, call["value"], call["memory"], None,
        call["log_decay"],
    )  # fmt: skip
    plan = Plan("pallas", numerics.policy(inputs.query), normalize_key=True)
    rule = mosaic.RULES[Delta]
    outputs, saved = rule.forward(plan, inputs)
    gradients = rule.backward(plan, inputs, saved, DeltaOutputs(call["d_out"], call["d_memory"]))

    def recurrence(inputs):
        unit = inputs._replace(key=numerics.normalize(inputs.key))
        return reference.RULES[Delta].forward(plan, unit)[0]

    with jax.enable_x64(True):
        given = inputs._replace(
            **{n: wide(x) for n, x in inputs._asdict().items() if x is not None}
        )
        expected, pull = jax.vjp(recurrence, given)
        wanted = pull(DeltaOutputs(wide(call["d_out"]), wide(call["d_memory"])))[0]
    tolerance = tolerances.BFLOAT16_RMS
    for name in ("out", "memory"):
        support.assert_rms_close(getattr(outputs, name), getattr(expected, name), tolerance, name)
    for name, x in inputs._asdict().items():
        if x is not None:
            actual = getattr(gradients, name)
            support.assert_rms_close(actual, getattr(wanted, name), tolerance, "d " + name)
    assert gradients.write_key.dtype == jnp.float32


def test_who_is_served(monkeypatch):
    """Hopper, bfloat16, 64 and 128: the delta rule, with decay; all else goes to Triton or none."""

    def bundle(dtype=BF16, write_dtype=BF16, dim=64, value_dim=64, gated=True):
        x = jnp.zeros((1, 4, 1, dim), dtype)
        return Delta(
            x, x, x.astype(write_dtype), jnp.zeros((1, 4, 1, value_dim), dtype),
            jnp.zeros((1, 1, dim, value_dim)), None, jnp.zeros((1, 4, 1)) if gated else None,
        )  # fmt: skip

    class Device:
        compute_capability = "9.0"

    monkeypatch.delenv(common.INTERPRET, raising=False)
    monkeypatch.setattr(common, "gpu", lambda: Device)
    monkeypatch.setattr(backend, "FIRST_JAX", (0, 0))
    assert pallas.unsupported(bundle(), None) is None
    assert pallas.normalizes(bundle(write_dtype=jnp.float32), None)
    assert not pallas.normalizes(bundle(gated=False), jax.lax.Precision.HIGHEST)
    for wrong, reason in (
        (bundle(dtype=jnp.float32), "query is float32"),
        (bundle(dim=32), "query has 32 features"),
        (bundle(write_dtype=jnp.float16), "write_key is float16"),
    ):
        assert reason in mosaic.unsupported(wrong)
        refused = pallas.unsupported(wrong, None)
        assert reason in refused
        assert "triton: its kernels have no log_decay" in refused
    token, matrix = jnp.zeros((1, 4, 1, 64), BF16), jnp.zeros((1, 1, 64, 64))
    whole = Attention(token, token, token, None, jnp.ones(1), matrix, matrix, jnp.zeros((1, 1, 64)))
    assert "the one with gates" in mosaic.unsupported(whole)
    for gated, inverse in ((whole, "read"), (whole._replace(beta=jnp.ones((1, 4, 1))), "write")):
        assert implementations.choose("pallas", gated, None, inverse) == "pallas"
        with pytest.raises(NotImplementedError, match="precision is HIGHEST"):
            implementations.choose("pallas", gated, None, inverse, jax.lax.Precision.HIGHEST)
    assert pallas.unsupported(whole, None) is None  # Triton
    plan = Plan("pallas", numerics.policy(token))
    for kind, served in ((whole, "triton"), (bundle(), "mosaic")):
        assert (
            pallas._rule(plan, kind)
            is importlib.import_module(pallas.FAMILIES[served]).RULES[type(kind)]
        )
    Device.compute_capability = "10.0"
    assert "10.0 is not 9.0 (Hopper)" in mosaic.unsupported(bundle())
    assert pallas.unsupported(bundle(gated=False), None) is None  # Triton
    monkeypatch.setattr(backend, "FIRST_JAX", (99,))
    assert "need jax 99" in mosaic.unsupported(bundle())
