"""The training loop of every example: data order, checkpoints, early stop, result and curve.

Everything a run draws comes from ``(seed, stream, index)``, so the batch of step ``i`` is the same
whether or not the run was interrupted before it, and held-out data never meet training data.

One file, because a run's directory is one invariant: what a step, a checkpoint, a signal and a
resumed process may each leave in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from commands import Interrupted, Lock, directory, said, signals
from flax import nnx
from model import Model, ModelConfig
from tasks import Batch, Task

import vla_jax
from vla_jax.files import replacing

try:
    from tqdm import tqdm
except ImportError:  # no progress bar then
    tqdm = None
try:
    from matplotlib.figure import Figure
except ImportError:  # no curve then
    Figure = None  # type: ignore[assignment, misc]

# Streams of the data generator: training, the evaluations that stop a run, the reported one.
TRAIN, VALIDATION, TEST = range(3)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
      steps: optimiser steps at most; the cosine schedule ends there.
      batch_size: sequences of a batch.
      learning_rate: peak of the schedule, after ``warmup`` steps from zero.
      warmup, weight_decay, clip: of AdamW (``clip`` is the global norm of the gradient).
      target_accuracy: validation accuracy at which the run stops early; above 1 for never.
      eval_every: steps between validations.
      eval_batches: batches of one validation; the test uses four times as many.
      checkpoint_every: steps between checkpoints.
      log_every: steps between points of the curve.
      seed: of the parameters and of the data.
      accumulate: parts that a batch is computed in, one after the other, with the gradient of the
        whole; None for one.
      b2: of AdamW, the memory of the second moment; None for 0.999.

    Raises:
      ValueError: naming what does not fit.
    """

    steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    target_accuracy: float = 0.999
    eval_every: int = 50
    eval_batches: int = 8
    checkpoint_every: int = 200
    log_every: int = 10
    seed: int = 0
    accumulate: int | None = None
    b2: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_batches", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.b2 is not None and not 0 <= self.b2 < 1:
            raise ValueError(f"b2 must be from 0 to below 1, got {self.b2}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.accumulate is not None and (
            self.accumulate < 1 or self.batch_size % self.accumulate
        ):
            raise ValueError(
                f"accumulate must divide batch_size = {self.batch_size}, got {self.accumulate}"
            )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip, with a linear warm-up and a cosine decay to zero."""
        warmup = min(self.warmup, self.steps // 2)
        schedule = optax.warmup_cosine_decay_schedule(0, self.learning_rate, warmup, self.steps)
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                schedule,
                b2=0.999 if self.b2 is None else self.b2,
                weight_decay=self.weight_decay,
                mask=decays,
            ),
        )


_MATRICES = {"kernel", "embedding"}
_GATES = {"gate", "beta", "decay", "log_decay", "beta_proj", "decay_proj"}


def decays(params: Any) -> Any:
    """Which parameters weight decay acts on: kernels and embeddings, but not those of gates.

    Decay of a bias, a scale or a logarithm pulls it to a value that means nothing in particular.
    """

    def decayed(path: Any, _: Any) -> bool:
        names = set(jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        return bool(names & _MATRICES) and not names & _GATES

    return jax.tree_util.tree_map_with_path(decayed, params)


RunT = TypeVar("RunT", bound="Run")


class TrainState(NamedTuple):
    """What a checkpoint holds of the model."""

    step: int
    params: Any
    opt_state: Any


class Scores(NamedTuple):
    """Mean loss and accuracy over the positions that have a weight."""

    loss: float
    accuracy: float


class SettingsError(ValueError):
    """The directory holds what this run cannot go on from."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def batch(task: Task, config: TrainConfig, stream: int, index: int) -> Batch:
    """Batch ``index`` of a stream, from the task's ``split(stream)`` where it has splits.

    Raises:
      ValueError: if the split gives no row twice and has none left.
    """
    split = getattr(task, "split", None)
    source: Any = task if split is None else split(stream)
    if getattr(source, "once", False):
        return source.batch(config.seed, index, config.batch_size)
    return source.sample(np.random.default_rng([config.seed, stream, index]), config.batch_size)


