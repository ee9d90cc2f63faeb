"""The oracle's hand-written adjoints against complex-step derivatives of its forward functions."""

import numpy as np
import oracle
import pytest

STEP = 1e-30  # no cancellation in a complex step, so it may be this small
TOLERANCE = 1e-11


def directional(function, arguments, perturbation):
    """d/dh of ``function(arguments + h * perturbation)``, exact to rounding."""
    moved = {
        name: x if x is None else x + 1j * STEP * perturbation[name]
        for name, x in arguments.items()
    }
    return function(moved).imag / STEP


def check(function, arguments, gradients, rng):
    """One random direction for each argument, then one in all of them."""
    draws = {n: rng.standard_normal(np.shape(x)) for n, x in arguments.items() if x is not None}
    zero = {n: np.zeros(np.shape(x)) for n, x in draws.items()}
    for name, draw in draws.items():
        expected = directional(function, arguments, {**zero, name: draw})
        actual = np.sum(gradients[name] * draw)
        scale = np.linalg.norm(gradients[name]) * np.linalg.norm(draw)
        assert abs(actual - expected) <= TOLERANCE * max(scale, 1e-6), name
    total = sum(np.sum(gradients[n] * d) for n, d in draws.items())
    np.testing.assert_allclose(total, directional(function, arguments, draws), rtol=1e-9)


def inner(x, y):
    return 0 if y is None else (x * y).sum()


def draw(rng, batch=2, length=9, heads=2, groups=1, dim=4, value_dim=3):
    shape = (batch, length, heads)
    return {
        "query": rng.exponential(size=(batch, length, heads * groups, dim)),
        "key": rng.exponential(size=(*shape, dim)),
        "value": rng.standard_normal((*shape, value_dim)),
        "direction": rng.standard_normal((*shape, dim)) / dim,
        "lambda0": rng.uniform(0.1, 1, heads),
        "memory": rng.standard_normal((batch, heads, dim, value_dim)),
        "penalty": np.einsum(
            "...ij,...kj->...ik", *[rng.standard_normal((batch, heads, dim, 3))] * 2
        ),
        "key_sum": rng.exponential(size=(batch, heads, dim)),
    }


SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 7]])
MASK = np.array([[1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1, 0]], bool)
VARIANTS = {
    "plain": {},
    "segments": {"segment_ids": SEGMENTS},
    "mask_segments": {"segment_ids": SEGMENTS, "mask": MASK, "groups": 3},
    "key_direction": {"direction": None, "mask": MASK},
    "projection": {"write_gain": "projection", "direction": None, "segment_ids": SEGMENTS},
    "rls": {"write_gain": "rls", "groups": 2},
    "no_ratio": {"readout": "none", "segment_ids": SEGMENTS},
    "floor": {"eps": 12.0},
    "scalar_lambda0": {"lambda0": 0.3},
    "zero_keys": {"zero_keys": True},
    "gates": {"gates": "mixed", "groups": 2},
    "gates_mask_segments": {"gates": "mixed", "segment_ids": SEGMENTS, "mask": MASK},
    "gates_rls": {"gates": "mixed", "write_gain": "rls", "direction": None, "readout": "none"},
    "gates_projection": {"gates": "resets", "write_gain": "projection"},
    "beta_alone": {"gates": "beta", "segment_ids": SEGMENTS},
    "log_decay_alone": {"gates": "log_decay", "eps": 3.0},
    "read": {"inverse": "read", "gates": "mixed", "groups": 2, "segment_ids": SEGMENTS},
    "read_key_direction": {"inverse": "read", "gates": "resets", "direction": None, "mask": MASK},
    "read_ungated": {"inverse": "read", "direction": None, "groups": 3},
}


def draw_gates(rng, kind, shape=(2, 9, 2)):
    """Weights, one in five of them 0, and decays: of any size, some of them resets."""
    beta = np.where(rng.random(shape) < 0.2, 0, rng.uniform(0.1, 2, shape))
    log_decay = -rng.exponential(size=shape) * rng.choice([0, 0.01, 1, 30], shape)
    if kind == "resets":
        log_decay = np.where(rng.random(shape) < 0.3, -1e30, log_decay)
    gates = {"beta": beta, "log_decay": log_decay}
    return {kind: gates[kind]} if kind in gates else gates


