"""Weights, decay and the inverse at the write or at the read, against the oracle.

One file, because all tests draw from one grid of gates, of one shape that compiles once.
"""

import dataclasses
import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from hypothesis import strategies as st
from support import assert_close, cast

import vla_jax
from vla_jax import diagnostics, implementations
from vla_jax.bundles import Attention
from vla_jax.chunkwise import gated_solve

# --- the public functions, float64 through "xla" by default ---------------------------------------

_named = functools.partial(functools.partial, implementation="xla")
penalty_solve, delta_rule = map(_named, (vla_jax.penalty_solve, vla_jax.delta_rule))
vla_attention = _named(vla_jax.vla_attention, return_state=True)
vla_step = vla_jax.vla_step
solve_report, solve_residual = diagnostics.solve_report, diagnostics.solve_residual


# --- cases ---------------------------------------------------------------------------------------

B, T, H, G, D, E = 2, 21, 2, 2, 5, 3
CHUNK = 8
pytestmark = pytest.mark.operation(operation=Attention, gated=True)
STATE = ("memory", "penalty", "key_sum")


@dataclasses.dataclass(frozen=True)
class Gates:
    """How weights and decays are drawn: one compiled program serves all."""

    weights: str = "any"
    decay: str = "any"
    segments: str = "one"

    def __str__(self):
        return f"{self.decay}_decay-{self.weights}_weights-{self.segments}_segments"

    def weight(self, rng, shape):
        weight = rng.uniform(0.1, 2, shape)
        return {
            "any": np.where(rng.random(shape) < 0.2, 0, weight),
            "zero": np.zeros(shape),
            "one": np.ones(shape),
        }[self.weights]

    def log_decay(self, rng, shape):
        x = -rng.exponential(size=shape)
        return {
            "any": x * rng.choice([0, 0.01, 1, 30], shape),
            "none": np.zeros(shape),
            "slow": 1e-6 * x,
            "fast": np.full(shape, -30.0),
            "resets": np.where(np.arange(shape[1])[:, None] % 5 == 4, -1e30, 0.1 * x),
            "all_reset": np.full(shape, -1e30),
        }[self.decay]

    def segment_ids(self):
        """At the first tokens, at the last, inside a chunk, of one token, and everywhere."""
        starts = {
            "one": ([], []),
            "early": ([1], [2, 3]),
            "late": ([T - 1], [9, 10, 11, T - 2]),
            "edges": ([8, 16], [7, 8, 15]),
            "all": (list(range(1, T)), [13]),
        }[self.segments]
        ids = np.zeros((B, T), np.int32)
        for row, at in zip(ids, starts, strict=True):
            row[at] = 1
        return np.cumsum(ids, axis=1, dtype=np.int32)


GATES = (
    Gates(),
    Gates("any", "resets", "early"),
    Gates("one", "slow", "late"),
    Gates("any", "fast", "edges"),
    Gates("zero", "any"),
    Gates("one", "none", "all"),
    Gates("any", "all_reset"),
)


def draw(gates, seed=0, lambda0=0.3):
    """Inputs of ``vla_attention``: arrays to differentiate by, and the rest."""
    rng = np.random.default_rng(seed)
    past = rng.standard_normal((B, H, D, 2 * D)) / np.sqrt(D)
    mask = rng.random((B, T)) < 0.8
    mask[:, T - 1] = mask[:, 2] = False  # starts of segments in some cases
    arrays = {
        "query": rng.exponential(size=(B, T, H * G, D)),
        "key": rng.exponential(size=(B, T, H, D)),
        "value": rng.standard_normal((B, T, H, E)),
        "direction": rng.standard_normal((B, T, H, D)) / np.sqrt(D),
        "beta": gates.weight(rng, (B, T, H)),
        "log_decay": gates.log_decay(rng, (B, T, H)),
        "lambda0": lambda0 * (1 + np.arange(H)),
        "memory": rng.standard_normal((B, H, D, E)),
        "penalty": past @ np.swapaxes(past, -1, -2),
        "key_sum": rng.exponential(size=(B, H, D)),
    }
    return arrays, {"segment_ids": gates.segment_ids(), "mask": mask}


def attention(arrays, rest, **options):
    """Flat arrays to (out, the three fields of the state)."""
    arrays = dict(arrays)
    state = vla_jax.VLAState(*(arrays.pop(n) for n in STATE))
    out, state = vla_attention(**arrays, **rest, initial_state=state, **options)
    return out, tuple(getattr(state, n) for n in STATE)


def solve(arrays, rest, **options):
    arrays = dict(arrays)
    tokens = arrays.pop("rhs"), arrays.pop("direction")
    return penalty_solve(
        *tokens, initial_penalty=arrays.pop("penalty"), **arrays, **rest, **options
    )


