"""``tests/gpu/run.py`` without a GPU: one small case, interpreted."""

import os
import subprocess
import sys

from support import ROOT

from benchmarks.cases import CASES
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
    found = run("--implementations=pallas", f"--cases={CASES[0]}")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("PASS pallas") == 2, found.stdout
    assert "2 checks, 0 failed" in found.stdout


def test_nothing_checked_is_a_failure():
    found = run("--implementations=triton", "--cases=none of them")
    assert found.returncode == 1
    assert "FAIL triton was named and cannot run here" in found.stdout, found.stdout + found.stderr
