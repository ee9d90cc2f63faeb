"""One small use of every public function and layer, in JAX's strict modes: ``make smoke``."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx as flax_nnx
from support import assert_close
from test_public_api import MODULES, public

import vla_jax
import vla_jax.linen
import vla_jax.pallas
from vla_jax import (
    baseline_layers,
    baselines,
    checks,
    diagnostics,
    generation,
    nnx,
    packing,
    presets,
    selftest,
    serialization,
    sharding,
)

B, T, H, D, E = 2, 5, 1, 3, 2
TOLERANCE = 1e-4
USES = {}


STRICT = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
}


@contextlib.contextmanager
def setting(options):
    """JAX's configuration with these options."""
    before = {name: getattr(jax.config, name) for name in options}
    attended.cache_clear()
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        attended.cache_clear()


@pytest.fixture(autouse=True)
def _strict():
    with setting(STRICT):
        yield


def use(*names):
    """Registers a test as the use of these public names."""

    def register(function):
        for name in names:
            assert name not in USES, name
            USES[name] = function
        return function

    return register


def test_every_public_name_has_a_use():
    wanted = {
        f"{module}.{name}" for module in MODULES for name in public(importlib.import_module(module))
    }
    assert set(USES) == wanted


def arrays(*, heads=H):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.uniform(0.1, 1, shape).astype(np.float32)  # noqa: E731
    return {
        "query": draw(B, T, heads, D),
        "key": draw(B, T, heads, D),
        "value": draw(B, T, heads, E),
    }


def mesh():
    return jax.make_mesh((2,), ("context",))


def over_devices(function, *whole):
    """``function`` of each device's half of the first axis."""
    over, spec = mesh(), jax.P("context")
    halves = jax.device_put(whole, jax.NamedSharding(over, spec))
    return jax.jit(jax.shard_map(function, mesh=over, in_specs=spec, out_specs=spec))(*halves)


@functools.lru_cache(None)
def attended():
    call = jax.jit(functools.partial(vla_jax.vla_attention, return_state=True))
    return call(**arrays())


def assert_oracle(out, state=None, **options):
    wanted, fields, _ = oracle.attention(**arrays(), **options)
    assert_close(out, wanted, TOLERANCE)
    for name, x in zip(("memory", "penalty", "key_sum"), fields if state else (), strict=False):
        assert_close(getattr(state, name), x, TOLERANCE, name)


@use("vla_jax.vla_attention", "vla_jax.VLAState")
def test_attention():
    out, state = attended()
    assert isinstance(state, vla_jax.VLAState)
    assert_oracle(out, state)


@use("vla_jax.vla_step", "vla_jax.init_state")
def test_step():
    state, outs = vla_jax.init_state(B, H, D, E), []
    step = jax.jit(lambda t, s: vla_jax.vla_step(t["query"], t["key"], t["value"], None, s))
    for t in range(T):
        out, state = step({n: x[:, t] for n, x in arrays().items()}, state)
        outs.append(out)
    assert_oracle(jnp.stack(outs, 1), state)


@use("vla_jax.feature_map")
def test_feature_map():
    np.testing.assert_allclose(vla_jax.feature_map(jnp.asarray([-1.0, 2])), [np.exp(-1), 3], 1e-6)


@use(
    "vla_jax.penalty_solve",
    "vla_jax.diagnostics.solve_report",
    "vla_jax.diagnostics.solve_residual",
)
def test_penalty_solve():
    tokens, gate = arrays(), np.full((B, T, H), -0.1, np.float32)
    given = {"rhs": tokens["query"], "direction": tokens["key"], "lambda0": 0.5}
    solution, penalty = jax.jit(vla_jax.penalty_solve)(**given)
    wanted, end = oracle.penalty_solve(**given)
    assert_close(solution, wanted, TOLERANCE)
    assert_close(penalty, end, TOLERANCE)
    assert np.max(jax.jit(diagnostics.solve_residual)(solution, **given)) < TOLERANCE
    report = jax.jit(diagnostics.solve_report)(**given, log_decay=gate)
    assert np.max(report.residual) < TOLERANCE


@use("vla_jax.delta_rule")
def test_delta_rule():
    x = arrays()
    given = x["query"], x["key"], 0.5 * x["key"], x["value"]
    for found, wanted in zip(jax.jit(vla_jax.delta_rule)(*given), oracle.delta_rule(*given)):  # noqa: B905
        assert_close(found, wanted, TOLERANCE)


