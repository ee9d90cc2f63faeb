"""``implementation="triton"``: what can be known without a GPU; the rest is in tests/gpu/run.py."""

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

import vla_jax
from vla_jax import triton
from vla_jax.bundles import Attention, Solve
from vla_jax.pallas import common
from vla_jax.plan import Plan

KERNELS = pathlib.Path(triton.__file__).with_name("kernels.py")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what it is; unset, Triton 3.9 warns
    modules = triton._modules
    modules.cache_clear()
    yield
    modules.cache_clear()


def test_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("jax_triton", "triton"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(NotImplementedError, match=r"pip install vla-jax\[triton\]"):
        vla_jax.vla_attention(x, x, x, implementation="triton")


def test_limits_are_named(monkeypatch):
    monkeypatch.setattr(triton, "_modules", lambda: None)
    token = jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.float32)
    bundle = Attention(token, token, token, None, *[None] * 4)
    monkeypatch.setenv(common.INTERPRET, "1")
    assert "no interpret mode" in triton.unsupported(bundle, None)
    monkeypatch.setenv(common.INTERPRET, "0")
    monkeypatch.setattr(common, "gpu", lambda: None)
    assert "chunk_size must be None" in triton.unsupported(bundle, 16)
    assert "no NVIDIA GPU" in triton.unsupported(bundle, None)
    wide = jax.ShapeDtypeStruct((1, 2, 1, 256), jnp.float32)
    assert "up to 128, got 256" in triton.unsupported(bundle._replace(value=wide), None)
    solve = Solve(token, token, None, None)
    assert "use 'pallas' or 'xla'" in triton.unsupported(solve, None)


def test_kernel_parameters_match_the_calls():
    """The arrays of a launch are as many as the kernel's pointers, in both directions."""
    functions = {
        node.name: [a.arg for a in node.args.args]
        for node in ast.parse(KERNELS.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    static = {"T", "H", "G", "DIM", "VALUE_DIM", "D", "E", "BLOCK", "EPS", "GAIN", "RATIO"}
    static |= {"LEARNED", "SEGMENTS"}
    assert all(f"{name}=" in inspect.getsource(triton._launch) for name in static)
    launched = {}

    def record(which, call, inputs, outputs):
        launched[which] = len(inputs) + len(outputs)
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    token, wide = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 1, 4, 4))
    arrays = Attention(token, token, token, None, jnp.ones(1), wide, wide, jnp.ones((1, 1, 4)))
    plan, rule = Plan("triton", None), triton.RULES[Attention]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_launch", record)
        outputs, saved = rule.forward(plan, arrays)
        gradients = rule.backward(plan, arrays, saved, outputs)
    shapes = [None if x is None else x.shape for x in gradients]
    assert shapes == [None if x is None else x.shape for x in arrays]
    assert set(launched) == {"forward", "backward"}
    for name, count in launched.items():
        assert set(functions[name]) >= static
        assert count == len(set(functions[name]) - static)


def test_kernels_compile(tmp_path, monkeypatch):
    """For a Hopper GPU, where the compiler is installed; no GPU is needed."""
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    from vla_jax.triton import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    static = {"H": 2, "G": 2, "DIM": 12, "VALUE_DIM": 20, "D": 16, "E": 32, "BLOCK": 1024}
    static |= {"T": 40, "EPS": 1e-6, "GAIN": 1, "RATIO": True, "LEARNED": False, "SEGMENTS": True}
    for kernel in (kernels.forward, kernels.backward):
        signature = {n: "constexpr" if n in static else "*fp32" for n in kernel.arg_names}
        signature["seg_ptr"] = "*i32"
        source = compiler.ASTSource(kernel, signature=signature, constexprs=static)
        compiled = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32))
        assert "sm_90" in compiled.asm["ptx"]


def test_both_launches_lower(tmp_path, monkeypatch):
    """As on an H200, where jax-triton and JAX's CUDA plugin are installed; no GPU is needed."""
    if not (os.environ.get("CI") and importlib.util.find_spec("jax_triton")):  # make triton
        pytest.importorskip("jax_triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    library = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    monkeypatch.setattr(library, "get_compute_capability", lambda device: 90)
    struct, wide = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1, 2, 16, 16), jnp.float32)
    token, vector = struct((1, 5, 2, 16), jnp.bfloat16), struct((1, 2, 16), jnp.float32)
    lambda0, ids = struct((2,), jnp.float32), struct((1, 5), jnp.int32)
    arrays = Attention(token, token, token, None, lambda0, wide, wide, vector, ids)

    def run(arrays):
        plan, rule = Plan("triton", None), triton.RULES[Attention]
        outputs, saved = rule.forward(plan, arrays)
        return rule.backward(plan, arrays, saved, outputs)

    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 2
