"""What the commands on text share: a run that trains, prefill and step, reading by blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from commands import append
from flax import nnx
from jax.tree_util import Partial
from model import Model, ModelConfig, ModelState
from text import Split
from training import TEST, TRAIN, Run, TrainConfig, batch, eval_step

from vla_jax import serialization
from vla_jax.files import replacing

# Models of bytes by the machine that they are for. The read-out without a ratio: with it, a layer
# norm's ε fades what is far beyond the length of training.
PRESETS = {
    "cpu": ModelConfig(
        vocab_size=256,
        max_length=None,
        d_model=192,
        num_heads=6,
        num_layers=1,
        ffn_dim=512,
        direction="key",
        readout="none",
        ngrams=6,
    ),
    "h200": ModelConfig(
        vocab_size=256,
        max_length=None,
        d_model=512,
        num_heads=8,
        num_layers=8,
        ffn_dim=2560,
        direction="key",
        readout="none",
        short_conv=4,
        dtype="bfloat16",
    ),
}


class LanguageRun(Run):
    """A run that logs to ``metrics.jsonl`` and reports bits per byte.

    Attributes:
      test_bytes: held-out bytes of the reported bits per byte; 0 for all.
      contexts: lengths of context at which bits per byte are reported as well.

    Raises:
      ValueError: as ``Run``, and if the text is to be read once and has too few rows.
    """

    test_bytes = 0
    contexts: Sequence[int] = ()
    _events: Any = None

    def __init__(self, task: Any, model: ModelConfig, config: TrainConfig, *args: Any, **kw: Any):
        batch(task, config, TRAIN, config.steps - 1)  # is there text for all steps?
        super().__init__(task, model, config, *args, **kw)

    def log_to_tensorboard(self) -> None:
        """Writes the metrics as TensorBoard events too, in ``tensorboard/``.

        Raises:
          ValueError: if tensorboardX is not installed.
        """
        try:
            import tensorboardX
        except ImportError as error:
            raise ValueError(
                "TensorBoard events need tensorboardX: pip install 'vla-jax[tensorboard]'"
            ) from error
        self._events = tensorboardX.SummaryWriter(
            str(self.out_dir / "tensorboard"), purge_step=self.step + 1
        )

    def close(self) -> None:
        """As in ``Run``."""
        if self._events is not None:
            self._events.close()
        super().close()

    def _advance(self, *args: Any) -> bool:
        self._metrics = self.out_dir / "metrics.jsonl"
        with replacing(self._metrics) as temporary:  # the log goes on from the checkpoint
            temporary.write_text("".join(json.dumps(p) + "\n" for p in self.history), "utf-8")
        return super()._advance(*args)

    def _record(self, point: dict[str, float]) -> None:
        for name in [name for name in point if name.endswith("loss")]:
            point[name.replace("loss", "bits_per_byte")] = point[name] / math.log(2)
        seen = point["step"] * self.config.batch_size * self.task.length
        point.update(bytes=seen, seconds=round(self.seconds, 2))
        super()._record(point)
        append(self._metrics, point)
        if self._events is not None:
            for name in sorted(point.keys() - {"step"}):
                self._events.add_scalar(name, point[name], int(point["step"]))

    def _report(self) -> dict[str, Any]:
        split: Split = self.task.split(TEST)  # type: ignore[attr-defined]
        held_out = split.head(self.test_bytes)
        nats = 0.0
        for rows in held_out.windows(self.config.batch_size):
            count = float(np.sum(rows.weights))
            if count:
                loss, _ = eval_step(self.graphdef, self.state.params, rows)
                nats += float(loss) * count
        self._require_finite(nats, self.step)
        report: dict[str, Any] = {
            "bits_per_byte": nats / math.log(2) / held_out.num_bytes,
            **held_out.gzip_bits_per_byte(),
            "scored_bytes": held_out.num_bytes,
            "trained_bytes": self.step * self.config.batch_size * self.task.length,
            "bytes_per_second": self._speed(),
        }
        if self.contexts:
            report["bits_per_byte_at_context"] = {
                str(context): bits_per_byte(self.model_config, self.state.params, held_out, context)
                for context in self.contexts
            }
        return report

    def _speed(self) -> float | None:
        """Bytes trained on in a second: the median over the points of the log."""
        speeds = [
            (b["bytes"] - a["bytes"]) / (b["seconds"] - a["seconds"])
            for a, b in itertools.pairwise(self.history)
            if b["seconds"] > a["seconds"]
        ]
        return round(statistics.median(speeds), 1) if speeds else None


def bits_per_byte(
    config: ModelConfig, params: Any, held_out: Split, context: int, block: int = 2048
) -> float:
    """Bits per byte of documents, read block by block in windows of ``context`` bytes.

    Each byte is predicted from at least ``context // 2`` bytes of its document, or from all that
    precede it there. What is between blocks is the model's state, so memory does not grow with
    the context but for the cache of softmax layers.

    Args:
      config, params: of the model.
      held_out: the documents.
      context: bytes of a window, at least 2.
      block: bytes read at a time, at most; ``context`` must be a multiple of it or below it.

    Raises:
      ValueError: naming what does not fit.
    """
    block = min(block, context)
    if context < 2 or context % block:
        raise ValueError(f"context must be at least 2 and a multiple of {block}, got {context}")
    config = dataclasses.replace(config, window=context)
    graphdef = nnx.split(nnx.eval_shape(lambda: Model(config, nnx.Rngs(0))))[0]
    nats, scored = 0.0, 0.0
    for rows in Split(held_out.documents, context).windows(max(2**15 // context, 1)):
        nats += float(_nats(graphdef, params, rows, block=block))
        scored += float(np.sum(rows.weights))
    return nats / math.log(2) / scored


@functools.partial(jax.jit, static_argnames=("graphdef", "block"))
def _nats(graphdef, params, rows, block):
    model = nnx.merge(graphdef, params)
    batch = rows.inputs.shape[0]
    fresh = model.init_state(batch)
    blocks = jax.tree.map(
        lambda x: jnp.moveaxis(jnp.asarray(x).reshape(batch, -1, block), 1, 0), rows
    )

    def read(carry, part):
        state, document = carry
        # A state belongs to the document that a block begins with.
        begins = part.segment_ids[:, 0] != document
        choose = lambda new, old: jnp.where(  # noqa: E731
            begins.reshape(-1, *(1,) * (old.ndim - 1)), new, old
        )
        state = jax.tree.map(choose, fresh, state)
        logits, state = model(
            part.inputs, segment_ids=part.segment_ids, initial_state=state, return_state=True
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, part.targets)
        return (state, part.segment_ids[:, -1]), jnp.sum(losses * part.weights)

    _, nats = jax.lax.scan(read, (fresh, blocks.segment_ids[0, :, 0]), blocks)
    return jnp.sum(nats)


def functions(model: Model) -> tuple[Any, Any]:
    """``(prefill(state, ids, mask), step)`` of a model, its parameters as arguments."""
    graphdef, params = nnx.split(model)
    return Partial(functools.partial(_read, graphdef), params), Partial(
        functools.partial(_step, graphdef), params
    )


def _step(graphdef, params, token, state):
    return nnx.merge(graphdef, params).step(token, state)


SIZES_AT = (1_000, 1_000_000)  # bytes of text at which the size of a state is shown


def state_bytes(model: Model, length: int) -> int:
    """Bytes of the state of a sequence of ``length`` bytes, by the shapes that reading it gives.

    Nothing is computed: ``jax.eval_shape`` traces the whole read.
    """
    graphdef, params = nnx.split(model)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    read = functools.partial(_forward, graphdef)
    _, state = jax.eval_shape(read, params, jax.eval_shape(lambda: model.init_state(1)), ids, None)
    return serialization.nbytes(state)


def describe(model: Model, config: ModelConfig, state: ModelState) -> str:
    """One line on the size of a state, now and at other lengths."""
    size = serialization.nbytes(state) // state.position.size
    line = f"{size:,} bytes of state a sequence, at {int(jnp.max(state.position)):,} bytes of text"
    if config.capacity is not None:
        return f"{line}, with room for {config.capacity:,}"
    sizes = " and ".join(f"{state_bytes(model, n):,} at {n:,}" for n in SIZES_AT)
    return f"{line} ({sizes})"


class Line(NamedTuple):
    """A line that has been read.

    Attributes:
      number: from 1.
      size: its bytes, with the one that ends it.
      bits: its surprise: ``−log₂`` of the probability that the model gave to it.
      text: its first bytes, without the one that ends it.
    """

    number: int
    size: int
    bits: float
    text: bytes


class Reader:
    """A model that reads bytes block by block and keeps a state of constant size.

    Args:
      model: reads bytes; without a bound on their number.
      block: bytes read at a time: the only shape that is compiled.
      keep: bytes kept of a line to show it.
    """

    def __init__(self, model: Model, block: int, keep: int = 400):
        self._graphdef, self._params = nnx.split(model)
        self._block, self._keep = block, keep
        start = jnp.zeros((1, block), jnp.int32), jnp.arange(block)[None] == 0
        logits, state = _read(self._graphdef, self._params, model.init_state(1), *start)
        self._session = {"state": state, "logits": logits[:, 0]}
        self._position = np.zeros(3, np.float64)  # bytes read, lines ended, bits of the open line
        self._size, self._text = 0, b""

    @property
    def state(self) -> Any:
        """The model's state."""
        return self._session["state"]

    @property
    def bytes_read(self) -> int:
        """Bytes read since the beginning of the text."""
        return int(self._position[0])

    def read(self, data: bytes) -> Iterator[Line]:
        """Reads at most ``block`` bytes; yields the lines that end in them."""
        count = len(data)
        ids = np.zeros((1, self._block), np.int32)
        ids[0, :count] = np.frombuffer(data, np.uint8)
        mask = np.arange(self._block)[None] < count
        logits, state = _read(self._graphdef, self._params, self.state, ids, mask)
        before = jnp.concatenate([self._session["logits"], logits[0, :-1]])
        bits = np.asarray(_surprise(before, jnp.asarray(ids[0])), np.float64)
        self._session = {"state": state, "logits": logits[:, count - 1]}
        done = 0
        while (end := data.find(b"\n", done)) >= 0:
            self._add(data[done : end + 1], bits[done : end + 1])
            yield self._end()
            done = end + 1
        self._add(data[done:], bits[done:count])

    def finish(self) -> Iterator[Line]:
        """Yields the last line, if nothing has ended it."""
        if self._size:
            yield self._end()

    def save(self, path: str) -> None:
        """Writes all that is needed to go on."""
        serialization.save(path, self._everything())

    def load(self, path: str) -> None:
        """Goes on from a file that ``save`` wrote.

        Raises:
          ValueError: if the file is damaged or of another model.
        """
        found = serialization.load(path, self._everything())
        self._session = found["session"]
        # Whole numbers up to 2⁵³ travel as two halves of a float64: JAX would round them.
        self._position = np.array(found["position"]).view(np.float64)
        text = bytes(np.asarray(found["text"]))
        self._size = int(np.asarray(found["size"]).view(np.int64)[0])
        self._text = text[: min(self._size, self._keep)]

    def _everything(self) -> dict[str, Any]:
        text = self._text.ljust(self._keep, b"\0")
        return {
            "session": self._session,
            "position": self._position.view(np.uint32),
            "size": np.array([self._size], np.int64).view(np.uint32),
            "text": np.frombuffer(text, np.uint8),
        }

    def _add(self, data: bytes, bits: np.ndarray) -> None:
        self._position += (len(data), 0, float(np.sum(bits)))
        self._size += len(data)
        self._text += data[: self._keep - len(self._text)]

    def _end(self) -> Line:
        self._position[1] += 1
        line = Line(
            int(self._position[1]), self._size, float(self._position[2]), self._text.rstrip(b"\r\n")
        )
        self._position[2], self._size, self._text = 0, 0, b""
        return line


def _forward(graphdef, params, state, ids, mask):
    model = nnx.merge(graphdef, params)
    return model(ids, mask=mask, initial_state=state, return_state=True)


_read = jax.jit(_forward, static_argnames="graphdef")


@jax.jit
def _surprise(logits, ids):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0] / math.log(2)