def make_mesh(spec: str) -> jax.sharding.Mesh | None:
    """The mesh that ``"data:2,context:2"`` describes, None for ``""``.

    ``data`` shards the batch and ``context`` the sequence.

    Raises:
      ValueError: if ``spec`` reads otherwise or asks for more devices than there are.
    """
    if not spec:
        return None
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        name, _, size = part.partition(":")
        if name not in ("data", "context") or name in sizes or not size.isdecimal() or size == "0":
            raise ValueError(f"mesh must read like data:4 or data:2,context:2, got {spec!r}")
        sizes[name] = int(size)
    count = math.prod(sizes.values())
    if count > len(jax.devices()):
        raise ValueError(
            f"mesh {spec} needs {count} devices, found {len(jax.devices())}; on a CPU, "
            f"JAX_NUM_CPU_DEVICES={count} in the environment simulates them"
        )
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)


def tokens_spec(mesh: jax.sharding.Mesh | None) -> jax.P:
    """How ``[B, T]`` arrays lie over a mesh."""
    names = () if mesh is None else mesh.axis_names
    return jax.P(*(name if name in names else None for name in ("data", "context")))


def place(tree: Any, mesh: jax.sharding.Mesh | None, spec: jax.P) -> Any:
    """Arrays that every process holds whole, laid over a mesh that may span processes."""
    if mesh is None:
        return tree
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def put(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def scores(
    graphdef: Any,
    params: Any,
    data: Batch,
    mesh: jax.sharding.Mesh | None = None,
    total: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy of a batch, or its share of those of all weights ``total``."""
    axes = () if mesh is None else mesh.axis_names

    def local(params, data, total):
        axis_name = "context" if "context" in axes else None
        segment_ids = getattr(data, "segment_ids", None)
        model = nnx.merge(graphdef, params)
        logits = model(data.inputs, segment_ids=segment_ids, axis_name=axis_name)
        if total is None:
            total = jax.lax.psum(jnp.sum(data.weights), axes)
        weights = data.weights / total
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, data.targets)
        hits = jnp.argmax(logits, axis=-1) == data.targets
        return jax.lax.psum((jnp.sum(losses * weights), jnp.sum(hits * weights)), axes)

    if mesh is None:
        return local(params, data, total)
    specs = (jax.P(), tokens_spec(mesh), jax.P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())(params, data, total)


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "mesh"))
def train_step(
    params: Any,
    opt_state: Any,
    data: Batch,
    *,
    graphdef: Any,
    config: TrainConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Any, Any, Scores]:
    """One optimiser step."""
    loss_fn = functools.partial(scores, graphdef, mesh=mesh)
    gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if config.accumulate is None:
        results = gradient_fn(params, data)
    else:  # each part strided over the batch, so that every device holds rows of it
        total = jnp.sum(data.weights)
        parts = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(-1, config.accumulate, *x.shape[1:]), 1, 0), data
        )
        part_fn = functools.partial(gradient_fn, params, total=total)
        shapes = jax.eval_shape(part_fn, jax.tree.map(lambda x: x[0], parts))
        results, _ = jax.lax.scan(
            lambda sums, part: (jax.tree.map(jnp.add, sums, part_fn(part)), None),
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            parts,
        )
    (loss, accuracy), gradients = results
    updates, opt_state = config.optimizer().update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, Scores(loss, accuracy)


eval_step = jax.jit(scores, static_argnames=("graphdef", "mesh"))


def evaluate(
    graphdef: Any,
    params: Any,
    task: Task,
    config: TrainConfig,
    stream: int,
    batches: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Scores:
    """Loss and accuracy over the first ``batches`` batches of a stream."""
    results = []
    for i in range(batches):
        data = place(batch(task, config, stream, i), mesh, tokens_spec(mesh))
        results.append(eval_step(graphdef, params, data, mesh=mesh))
    return Scores(*(float(np.mean(x)) for x in zip(*results, strict=True)))


class Run:
    """A run in a directory: made, resumed or found finished, then trained.

    Args:
      task: what to learn.
      model_config: sizes and mixer.
      config: how to train.
      out_dir: holds ``checkpoints/``, ``settings.json``, ``result.json`` and ``curve.png``.
      overwrite: whether to throw away what the directory holds of an earlier run.
      mesh: from ``make_mesh``, to train on many devices; no setting of the run: it may be resumed
        on another one.

    The directory belongs to the run until ``close``, or until the process ends. The checkpoint
    before takes the place of one that cannot be read, which is put aside as ``damaged-STEP``.

    Raises:
      SettingsError: if the directory holds a run with other settings, or one that is damaged.
      ValueError: if the batch or the sequence cannot be sharded over the mesh, or the directory
        cannot be written to or is in use.
    """

    def __init__(
        self,
        task: Task,
        model_config: ModelConfig,
        config: TrainConfig,
        out_dir: str | os.PathLike[str],
        overwrite: bool = False,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.task, self.model_config, self.config, self.mesh = task, model_config, config, mesh
        for axis, name, size in (
            ("data", "batch_size", config.batch_size),
            ("context", "the length of a sequence", task.length),
        ):
            if mesh is not None and size % mesh.shape.get(axis, 1):
                raise ValueError(f"{name} = {size} is not divisible by {axis}:{mesh.shape[axis]}")
        if mesh is not None and "context" in mesh.shape and set(model_config.mixers) != {"vla"}:
            raise ValueError("a mesh with a context axis needs mixer 'vla' in every layer")
        self.out_dir = directory(out_dir)
        try:
            str(self.out_dir).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"out_dir must be UTF-8, got {str(self.out_dir)!r}") from error
        self.result_path = self.out_dir / "result.json"
        self._settings_path = self.out_dir / "settings.json"
        # Of several processes the first one holds the directory that all of them write to.
        self._lock = Lock(self.out_dir) if jax.process_index() == 0 else None
        try:
            self._open(self.out_dir / "checkpoints", overwrite)
        except BaseException:
            self._release()
            raise

    def _open(self, checkpoints: pathlib.Path, overwrite: bool) -> None:
        config, mesh = self.config, self.mesh
        self._check_settings(checkpoints, overwrite)
        if jax.process_index() == 0:
            for left in self.out_dir.glob(".*.partial*"):  # by a process that was killed
                left.unlink(missing_ok=True)
        self.graphdef, params = nnx.split(Model(self.model_config, nnx.Rngs(config.seed)))
        trees = params, config.optimizer().init(params)
        self.state = TrainState(0, *place(trees, mesh, jax.P()))
        self.history: list[dict[str, float]] = []
        self._earlier_seconds, self._start = 0.0, time.perf_counter()
        self._manager = ocp.CheckpointManager(
            checkpoints,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
            ),
        )
        if self._manager.latest_step() is not None:
            self._restore()

    def settings(self) -> dict[str, Any]:
        """All that decides the outcome, as JSON data."""
        settings = {
            "task": {"name": type(self.task).__name__, **dataclasses.asdict(self.task)},
            "model": self.model_config.settings(),
            "training": dataclasses.asdict(self.config),
        }
        return json.loads(json.dumps(settings))

    def _check_settings(self, checkpoints: pathlib.Path, overwrite: bool) -> None:
        if overwrite and jax.process_index() == 0:
            shutil.rmtree(checkpoints, ignore_errors=True)
            for old in (self._settings_path, self.result_path, self.out_dir / _DIGESTS):
                old.unlink(missing_ok=True)
        if self.finished:
            try:
                self.result()
            except ValueError:
                self._put_aside(self.result_path, "it is written anew")
        if self._settings_path.exists():
            found = _flat(_read_settings(self._settings_path))
            asked = _flat(self.settings())
            differences = [
                f"{name} is {found.get(name)!r} there and {asked.get(name)!r} here"
                for name in sorted(found.keys() | asked.keys())
                if found.get(name) != asked.get(name)
            ]
            if differences:
                raise SettingsError(
                    f"{self.out_dir} holds a run with other settings: {'; '.join(differences)}. "
                    "Choose another directory, or overwrite it"
                )
        elif self.result_path.exists() or any(checkpoints.glob("[0-9]*")):
            raise SettingsError(
                f"{self.out_dir} holds a run without its settings.json. "
                "Choose another directory, or overwrite it"
            )

    def _put_aside(self, path: pathlib.Path, instead: str) -> None:
        """Moves what is damaged out of the way, as ``damaged-NAME``, and says so."""
        aside = self.out_dir / f"damaged-{path.name}"
        print(f"{path} is damaged; {instead} ({aside.name} keeps it)", file=sys.stderr, flush=True)
        if jax.process_index() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)

    def result(self) -> dict[str, Any] | None:
        """What the finished run wrote, or None if it is not finished."""
        return json.loads(self.result_path.read_text("utf-8")) if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the result has been written."""
        return self.result_path.exists()

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.state.step

    @property
    def seconds(self) -> float:
        """Time spent, compilation and evaluation included, over all sittings of the run."""
        return self._earlier_seconds + time.perf_counter() - self._start

    def train(self, progress: bool = True) -> dict[str, Any]:
        """Trains to the end and returns the result; a finished run only returns it.

        Ctrl-C and SIGTERM end it after the step that is under way: a checkpoint is saved (but by
        one of several processes: the others are not at the same step) and ``Interrupted`` raised;
        another run in the same directory resumes. A second signal does not wait.

        Raises:
          Interrupted: after Ctrl-C or SIGTERM; a KeyboardInterrupt.
          FloatingPointError: if the loss, or what a checkpoint would hold, is not finite. Nothing
            of it is saved.
          CheckpointError: if a checkpoint cannot be written.
        """
        if (result := self.result()) is not None:
            return result
        with signals() as requested:
            self._advance(self.config.steps, requested, progress)
            requested.waits = False  # all is saved
            if number := requested():
                raise Interrupted(number)
            return self._finish()

    def advance(self, step: int, stop: Callable[[], bool], progress: bool = True) -> bool:
        """Trains as ``train`` does, to ``step`` or until ``stop`` says so, and saves.

        Returns:
          Whether ``step`` is reached.

        Raises:
          Interrupted, FloatingPointError, CheckpointError: as ``train`` does.
        """
        with signals() as requested:
            reached = self._advance(step, requested, progress, stop)
        self._earlier_seconds, self._start = self.seconds, time.perf_counter()
        return reached

    def _advance(self, to, requested, progress, stop=lambda: False) -> bool:
        self._start = time.perf_counter()
        for _ in self._steps(to, progress):
            if number := requested():
                if jax.process_count() == 1:
                    self._save()
                raise Interrupted(number)
            if self.step % self.config.checkpoint_every == 0:
                self._save()
            if stop():
                break
        self._save()
        return self.step >= to or self._reached_target()

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _require_finite(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; {self._last_good()}")

    def _last_good(self) -> str:
        step = self._manager.latest_step()
        if step is None:
            return "no checkpoint has been saved before"
        return f"the last good checkpoint is that of step {step}"

    def _steps(self, to: int, progress: bool) -> Iterator[None]:
        config = self.config
        compiled = dataclasses.replace(config, seed=0)  # one program for all seeds
        with _bar(to, self.step, progress) as bar:
            while self.step < to and not self._reached_target():
                step, params, opt_state = self.state
                data = batch(self.task, config, TRAIN, step)
                data = place(data, self.mesh, tokens_spec(self.mesh))
                params, opt_state, train = train_step(
                    params, opt_state, data, graphdef=self.graphdef, config=compiled, mesh=self.mesh
                )
                step += 1
                point: dict[str, float] = {}
                if step % config.log_every == 0:
                    loss, accuracy = map(float, train)
                    self._require_finite(loss, step)
                    bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")
                    point.update(loss=loss, accuracy=accuracy)
                if step % config.eval_every == 0 or step == config.steps:
                    held_out = self._evaluate(params, VALIDATION, config.eval_batches)
                    self._require_finite(held_out.loss, step)
                    point.update(eval_loss=held_out.loss, eval_accuracy=held_out.accuracy)
                if point:
                    self._record({"step": step, **point})
                self.state = TrainState(step, params, opt_state)
                bar.update()
                yield

    def _record(self, point: dict[str, float]) -> None:
        self.history.append(point)

    def _report(self) -> dict[str, Any]:
        """Further entries of the result."""
        return {}

    def _evaluate(self, params: Any, stream: int, batches: int) -> Scores:
        return evaluate(self.graphdef, params, self.task, self.config, stream, batches, self.mesh)

    def _reached_target(self) -> bool:
        evaluated = [point for point in self.history if "eval_accuracy" in point]
        return bool(evaluated) and (evaluated[-1]["eval_accuracy"] >= self.config.target_accuracy)

    def _save(self) -> None:
        if self._manager.latest_step() == self.step:
            return
        # Numbers may be finite and no use: what they give is looked at too.
        self._require_finite(self._evaluate(self.state.params, VALIDATION, 1).loss, self.step)
        if not bool(_all_finite(self.state[1:])):
            raise FloatingPointError(
                f"the parameters are not finite at step {self.step}; {self._last_good()}"
            )
        meta = {"history": self.history, "seconds": self.seconds}
        try:
            if not self._settings_path.exists() and jax.process_index() == 0:
                _write_json(self._settings_path, self.settings())
            self._manager.save(
                self.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_by_name(self.state[1:])),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
            if jax.process_index() == 0:
                self._note_digests()
        except (OSError, ValueError) as error:
            if jax.process_count() > 1 and not isinstance(error, OSError):
                raise  # a process that is lost
            raise CheckpointError(
                f"the checkpoint of step {self.step} cannot be written to {self.out_dir} "
                f"({said(error)}); {self._last_good()}"
            ) from error

    def _note_digests(self) -> None:
        """Writes what the files of the checkpoints must be, to tell later whether they are."""
        known = _known_digests(self.out_dir)
        known.pop(str(self.step), None)
        steps = map(str, self._manager.all_steps())
        found = {s: known.get(s) or _digests(self.out_dir / "checkpoints" / s) for s in steps}
        _write_json(self.out_dir / _DIGESTS, found)

    def _restore(self) -> None:
        while (step := self._manager.latest_step()) is not None:
            try:
                self.state, meta = _restore(self._manager, step, self.state[1:])
                break
            except Exception as error:  # orbax raises many, Exception itself among them
                earlier = [s for s in self._manager.all_steps() if s < step]
                if not earlier:
                    raise SettingsError(
                        f"{self.out_dir} holds no checkpoint that can be read (of step {step}: "
                        f"{said(error)[:200]}). Choose another directory, or overwrite it"
                    ) from error
                self._put_aside(
                    self.out_dir / "checkpoints" / str(step),
                    f"the run goes on from the checkpoint of step {max(earlier)}",
                )
                if jax.process_index() == 0:
                    known = _known_digests(self.out_dir)
                    known.pop(str(step), None)  # another one of this step may come
                    _write_json(self.out_dir / _DIGESTS, known)
                self._manager.reload()
        self.history = meta["history"]
        self._earlier_seconds = meta["seconds"]

    def _finish(self) -> dict[str, Any]:
        held_out = self._evaluate(self.state.params, TEST, 4 * self.config.eval_batches)
        self._require_finite(held_out.loss, self.step)
        settings = self.settings()
        result = {
            "model": ",".join(self.model_config.layers or [self.model_config.mixer]),
            **settings["task"],
            "seq_len": self.task.length,
            "seed": self.config.seed,
            "steps": self.step,
            "eval_accuracy": held_out.accuracy,
            "eval_loss": held_out.loss,
            "train_seconds": round(self.seconds, 2),
            "parameters": sum(x.size for x in jax.tree.leaves(self.state.params)),
            "device": jax.devices()[0].device_kind,
            "versions": {
                "python": platform.python_version(),
                **{m.__name__: m.__version__ for m in (jax, flax, optax, np, vla_jax)},
            },
            **self._report(),
            "settings": settings,
            "history": self.history,
        }
        if jax.process_index() == 0:
            if Figure is not None:
                _plot(self.history, result, self.out_dir / "curve.png")
            _write_json(self.result_path, result)
        return result


def begin(name: str, make: Callable[[], RunT]) -> RunT:
    """The run of a command, with a line on where it stands; ends if its flags do not fit."""
    try:
        run = make()
    except SettingsError as error:
        sys.exit(f"{name}: {error} with --overwrite")
    except (OSError, ValueError, NotImplementedError) as error:
        sys.exit(f"{name}: {said(error)}")
    if run.finished:
        print(f"{run.out_dir} holds the finished run; --overwrite trains it anew.")
    elif run.step:
        print(f"Resuming {run.out_dir} after step {run.step}.", flush=True)
    return run


def load_model(run_dir: str | os.PathLike[str]) -> tuple[Model, ModelConfig]:
    """The model of the latest checkpoint of a run.

    Raises:
      ValueError: if the directory holds no run, none that has come to a checkpoint, or one that
        cannot be read.
    """
    run_dir = pathlib.Path(run_dir).resolve()
    path = run_dir / "settings.json"
    try:
        settings = _read_settings(path)
    except OSError as error:
        raise ValueError(f"{run_dir} holds no trained model: no settings.json") from error
    model_config = _configuration(path, "model", settings["model"], ModelConfig)
    config = _configuration(path, "training", settings["training"], TrainConfig)
    if not (run_dir / "checkpoints").is_dir():
        raise ValueError(f"{run_dir} holds no checkpoint")
    graphdef, params = nnx.split(Model(model_config, nnx.Rngs(0)))
    with ocp.CheckpointManager(
        run_dir / "checkpoints",
        options=ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False),
    ) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        trees = params, config.optimizer().init(params)
        for step in steps:
            try:
                state, _ = _restore(manager, step, trees)
                return nnx.merge(graphdef, state.params), model_config
            except Exception as error:  # orbax raises many, Exception itself among them
                print(f"{run_dir}: the checkpoint of step {step} is damaged "
                      f"({said(error)[:200]})", file=sys.stderr, flush=True)  # fmt: skip
    raise ValueError(f"{run_dir} holds no checkpoint" + " that can be read" * bool(steps))


def _read_settings(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """``settings.json``: groups of keys."""
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SettingsError(
            f"{path} is damaged ({said(error)}). Choose another directory, or overwrite it"
        ) from error
    groups = ("task", "model", "training")
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(group), dict) for group in groups
    ):
        raise SettingsError(
            f"{path} must hold an object with the keys {', '.join(groups)}. "
            "Choose another directory, or overwrite it"
        )
    return settings


def _configuration(path: pathlib.Path, group: str, values: dict[str, Any], kind: Any) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    for key in values.keys() - known:
        raise ValueError(
            f"{path} has the key {key!r} in {group!r}, which these examples do not know: use those "
            "that trained the model, or remove the key if it has no effect there"
        )
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has no use as {group!r}: {said(error)}") from error


_DIGESTS = "checkpoints.json"  # {step: {file: SHA-256}}


def _known_digests(run_dir: pathlib.Path) -> dict[str, dict[str, str]]:
    try:
        known = json.loads((run_dir / _DIGESTS).read_text("utf-8"))
    except (OSError, ValueError):  # nothing is known then
        return {}
    return known if isinstance(known, dict) else {}


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@jax.jit
def _all_finite(trees: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _restore(
    manager: ocp.CheckpointManager, step: int, trees: Any
) -> tuple[TrainState, dict[str, Any]]:
    """A checkpoint as ``(state, meta)``; ``trees`` are like its parameters and so on."""
    checkpoint = pathlib.Path(manager.directory) / str(step)
    expected = _known_digests(checkpoint.parents[1]).get(str(step))
    if expected is not None:  # orbax prints pages about files that are not what they were
        found = _digests(checkpoint)
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ValueError(f"{name} is not what it was")
    named = _by_name(trees)
    restored = manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(named), meta=ocp.args.JsonRestore()),
    )
    leaves = [restored["state"][name] for name in named]
    state = TrainState(step, *jax.tree.unflatten(jax.tree.structure(trees), leaves))
    return state, restored["meta"]


