"""More of JAX's modes: 64 bits and no jit over uses of ``test_smoke``, and no transfers under jit.

The modes that go together are set for all uses there.
"""

import jax
import numpy as np
import pytest
import test_smoke as smoke
from flax import nnx as flax_nnx

import vla_jax
from vla_jax import nnx, presets

FUNCTIONS = (smoke.test_attention, smoke.test_step, smoke.test_penalty_solve, smoke.test_delta_rule)
LAYERS = (smoke.test_nnx, smoke.test_linen, smoke.test_baseline_layer)
MODES = {
    "x64": ({"jax_enable_x64": True}, (*FUNCTIONS, *LAYERS, smoke.test_generation)),
    "no_jit": ({"jax_disable_jit": True}, (smoke.test_step, smoke.test_nnx, smoke.test_baselines)),
}


@pytest.mark.parametrize(
    ("mode", "use"),
    [(mode, use) for mode, (_, uses) in MODES.items() for use in uses],
    ids=lambda x: x if isinstance(x, str) else x.__name__.removeprefix("test_"),
)
def test_mode(mode, use):
    with smoke.setting(MODES[mode][0]):
        use()


@pytest.mark.parametrize("name", ["attention", "step", "penalty_solve", "delta_rule", "layer"])
def test_nothing_is_transferred_under_jit(name):
    x = jax.device_put(smoke.arrays())
    q, k, v = x["query"], x["key"], x["value"]
    gates = jax.device_put(np.full(k.shape[:3], 0.5, np.float32))
    layer = nnx.VariationalLinearAttention(
        2, 6, **presets.options("language"), rngs=flax_nnx.Rngs(0)
    )
    graphdef, parameters = flax_nnx.split(layer)
    state = vla_jax.init_state(smoke.B, smoke.H, smoke.D, smoke.E)
    tokens = jax.device_put(np.ones((2, 5, 6), np.float32))
    function, arguments = {
        "attention": (
            lambda q, k, v, b: vla_jax.vla_attention(q, k, v, beta=b, log_decay=-b, inverse="read"),
            (q, k, v, gates),
        ),
        "step": (
            lambda q, k, v, s: vla_jax.vla_step(q[:, 0], k[:, 0], v[:, 0], None, s),
            (q, k, v, state),
        ),
        "penalty_solve": (lambda k: vla_jax.penalty_solve(k, k, lambda0=0.5), (k,)),
        "delta_rule": (lambda q, k, v: vla_jax.delta_rule(q, k, k, v), (q, k, v)),
        "layer": (lambda p, x: flax_nnx.merge(graphdef, p)(x), (parameters, tokens)),
    }[name]
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(jax.jit(function)(*arguments))