def rule(arrays, rest, **options):
    arrays = dict(arrays)
    tokens = [arrays.pop(n) for n in ("query", "key", "write_key", "value")]
    return delta_rule(*tokens, initial_memory=arrays.pop("memory"), **arrays, **rest, **options)


@functools.lru_cache(None)
def compiled(function, **options):
    """jit of (arrays, rest, cotangents) -> (values, gradients)."""

    @jax.jit
    def run(arrays, rest, cotangents):
        values, pullback = jax.vjp(lambda x: function(x, rest, **options), arrays)
        return values, pullback(cotangents)[0]

    return run


def solve_arrays(arrays):
    names = {"rhs": "query", "weight": "beta"}
    wanted = "rhs", "direction", "weight", "log_decay", "lambda0", "penalty"
    return {n: arrays[names.get(n, n)] for n in wanted}


def rule_arrays(arrays):
    wanted = "query", "key", "write_key", "value", "log_decay", "memory"
    key = arrays["key"] / np.linalg.norm(arrays["key"], axis=-1, keepdims=True)
    return {n: {**arrays, "write_key": arrays["direction"], "key": key}[n] for n in wanted}


def oracle_of(function, arrays, rest, cotangents=None, **options):
    """Values of the oracle or, with cotangents, its gradients; for the functions above."""
    arrays = dict(arrays)
    if function is attention:
        options = {"initial_state": tuple(arrays.pop(n) for n in STATE), **options, **rest}
        if cotangents is None:
            return oracle.attention(**arrays, **options)[:2]
        return oracle.attention_grad(*cotangents, **arrays, **options)
    name, tokens, initial = {
        solve: ("penalty_solve", ("rhs", "direction"), "penalty"),
        rule: ("delta_rule", ("query", "key", "write_key", "value"), "memory"),
    }[function]
    tokens = [arrays.pop(n) for n in tokens]
    options = {f"initial_{initial}": arrays.pop(initial), **arrays, **rest}
    if cotangents is None:
        return getattr(oracle, name)(*tokens, **options)
    return getattr(oracle, name + "_grad")(*cotangents, *tokens, **options)


def check(
    function, arrays, rest, dtype, tolerance, gradient_tolerance, oracle_options=(), floor=0,
    **options,
):  # fmt: skip
    """Values and all gradients, through output and state, against the oracle."""
    given = dict(oracle_options)
    values = oracle_of(function, arrays, rest, **given)
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda x: rng.standard_normal(x.shape), tuple(values))
    gradients = oracle_of(function, arrays, rest, cotangents, **given)
    actual, actual_gradients = compiled(function, **given, **options)(
        *cast((arrays, rest, cotangents), dtype)
    )
    if dtype == jnp.float32:
        floor = max(floor, 1e-30)  # less than 1e-38 is zero
    for i, (x, y) in enumerate(zip(*map(jax.tree.leaves, (actual, values)), strict=True)):
        assert_close(x, y, tolerance, f"value {i}", floor)
    for name, x in actual_gradients.items():
        # That of λ₀ is the trace of another, whose terms may cancel.
        least = max(floor, np.abs(gradients["penalty"]).max()) if name == "lambda0" else floor
        assert_close(x, gradients[name], gradient_tolerance, f"gradient of {name}", least)


# --- against the oracle --------------------------------------------------------------------------


def chunks(implementation):
    return {"implementation": implementation, "chunk_size": CHUNK}


@pytest.mark.parametrize("gates", GATES, ids=str)
def test_penalty_solve_float64(gates, implementation, x64):
    arrays, rest = draw(gates)
    rest = {"segment_ids": rest["segment_ids"]}
    check(solve, solve_arrays(arrays), rest, jnp.float64, 1e-9, 1e-7, **chunks(implementation))


@pytest.mark.parametrize("gates", GATES, ids=str)
def test_delta_rule_float64(gates, implementation, x64):
    arrays, rest = draw(gates)
    rest = {"segment_ids": rest["segment_ids"]}
    check(rule, rule_arrays(arrays), rest, jnp.float64, 1e-9, 1e-7, **chunks(implementation))


KINDS = {
    "write": {"inverse": "write"},
    "projection": {"inverse": "write", "write_gain": "projection", "readout": "none"},
    "read": {"inverse": "read"},
}


COMPOSED = [
    (k, i) for k in KINDS for i in implementations.GATED if (k, i) != ("projection", "associative")
]


@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize(("kind", "implementation"), COMPOSED)
def test_attention_float64(kind, implementation, gates, x64):
    options = tuple(KINDS[kind].items())
    case = draw(gates)
    check(attention, *case, jnp.float64, 1e-9, 1e-7, options, **chunks(implementation))


