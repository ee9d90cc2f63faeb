"""Training on several devices and in several processes: the same curve, and what a loss costs."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from test_examples import ROOT

import training  # isort: skip  # test_examples has put examples/ on the path
from model import ModelConfig
from tasks import MQAR

TASK = MQAR(num_pairs=2, vocab_size=16, seq_len=16)
MODEL = ModelConfig(vocab_size=16, max_length=16, d_model=8, num_heads=2, num_layers=1, ffn_dim=8)
SETTINGS = training.TrainConfig(
    steps=8, batch_size=8, learning_rate=2e-2, warmup=1, eval_every=4, eval_batches=1, log_every=1,
    checkpoint_every=4,
)  # fmt: skip
FLAGS = (
    "--num_pairs=2", "--vocab_size=16", "--seq_len=16", "--d_model=8", "--num_heads=2",
    "--num_layers=1", "--ffn_dim=8", "--batch_size=8", "--warmup=1", "--noprogress",
)  # fmt: skip


def train(directory, mesh, config=SETTINGS):
    run = training.Run(TASK, MODEL, config, directory, mesh=training.make_mesh(mesh))
    try:
        return run.train(progress=False)
    finally:
        run.close()


def curve(result):
    return [[point[k] for k in sorted(point)] for point in result["history"]]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), "")


@pytest.mark.parametrize("mesh", ["data:4", "data:2,context:2"])
def test_the_same_curve_on_one_and_four_devices(one_device, mesh, tmp_path):
    result = train(tmp_path, mesh)
    assert len(result["history"]) == SETTINGS.steps
    losses = [point["loss"] for point in result["history"]]
    assert max(losses) - min(losses) > 0.05  # it has learned something
    for ours, wanted in zip(curve(result), curve(one_device), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_moves_to_another_number_of_devices(one_device, tmp_path, monkeypatch):
    """Four steps on four devices, the rest on two of them with the sequence over both."""
    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "_finish", lambda run: None)
        patch.setattr(training.Run, "_reached_target", lambda run: run.step == 4)
        train(tmp_path, "data:4")
    run = training.Run(TASK, MODEL, SETTINGS, tmp_path, mesh=training.make_mesh("context:2"))
    try:
        assert run.step == 4
        placed = {leaf.sharding.num_devices for leaf in jax.tree.leaves(run.state.params)}
        assert placed == {2}
        result = run.train(progress=False)
    finally:
        run.close()
    for ours, wanted in zip(curve(result), curve(one_device), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [("data", "must read like"), ("data:2,data:2", "must read like"), ("data:99", "JAX_NUM_CPU")],
)
def test_meshes_that_cannot_be(mesh, message):
    with pytest.raises(ValueError, match=message):
        training.make_mesh(mesh)


def test_what_cannot_be_sharded(tmp_path):
    for mesh, message in (("data:3", "batch_size = 8"), ("context:3", "sequence = 16")):
        with pytest.raises(ValueError, match=message):
            training.Run(TASK, MODEL, SETTINGS, tmp_path, mesh=training.make_mesh(mesh))


# --- two processes -----------------------------------------------------------------------------


def start(directory, port, process_id, steps):
    """One of two processes with one device each, its output in a file."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-u", str(ROOT / "examples" / "mqar.py"), *FLAGS]
    command += [f"--out_dir={directory / 'run'}", f"--steps={steps}", "--target_accuracy=2"]
    command += ["--checkpoint_every=20"]
    command += ["--mesh=data:2", f"--coordinator=localhost:{port}", "--num_processes=2"]
    with open(directory / f"log{process_id}", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, f"--process_id={process_id}"], env=environment, stdout=log, stderr=log
        )


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def log(directory, process_id):
    return (directory / f"log{process_id}").read_text("utf-8")


def finish(processes, timeout):
    try:
        return [p.wait(timeout) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()


EAGER = """
import sys
import jax
import numpy as np
from vla_jax import baselines, vla_attention

process, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"localhost:{port}", 2, process)
mesh = jax.make_mesh((2,), ("data",))
rows = jax.NamedSharding(mesh, jax.P("data"))
spread = lambda x: jax.make_array_from_callback(x.shape, rows, lambda at: x[at])
x = np.random.default_rng(0).random((2, 6, 1, 4)).astype(np.float32)
ids = np.array([[0, 0, 0, 1, 1, 1]] * 2, np.int32)
for call in (
    lambda x, ids: vla_attention(x, x, x, segment_ids=ids, implementation="xla"),
    lambda x, ids: baselines.gated_delta_net(x, x, x, None, -x[..., 0], segment_ids=ids),
):
    (mine,) = call(spread(x), spread(ids)).addressable_shards
    np.testing.assert_allclose(mine.data, call(x, ids)[process : process + 1], rtol=1e-5)
"""


def test_values_in_another_process_are_not_looked_at():
    """Outside ``jit`` the order of segments and the sign of gates are checked where they can be."""
    port = free_port()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", EAGER]
    processes = [subprocess.Popen([*command, str(i), str(port)], env=environment) for i in (0, 1)]
    assert finish(processes, 120) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])  # process 0 runs the coordinator
def test_two_processes_a_loss_and_a_resumption(killed, tmp_path):
    """One of two is killed: the other ends soon and says so; both started anew go on.

    Where the coordinator is lost JAX itself may end the process, before any of our code runs.
    """
    steps = 60
    checkpoints: pathlib.Path = tmp_path / "run" / "checkpoints"
    port = free_port()
    processes = [start(tmp_path, port, i, steps) for i in (0, 1)]
    try:
        deadline = time.monotonic() + 120
        while not (checkpoints / "20").exists():
            assert time.monotonic() < deadline, log(tmp_path, 0)
            assert all(p.poll() is None for p in processes), log(tmp_path, 0) + log(tmp_path, 1)
            time.sleep(0.05)
        processes[killed].kill()
        assert processes[1 - killed].wait(60) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = f"mqar: process {1 - killed} lost another one after step"
    if killed == 0:
        said = f"{said}|This most likely indicates that another task died"
    assert re.search(said, log(tmp_path, 1 - killed))
    if killed == 0:
        return
    saved = max(int(p.name) for p in checkpoints.glob("[0-9]*"))

    port = free_port()
    codes = finish([start(tmp_path, port, i, steps) for i in (0, 1)], 120)
    logs = [log(tmp_path, i) for i in (0, 1)]
    assert codes == [0, 0], logs
    assert all(f"Resuming {tmp_path / 'run'} after step {saved}" in text for text in logs)
    reports = [json.loads(text.splitlines()[-2]) for text in logs]
    assert reports[0]["eval_accuracy"] == reports[1]["eval_accuracy"]
    assert reports[0]["steps"] == steps