class _NoBar:
    """Shows nothing."""

    def update(self) -> None: ...

    def set_postfix(self, **_: Any) -> None: ...


def _bar(total: int, initial: int, shown: bool) -> contextlib.AbstractContextManager[Any]:
    if tqdm is None:
        return contextlib.nullcontext(_NoBar())
    return tqdm(total=total, initial=initial, unit="step", disable=not shown)


def _by_name(tree: Any) -> dict[str, jax.Array]:
    """The leaves of a tree by their path: a checkpoint then depends on no class."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _flat(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{group}.{k}": v for group, values in settings.items() for k, v in values.items()}


def _write_json(path: pathlib.Path, data: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", "utf-8")


def _plot(history: list[dict[str, float]], result: dict[str, Any], path: pathlib.Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "loss"), (right, "accuracy")):
        for key, label in ((name, "training batch"), (f"eval_{name}", "held out")):
            points = [(point["step"], point[key]) for point in history if key in point]
            if points:
                axes.plot(*zip(*points, strict=True), label=label)
        axes.set(xlabel="step", ylabel=name)
    right.set_ylim(-0.02, 1.02)
    right.legend()
    figure.suptitle(
        f"{result['name']}, {result['model']}: accuracy {result['eval_accuracy']:.4f} "
        f"after {result['steps']} steps"
    )
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
