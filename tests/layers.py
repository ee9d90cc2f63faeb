"""The small NNX layer of the tests of layers, and its input."""

import jax
from flax import nnx as flax_nnx

from vla_jax import nnx

IN = 12
FULL = {
    "num_kv_heads": 2,
    "head_dim": 6,
    "value_dim": 5,
    "out_features": 7,
    "lambda0": (0.1, 0.3),
    "learn_lambda0": True,
    "short_conv": 4,
    "output_norm": "rms_per_head",
}


def make(seed=0, num_heads=4, **kwargs):
    """An NNX layer whose every parameter, biases included, is random."""
    random = jax.nn.initializers.normal(0.3)
    kwargs = {"bias_init": random} | kwargs
    return nnx.VariationalLinearAttention(num_heads, IN, rngs=flax_nnx.Rngs(seed), **kwargs)


def draw(length, batch=2, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, length, IN))


def pure(module):
    """The parameters as nested dictionaries of arrays."""
    return flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))
