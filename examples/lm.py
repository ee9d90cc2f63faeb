"""What the commands on text share: a run that trains, prefill and step, reading by blocks."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from model import Model, ModelState
from training import TEST, Run, eval_step

from vla_jax import serialization


class LanguageRun(Run):
    """A run that logs to ``metrics.jsonl`` and reports bits per byte."""

    test_bytes = 0  # of the reported bits per byte; 0 for all

    def train(self, progress: bool = True) -> dict[str, Any]:
        """As in ``Run``; the log goes on from the checkpoint."""
        self._metrics = self.out_dir / "metrics.jsonl"
        if not self.finished:
            temporary = self._metrics.with_suffix(".partial")
            temporary.write_text("".join(json.dumps(p) + "\n" for p in self.history), "utf-8")
            temporary.replace(self._metrics)
        return super().train(progress)

    def _record(self, point: dict[str, float]) -> None:
        for name in [name for name in point if name.endswith("loss")]:
            point[name.replace("loss", "bits_per_byte")] = point[name] / math.log(2)
        seen = point["step"] * self.config.batch_size * self.task.length
        point.update(bytes=seen, seconds=round(self.seconds, 2))
        super()._record(point)
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")

    def _report(self) -> dict[str, Any]:
        held_out = self.task.split(TEST).head(self.test_bytes)  # type: ignore[attr-defined]
        nats = 0.0
        for rows in held_out.windows(self.config.batch_size):
            count = float(np.sum(rows.weights))
            if count:
                loss, _ = eval_step(self.graphdef, self.state.params, rows)
                nats += float(loss) * count
        return {
            "bits_per_byte": nats / math.log(2) / held_out.num_bytes,
            **held_out.gzip_bits_per_byte(),
            "scored_bytes": held_out.num_bytes,
            "trained_bytes": self.step * self.config.batch_size * self.task.length,
        }


def functions(model: Model) -> tuple[Any, Any]:
    """``(prefill(state, ids, mask), step)`` of a model, its parameters as arguments."""
    graphdef, params = nnx.split(model)
    return Partial(functools.partial(_read, graphdef), params), Partial(
        functools.partial(_step, graphdef), params
    )


def _step(graphdef, params, token, state):
    return nnx.merge(graphdef, params).step(token, state)


def describe(state: ModelState) -> str:
    """One line on the size of a state."""
    batch = state.position.size
    size = serialization.nbytes(state) // batch
    return f"{size:,} bytes of state a sequence, at {int(jnp.max(state.position)):,} bytes of text"


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


@functools.partial(jax.jit, static_argnames="graphdef")
def _read(graphdef, params, state, ids, mask):
    model = nnx.merge(graphdef, params)
    return model(ids, mask=mask, initial_state=state, return_state=True)


@jax.jit
def _surprise(logits, ids):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0] / math.log(2)