@pytest.mark.parametrize(("inverse", "absent"), [("write", "beta"), ("read", "log_decay")])
def test_key_directions_and_one_gate_alone(inverse, absent, x64):
    arrays, rest = draw(GATES[0])
    arrays = {n: x for n, x in arrays.items() if n not in ("direction", absent)}
    options = (("inverse", inverse),)
    check(attention, arrays, rest, jnp.float64, 1e-9, 1e-7, options, **chunks("xla"))


@pytest.mark.parametrize("kind", ["solve", "rule", "projection", "read"])
@pytest.mark.parametrize("gates", GATES, ids=str)
def test_float32(gates, kind):
    """λ₀ of .1 and .01 of the longest β‖u‖², and of 1e3: what the solver stops at, over λ₀."""
    function = {"solve": solve, "rule": rule}.get(kind, attention)
    options = tuple(KINDS.get(kind, {}).items())
    for lambda0, tolerance in tolerances.GATED32.items():
        arrays, rest = draw(gates)
        size = np.max(arrays["beta"] * np.sum(arrays["direction"] ** 2, axis=-1), initial=0.1)
        arrays["lambda0"] = np.array([1.0, 2.0]) * lambda0 * (size if lambda0 < 1 else 1)
        if function is not attention:
            arrays = {"solve": solve_arrays, "rule": rule_arrays}[kind](arrays)
            rest = {"segment_ids": rest["segment_ids"]}
        # The gain divides by the size of α, and with it nearly all of the derivative by a huge λ₀.
        floor = 1e-4 if kind == "projection" and lambda0 > 1 else 0
        tolerance = (tolerance, tolerance)
        check(function, arrays, rest, jnp.float32, *tolerance, options, floor, **chunks("xla"))


# --- what bites ----------------------------------------------------------------------------------


def unit_keys(rng, length, dim, *, heads=1, spectrum=1.0):
    """Keys of unit length whose entries go from 1 down to ``spectrum``."""
    x = rng.standard_normal((1, length, heads, dim)) * np.geomspace(1, spectrum, dim)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


@functools.lru_cache(None)
def reported(**options):
    """jit of (rhs, direction, weight, log_decay, lambda0) -> solution, report, true residual."""

    @jax.jit
    def run(rhs, direction, weight, log_decay, lambda0):
        options_ = {"weight": weight, "log_decay": log_decay, "lambda0": lambda0, **options}
        solution, _ = penalty_solve(rhs, direction, **options_)
        report = solve_report(rhs, direction, **options_)
        return solution, report, solve_residual(solution, rhs, direction, **options_)

    return run


def run_reported(key, log_decay, lambda0, rhs=None, **options):
    """Unit weights; a scalar ``log_decay`` is that of every token."""
    log_decay = jnp.broadcast_to(jnp.float32(log_decay), key.shape[:3])
    rhs = key if rhs is None else rhs
    ones = jnp.ones(key.shape[:3], jnp.float32)
    return reported(**options)(rhs, key, ones, log_decay, jnp.float32(lambda0))


@pytest.mark.parametrize("scale", [1e-25, 1e-33, 1e25])
def test_tiny_and_huge_right_hand_sides(scale):
    """Solution and gradients have the relative error that they have at a scale of 1."""
    arrays, rest = draw(GATES[1])
    arrays, rest = solve_arrays(arrays), {"segment_ids": rest["segment_ids"]}
    run = compiled(solve, **chunks("xla"))
    rng = np.random.default_rng(2)
    d_solution = rng.standard_normal(arrays["rhs"].shape)
    d_penalty = np.zeros(arrays["penalty"].shape)
    values = oracle_of(solve, arrays, rest)
    gradients = oracle_of(solve, arrays, rest, (d_solution, d_penalty))
    for scaled in ("rhs", "cotangent"):
        tiny = {**arrays, "rhs": arrays["rhs"] * (scale if scaled == "rhs" else 1)}
        cotangents = d_solution * (scale if scaled == "cotangent" else 1), d_penalty
        (solution, _), found = run(*cast((tiny, rest, cotangents), jnp.float32))
        if scaled == "rhs":
            assert_close(np.float64(solution) / scale, values[0], 5e-5, "solution")
        else:
            assert_close(np.float64(found["rhs"]) / scale, gradients["rhs"], 5e-5, "rhs")
        for name in ("direction", "log_decay", "penalty"):
            assert_close(np.float64(found[name]) / scale, gradients[name], 1e-4, name)