def decodes(layer, read, step):
    """A whole sequence, then the same one read but for its last token and that decoded."""
    x = jax.random.normal(jax.random.key(0), (B, T, 4))
    whole, _ = read(layer, x)
    assert np.std(whole) > 0.05
    _, state = read(layer, x[:, :-1])
    out, state = step(layer, x[:, -1], state)
    np.testing.assert_allclose(out, whole[:, -1], atol=TOLERANCE)
    return state


def decodes_nnx(layer):
    return decodes(
        layer,
        flax_nnx.jit(lambda layer, x: layer(x, return_state=True)),
        flax_nnx.jit(lambda layer, x, state: layer.step(x, state)),
    )


@use("vla_jax.nnx.VariationalLinearAttention", "vla_jax.nnx.LayerState")
def test_nnx():
    layer = nnx.VariationalLinearAttention(2, 4, short_conv=2, rngs=flax_nnx.Rngs(0))
    assert isinstance(decodes_nnx(layer), nnx.LayerState)


@use("vla_jax.linen.VariationalLinearAttention", "vla_jax.linen.LayerState")
def test_linen():
    layer = vla_jax.linen.VariationalLinearAttention(2, 4, inverse="read", decay=True)
    variables = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((B, T, 4)))
    state = decodes(
        layer,
        lambda layer, x: jax.jit(lambda x: layer.apply(variables, x, return_state=True))(x),
        lambda layer, x, s: jax.jit(lambda x, s: layer.apply(variables, x, s, method="step"))(x, s),
    )
    assert isinstance(state, vla_jax.linen.LayerState)


@use("vla_jax.sharding.context_parallel_attention", "vla_jax.sharding.sharded_attention")
def test_sequence_over_devices():
    x = {n: np.concatenate([a, a[:, :1]], 1) for n, a in arrays().items()}
    call = jax.jit(
        functools.partial(sharding.sharded_attention, mesh=mesh(), context_axis="context")
    )
    assert_oracle(np.asarray(call(**x))[:, :T])


@use(
    "vla_jax.sharding.axis_size",
    "vla_jax.sharding.from_left",
    "vla_jax.sharding.from_last",
    "vla_jax.sharding.exclusive_scan",
    "vla_jax.sharding.continues",
    "vla_jax.sharding.kept",
    "vla_jax.sharding.check_divides",
)
def test_collectives():
    def local(x, ids):
        scanned = sharding.exclusive_scan(
            lambda a, b: (a[0] + b[0],),
            lambda s, e: (s + e[0],),
            (x,),
            jnp.zeros_like(x),
            "context",
        )
        joins, keep = sharding.continues(ids[None], "context")
        return jnp.stack(
            [
                sharding.from_left(x, "context")[0],
                sharding.from_last(x, "context")[0] * sharding.axis_size("context"),
                scanned[0],
                sharding.kept(joins, x[:1])[0],
                keep[0].astype(x.dtype),
            ]
        )[None]

    found = over_devices(local, jnp.asarray([3.0, 5.0]), jnp.asarray([1, 2]))
    np.testing.assert_array_equal(found, [[0, 10, 0, 3, 1], [3, 10, 3, 0, 0]])
    with pytest.raises(ValueError, match="T = 5 is not divisible by the 2 devices"):
        sharding.check_divides(mesh(), "context_axis", "context", T=5)


