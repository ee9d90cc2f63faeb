"""Layers with weights, decay and the inverse at the read: parameters, decoding, states, checks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import IN, draw, make, pure
from support import assert_close
from tolerances import REORDERED32

from vla_jax import layer, linen, serialization
from vla_jax.layer import LayerConfig

READ = {
    "decay": True, "beta": True, "inverse": "read", "num_kv_heads": 2, "short_conv": 3,
    "output_norm": "rms_per_head",
}  # fmt: skip
WRITE = {"decay": True, "beta": True}


@pytest.mark.parametrize("options", [READ, WRITE], ids=["read", "write"])
def test_both_layers_decode_and_restore_what_they_compute(options, tmp_path):
    module, x = make(**options), draw(9)
    other = linen.VariationalLinearAttention(4, IN, **options)
    assert jax.tree.map(jnp.shape, other.init(jax.random.key(0), x)["params"]) == jax.tree.map(
        jnp.shape, pure(module)
    )
    whole, end = module(x, return_state=True)
    chex.assert_trees_all_equal(other.apply({"params": pure(module)}, x), whole)

    _, state = module(x[:, :4], return_state=True)
    step = jax.jit(functools.partial(layer.step, module.config))
    outs = []
    for t in range(4, 9):
        serialization.save(tmp_path / "state", state)
        state = serialization.load(tmp_path / "state", state)
        out, state = step(pure(module), x[:, t], state)
        outs.append(out)
    assert_close(jnp.stack(outs, 1), np.asarray(whole[:, 4:]), REORDERED32)
    for name in ("memory", "penalty", "key_sum"):
        found, wanted = (getattr(y.vla, name) for y in (state, end))
        assert_close(found, np.asarray(wanted), REORDERED32, name)


def test_gates_start_over_10_to_1000_tokens_and_have_gradients():
    module, x = make(**WRITE), draw(6)
    nothing = jnp.zeros_like(x)
    params = pure(module)
    for group in ("beta_proj", "decay_proj"):  # random in the tests' layer
        params[group]["bias"] = jnp.zeros_like(params[group]["bias"])
    gates = layer.gates(module.config, params, nothing)
    np.testing.assert_allclose(gates["beta"], 0.5, rtol=1e-6)
    tokens = -1 / np.asarray(gates["log_decay"])[0, 0]
    assert tokens.min() > 10
    assert tokens.max() < 1000
    np.testing.assert_allclose(np.diff(np.log10(tokens)), 0.5, rtol=1e-4)  # four heads

    def loss(params):
        return jnp.sum(layer.apply(module.config, params, x) ** 2)

    gradients = jax.grad(loss)(pure(module))
    for group in ("beta_proj", "decay_proj"):
        for name, gradient in gradients[group].items():
            assert jnp.abs(gradient).max() > 0, (group, name)


def test_options_of_the_read():
    config = LayerConfig(num_heads=2, in_features=8, inverse="read")
    assert (config.write_gain, config.readout, config.lambda0) == (None, "none", 1.0)
    published = LayerConfig(num_heads=2, in_features=8)
    assert (published.write_gain, published.readout, published.lambda0) == ("unit", "ratio", 0.1)
    for name, value in (("write_gain", "rls"), ("readout", "ratio"), ("inverse", "both")):
        with pytest.raises(ValueError, match=name):
            LayerConfig(num_heads=2, in_features=8, **{"inverse": "read", name: value})
    with pytest.raises(TypeError, match="decay must be a bool"):
        LayerConfig(num_heads=2, in_features=8, decay=1)


@pytest.mark.parametrize("inverse", ["write", "read"])
def test_length_of_learned_directions(inverse):
    """1/√D at the write; at the read 1, as that of the key is, beside which λ₀ counts."""
    module, x = make(inverse=inverse, head_dim=9), draw(6)
    inputs = layer.attention_inputs(module.config, pure(module), x, None, None, None)
    lengths = jnp.linalg.norm(inputs[3], axis=-1)
    np.testing.assert_allclose(lengths, {"write": 1 / 3, "read": 1}[inverse], rtol=1e-5)


@pytest.mark.parametrize("options", [{"beta": True}, {"decay": True}, {"inverse": "read"}], ids=str)
def test_triton_is_refused_when_the_layer_is_built(options):
    (name,) = options
    for made in (make, functools.partial(LayerConfig, num_heads=2, in_features=8)):
        with pytest.raises(NotImplementedError, match=f"implementation='triton' has no {name}"):
            made(implementation="triton", **options)


def test_invariants_with_gates():
    """What the solver does not reach at a λ₀ far below the weights is said."""
    x = draw(6)
    chex.assert_trees_all_equal(make(check_invariants=True, **READ)(x), make(**READ)(x))
    hard = {"check_invariants": True, "inverse": "read", "beta": True, "decay": True}
    module = make(lambda0=1e-12, head_dim=32, **hard)
    long = draw(200)
    with pytest.raises(AssertionError, match="relative residual"):
        module(long)
    with pytest.raises(AssertionError, match="unit length"):
        make(**hard)(x.at[0, 2].set(jnp.nan))
    with pytest.raises(RuntimeError, match="chexify"):
        jax.jit(functools.partial(layer.apply, module.config))(pure(module), x)
