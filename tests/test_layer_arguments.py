"""What a layer refuses, by name: options, functions, arrays and states."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx
from layers import FULL, IN, draw, make

from vla_jax import layer, linen, nnx


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"num_heads": 0}, ValueError),
        ({"num_heads": 2.0}, TypeError),
        ({"in_features": -1}, ValueError),
        ({"num_heads": 5}, ValueError),  # does not divide in_features: head_dim is named
        ({"num_kv_heads": 3}, ValueError),
        ({"head_dim": 0}, ValueError),
        ({"value_dim": "8"}, TypeError),
        ({"out_features": 0}, ValueError),
        ({"lambda0": 0.0}, ValueError),
        ({"lambda0": (0.1, 0.2, 0.3)}, ValueError),
        ({"lambda0": "big"}, TypeError),
        ({"learn_lambda0": 1}, TypeError),
        ({"direction": "none"}, ValueError),
        ({"write_gain": "none"}, ValueError),
        ({"readout": "mean"}, ValueError),
        ({"short_conv": 0}, ValueError),
        ({"short_conv": True}, TypeError),
        ({"output_norm": "batch"}, ValueError),
        ({"norm_eps": 0}, ValueError),
        ({"use_bias": None}, TypeError),
        ({"dtype": jnp.int32}, TypeError),
        ({"dtype": "foo"}, TypeError),
        ({"param_dtype": {}}, TypeError),
        ({"precision": "foo"}, ValueError),
        ({"precision": 3}, TypeError),
        ({"param_dtype": None}, TypeError),
        ({"feature_map": "silu"}, TypeError),
        ({"kernel_init": 0.1}, TypeError),
        ({"bias_init": None}, TypeError),
        ({"implementation": "cuda"}, ValueError),
        ({"check_invariants": "yes"}, TypeError),
        ({"logical_axes": None}, TypeError),
        ({"heads": 4}, TypeError),
    ],
    ids=str,
)
def test_wrong_options_are_named(wrong, error):
    (name,) = wrong
    fields = {"num_heads": 4, "in_features": IN} | wrong
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
    with pytest.raises(TypeError, match=r"kernel_init.*logical_axes"):
        make(kernel_init=annotated)


@dataclasses.dataclass
class Scaled:
    """A function that cannot be hashed."""

    scale: float = 2.0

    def __call__(self, x):
        return self.scale * x


@pytest.mark.parametrize(
    ("feature_map", "message"),
    [
        (Scaled(), "feature_map must be hashable, got Scaled"),
        (flax_nnx.Linear(3, 3, rngs=flax_nnx.Rngs(0)), "feature_map .* without arrays .* Linear"),
        (jax.tree_util.Partial(jnp.multiply, jnp.ones(3)), "feature_map .* without arrays"),
    ],
    ids=["unhashable", "module", "Partial"],
)
def test_a_feature_map_that_cannot_be_static_is_refused(feature_map, message):
    with pytest.raises(TypeError, match=message):
        make(feature_map=feature_map)
    with pytest.raises(TypeError, match=message):
        linen.VariationalLinearAttention(4, IN, feature_map=feature_map)


@pytest.mark.parametrize(
    ("feature_map", "error"),
    [
        (lambda raw: jnp.concatenate([raw, -raw], axis=-1), ValueError),
        (lambda raw: raw > 0, TypeError),
        (lambda raw: None, TypeError),
    ],
    ids=["shape", "dtype", "nothing"],
)
def test_a_feature_map_that_returns_something_else_is_refused(feature_map, error):
    with pytest.raises(error, match="feature_map"):
        make(feature_map=feature_map)(draw(3))


def test_an_initialiser_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"kernel_init must return .*\[12, 12\], got \[3\]"):
        make(kernel_init=lambda *_: jnp.ones(3))


@pytest.mark.parametrize("rngs", [None, 0, jax.random.key(0)], ids=str)
def test_rngs_are_named(rngs):
    with pytest.raises(TypeError, match="rngs must be"):
        nnx.VariationalLinearAttention(4, IN, rngs=rngs)


CONV = (2, 3, 4 * 6 + 2 * (6 + 5))  # what FULL keeps for its convolution


def _state(**changes):
    return dataclasses.replace(make(**FULL).init_state(2), **changes)


@pytest.mark.parametrize(
    ("wrong", "error", "name"),
    [
        ({"x": jnp.zeros((2, IN))}, ValueError, "x"),
        ({"x": jnp.zeros((2, 5, IN + 1))}, ValueError, "x"),
        ({"x": jnp.zeros((2, 0, IN))}, ValueError, "x"),
        ({"x": jnp.zeros((2, 5, IN), int)}, TypeError, "x"),
        ({"x": [[0.0]]}, TypeError, "x"),
        ({"mask": jnp.ones((2, 4), bool)}, ValueError, "mask"),
        ({"mask": jnp.ones((2, 5))}, TypeError, "mask"),
        ({"segment_ids": jnp.ones((2, 5))}, TypeError, "segment_ids"),
        ({"segment_ids": jnp.array([[1, 0, 0, 0, 0]] * 2)}, ValueError, "segment_ids"),
        ({"initial_state": _state().vla}, TypeError, "initial_state"),
        ({"initial_state": _state(conv=None)}, TypeError, "initial_state.conv"),
        ({"initial_state": _state(conv=[1.0])}, TypeError, "initial_state.conv"),
        ({"initial_state": _state(conv=jnp.zeros(CONV, int))}, TypeError, "initial_state.conv"),
        ({"initial_state": _state(conv=jnp.zeros(CONV) * 1j)}, TypeError, "initial_state.conv"),
        ({"initial_state": _state(conv=jnp.zeros((2, 2, 1)))}, ValueError, "initial_state.conv"),
        ({"initial_state": make(**FULL).init_state(3)}, ValueError, "initial_state"),
        ({"axis_name": "z"}, ValueError, "axis_name = 'z'"),
        ({"axis_name": 1}, TypeError, "axis_name"),
        ({"positions": None}, TypeError, "positions"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, name):
    arguments = {"x": draw(5)} | wrong
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
    with pytest.raises(TypeError, match=r"state\.conv"):
        module.step(draw(5)[:, 0], _state(conv=None))
    with pytest.raises(ValueError, match=r"state\.conv"):
        make(**FULL | {"short_conv": None}).step(draw(5)[:, 0], state)
    with pytest.raises(ValueError, match="batch_size"):
        module.init_state(0)