@pytest.mark.parametrize("function", [solve, rule])
def test_minus_thirty_everywhere(function):
    """exp(-30) of the past is left, and the derivative by the decay is that small, and right."""
    arrays, rest = draw(Gates("one", "fast"))
    arrays = {solve: solve_arrays, rule: rule_arrays}[function](arrays)
    rest = {"segment_ids": rest["segment_ids"]}
    rng = np.random.default_rng(3)
    values = tuple(oracle_of(function, arrays, rest))
    cotangents = tuple(rng.standard_normal(x.shape) for x in values)
    wanted = oracle_of(function, arrays, rest, cotangents)["log_decay"]
    assert 1e-14 < np.abs(wanted).max() < 1e-10
    run = compiled(function, **chunks("xla"))
    _, found = run(*cast((arrays, rest, cotangents), jnp.float32))
    assert_close(found["log_decay"], wanted, 1e-5)


@pytest.mark.parametrize("function", [solve, rule])
def test_decay_of_a_huge_lambda0(function):
    """The sum over the whole sequence that telescopes would lose all of it to rounding."""
    rng = np.random.default_rng(4)
    arrays, rest = draw(Gates("one", "none"))
    arrays["log_decay"] = np.full((B, T, H), np.log(0.5))
    arrays["lambda0"] = np.full(H, 1e3)
    arrays = {solve: solve_arrays, rule: rule_arrays}[function](arrays)
    rest = {"segment_ids": rest["segment_ids"]}
    values = tuple(oracle_of(function, arrays, rest))
    cotangents = tuple(rng.standard_normal(x.shape) for x in values)
    cotangents = cotangents[0], 0 * cotangents[1]
    wanted = oracle_of(function, arrays, rest, cotangents)["log_decay"]
    run = compiled(function, **chunks("xla"))
    _, found = run(*cast((arrays, rest, cotangents), jnp.float32))
    assert_close(found["log_decay"], wanted, 1e-6)


def test_bfloat16_decay_over_a_long_sequence():
    """log γ has at most twice the error of the values, also after 4096 tokens."""
    length, dim = 4096, 16
    rng = np.random.default_rng(5)
    key = unit_keys(rng, length, dim)
    shape = (1, length, 1, dim)
    arrays = {
        "query": rng.standard_normal(shape),
        "key": key,
        "write_key": key * rng.uniform(size=(1, length, 1, 1)),
        "value": rng.standard_normal(shape),
    }
    arrays = {n: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for n, x in arrays.items()}
    log_decay = np.full(shape[:3], np.log(0.99), np.float32).astype(np.float64)
    d_out = np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), np.float64)
    wanted = oracle.delta_rule_grad(d_out, None, **arrays, log_decay=log_decay)

    @jax.jit
    def gradients(arrays, log_decay, d_out):
        run = lambda arrays, log_decay: delta_rule(**arrays, log_decay=log_decay)[0]  # noqa: E731
        return jax.vjp(run, arrays, log_decay)[1](d_out)

    found, d_log_decay = gradients(
        cast(arrays, jnp.bfloat16), jnp.float32(log_decay), jnp.bfloat16(d_out)
    )

    def error(x, y):
        return np.linalg.norm(np.asarray(x).astype(np.float64) - y) / np.linalg.norm(y)

    limit = 2 * error(found["value"], wanted["value"])
    assert 1e-4 < limit < 0.05
    assert error(d_log_decay, wanted["log_decay"]) < limit
    for at in (slice(0, 512), slice(-512, None)):  # and it does not grow along the sequence
        assert error(d_log_decay[:, at], wanted["log_decay"][:, at]) < 2 * limit


@pytest.mark.parametrize(
    ("spectrum", "decay", "steps"), [(1.0, "resets", 40), (0.01, "resets", 48), (0.01, "none", 40)]
)
def test_steps_at_a_small_lambda0(spectrum, decay, steps):
    """λ₀ = .01 with a new start every 50 tokens or so; and log-spaced keys that never decay."""
    rng = np.random.default_rng(6)
    key = unit_keys(rng, 320, 64, spectrum=spectrum)
    log_decay = np.where(rng.random(key.shape[:3]) < 0.02, -1e30, np.log(0.995))
    if decay == "none":
        log_decay = 0
    solution, report, residual = run_reported(key, log_decay, 0.01)
    assert 2 < report.steps.max() <= steps
    assert report.residual.max() <= gated_solve.TOLERANCE
    assert residual.max() <= 10 * gated_solve.TOLERANCE
    assert np.isfinite(solution).all()


