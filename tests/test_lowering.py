"""Every kernel lowered for an NVIDIA GPU that need not be there: it is in the program, by name."""

import re

import jax
import jax.numpy as jnp
import pytest

import vla_jax
from vla_jax import numerics
from vla_jax.bundles import Attention, Delta, Solve, Step
from vla_jax.pallas import common, triton
from vla_jax.plan import Plan, Variant

SOLVE = ("gram", "prefix", "invert", "factor", "apply", "apply_backward", "gram_backward", "du")
SOLVE = {f"vla_penalty_{name}" for name in SOLVE}
DELTA = {f"vla_delta_{n}" for n in ("solve", "sweep", "read", "pull", "sweep_reverse", "grads")}
STEP = {"vla_decode_refresh", "vla_decode_step"}
NAMES = {Solve: SOLVE, Delta: DELTA, Attention: SOLVE | DELTA, Step: STEP}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.delenv(common.INTERPRET, raising=False)
    monkeypatch.setattr(common, "unavailable", lambda: None)


def arrays(kind, dtype, dim, length, segments):
    """The shapes of a bundle of that kind: two heads, two queries for each of them."""
    struct, heads = jax.ShapeDtypeStruct, (1, 2)
    token = struct((1, length, 2, dim), dtype)
    query = struct((1, length, 4, dim), dtype)
    matrix = struct((*heads, dim, dim), jnp.float32)
    vector, scalar = struct((*heads, dim), jnp.float32), struct(heads, jnp.float32)
    lambda0 = struct((2,), jnp.float32)
    ids = struct((1, length), jnp.int32) if segments else None
    if kind is Solve:
        return Solve(token, token, lambda0, matrix, ids)
    if kind is Delta:
        return Delta(query, token, token, token, matrix, ids)
    if kind is Attention:
        return Attention(query, token, token, None, lambda0, matrix, matrix, vector, ids)
    state = vla_jax.VLAState(matrix, matrix, vector, matrix, scalar, scalar, matrix)
    query, token = (struct((1, x.shape[2], dim), dtype) for x in (query, token))
    return Step(query, token, token, token, lambda0, state)


def kernels(bundle, variant=Variant()):  # noqa: B008
    """The names of the kernels in the program of values and cotangents, lowered for an H200."""
    rule = triton.RULES[type(bundle)]

    def run(bundle):
        plan = Plan("pallas", numerics.policy(*bundle[:2]), variant=variant)
        outputs, saved = rule.forward(plan, bundle)
        if rule.backward is None:
            return outputs
        return outputs, rule.backward(plan, bundle, saved, outputs)

    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(bundle).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    return set(re.findall(r"\bvla_[a-z_]+", text))


@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "segments"),
    [
        (Solve, "float16", 128, False),
        (Solve, "bfloat16", 256, True),
        (Delta, "float32", 256, False),
        (Delta, "bfloat16", 128, True),
        (Attention, "bfloat16", 64, True),
        (Step, "bfloat16", 128, False),
        (Step, "float32", 20, False),
    ],
)
def test_every_kernel_lowers(kind, dtype, dim, segments):
    assert kernels(arrays(kind, jnp.dtype(dtype), dim, 80, segments)) >= NAMES[kind]


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [(Variant("projection", "none"), "bfloat16"), (Variant("rls", "ratio"), "float32")],
)
def test_variants_lower(variant, dtype):
    bundle = arrays(Attention, jnp.dtype(dtype), 24, 40, dtype == "bfloat16")
    assert kernels(bundle, variant) >= SOLVE | DELTA


def test_super_chunks_lower():
    """Few heads and many tokens: the sweep of the maps too."""
    assert kernels(arrays(Delta, jnp.bfloat16, 64, 8192, True)) >= DELTA


@pytest.mark.parametrize("kind", [Attention, Step])
def test_64_bit_mode_lowers(kind, x64):
    """No index or constant becomes 64 bits wide, which Triton would refuse."""
    assert kernels(arrays(kind, jnp.float32, 16, 40, True)) >= NAMES[kind]
