"""``implementation="triton"``: what can be known without a GPU; the rest is in tests/gpu/run.py."""

import ast
import builtins
import inspect
import pathlib

import jax.numpy as jnp
import pytest

import vla_jax
from vla_jax import triton
from vla_jax.pallas import backend

KERNELS = pathlib.Path(triton.__file__).with_name("triton_kernels.py")


@pytest.fixture(autouse=True)
def forget():
    triton._modules.cache_clear()
    yield
    triton._modules.cache_clear()


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
    monkeypatch.setenv(backend.INTERPRET, "1")
    with pytest.raises(NotImplementedError, match="no interpret mode"):
        triton.require((jnp.float32,), (64,), None)
    monkeypatch.setenv(backend.INTERPRET, "0")
    with pytest.raises(NotImplementedError, match="chunk_size must be None"):
        triton.require((jnp.float32,), (64,), 16)
    with pytest.raises(NotImplementedError, match="use 'pallas' or 'xla'"):
        triton.require((jnp.float32,), (64,), None, "penalty_solve")


def test_kernel_parameters_match_the_calls():
    """The arrays of a launch are as many as the kernel's pointers, in both directions."""
    functions = {
        node.name: [a.arg for a in node.args.args]
        for node in ast.parse(KERNELS.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    static = {"T", "H", "G", "DIM", "VALUE_DIM", "D", "E", "BLOCK", "EPS", "GAIN", "RATIO"}
    static |= {"LEARNED", "SEGMENTS"}
    assert all(f"{name}=" in inspect.getsource(triton._call) for name in static)
    launched = {}

    def record(which, sizes, inputs, outputs, options, params):
        launched[which] = len(inputs) + len(outputs)
        return [jnp.zeros(shape, dtype) for shape, dtype in outputs]

    token, wide = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 1, 4, 4))
    arrays = token, token, token, None, jnp.ones((1, 1)), wide, wide, jnp.ones((1, 1, 4)), None
    options = {"write_gain": "unit", "readout": "ratio", "eps": 1e-6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_call", record)
        out, state, saved = triton.forward(*arrays, **options)
        triton.backward(saved, *arrays, out, *state, **options)
    for name, count in launched.items():
        assert set(functions[name]) >= static
        assert count == len(set(functions[name]) - static)


def test_kernels_compile(tmp_path, monkeypatch):
    """For a Hopper GPU, where the compiler is installed; no GPU is needed."""
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    from vla_jax import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    static = {"H": 2, "G": 2, "DIM": 12, "VALUE_DIM": 20, "D": 16, "E": 32, "BLOCK": 1024}
    static |= {"T": 40, "EPS": 1e-6, "GAIN": 1, "RATIO": True, "LEARNED": False, "SEGMENTS": True}
    for kernel in (triton_kernels.forward, triton_kernels.backward):
        signature = {n: "constexpr" if n in static else "*fp32" for n in kernel.arg_names}
        signature["seg_ptr"] = "*i32"
        source = compiler.ASTSource(kernel, signature=signature, constexprs=static)
        compiled = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32))
        assert "sm_90" in compiled.asm["ptx"]