def test_what_has_not_converged_is_reported():
    key = unit_keys(np.random.default_rng(7), 320, 64, spectrum=0.01)
    solution, report, residual = run_reported(key, np.log(0.9), 1e-6)
    assert np.isfinite(solution).all()
    late = np.asarray(report.residual) > gated_solve.TOLERANCE
    assert late.any()
    assert (np.asarray(report.steps)[late] == gated_solve.MAX_STEPS).all()
    assert (np.asarray(residual)[late] > gated_solve.TOLERANCE).all()


def test_zero_and_infinite_rows():
    """A zero row is 0, an unwritten state r / λ₀; what is not finite stays in its row and ends."""
    rng = np.random.default_rng(8)
    key = unit_keys(rng, 320, 64)
    rhs = rng.standard_normal(key.shape).astype(np.float32)
    rhs[:, 5], rhs[:, 70, 0, 3], rhs[:, 71, 0, 3] = 0, np.nan, np.inf
    solution, report, _ = run_reported(key, np.log(0.9), 0.1, rhs)
    solution, steps = np.asarray(solution)[0, :, 0], np.asarray(report.steps)[0, :, 0]
    assert (solution[5] == 0).all()
    assert np.isnan(solution[70:72]).all()
    assert (steps[[5, 70, 71]] == 0).all()
    assert np.isfinite(np.delete(solution, (70, 71), 0)).all()
    assert (np.delete(steps, (5, 70, 71)) > 0).all()
    key[:, :40] = 0
    solution, report, _ = run_reported(key, np.log(0.9), 0.1, rhs)
    assert_close(solution[0, :40], rhs[0, :40] / np.float32(0.1), 1e-6)
    key[0, 100, 0, 0] = np.nan  # reaches what follows, and says so
    solution, report, _ = run_reported(key, np.log(0.9), 0.1, rhs)
    assert np.isnan(np.asarray(solution)[0, 100:, 0]).all(axis=-1).all()
    assert report.steps[0, 112:].max() <= 1


def test_only_the_symmetric_part_of_a_cotangent_of_the_penalty_counts(x64):
    arrays, rest = draw(GATES[0])
    arrays, rest = solve_arrays(arrays), {"segment_ids": rest["segment_ids"]}
    rng = np.random.default_rng(9)
    cotangent = rng.standard_normal(arrays["penalty"].shape)
    run = compiled(solve, **chunks("xla"))
    nothing = np.zeros(arrays["rhs"].shape)
    whole, symmetric, none = (
        run(arrays, rest, (nothing, x))[1]
        for x in (
            cotangent,
            (cotangent + np.swapaxes(cotangent, -1, -2)) / 2,
            cotangent - np.swapaxes(cotangent, -1, -2),
        )
    )
    for name, x in whole.items():
        assert_close(x, symmetric[name], 1e-13, name)
        assert np.abs(none[name]).max() < 1e-13, name
    assert np.abs(whole["penalty"]).max() > 0


def test_sixteen_bits():
    """The solve of bfloat16 inputs: .2 % of the largest entry at λ₀ ≥ .1, whatever decays."""
    key = unit_keys(np.random.default_rng(10), 320, 64, spectrum=0.1)
    half = np.asarray(jnp.asarray(key, jnp.bfloat16), np.float64)
    for gamma in (1.0, 0.9, 0.5):
        log_decay = np.full(key.shape[:3], np.log(gamma))
        # Computed as bfloat16 inputs are, returned as they are not.
        solution, _, _ = run_reported(
            jnp.asarray(half, jnp.float32), np.log(gamma), 0.1, precision="high"
        )
        wanted, _ = oracle.penalty_solve(half, half, lambda0=0.1, log_decay=log_decay)
        assert_close(solution, wanted, 3e-3, f"γ = {gamma}")


def test_the_penalty_next_to_no_decay_is_summed_without_drift():
    """8192 sums of one direction at γ = 1 − 1e-7, one token a chunk."""
    length = 8192
    u = np.full((1, length, 1, 1), 0.7, np.float32)
    log_decay = np.full((1, length, 1), -1e-7, np.float32)
    gamma = np.exp(np.float64(log_decay[0, 0, 0]))
    wanted = np.float64(u[0, 0, 0, 0]) ** 2 * (1 - gamma**length) / (1 - gamma)
    _, penalty = penalty_solve(u, u, lambda0=1.0, log_decay=log_decay, chunk_size=1)
    assert abs(float(penalty[0, 0, 0, 0]) / wanted - 1) < 3e-7


# --- what must be the same -----------------------------------------------------------------------