@pytest.mark.parametrize("loss", ["out", "state", "both"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_grad(variant, loss):
    rng = np.random.default_rng(1)
    options = dict(VARIANTS[variant])
    arguments = draw(rng, groups=options.pop("groups", 1))
    if "gates" in options:
        arguments |= draw_gates(rng, options.pop("gates"))
    if options.pop("zero_keys", False):
        arguments["key"][:, 2:5] = 0
        arguments["direction"][:, 3] = 0
    for name in ("direction", "lambda0"):
        if name in options:
            arguments[name] = options.pop(name)
    out, state, _ = run_attention(arguments, options)
    cotangent = rng.standard_normal(out.shape) if loss != "state" else None
    cotangents = [rng.standard_normal(x.shape) if loss != "out" else None for x in state]

    def value(moved):
        out, state, _ = run_attention(moved, options)
        return inner(out, cotangent) + sum(map(inner, state, cotangents))

    a = dict(arguments)
    initial = tuple(a.pop(n) for n in ("memory", "penalty", "key_sum"))
    gradients = oracle.attention_grad(cotangent, cotangents, **a, initial_state=initial, **options)
    check(value, arguments, gradients, rng)


def run_attention(arguments, options):
    a = dict(arguments)
    initial = tuple(a.pop(n) for n in ("memory", "penalty", "key_sum"))
    return oracle.attention(**a, initial_state=initial, **options)


@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["plain", "segments"])
def test_penalty_solve_grad(segment_ids, gated):
    rng = np.random.default_rng(2)
    a = draw(rng, groups=2 if gated else 1)
    arguments = {"rhs": a["query"], **{n: a[n] for n in ("direction", "lambda0", "penalty")}}
    if gated:
        gates = draw_gates(rng, "mixed")
        arguments |= {"weight": gates["beta"], "log_decay": gates["log_decay"]}

    def split(x):
        x = dict(x)
        tokens = x.pop("rhs"), x.pop("direction")
        return tokens, {"initial_penalty": x.pop("penalty"), "segment_ids": segment_ids, **x}

    def run(x):
        tokens, options = split(x)
        return oracle.penalty_solve(*tokens, **options)

    cotangents = [rng.standard_normal(x.shape) for x in run(arguments)]
    tokens, options = split(arguments)
    gradients = oracle.penalty_solve_grad(*cotangents, *tokens, **options)
    check(lambda x: sum(map(inner, run(x), cotangents)), arguments, gradients, rng)


@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["plain", "segments"])
def test_delta_rule_grad(segment_ids, gated):
    rng = np.random.default_rng(3)
    a = draw(rng, groups=2)
    arguments = {n: a[n] for n in ("query", "key", "value", "memory")}
    arguments["write_key"] = 0.3 * rng.standard_normal(a["key"].shape)
    if gated:
        arguments["log_decay"] = draw_gates(rng, "mixed")["log_decay"]

    def run(x):
        return oracle.delta_rule(
            *(x[n] for n in ("query", "key", "write_key", "value")),
            log_decay=x.get("log_decay"),
            initial_memory=x["memory"],
            segment_ids=segment_ids,
        )

    cotangents = [rng.standard_normal(x.shape) for x in run(arguments)]
    gradients = oracle.delta_rule_grad(
        *cotangents,
        *(arguments[n] for n in ("query", "key", "write_key", "value")),
        log_decay=arguments.get("log_decay"),
        initial_memory=a["memory"],
        segment_ids=segment_ids,
    )
    check(lambda x: sum(map(inner, run(x), cotangents)), arguments, gradients, rng)


def test_attention_is_the_composition_of_the_primitives():
    rng = np.random.default_rng(4)
    a = draw(rng, groups=2)
    unit_key, _ = oracle.normalize(a["key"])
    alpha, penalty = oracle.penalty_solve(
        unit_key,
        a["direction"],
        lambda0=a["lambda0"],
        initial_penalty=a["penalty"],
        segment_ids=SEGMENTS,
    )
    out, memory = oracle.delta_rule(
        a["query"],
        unit_key,
        oracle.normalize(alpha)[0],
        a["value"],
        initial_memory=a["memory"],
        segment_ids=SEGMENTS,
    )
    whole, state, writes = run_attention(a, {"segment_ids": SEGMENTS, "readout": "none"})
    np.testing.assert_allclose(whole, out, rtol=1e-12)
    np.testing.assert_allclose(state[0], memory, rtol=1e-12)
    np.testing.assert_allclose(state[1], penalty, rtol=1e-12)
    np.testing.assert_allclose(writes, oracle.normalize(alpha)[0], rtol=1e-12)


