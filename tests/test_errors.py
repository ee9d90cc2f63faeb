"""Every bad argument raises ValueError or TypeError with a message that names it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vla_jax
from vla_jax import baselines
from vla_jax.layer import LayerConfig

B, T, H, HQ, D, E = 2, 3, 2, 4, 4, 5


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def good():
    return {
        "query": ones(B, T, HQ, D),
        "key": ones(B, T, H, D),
        "value": ones(B, T, H, E),
        "direction": ones(B, T, H, D),
    }


def state(**changes):
    return vla_jax.init_state(B, H, D, E).replace(**changes)


ATTENTION = {
    "query": [
        ones(B, T, D),
        ones(B, T, 3, D),
        ones(B, T + 1, HQ, D),
        ones(B, T, HQ, D + 1),
        ones(B + 1, T, HQ, D),
        ones(B, T, HQ, D, dtype=jnp.int32),
        np.full((B, T, HQ, D), None),
        np.full((B, T, HQ, D), "1.0"),
        [[1.0]],
    ],
    "key": [
        ones(B, T, H),
        ones(B, T, H, D, 1),
        ones(B, T, H, D, dtype=jnp.complex64),
        ones(B, T + 1, H, D),
        ones(B + 1, T, H, D),
        ones(B, T, H, D + 1),
        ones(B, T, H + 1, D),
    ],
    "value": [ones(B, T, H), ones(B, T, HQ, E), ones(B, T, H, 0), ones(B, T, H, E, dtype=bool)],
    "direction": [ones(B, T, H, E), ones(B, T, HQ, D), ones(B, 1, H, D)],
    "lambda0": [
        0.0,
        -0.1,
        float("nan"),
        float("inf"),
        1e32,  # keys over it would lose digits to underflow
        10**400,
        np.array([0.1, -1.0]),
        np.array([0.1, np.nan]),
        ones(3),
        ones(1, H),
        "0.1",
        1j,
    ],
    "segment_ids": [
        ones(B, T),
        ones(B, T - 1, dtype=jnp.int32),
        ones(B, T, 1, dtype=jnp.int32),
        ones(T, dtype=jnp.int32),
        jnp.array([[0, 0, 1], [1, 0, 0]]),
        np.array([[0, 0, 1], [1, 1, 0]]),
    ],
    "mask": [
        ones(B, T),
        ones(B, T, dtype=jnp.int32),
        ones(B, T + 1, dtype=bool),
        ones(T, dtype=bool),
        ones(B, T, H, dtype=bool),
    ],
    "write_gain": ["units", "", 1],
    "readout": ["ratios", True],
    "eps": [0.0, -1e-6, float("nan"), "small", 1e-39, 1e-50],
    "chunk_size": [0, -1, 2.5, True, "16"],
    "implementation": ["xlaa", "", "Pallas", 3],
    "precision": [{}, 0, True, "foo", ("high",), ("high", 1), object()],
    "initial_state": [
        (ones(B, H, D, E), ones(B, H, D, D), ones(B, H, D)),
        state(memory=ones(B, H, E, D)),
        state(memory=ones(B, HQ, D, E)),
        state(penalty=ones(B, H, D)),
        state(penalty=ones(B, H, D, D + 1)),
        state(key_sum=ones(B, H, D, 1)),
        state(key_sum=ones(B + 1, H, D)),
        state(key_sum=ones(B, H, D, dtype=jnp.int32)),
    ],
}


def parameters(table):
    return [
        pytest.param(name, x, id=f"{name}-{i}")
        for name, xs in table.items()
        for i, x in enumerate(xs)
    ]


@pytest.mark.parametrize(("name", "bad"), parameters(ATTENTION))
def test_vla_attention(name, bad):
    first = "^" if name in good() else ""  # not what it is compared with
    with pytest.raises((ValueError, TypeError), match=rf"{first}\b{name}\b"):
        vla_jax.vla_attention(**{**good(), name: bad})


def test_a_chunk_may_be_larger_than_any_sequence():
    out = vla_jax.vla_attention(**good(), chunk_size=10**30)
    np.testing.assert_array_equal(out, vla_jax.vla_attention(**good(), chunk_size=T))


FIELDS = [field.name for field in dataclasses.fields(vla_jax.VLAState)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("bad", [ones(1), ones(B + 1, H), [1.0], "x", ones(B, H, dtype=jnp.int32)])
def test_state_errors_name_the_field(field, bad):
    """Also of the cache, which would otherwise broadcast: into another sequence, silently."""
    value = dataclasses.replace(state(), **{field: bad})
    with pytest.raises((ValueError, TypeError), match=rf"^initial_state\.{field} must"):
        vla_jax.vla_attention(**good(), initial_state=value)
    arguments = {n: x[:, 0] for n, x in good().items()}
    with pytest.raises((ValueError, TypeError), match=rf"^state\.{field} must"):
        vla_jax.vla_step(**arguments, state=value)


def test_only_an_optional_state_may_be_none():
    arguments = {n: x[:, 0] for n, x in good().items()}
    with pytest.raises(TypeError, match="state must be a VLAState, got NoneType"):
        vla_jax.vla_step(**arguments, state=None)
    with pytest.raises(TypeError, match="initial_state must be a VLAState or None, got tuple"):
        vla_jax.vla_attention(**good(), initial_state=())
    for field in ("memory", "penalty", "key_sum"):
        with pytest.raises(TypeError, match=rf"state\.{field} must be an array, got NoneType"):
            vla_jax.vla_step(**arguments, state=dataclasses.replace(state(), **{field: None}))


def test_no_tokens():
    with pytest.raises(ValueError, match="T"):
        vla_jax.vla_attention(**{n: x[:, :0] for n, x in good().items()})


STEP = {
    "query": [ones(B, 3, D), ones(B, 1, HQ, D), ones(B, HQ, D + 1)],
    "key": [ones(B, H), ones(B, H, D, dtype=jnp.int32)],
    "value": [ones(B, HQ, E), ones(B, E)],
    "direction": [ones(B, H, E)],
    "state": [None, (), state(memory=ones(B, H, E, D)), state(penalty=ones(B, H, D))],
    "lambda0": [0.0, float("nan")],
    "write_gain": ["units"],
    "readout": ["ratios"],
    "eps": [0.0, 1e-50],
}


@pytest.mark.parametrize(("name", "bad"), parameters(STEP))
def test_vla_step(name, bad):
    arguments = {n: x[:, 0] for n, x in good().items()}
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        vla_jax.vla_step(**{**arguments, "state": state(), name: bad})


SOLVE = {
    "rhs": [ones(B, T, D), ones(B, T, H, D, dtype=jnp.int32), 1.0],
    "direction": [ones(B, T, H, E), None],
    "lambda0": [0.0, -1.0, float("nan"), ones(3), None],
    "initial_penalty": [ones(B, H, D), ones(B, H, D, E), ones(H, D, D)],
    "segment_ids": [ones(B, T), jnp.array([[0, 0, 1], [1, 0, 0]])],
    "chunk_size": [0],
    "implementation": ["cuda"],
}


@pytest.mark.parametrize(("name", "bad"), parameters(SOLVE))
def test_penalty_solve(name, bad):
    arguments = {"rhs": ones(B, T, H, D), "direction": ones(B, T, H, D), "lambda0": 0.1}
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        vla_jax.penalty_solve(**{**arguments, name: bad})


RULE = {
    "query": [ones(B, T, D), ones(B, T, 3, D)],
    "key": [ones(B, T, D)],
    "write_key": [ones(B, T, H, E), ones(B, T, HQ, D)],
    "value": [ones(B, T, HQ, E)],
    "initial_memory": [ones(B, H, E, D), ones(B, H, D)],
    "segment_ids": [ones(B, T), jnp.array([[0, 0, 1], [1, 0, 0]])],
    "chunk_size": [0],
    "implementation": ["cuda"],
}


@pytest.mark.parametrize(("name", "bad"), parameters(RULE))
def test_delta_rule(name, bad):
    arguments = {**good(), "write_key": ones(B, T, H, D)}
    del arguments["direction"]
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        vla_jax.delta_rule(**{**arguments, name: bad})


@pytest.mark.parametrize("name", ["batch_size", "num_heads", "key_dim", "value_dim"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "a", None])
def test_init_state(name, bad):
    sizes = {"batch_size": B, "num_heads": H, "key_dim": D, "value_dim": E}
    with pytest.raises((ValueError, TypeError), match=name):
        vla_jax.init_state(**{**sizes, name: bad})


@pytest.mark.parametrize("dtype", ["foo", None, np.int32, complex, jnp.bfloat16, object()])
def test_dtype_of_init_state(dtype):
    with pytest.raises((ValueError, TypeError), match="dtype must be"):
        vla_jax.init_state(B, H, D, E, dtype=dtype)


def test_checks_of_shape_hold_under_jit():
    with pytest.raises(ValueError, match="mask"):
        jax.jit(vla_jax.vla_attention)(**good(), mask=ones(B, T + 1, dtype=bool))


@pytest.mark.parametrize("name", ["batch_size", "num_heads", "key_dim", "value_dim"])
def test_an_axis_that_no_array_has(name):
    sizes = {"batch_size": B, "num_heads": H, "key_dim": D, "value_dim": E}
    with pytest.raises(ValueError, match=f"{name} must be less than 2.*, got 1000"):
        vla_jax.init_state(**{**sizes, name: 10**30})
    with pytest.raises(ValueError, match="num_heads must be less than 2"):
        LayerConfig(num_heads=10**30, in_features=8, head_dim=4)


def test_checks_of_shape_hold_where_chex_is_switched_off():
    chex.disable_asserts()
    try:
        with pytest.raises(ValueError, match="value must have shape"):
            vla_jax.vla_attention(**good() | {"value": ones(B, 1, H, E)})
    finally:
        chex.enable_asserts()


@pytest.mark.parametrize(
    "wide", [2**32 + 5, 10**10, np.int64(2**40), np.full(H, 2**31 + 7), [2**40, 1]]
)
def test_integers_are_not_narrowed_before_they_are_used(wide):
    options = {"write_gain": "rls", "readout": "none"}
    found = vla_jax.vla_attention(**good(), lambda0=wide, **options)
    want = vla_jax.vla_attention(**good(), lambda0=np.asarray(wide, float), **options)
    np.testing.assert_array_equal(found, want)
    assert LayerConfig(num_heads=H, in_features=8 * H, lambda0=wide).lambda0


@pytest.mark.parametrize("bad", [1e-50, 10**400, 1e300])
def test_epsilons_that_float32_rounds_away(bad):
    x = np.zeros((1, 2, 1, 4), np.float32)
    for call in (vla_jax.vla_attention, baselines.linear_attention, baselines.gated_delta_net):
        with pytest.raises(ValueError, match=r"\beps must be positive and finite in float32"):
            call(x, x, x, eps=bad)
    with pytest.raises(ValueError, match="norm_eps must be positive and finite in float32"):
        LayerConfig(num_heads=H, in_features=8 * H, norm_eps=bad)


@pytest.mark.parametrize(
    "bad",
    [
        np.ones((B, T, H, D), np.longdouble),
        np.ones((B, T, H, D), [("a", np.float32)]),
        np.ma.masked_array(np.ones((B, T, H, D), np.float32), mask=True),
    ],
    ids=["longdouble", "structured", "masked"],
)
def test_arrays_that_jax_does_not_know(bad):
    with pytest.raises(TypeError, match="key must be an array"):
        vla_jax.vla_attention(**good() | {"key": bad})


def test_segment_ids_beyond_int32():
    """They would merge; JAX arrays have them in x64 mode."""
    with jax.enable_x64(True):
        for ids in (jnp.array([[0, 0, 2**32]] * B), np.array([[0, 0, 2**31]] * B)):
            with pytest.raises(ValueError, match="segment_ids must fit in int32, got 0 to"):
                vla_jax.vla_attention(**good(), segment_ids=ids)


def test_values_are_checked_only_where_concrete():
    """Traced lambda0 and segment_ids cannot be checked and must not fail."""
    ids = jnp.zeros((B, T), jnp.int32)
    run = jax.jit(
        lambda lambda0, ids: vla_jax.vla_attention(**good(), lambda0=lambda0, segment_ids=ids)
    )
    assert run(0.1, ids).shape == (B, T, HQ, E)


def unavailable(name):
    try:
        vla_jax.vla_attention(**good(), implementation=name)
    except NotImplementedError:
        return True
    return False


@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_unavailable_implementation(name):
    if not unavailable(name):
        pytest.skip(f"{name} works here")
    with pytest.raises(NotImplementedError, match=name):
        vla_jax.vla_attention(**good(), implementation=name)


@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_the_operation_that_cannot_be_served_is_named(name):
    x = np.ones((B, T, H, D), np.float64)
    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match=rf"{name}.* penalty_solve\b"):
            vla_jax.penalty_solve(x, x, lambda0=0.1, implementation=name)
        with pytest.raises(NotImplementedError, match=rf"{name}.* delta_rule\b"):
            vla_jax.delta_rule(x, x, x, x, implementation=name)


def primal(x, implementation):
    return vla_jax.vla_attention(x, x, x, implementation=implementation).sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_forward_mode_names_the_remedy(wrap, fast_implementation):
    """Inside the caller's jit the error is JAX's own, raised after the library has returned."""
    function = wrap(functools.partial(primal, implementation=fast_implementation))
    error, match = NotImplementedError, "implementation='reference'"
    if wrap is jax.jit:
        error, match = (NotImplementedError, TypeError), "forward-mode"
    with pytest.raises(error, match=match):
        jax.jvp(function, (ones(1, T, 1, D),), (ones(1, T, 1, D),))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_second_order_names_the_remedy(wrap, fast_implementation):
    function = wrap(functools.partial(primal, implementation=fast_implementation))
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.grad(lambda x: jax.grad(function)(x).sum())(ones(1, T, 1, D))


def test_an_epsilon_of_a_narrow_dtype_is_its_number():
    x, eps = np.ones((1, 2, 1, 4), np.float32), np.float16(1e-4)
    found, want = (vla_jax.vla_attention(x, x, x, eps=e) for e in (eps, float(eps)))
    np.testing.assert_array_equal(found, want)