@pytest.mark.parametrize("inverse", ["write", "read"])
def test_split_resume_and_decode(inverse, x64):
    """A sequence in two calls, and token by token, is the sequence in one."""
    arrays, _ = draw(GATES[0])
    options = {"inverse": inverse, "lambda0": 0.4}
    state = vla_jax.init_state(B, H, D, E, dtype=jnp.float64)
    tokens = {n: jnp.asarray(x) for n, x in arrays.items() if n not in (*STATE, "lambda0")}
    call = jax.jit(functools.partial(vla_attention, **options, chunk_size=CHUNK))
    step = jax.jit(functools.partial(vla_step, **options))
    whole, last = call(**{n: x[:, :20] for n, x in tokens.items()}, initial_state=state)
    first, middle = call(**{n: x[:, :10] for n, x in tokens.items()}, initial_state=state)
    rest, resumed = call(**{n: x[:, 10:20] for n, x in tokens.items()}, initial_state=middle)
    assert_close(jnp.concatenate([first, rest], 1), whole, 1e-12)
    decoded = []
    for t in range(20):
        out, state = step(**{n: x[:, t] for n, x in tokens.items()}, state=state)
        decoded.append(out)
    assert_close(jnp.stack(decoded, 1), whole, 1e-12)
    for name in STATE:
        assert_close(getattr(resumed, name), getattr(last, name), 1e-12, name)
        assert_close(getattr(state, name), getattr(last, name), 1e-12, name)


@pytest.mark.parametrize("inverse", ["write", "read"])
def test_a_hundred_thousand_steps(inverse):
    """Heads that forget over 100, 300 and 10⁵ tokens; the first two have the oracle's state.

    Of the third, which sums nearly all, what the recurrence sums is known in closed form.
    """
    count, tail, dim = 100_000, 6_000, 4
    rng = np.random.default_rng(13)
    shape = (count, 1, 3)
    tokens = {
        "query": rng.exponential(size=(*shape, dim)),
        "key": rng.exponential(size=(*shape, dim)),
        "value": rng.standard_normal((*shape, 2)),
        "beta": rng.uniform(size=shape),
        "log_decay": -rng.exponential(size=shape) / np.array([100, 300, 1e5]),
    }
    tokens = cast(tokens, jnp.float32)

    @jax.jit
    def run(tokens):
        def step(state, token):
            return vla_step(**token, direction=None, state=state, inverse=inverse)[::-1]

        state, out = jax.lax.scan(step, vla_jax.init_state(1, 3, dim, 2), tokens)
        return state, out[-1]

    state, out = run(tokens)
    wide = {n: np.asarray(x, np.float64) for n, x in tokens.items()}
    late = {n: np.moveaxis(x[-tail:, :, :2], 0, 1) for n, x in wide.items()}
    wanted_out, wanted, _ = oracle.attention(**late, inverse=inverse)
    assert_close(out[:, :2], wanted_out[:, -1], 1e-3)
    for name, x in zip(STATE, wanted, strict=True):
        assert_close(getattr(state, name)[:, :2], x, 1e-3, name)
    slow = {n: x[:, 0, 2] for n, x in wide.items()}
    kept = np.exp(np.append(np.cumsum(slow["log_decay"][:0:-1])[::-1], 0)) * slow["beta"]
    unit, _ = oracle.normalize(slow["key"])
    u = unit if inverse == "read" else unit / 2
    assert_close(state.penalty[0, 2], (u.T * kept) @ u, 1e-5)
    assert_close(state.key_sum[0, 2], kept @ slow["key"], 1e-3)
    if inverse == "read":
        assert_close(state.memory[0, 2], (unit.T * kept) @ slow["value"], 1e-3)


def test_a_gated_step_and_what_the_state_caches():
    """The inverse is cleared: a step without gates would trust it. The rest decays too."""
    rng = np.random.default_rng(11)
    token = lambda *shape: jnp.asarray(rng.exponential(size=(B, *shape)), jnp.float32)  # noqa: E731
    tokens = [(token(H, D), token(H, D), token(H, E), None) for _ in range(3)]
    gates = {"beta": token(H), "log_decay": -token(H)}
    _, before = vla_jax.vla_step(*tokens[0], vla_jax.init_state(B, H, D, E))
    assert (before.inverse_lambda0 > 0).all()
    rest = jnp.full_like(before.penalty, 1e-3)
    before = dataclasses.replace(before, penalty_rest=rest)
    _, state = vla_step(*tokens[1], before, **gates)
    unit = oracle.normalize(np.float64(tokens[1][1]))[0] / np.sqrt(D)
    added = np.float64(gates["beta"])[..., None, None] * unit[..., :, None] * unit[..., None, :]
    decay = np.exp(np.float64(gates["log_decay"]))[..., None, None]
    assert_close(
        np.float64(state.penalty) + np.float64(state.penalty_rest),
        decay * (np.float64(before.penalty) + 1e-3) + added,
        2e-7,
    )
    assert (state.inverse_lambda0 == 0).all()
    out, _ = vla_jax.vla_step(*tokens[2], state)
    emptied = state.replace(penalty=state.penalty, penalty_rest=state.penalty_rest)
    wanted, _ = vla_jax.vla_step(*tokens[2], emptied)
    np.testing.assert_array_equal(out, wanted)


