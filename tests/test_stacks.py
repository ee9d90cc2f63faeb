"""The training stacks of ``examples/stacks``, small: they train, and go on from a checkpoint."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

SMALL = ("--width=16", "--heads=2", "--seq_len=32", "--batch_size=4")
PROGRAMS = {
    "nnx": ("nnx_lm", "--layers=2"),
    "nnx, hybrid": ("nnx_lm", "--layers=4", "--softmax_every=4"),
    "linen": ("linen_lm", "--layers=2"),
}
# Of a third party, and not among the test extra: its own requirements hold others back.
THIRD_PARTY = ["recurrentgemma_lm"] if importlib.util.find_spec("recurrentgemma") else []


def run(program, *arguments):
    """``{step: loss}`` that a program prints, and all that it prints."""
    done = subprocess.run(
        [sys.executable, f"examples/stacks/{program}.py", *SMALL, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"^step (\d+): loss ([\d.]+) nats per byte", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in losses}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_stack_trains_and_goes_on_from_its_checkpoint(program, tmp_path):
    once, _ = run(*program, "--steps=20", f"--out_dir={tmp_path / 'once'}")
    assert once[20] < once[1] - 0.5
    run(*program, "--steps=10", f"--out_dir={tmp_path / 'twice'}")
    resumed, _ = run(*program, "--steps=20", f"--out_dir={tmp_path / 'twice'}")
    assert set(resumed) == {11, 20}
    assert resumed[20] == once[20]


@pytest.mark.slow
def test_a_third_partys_stack_trains_and_decodes():
    for program in THIRD_PARTY:
        losses, printed = run(program, "--steps=20")
        assert losses[20] < losses[1] - 0.5
        assert float(printed.split()[-3]) < 1e-3, printed