@use("vla_jax.serialization.save", "vla_jax.serialization.load", "vla_jax.serialization.nbytes")
def test_serialization(tmp_path):
    _, state = attended()
    serialization.save(tmp_path / "state", state)
    found = serialization.load(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert serialization.nbytes(state) == sum(x.nbytes for x in jax.tree.leaves(state))


@use(
    "vla_jax.generation.generate",
    "vla_jax.generation.stream",
    "vla_jax.generation.Generation",
    "vla_jax.generation.left_pad",
    "vla_jax.generation.sample",
)
def test_generation():
    """A model that counts: the next token is the last one plus 1."""
    step = lambda token, state: (10 * jax.nn.one_hot(token + 1, 9), state)  # noqa: E731
    prefill = lambda ids, mask: (step(ids[:, -1], None)[0], jnp.zeros(ids.shape[0]))  # noqa: E731
    prompts, mask = generation.left_pad([[1], [2, 3]])
    options = {"max_new": 3, "temperature": 0}
    found = generation.generate(prefill, step, prompts, mask, **options)
    assert isinstance(found, generation.Generation)
    np.testing.assert_array_equal(found.tokens, [[2, 3, 4], [4, 5, 6]])
    *_, last = generation.stream(prefill, step, prompts, mask, chunk=2, **options)
    np.testing.assert_array_equal(last.tokens[:, :1], [[4], [6]])
    assert generation.sample(jnp.asarray([[0.0, 9, 1]]), temperature=0)[0] == 1


@use(*(f"vla_jax.baselines.{n}" for n in public(baselines)))
def test_baselines():
    """Without what makes them differ, each is linear attention or plain DeltaNet."""
    x, one = arrays(), np.ones((B, T, H), np.float32)

    @jax.jit
    def run(query, key, value):
        tokens = query, key, value
        gates = {"beta": one, "log_decay": 0 * one}
        return {
            "linear": baselines.linear_attention(*tokens, readout="none"),
            "identity": baselines.identity_attention(*tokens),
            "delta": baselines.delta_net(*tokens, one, return_state=True),
            "gated": baselines.gated_delta_net(*tokens, **gates),
            "mesa": baselines.mesa_net(*tokens, **gates),
            "published": baselines.published_deltanet(
                *tokens, jnp.ones_like(value), readout="none"
            ),
            "softmax": baselines.softmax_attention(*tokens),
        }

    found = run(**x)
    out, state = found["delta"]
    assert isinstance(state, baselines.BaselineState)
    unit = x["key"] / np.linalg.norm(x["key"], axis=-1, keepdims=True)
    assert_close(out, oracle.delta_rule(x["query"], unit, unit, x["value"])[0], TOLERANCE)
    assert_close(found["gated"], out, TOLERANCE)
    causal = np.tril(np.ones((T, T)))
    scores = np.einsum("bthd,bshd->bhts", x["query"], x["key"])
    wanted = np.einsum("bhts,bshe->bthe", scores * causal, x["value"])
    assert_close(found["linear"], wanted, TOLERANCE)
    weights = np.exp(scores / np.sqrt(D)) * causal
    weights /= weights.sum(-1, keepdims=True)
    assert_close(found["softmax"], np.einsum("bhts,bshe->bthe", weights, x["value"]), TOLERANCE)
    assert_close(found["mesa"], oracle.attention(**x, inverse="read")[0], TOLERANCE)
    for name in ("identity", "published"):
        assert np.all(np.isfinite(found[name])), name
        assert np.std(found[name]) > 0.01, name


@use("vla_jax.baseline_layers.BaselineAttention", "vla_jax.baseline_layers.BaselineLayerState")
def test_baseline_layer():
    layer = baseline_layers.BaselineAttention("deltanet", 2, 4, rngs=flax_nnx.Rngs(0))
    assert isinstance(decodes_nnx(layer), baseline_layers.BaselineLayerState)


@use("vla_jax.baseline_layers.SoftmaxAttention", "vla_jax.baseline_layers.Cache")
def test_softmax_layer():
    layer = baseline_layers.SoftmaxAttention(2, 4, window=T, rngs=flax_nnx.Rngs(0))
    assert isinstance(decodes_nnx(layer), baseline_layers.Cache)


@use(*(f"vla_jax.checks.{n}" for n in public(checks)))
def test_checks():
    unit = jnp.eye(3)
    checks.assert_unit_norm(unit)
    checks.assert_unit_key_and_gain(unit, unit)
    checks.assert_converged(jnp.zeros(2))
    assert checks.unit_norm_tolerance(jnp.float32) < 1e-5
    for wrong in (
        lambda: checks.assert_unit_norm(2 * unit),
        lambda: checks.assert_unit_key_and_gain(unit, 2 * unit),
        lambda: checks.assert_converged(jnp.ones(2)),
    ):
        with pytest.raises(AssertionError):
            wrong()


@use(
    "vla_jax.diagnostics.state_norm",
    "vla_jax.diagnostics.lyapunov",
    "vla_jax.diagnostics.inverse_drift",
    "vla_jax.diagnostics.penalty_condition_number",
    "vla_jax.diagnostics.alignment",
    "vla_jax.diagnostics.closed_form_norm",
    "vla_jax.diagnostics.closed_form_radius",
    "vla_jax.diagnostics.step_jacobian_norm",
    "vla_jax.diagnostics.step_jacobian_radius",
)
def test_diagnostics():
    _, state = attended()
    x = arrays()
    norms = jax.jit(diagnostics.state_norm)(x["key"], x["value"])
    memory, penalty = (np.asarray(a, np.float64) for a in (state.memory, state.penalty))
    assert_close(norms[:, -1], np.linalg.norm(memory, axis=(-2, -1)), TOLERANCE)
    ridge = penalty + 0.1 * np.eye(D)
    assert_close(
        diagnostics.lyapunov(state), np.einsum("bhde,bhdf,bhfe->bh", memory, ridge, memory), 1e-4
    )
    condition = diagnostics.penalty_condition_number(state.penalty)
    assert_close(condition, np.linalg.cond(ridge), 1e-3)
    assert np.max(diagnostics.inverse_drift(np.linalg.inv(ridge), state.penalty)) < TOLERANCE
    unit, gain = jnp.eye(3)[:1], jnp.asarray([[0.6, 0.8, 0]])
    c = diagnostics.alignment(unit, gain)
    np.testing.assert_allclose(c, [0.6], atol=1e-6)
    for name in ("norm", "radius"):
        found = getattr(diagnostics, f"step_jacobian_{name}")(unit, gain)
        wanted = getattr(diagnostics, f"closed_form_{name}")(c)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@use("vla_jax.packing.from_positions")
def test_packing():
    ids, mask = packing.from_positions(jnp.asarray([[0, 1, 0, -1]]))
    np.testing.assert_array_equal(ids, [[1, 1, 2, 2]])
    np.testing.assert_array_equal(mask, [[True, True, True, False]])


@use("vla_jax.packing.from_packed_ids", "vla_jax.packing.from_attention_mask")
def test_packed_rows_and_their_attention_mask():
    packed = jnp.asarray([[1, 1, 2, 0]])
    ids, mask = packing.from_packed_ids(packed)
    np.testing.assert_array_equal(mask, [[True, True, True, False]])
    earlier = np.tri(4, dtype=bool)[None]
    seen = (packed[:, :, None] == packed[:, None]) & earlier & mask[:, None]
    found, present = packing.from_attention_mask(seen[:, None])
    np.testing.assert_array_equal(present, mask)
    np.testing.assert_array_equal(found[0, 1:] == found[0, :-1], ids[0, 1:] == ids[0, :-1])


@use("vla_jax.nnx.SelfAttention", "vla_jax.linen.SelfAttention")
def test_drop_ins():
    x = np.random.default_rng(0).standard_normal((B, T, 4), np.float32)
    layer = nnx.SelfAttention(2, 4, rngs=flax_nnx.Rngs(0))
    linen = vla_jax.linen.SelfAttention(2)
    out = flax_nnx.jit(lambda layer, x: layer(x))(layer, x)
    drawn = jax.jit(linen.init_with_output)(jax.random.key(0), x)[0]
    assert out.shape == drawn.shape == x.shape
    layer.init_cache(x.shape)
    step = flax_nnx.jit(lambda layer, x: layer(x, decode=True))
    decoded = [step(layer, x[:, t : t + 1]) for t in range(T)]
    assert_close(jnp.concatenate(decoded, axis=1), out, TOLERANCE)


@use("vla_jax.presets.PRESETS", "vla_jax.presets.options")
def test_presets():
    for name in presets.PRESETS:
        options = presets.options(name, output_norm=None)
        assert options.pop("output_norm") is None
        assert options.items() <= presets.PRESETS[name].items()
        nnx.VariationalLinearAttention(2, 4, **options, rngs=flax_nnx.Rngs(0))


@use(*(f"vla_jax.selftest.{n}" for n in public(selftest)))
def test_selftest(monkeypatch, capsys):
    case = selftest.Case("small", (1, 17, 1, 1, 3, 2))
    results = selftest.run(["xla"], cases=[case])
    assert isinstance(results[0], selftest.Result)
    assert "safe" in selftest.verdicts(results)["xla"]
    monkeypatch.setattr(selftest, "run", lambda *_, **__: results)
    monkeypatch.setattr("sys.argv", ["selftest"])
    assert selftest.main() == 0
    assert selftest.report(results) in capsys.readouterr().out


@use("vla_jax.pallas.export_checks")
def test_pallas_export_checks():
    assert all(
        isinstance(x, jax.export.DisabledSafetyCheck) for x in vla_jax.pallas.export_checks()
    )
    assert len(vla_jax.pallas.export_checks()) > 0
