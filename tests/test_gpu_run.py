"""``tests/gpu/run.py`` without a GPU: one small case, interpreted; and what its cases are."""

import os
import subprocess
import sys

import numpy as np
from support import ROOT

from benchmarks.cases import CASES, Case, draw
from vla_jax.pallas import common


def run(*arguments):
    return subprocess.run(
        [sys.executable, "tests/gpu/run.py", "--parts=cases", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            common.INTERPRET: "1",
        },
        check=False,
    )


def test_one_case():
    """One that ``test_attention`` has compiled."""
    found = run("--implementations=pallas", "--dtypes=float32", f"--cases={CASES[3]}")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"PASS pallas    float32  {CASES[3]}" in found.stdout, found.stdout
    assert "1 checks, 0 failed" in found.stdout


def test_nothing_checked_is_a_failure():
    found = run("--implementations=triton", "--cases=none of them")
    assert found.returncode == 1
    assert "FAIL triton was named and cannot run here" in found.stdout, found.stdout + found.stderr


def test_the_hard_cases_are_what_they_say():
    shape = {"batch": 1, "length": 200, "heads": 1, "groups": 1, "dim": 8, "value_dim": 8}
    aligned = draw(Case(**shape, direction="aligned"))
    u = aligned["direction"][0, :, 0]
    condition = np.linalg.cond(aligned["lambda0"] * np.eye(8) + u.T @ u)
    assert 0.8 * 200 / 0.1 < condition < 1.2 * 200 / 0.1
    key = draw(Case(**shape, keys="equal"))["key"]
    assert (key == key[:, :1]).all()
    assert draw(Case(**shape, keys="sign"))["key"].min() > 2
