"""States in files: what is written comes back; what is damaged or does not fit is refused."""

import os
import signal
import struct
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vla_jax
from vla_jax import layer, serialization

CONFIG = layer.LayerConfig(num_heads=2, num_kv_heads=1, in_features=8, short_conv=3)


def filled(tree, seed=0):
    """A tree like another with values at random."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


TREES = {
    "VLAState": lambda: vla_jax.init_state(2, 1, 3, 4),
    "without a cache": lambda: vla_jax.init_state(2, 1, 3, 4).replace(inverse=None),
    "LayerState": lambda: layer.init_state(CONFIG, 2),
    "list": lambda: [layer.init_state(CONFIG, 1), vla_jax.init_state(1, 2, 3, 3)],
    "16 bits": lambda: {"cache": jnp.zeros((3, 2), jnp.bfloat16), "count": jnp.zeros(3, jnp.int32)},
    "one array": lambda: jnp.zeros((2, 0, 3)),
    "nothing": lambda: [],
}


@pytest.mark.parametrize("name", TREES)
def test_what_is_saved_is_loaded(name, tmp_path):
    template = TREES[name]()
    state, path = filled(template), tmp_path / "session"
    serialization.save(path, state)
    assert_same(serialization.load(path, template), state)
    assert_same(serialization.load(path, jax.eval_shape(lambda: template)), state)
    assert os.listdir(tmp_path) == ["session"]
    serialization.save(path, filled(template, seed=1))
    assert_same(serialization.load(path, template), filled(template, seed=1))


def test_float64(tmp_path):
    with jax.enable_x64(True):
        state = filled(vla_jax.init_state(1, 1, 2, 2, dtype=jnp.float64))
        serialization.save(tmp_path / "f", state)
        assert_same(serialization.load(tmp_path / "f", state), state)
    with pytest.raises(ValueError, match=r"memory must be float32\[1, 1, 2, 2\], found float64"):
        serialization.load(tmp_path / "f", vla_jax.init_state(1, 1, 2, 2))


def test_a_session_goes_on_and_forks(tmp_path):
    params = layer.init_parameters(CONFIG, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 2, 8))
    step = jax.jit(lambda x, state: layer.step(CONFIG, params, x, state))
    state = layer.init_state(CONFIG, 2)
    for x_t in x[:4]:
        _, state = step(x_t, state)
    kept = jax.tree.map(np.array, state)
    serialization.save(tmp_path / "s", state)
    fork = serialization.load(tmp_path / "s", layer.init_state(CONFIG, 2))
    expected, _ = step(x[4], state)
    other, _ = step(-x[4], state)  # one branch goes elsewhere
    assert not np.allclose(other, expected)
    assert_same(jax.tree.map(np.asarray, state), kept)  # and the fork point is as it was
    for branch in (state, fork):
        np.testing.assert_array_equal(step(x[4], branch)[0], expected)


@pytest.fixture
def saved(tmp_path):
    path, state = tmp_path / "session", filled(vla_jax.init_state(2, 1, 3, 4))
    serialization.save(path, state)
    return path, state


def damaged(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)
    return path


def refused(path, template, message):
    with pytest.raises(ValueError, match=message) as error:
        serialization.load(path, template)
    assert str(path) in str(error.value)


def test_every_truncation_is_refused(saved):
    path, state = saved
    data = path.read_bytes()
    for length in sorted({0, 3, 8, 51, 52, 53, len(data) // 2, len(data) - 1}):
        path.write_bytes(data[:length])
        expected = "truncated: expected" if length else "must be a file that"
        refused(path, state, expected)


@pytest.mark.parametrize("at", [20, 30, 52, 90, -1])
def test_a_flipped_bit_is_refused(saved, at):
    path, state = saved

    def flip(data):
        data[at] ^= 4

    refused(damaged(path, flip), state, "corrupted: expected")


def test_bytes_after_the_end_are_refused(saved):
    refused(damaged(saved[0], lambda data: data + b"\0"), saved[1], "corrupted")


def test_another_version_is_refused(saved):
    path, state = saved
    damaged(path, lambda data: data[:8] + struct.pack(">I", 7) + data[12:])
    refused(path, state, "has version 7 of the format, and this vla_jax reads version 1")


def test_what_is_not_a_state_is_refused(tmp_path):
    state = vla_jax.init_state(1, 1, 2, 2)
    refused(tmp_path / "absent", state, "must be a file that .* No such file")
    refused(tmp_path, state, "must be a file that .* directory")
    (tmp_path / "text").write_text("some text that is longer than a header " * 3)
    refused(tmp_path / "text", state, "begins with b'some tex' in place of")


def test_a_state_that_does_not_fit_is_refused(saved):
    path, state = saved
    refused(path, vla_jax.init_state(3, 1, 3, 4), r"memory must be float32\[3, 1, 3, 4\], found")
    refused(path, state.replace(key_sum=state.key_sum.astype(jnp.bfloat16)), "key_sum must be bf")
    refused(path, state.replace(inverse=None), "inverse is not expected")
    refused(path, [state], "0.memory is missing; .*; memory is not expected")
    serialization.save(path, state.replace(inverse=None))
    refused(path, state, "another state than the template: inverse is missing")


@pytest.mark.parametrize("leaf", [3, "text", object(), np.array(["text"]), jax.random.key(0)])
def test_only_arrays_are_saved(leaf, tmp_path):
    with pytest.raises(
        TypeError, match=r"tree must hold arrays of numbers or booleans, got .* at a"
    ):
        serialization.save(tmp_path / "f", {"a": leaf})
    assert not os.listdir(tmp_path)


def test_names_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="different dotted name"):
        serialization.save(tmp_path / "f", {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    path, state = saved

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        serialization.save(path, filled(state, seed=1))
    assert_same(serialization.load(path, state), state)
    assert os.listdir(path.parent) == [path.name]


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_file(saved):
    path, state = saved
    script = """
        import builtins, os, signal, sys
        import numpy as np
        from vla_jax import serialization

        class Killed:  # a file whose second write kills the process half way through
            def __init__(self, file):
                self.file, self.writes = file, 0
            def __enter__(self):
                return self
            def __exit__(self, *error):
                pass
            def write(self, data):
                self.writes += 1
                if self.writes == 2:
                    self.file.write(data[: len(data) // 2])
                    self.file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                self.file.write(data)

        usual = open
        kinds = {"wb": Killed, "rb": lambda file: file}
        builtins.open = lambda path, mode: kinds[mode](usual(path, mode))
        serialization.save(sys.argv[1], {"a": np.ones(100_000)})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(path.parent)) == 2  # the torn one lies beside it
    assert_same(serialization.load(path, state), state)


def test_nbytes():
    assert serialization.nbytes(vla_jax.init_state(1, 2, 4, 8).replace(inverse=None)) == 4 * (
        2 * 4 * 8 + 2 * 2 * 4 * 4 + 2 * 4 + 2 * 2
    )


def test_64_bits_are_not_narrowed(tmp_path):
    """Without x64 JAX would turn 2**40 into 0 and 1/3 into a float32."""
    path = tmp_path / "wide"
    for wide in (np.full(3, 2**40), np.full(3, 1 / 3), np.full(2, 1j)):
        serialization.save(path, {"a": wide})
        with pytest.raises(ValueError, match=rf"wide .*jax_enable_x64: a is {wide.dtype}"):
            serialization.load(path, {"a": wide})
        with jax.enable_x64(True):
            assert_same(serialization.load(path, {"a": wide}), {"a": jnp.asarray(wide)})


def test_any_byte_order_and_layout(tmp_path):
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    serialization.save(tmp_path / "f", {"a": array})
    for template in (array, jnp.zeros((3, 2))):
        loaded = serialization.load(tmp_path / "f", {"a": template})
        np.testing.assert_array_equal(loaded["a"], array)


def test_the_leaf_that_is_no_array_is_named(saved):
    path, _ = saved
    for leaf in (1.0, "x", object(), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"template must hold arrays .* at a"):
            serialization.load(path, {"a": leaf})
    with pytest.raises(TypeError, match="tree must hold concrete arrays, got a traced one at a"):
        jax.jit(lambda x: serialization.save(path, {"a": x}))(jnp.ones(2))
