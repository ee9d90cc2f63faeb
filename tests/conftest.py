"""Test configuration: CPU, four virtual devices, float64 on request, compilation counting."""

import functools
import gc
import os
import re
import tempfile

import hypothesis
import jax
import jax.numpy as jnp
import jaxlib
import pytest
import tolerances
from support import Precision

from vla_jax import bundles, implementations
from vla_jax.pallas import common

# No backend exists yet, so all take effect. JAX_PLATFORMS=cuda runs the suite on a GPU.
if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    # Optimising takes most of the time of compiling and changes no test. The environment reaches
    # the commands that tests start too.
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    # Fusions through MLIR take 3 times as long to compile as those before them, which jaxlib has
    # until 0.10; an unknown flag ends the process.
    if "XLA_FLAGS" not in os.environ and jaxlib.version.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        )

# What one test compiled, no other test, worker or command that a test starts compiles again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="vla_jax-compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Interpreted, "pallas" takes 1 to 10 s to compile a program, and runs these tests alone (of tests
# with cases, these): the smallest cases that cover grouped heads, segments, masks, both readouts,
# a state, odd D and E. The rows of pitfalls share one program. On a GPU it runs all tests.
INTERPRETED = {
    "test_attention.py": {"test_values_and_gradients": (3, 4, 6, 7)},
    "test_penalty_solve.py": {"test_values_and_gradients": (1,)},
    "test_delta_rule.py": {"test_values_and_gradients": (1,)},
    "test_errors.py": {
        "test_forward_mode_names_the_remedy": None,
        "test_second_order_names_the_remedy": None,
    },
    "test_pitfalls.py": {
        "test_pitfall_01_loss_on_the_returned_state": None,
        "test_pitfall_06_degenerate_tokens": None,
        "test_pitfall_07_mask_and_segments": None,
        "test_pitfall_08_short_segments_and_edges": None,
        "test_pitfall_17_floor_of_the_ratio": None,
        "test_pitfall_21_vmap": None,
        "test_pitfall_21_vmap_is_not_a_loop": None,
        "test_pitfall_22_others_name_the_reference": None,
        "test_pitfall_27_the_same_call_twice": None,
        "test_pitfall_30_values_and_keys_of_different_sizes": None,
    },
}

# With --versions, what a version of Python or JAX can break: every test, and of its cases the last
# of those that agree in the parameters which choose the code that runs. Other cases are numbers.
CODE = {
    *("implementation", "fast_implementation", "kind", "mixer", "function", "module", "operation"),
    *("name", "call", "transform", "how", "dtype", "inverse", "wrap", "mesh", "killed"),
    *("mode", "use"),
}

# Files of which --versions takes these tests alone. What is left out is of numbers, which no
# version changes, or of the examples' own files, folders and flags; the library's calls in them
# are made by the tests that stay.
ONCE = {
    "test_lm.py": ("test_training_command", "test_decoding_equals_prefill_at_every_split"),
    "test_runs.py": (
        "test_a_run_that_diverges_says_so_in_one_line",
        "test_a_damaged_checkpoint_gives_way_to_the_one_before",
        "test_a_signal_saves_and_another_run_goes_on",
    ),
    "test_grids.py": (
        "test_each_run_is_what_it_would_be_alone",
        "test_a_grid_that_was_stopped_goes_on",
    ),
    "test_examples.py": ("test_command", "test_result"),
    "test_text_arms.py": (),
    "test_multi_process.py": ("test_two_processes_a_loss_and_a_resumption",),
    "test_baselines.py": (
        "test_values_and_gradients_equal_the_oracle",
        "test_a_layer_decodes_what_it_computes",
        "test_shard_map_with_its_check",
        "test_shard_map_where_only_segments_vary",
    ),
    "test_pitfalls.py": (
        "test_pitfall_20_x64_mode_changes_nothing",
        "test_pitfall_21_vmap",
        "test_pitfall_22_every_order_with_the_reference",
        "test_pitfall_22_others_name_the_reference",
        "test_pitfall_23_gradient_inside_shard_map",
        "test_pitfall_24_remat_with_a_names_policy",
        "test_pitfall_25_selftest_command",
    ),
    "test_small_lambda0.py": (),
    "test_scaling.py": ("test_no_recompilation_for_a_repeated_shape",),
    "test_diagnostics.py": (),
    "test_fuzz.py": (),
}

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


