"""The package as a user has it: installed, and typed."""

import subprocess
import sys

import pytest

TYPED = """
import jax
import jax.numpy as jnp
from flax import nnx
import vla_jax
import vla_jax.nnx
from vla_jax import presets

layer = vla_jax.nnx.SelfAttention(4, 64, preset="recall", short_conv=3, rngs=nnx.Rngs(0))
x = jnp.ones((2, 8, 64))
reveal_type(layer(x, segment_ids=jnp.ones((2, 8), int)))
reveal_type(vla_jax.init_state(2, 4, 16, 16).replace())
vla_jax.nnx.VariationalLinearAttention(4, 64, **presets.options("language"), rngs=nnx.Rngs(0))
vla_jax.nnx.SelfAttention(4, 64, preset="best", rngs=nnx.Rngs(0))
vla_jax.init_state("two", 4, 16, 16)


def attend(x: jax.Array) -> jax.Array:
    out: jax.Array = vla_jax.vla_attention(x, x, x, readout="none")
    return out
"""
OPTIONS = ("--strict", "--no-incremental", "--follow-imports=silent")


@pytest.mark.slow
def test_a_users_mypy_sees_the_types(tmp_path):
    (tmp_path / "user.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *OPTIONS, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [
        line.partition("user.py:")[2] for line in done.stdout.splitlines() if "user.py" in line
    ]
    assert len(lines) >= 4, done.stdout + done.stderr
    assert lines[0].endswith('Array"'), done.stdout
    assert 'Revealed type is "vla_jax.types.VLAState"' in lines[1], done.stdout
    errors = [line for line in lines if ": error:" in line]
    assert [line.split(":")[0] for line in errors] == ["14", "15"], done.stdout
    assert '"preset"' in errors[0]
    assert '"batch_size"' in errors[1] or '"init_state"' in errors[1]