def test_segments_are_separate_sequences():
    rng = np.random.default_rng(5)
    a = draw(rng)
    whole, state, _ = run_attention(a, {"segment_ids": np.repeat(SEGMENTS[:1], 2, 0)})
    initial = tuple(a.pop(n) for n in ("memory", "penalty", "key_sum"))
    lambda0 = a.pop("lambda0")
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 9)):
        part = {n: x[:, start:stop] for n, x in a.items()}
        out, last, _ = oracle.attention(
            **part, lambda0=lambda0, initial_state=initial if start == 0 else None
        )
        np.testing.assert_allclose(whole[:, start:stop], out, rtol=1e-12)
    for x, y in zip(state, last, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def test_inverse_equals_sherman_morrison():
    """The printed update of A, which the oracle does not use, gives the oracle's write vectors."""
    rng = np.random.default_rng(6)
    a = draw(rng, batch=1, heads=1)
    key, u = a["key"][0, :, 0], a["direction"][0, :, 0]
    _, _, writes = oracle.attention(a["query"], a["key"], a["value"], a["direction"], lambda0=0.1)
    inverse = np.eye(4) / 0.1
    for t in range(9):
        w = inverse @ u[t]
        inverse = inverse - np.outer(w, w) / (1 + u[t] @ w)
        alpha = inverse @ key[t]
        np.testing.assert_allclose(writes[0, t, 0], alpha / np.linalg.norm(alpha), rtol=1e-10)


def plain_gates(rng, length=20):
    """Inputs of the printed baselines: unit keys, one query head a key head, no resets."""
    a = draw(rng, length=length)
    gates = draw_gates(rng, "mixed", (2, length, 2))
    return a, {"beta": gates["beta"], "log_decay": np.maximum(gates["log_decay"], -3)}


def test_solving_at_the_read_is_mesa_net():
    rng = np.random.default_rng(7)
    a, gates = plain_gates(rng)
    tokens = a["query"], a["key"], a["value"]
    out, _, _ = oracle.attention(*tokens, lambda0=a["lambda0"], inverse="read", **gates)
    unit_key, _ = oracle.normalize(a["key"])
    ridge = np.repeat(a["lambda0"][:, None], 4, 1)
    wanted = oracle.mesa_net(tokens[0], unit_key, tokens[2], *gates.values(), ridge)
    np.testing.assert_allclose(out, wanted, rtol=1e-11)


@pytest.mark.parametrize("write_gain", ["unit", "projection"])
def test_a_huge_lambda0_is_gated_delta_net(write_gain):
    a, gates = plain_gates(np.random.default_rng(8))
    tokens = a["query"], a["key"], a["value"]
    options = {"lambda0": 1e12, "readout": "none", "write_gain": write_gain}
    out, _, _ = oracle.attention(*tokens, **options, **gates)
    unit_key, _ = oracle.normalize(a["key"])
    wanted = oracle.gated_delta_net(tokens[0], unit_key, tokens[2], *gates.values())
    np.testing.assert_allclose(out, wanted, rtol=1e-10, atol=1e-10)


def test_write_with_rls_is_read_until_something_decays():
    a, gates = plain_gates(np.random.default_rng(9))
    unit_key, _ = oracle.normalize(a["key"])
    tokens = a["query"], a["key"], a["value"], unit_key
    kinds = {"inverse": "write", "write_gain": "rls", "readout": "none"}, {"inverse": "read"}
    for log_decay in (None, gates["log_decay"]):
        shared = {"lambda0": 0.1, "beta": gates["beta"], "log_decay": log_decay}
        write, read = (oracle.attention(*tokens, **x, **shared)[0] for x in kinds)
        assert np.allclose(write, read, rtol=1e-10) == (log_decay is None)


def test_a_reset_is_a_segment_start_and_a_weight_of_zero_only_decays():
    rng = np.random.default_rng(10)
    a, gates = plain_gates(rng, 9)
    reset = np.pad(SEGMENTS[:, 1:] != SEGMENTS[:, :-1], ((0, 0), (1, 0)))
    resets = {**gates, "log_decay": np.where(reset[..., None], -1e30, gates["log_decay"])}
    before = tuple(a[n] for n in ("memory", "penalty", "key_sum"))
    for inverse in ("write", "read"):
        out, state, _ = run_attention(a, {"inverse": inverse, "segment_ids": SEGMENTS, **gates})
        again, last, _ = run_attention(a, {"inverse": inverse, **resets})
        np.testing.assert_array_equal(out, again)
        for x, y in zip(state, last, strict=True):
            np.testing.assert_array_equal(x, y)
        idle = {"beta": np.zeros((2, 9, 2)), "log_decay": np.full((2, 9, 2), -0.5)}
        _, state, _ = run_attention(a, {"inverse": inverse, **idle})
        for x, y in zip(state, before, strict=True):
            np.testing.assert_allclose(x, np.exp(-4.5) * y, rtol=1e-12)