def interpret(monkeypatch, name):
    """Kernels of Pallas are interpreted where there is no GPU."""
    if name == "pallas" and common.gpu() is None:
        monkeypatch.setenv(common.INTERPRET, "1")


@functools.cache
def unserved(name, dtype, operation=bundles.Attention, gated=False):
    """Why an implementation cannot serve a bundle of this dtype here, or None."""
    arrays = {
        n: jax.ShapeDtypeStruct([1] * len(bundles.AXES[n].split()), dtype)
        for n in operation._fields
        if n not in operation._field_defaults or (gated and n == "log_decay")
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        interpret(monkeypatch, name)
        try:
            implementations.choose(name, operation(**arrays), None)
        except NotImplementedError as error:
            return str(error)
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--versions",
        action="store_true",
        help="one case of a test and code path: what a version of Python or JAX can break",
    )


def pytest_report_header():
    """Each implementation that some tests leave out, with its own reason."""
    lines = []
    for name in implementations.NAMES:
        for dtype in ("float32", "float64"):
            reason = unserved(name, dtype)
            if reason is not None:
                lines.append(f"left out, {dtype}: {reason}")
    return lines


def pytest_generate_tests(metafunc):
    """Every implementation that serves the test's operation in the test's dtype."""
    given = re.findall(
        r"\w+", str([m.args[0] for m in metafunc.definition.iter_markers("parametrize")])
    )
    marker = metafunc.definition.get_closest_marker("operation")
    asked = marker.kwargs if marker else {}
    dtype = "float64" if "x64" in metafunc.fixturenames else "float32"
    serving = [n for n in implementations.NAMES if unserved(n, dtype, **asked) is None]
    for fixture in ("implementation", "fast_implementation"):
        if fixture in metafunc.fixturenames and fixture not in given:
            names = [n for n in serving if n != "reference" or fixture == "implementation"]
            metafunc.parametrize(fixture, names, indirect=True)


def pytest_collection_modifyitems(config, items):
    """Deselects what the interpreter takes too long for, `INTERPRETED`, and by --versions."""
    deselected = _not_interpreted(items) if common.gpu() is None else []
    items[:] = [item for item in items if item not in set(deselected)]
    if config.getoption("--versions"):
        last = {_code_path(item): item for item in items if _of_a_version(item)}
        deselected += [item for item in items if last.get(_code_path(item)) is not item]
        items[:] = [item for item in items if last.get(_code_path(item)) is item]
    config.hook.pytest_deselected(items=deselected)


def _of_a_version(item):
    """Whether --versions takes cases of the test."""
    return item.originalname in ONCE.get(item.path.name, (item.originalname,))


def _code_path(item):
    """A test, and which of the library's code its case runs."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    chosen = [f"{n}={x}" for n, x in sorted(parameters.items()) if n in CODE]
    return item.path, item.originalname, *chosen


def _not_interpreted(items):
    """The items that `INTERPRETED` leaves out."""
    deselected = []
    for item in items:
        call = getattr(item, "callspec", None)
        named = call and {"implementation", "fast_implementation"} & call.params.keys()
        if not named or call.params[named.pop()] != "pallas":
            continue
        tests = INTERPRETED.get(item.path.name, {})
        cases = tests.get(item.originalname, ())
        if cases is not None and call.params.get("case") not in [
            item.module.CASES[i] for i in cases
        ]:
            deselected.append(item)
    return deselected


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_module():
    """Compiled programs map memory, of which a process may have 65,530 pieces: more is a crash."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def implementation(request, monkeypatch):
    interpret(monkeypatch, request.param)
    return request.param


@pytest.fixture
def fast_implementation(request, monkeypatch):
    """All but the reference."""
    interpret(monkeypatch, request.param)
    return request.param


@pytest.fixture
def precision(implementation):
    """The widest dtype that the implementation serves, inside the test."""
    if unserved(implementation, "float64") is not None:
        yield Precision(jnp.float32, tolerances.REORDERED32, tolerances.FLOAT32_GRADIENT)
        return
    with jax.enable_x64(True):
        yield Precision(jnp.float64, tolerances.FLOAT64, tolerances.FLOAT64)


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
