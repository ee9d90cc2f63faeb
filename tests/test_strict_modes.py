"""JAX's strict modes over a part of the public surface: uses of ``test_smoke`` in each.

The budget of this file is 90 s of CPU time a Python. Modes that allow it are therefore set
together, and only uses that run the mode's part of the library are named.
"""

import contextlib

import jax
import pytest
import test_smoke as smoke

TOGETHER = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
}
FUNCTIONS = (smoke.test_attention, smoke.test_step, smoke.test_penalty_solve, smoke.test_delta_rule)
LAYERS = (smoke.test_nnx, smoke.test_linen, smoke.test_baseline_layer)
OTHERS = (smoke.test_generation, smoke.test_checks, smoke.test_packing, smoke.test_feature_map)
MODES = {
    "strict": (
        TOGETHER,
        (smoke.test_attention, smoke.test_step, smoke.test_delta_rule, smoke.test_nnx, *OTHERS),
    ),
    "x64": ({"jax_enable_x64": True}, (*FUNCTIONS, *LAYERS, smoke.test_generation)),
    "no_jit": ({"jax_disable_jit": True}, (smoke.test_step, smoke.test_nnx, smoke.test_baselines)),
}


@contextlib.contextmanager
def setting(options):
    before = {name: getattr(jax.config, name) for name in options}
    smoke.attended.cache_clear()
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        smoke.attended.cache_clear()


@pytest.mark.parametrize(
    ("mode", "use"),
    [(mode, use) for mode, (_, uses) in MODES.items() for use in uses],
    ids=lambda x: x if isinstance(x, str) else x.__name__.removeprefix("test_"),
)
def test_mode(mode, use):
    with setting(MODES[mode][0]):
        use()