def test_derivatives_of_any_order_of_the_reference(x64):
    """Forward mode over reverse mode is the derivative of the gradient."""
    arrays, rest = draw(GATES[0])
    arrays, rest = solve_arrays(arrays), {"segment_ids": rest["segment_ids"]}
    arrays = cast(arrays, jnp.float64)

    @jax.jit
    def gradient(arrays):
        def loss(arrays):
            solution, penalty = solve(arrays, rest, implementation="reference")
            return jnp.sum(solution**2) + jnp.sum(jnp.sin(penalty))

        return jax.grad(loss)(arrays)

    rng = np.random.default_rng(12)
    move = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), arrays)
    move["lambda0"] = 0.1 * move["lambda0"]
    _, second = jax.jit(lambda x, y: jax.jvp(gradient, (x,), (y,)))(arrays, move)
    near = [
        gradient(jax.tree.map(lambda x, y, s=s: x + s * y, arrays, move)) for s in (1e-6, -1e-6)
    ]
    for name, x in second.items():
        assert_close(x, (near[0][name] - near[1][name]) / 2e-6, 1e-5, name)


@pytest.mark.parametrize("kind", ["plain", "write", "read"])
def test_second_derivatives_of_steps_inside_a_scan(kind, x64):
    """By directions and by λ₀: forward over reverse, and reverse over reverse."""
    arrays, _ = draw(GATES[0])
    gates = ("beta", "log_decay") if kind != "plain" else ()
    tokens = {n: arrays[n][:1, :4] for n in ("query", "key", "value", "direction", *gates)}
    tokens = {n: jnp.moveaxis(jnp.asarray(x), 1, 0) for n, x in tokens.items()}
    options = {"inverse": "read" if kind == "read" else "write"}

    def loss(x):
        def step(state, token):
            token = token | {"direction": x[0] * token["direction"]}
            return vla_step(**token, state=state, lambda0=x[1], **options)[::-1]

        state = vla_jax.init_state(1, H, D, E, dtype=jnp.float64)
        return jnp.sum(jnp.sin(jax.lax.scan(step, state, tokens)[1]))

    at, h = jnp.asarray([0.9, 0.4]), 1e-5
    gradient = jax.jit(jax.grad(loss))
    near = [(gradient(at + e) - gradient(at - e)) / (2 * h) for e in h * np.eye(2)]
    assert np.abs(near).min() > 1e-3
    for second in (jax.jacfwd(gradient), jax.jacrev(gradient)):
        assert_close(jax.jit(second)(at), np.stack(near), 1e-6)


def test_vmap_folds_into_the_batch():
    arrays, rest = draw(GATES[1])
    arrays, rest = cast(solve_arrays(arrays), jnp.float32), {"segment_ids": rest["segment_ids"]}
    whole = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), arrays)
    mapped = jax.jit(jax.vmap(lambda x: solve(x, rest, **chunks("xla"))))(whole)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], whole)
        zeros = tuple(jnp.zeros(one[n].shape) for n in ("rhs", "penalty"))
        wanted, _ = compiled(solve, **chunks("xla"))(one, rest, zeros)
        for x, y in zip(mapped, wanted, strict=True):
            assert_close(x[i], y, 1e-6)


def test_memory_is_linear_in_length():
    """No array with two axes of about T and no matrix a token, forward and backward."""

    def compiled_for(length):
        shape = jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)
        gate = jax.ShapeDtypeStruct((1, length, 1), jnp.float32)

        @jax.jit
        def run(q, k, v, beta, log_decay):
            def primal(*x):
                out, state = vla_attention(*x[:3], beta=x[3], log_decay=x[4])
                return out.sum() + state.memory.sum()

            return jax.grad(primal, (0, 1, 2, 3, 4))(q, k, v, beta, log_decay)

        return run.lower(shape, shape, shape, gate, gate)

    short, long = (compiled_for(n) for n in (4096, 16384))
    assert len(long.as_text()) <= 1.02 * len(short.as_text())
    for shape in re.findall(r"tensor<((?:\d+x)+)[a-z]", long.as_text()):
        sizes = [int(n) for n in shape.rstrip("x").split("x")]
        assert sum(n >= 4096 for n in sizes) <= 1, shape
        assert np.prod(sizes) <= 16384 * 32 * 2, shape
    used = long.compile().memory_analysis().temp_size_in_bytes
    assert used <= 40 * 16384 * 32 * 4  # arrays like the keys: a matrix a token would be 32


