"""The self-test finds a wrong gradient and a wrong value, and passes what is right."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from vla_jax import implementations, ops, selftest

ALL_CASES = selftest.CASES
SMALL = selftest.Case("small", (1, 5, 2, 1, 4, 3))


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    monkeypatch.setattr(selftest, "CASES", (SMALL,))


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, g: (1.01 * g,))


def spoil(monkeypatch, change):
    """Applies ``change`` to the output of the implementation that None chooses."""
    right = ops.vla_attention

    def vla_attention(*args, implementation, **kwargs):
        out, state = right(*args, implementation=implementation, **kwargs)
        return (out if implementation == "reference" else change(out)), state

    monkeypatch.setattr(ops, "vla_attention", vla_attention)


def spoil_gates(monkeypatch):
    """Spoils the gradient of the decay in the implementation that None chooses."""
    right = ops.vla_attention

    def vla_attention(*args, implementation, log_decay, **kwargs):
        log_decay = log_decay if implementation == "reference" else wrong_gradient(log_decay)
        return right(*args, implementation=implementation, log_decay=log_decay, **kwargs)

    monkeypatch.setattr(ops, "vla_attention", vla_attention)


def test_right_implementations_are_safe(capsys):
    assert selftest.main() == 0
    text = capsys.readouterr().out
    for name in implementations.NAMES:
        assert any(line.startswith(name) for line in text.splitlines())
    assert "safe  <- implementation=None" in text
    assert "WRONG" not in text


@pytest.mark.parametrize("operation", ["penalty_solve", "delta_rule"])
def test_primitives(operation):
    case = dataclasses.replace(SMALL, operation=operation, packed=True)
    (result,) = selftest.run(["xla"], cases=[case])
    assert result.passed
    assert result.worst


@pytest.mark.parametrize("inverse", ["write", "read"])
def test_gates(inverse, monkeypatch):
    """They have gradients of their own, and what has no gates says so."""
    options = {"inverse": inverse, "gates": True, "write_gain": None}
    case = dataclasses.replace(SMALL, readout="none", **options)
    found = selftest.run(["xla", "triton"], cases=[case])
    assert [r.served for r in found] == [True, False]
    assert found[0].passed
    assert found[0].chosen
    assert "no beta" in found[1].message
    spoil_gates(monkeypatch)
    (result,) = selftest.run(["xla"], cases=[case])
    assert result.worst == "log_decay"
    assert not result.passed


def test_cases_cover_the_operations_and_bfloat16():
    assert {c.operation for c in ALL_CASES} == {"vla_attention", "penalty_solve", "delta_rule"}
    assert {d for c in ALL_CASES for d in c.dtypes} == {"float32", "bfloat16"}
    assert any(c.packed for c in ALL_CASES)
    assert any(not c.packed for c in ALL_CASES)
    assert {c.inverse for c in ALL_CASES if c.gates} == {"write", "read"}


def test_a_wrong_gradient_is_found(monkeypatch):
    spoil(monkeypatch, wrong_gradient)
    (result,) = selftest.run(["xla"])
    assert result.served
    assert not result.passed
    assert result.value_error < 1e-4 < 1e-3 < result.gradient_error
    assert "WRONG" in selftest.report([result])


def test_difference():
    x = jnp.arange(4.0)
    assert selftest._difference(x, x) == 0
    assert selftest._difference(1.01 * x, x) == pytest.approx(0.01)
    assert selftest._difference(x.at[1].set(jnp.nan), x) == float("inf")
    assert selftest._difference(x, 0 * x) > 1


def test_command_fails_when_the_default_is_wrong(monkeypatch, capsys):
    errors = {"value_error": 1e-7, "worst": "key"}
    right = selftest.Result("xla", "small", "float32", gradient_error=1e-7, **errors)
    wrong = selftest.Result("pallas", "small", "float32", gradient_error=0.1, **errors)
    for default, other, status in ((wrong, right, 1), (right, wrong, 0)):
        results = [dataclasses.replace(default, chosen=True), other]
        monkeypatch.setattr(selftest, "run", lambda results=results: results)
        assert selftest.main() == status
        text = capsys.readouterr().out
        assert ("not safe here: pass implementation='xla'" in text) == bool(status)


def test_a_failing_implementation_is_reported(monkeypatch):
    def broken(out):
        raise RuntimeError("cannot lower\nthis")

    spoil(monkeypatch, broken)
    (result,) = selftest.run(["xla"])
    assert result.message.startswith("RuntimeError")
    assert not result.passed
    assert "FAILED: RuntimeError: cannot lower this" in selftest.report([result])
    assert selftest.verdicts([result]) == {"xla": "wrong"}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="implementation"):
        selftest.run(["fast"])
    with pytest.raises(ValueError, match="dtype"):
        selftest.run(["xla"], dtypes=["float8"])
