"""Two more of JAX's modes: 64 bits and no jit, over the uses of ``test_smoke`` they can break.

The modes that go together are set for all uses there.
"""

import pytest
import test_smoke as smoke

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
