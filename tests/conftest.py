"""Test configuration: CPU, four virtual devices, float64 on request, compilation counting."""

import gc
import os
import tempfile

import hypothesis
import jax
import pytest

# No backend exists yet, so both take effect. JAX_PLATFORMS=cuda runs the suite on a GPU.
if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        # LLVM's optimisation takes two thirds of the suite's time and changes no test.
        jax.config.update("jax_disable_most_optimizations", True)

# What one test compiled, no other test, worker or command that a test starts compiles again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="vla_jax-compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# One suite, many implementations: a new one is one more name here.
IMPLEMENTATIONS = ("reference", "xla", "associative")

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("default"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_module():
    """Compiled programs map memory, of which a process may have 65,530 pieces: more is a crash."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture(params=[i for i in IMPLEMENTATIONS if i != "reference"])
def fast_implementation(request):
    return request.param


@pytest.fixture
def x64():
    """float64 inside the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compilations():
    """A list that grows by one entry for each compilation."""
    events = []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)