# --- drawn ---------------------------------------------------------------------------------------

KNOBS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "weight": st.floats(-6, 1),
        "zeros": st.floats(0, 1),
        "decay": st.floats(-8, 2),
        "resets": st.floats(0, 1),
        "boundaries": st.floats(0, 1),
        "padding": st.floats(0, 1),
        "lambda0": st.floats(-2, 6),
        "function": st.sampled_from(["solve", "rule", "write", "read"]),
    }
)


@hypothesis.given(KNOBS)
def test_drawn_gates(x64, knobs):
    rng = np.random.default_rng(knobs["seed"])
    arrays, _ = draw(GATES[0], knobs["seed"])

    def chosen(name, *axes):
        return rng.random((B, T, *axes)) < knobs[name]

    shape = (B, T, H)
    arrays["beta"] = np.where(
        chosen("zeros", H), 0, 10 ** knobs["weight"] * rng.uniform(0.1, 1, shape)
    )
    arrays["log_decay"] = np.where(
        chosen("resets", H), -1e30, -(10 ** knobs["decay"]) * rng.exponential(size=shape)
    )
    arrays["lambda0"] = 10 ** knobs["lambda0"] * np.array([1.0, 2.0])
    ids = np.cumsum(chosen("boundaries"), axis=1, dtype=np.int32)
    rest = {"segment_ids": ids, "mask": ~chosen("padding")}
    function, options = {
        "solve": (solve, ()),
        "rule": (rule, ()),
        "write": (attention, tuple(KINDS["projection"].items())),
        "read": (attention, (("inverse", "read"),)),
    }[knobs["function"]]
    if function is not attention:
        del rest["mask"]
        arrays = {solve: solve_arrays, rule: rule_arrays}[function](arrays)
    check(
        function, arrays, rest, jnp.float64, 1e-9, 1e-7, options, floor=1e-5, **chunks("xla")
    )  # fmt: skip


# --- options and arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("inverse", ["write", "read"])
def test_the_reference_is_differentiated_in_any_mode(inverse):
    """Forward over reverse, with decay: what the other implementations have not."""
    arrays, _ = draw(GATES[0])
    arrays = cast({n: arrays[n][:1, :4] for n in ("query", "key", "value", "beta")}, jnp.float32)
    decay = -jnp.linspace(0.1, 1, 8).reshape(1, 4, 2)

    def loss(log_decay):
        out = vla_jax.vla_attention(
            **arrays, log_decay=log_decay, inverse=inverse, implementation="reference"
        )
        return jnp.sum(jnp.sin(out))

    forward = jax.jvp(loss, (decay,), (jnp.ones_like(decay),))[1]
    assert_close(forward, np.asarray(jax.grad(loss)(decay).sum()), 1e-4)
    second = jax.jvp(jax.grad(loss), (decay,), (jnp.ones_like(decay),))[1]
    step = 1e-2
    wanted = (jax.grad(loss)(decay + step) - jax.grad(loss)(decay - step)) / (2 * step)
    assert_close(second, np.asarray(wanted), 2e-2)


def test_what_kernels_refuse(monkeypatch):
    monkeypatch.setenv("VLA_JAX_PALLAS_INTERPRET", "1")
    x, gate = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2))
    refused = functools.partial(pytest.raises, NotImplementedError)
    for options, reason in (
        ({"beta": gate}, "no beta"),
        ({"log_decay": -gate}, "no log_decay"),
        ({"inverse": "read"}, "no inverse='read'"),
    ):
        for name in ("pallas", "triton"):
            with refused(match=f"implementation='{name}' cannot serve.*{reason}"):
                vla_jax.vla_attention(x, x, x, **options, implementation=name)
    with refused(match="no grouped right-hand sides"):
        vla_jax.penalty_solve(jnp.ones((1, 4, 4, 8)), x, lambda0=1.0, implementation="pallas")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_decay": np.full((1, 4, 2), 1, jnp.bfloat16)}, "log_decay must be finite and not"),
        ({"beta": np.full((1, 4, 2), np.nan, np.float32)}, "beta must be finite and not"),
        ({"beta": np.ones((1, 4, 3))}, r"beta must have shape \[B, T, H\]"),
        ({"inverse": "read", "write_gain": np.array(["unit", "rls"])}, "write_gain must be None"),
        ({"inverse": "read", "readout": "ratio"}, "readout must be 'none'"),
        ({"inverse": "both"}, "inverse must be one of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_bad_gates_are_named(options, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        vla_jax.vla_attention(x, x, x, **options)
