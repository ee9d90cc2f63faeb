"""The training stacks of ``examples/stacks``, small: they train, and go on from a checkpoint."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

SMALL = ("--width=16", "--heads=2", "--seq_len=32", "--batch_size=4")
# Both kinds of layers in one program; compiling it is what costs, so each goes on in its process.
PROGRAMS = {"nnx": ("--layers=2", "--softmax_every=2"), "linen": ("--layers=1",)}
# A program run to its 10th step, again to its 10th and its 20th, and once to its 20th.
GOES_ON = """
import sys
from absl import flags
import {name}
directory = sys.argv.pop()
flags.FLAGS(sys.argv)
for steps, part in ((10, "twice"), (20, "twice"), (20, "once")):
    flags.FLAGS.steps, flags.FLAGS.out_dir = steps, directory + "/" + part
    {name}.main(None)
"""
# `make test` installs it; it is no extra, because its own requirements hold others back.
RECURRENTGEMMA = "examples/stacks/recurrentgemma.txt"


def run(*command):
    """``[(step, loss)]`` that a program prints, and all that it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples' / 'stacks'}",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"^step (\d+): loss ([\d.]+) nats per byte", done.stdout, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in losses], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_stack_trains_and_goes_on_from_its_checkpoint(kind, tmp_path):
    code = GOES_ON.format(name=f"{kind}_lm")
    losses, printed = run("-c", code, *SMALL, *PROGRAMS[kind], str(tmp_path))
    assert [step for step, _ in losses] == [1, 10, 11, 20, 1, 20], printed
    first, tenth, _, resumed, again, once = (loss for _, loss in losses)
    assert (first, resumed) == (again, once)
    assert once < tenth < first - 0.3


@pytest.mark.slow
def test_a_third_partys_stack_trains_and_decodes():
    """Never left out where CI is set: an absent package is then a failure."""
    if importlib.util.find_spec("recurrentgemma") is None and not os.environ.get("CI"):
        pytest.skip(f"needs pip install --no-deps --requirement {RECURRENTGEMMA}")
    losses, printed = run("examples/stacks/recurrentgemma_lm.py", *SMALL, "--steps=20")
    assert [step for step, _ in losses] == [1, 20], printed
    assert losses[1][1] < losses[0][1] - 0.5
    difference = re.search(r"logits differ by (\S+) at most$", printed, re.MULTILINE)
    assert float(difference[1]) < 1e-3, printed
