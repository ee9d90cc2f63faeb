"""Synthetic tasks: multi-query associative recall (MQAR), copying, and words of a group.

A task draws batches from a NumPy generator and from nothing else, so a seed fixes the data.
Accuracy counts the positions that have a weight: those where the task asks for something.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

LAYOUTS = ("published", "zoology")
GROUPS = {"parity": 2, "s3": 3}  # permutations of so many things

# From here on, shuffling all ids to keep a few takes longer than a training step.
_MANY_IDS = 1024


class Batch(NamedTuple):
    """A batch of sequences, all ``[B, T]``.

    Attributes:
      inputs: int32 token ids.
      targets: int32 token ids, the right answer at every position that has a weight.
      weights: float32, 1 where an answer is asked for and 0 elsewhere.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class Task(Protocol):
    """What the training loop needs to know of a task; tasks are frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def length(self) -> int:
        """Tokens of a sequence, T."""

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draws ``batch_size`` sequences."""


def _distinct(rng: np.random.Generator, batch_size: int, low: int, high: int, count: int):
    """``[batch_size, count]`` ids of ``low <= id < high``, no id twice in a row."""
    if high - low >= _MANY_IDS and count * count <= 2 * (high - low):
        ids = rng.integers(low, high, (batch_size, count), dtype=np.int32)
        while True:  # rows with an id twice are drawn again: most have none
            ordered = np.sort(ids, axis=1)
            twice = np.any(ordered[:, 1:] == ordered[:, :-1], axis=1)
            if not twice.any():
                return ids
            ids[twice] = rng.integers(low, high, (int(twice.sum()), count), dtype=np.int32)
    ids = np.broadcast_to(np.arange(low, high, dtype=np.int32), (batch_size, high - low))
    return rng.permuted(ids, axis=1)[:, :count]


def _interleave(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``k₁ v₁ … kₙ vₙ``."""
    return np.stack([keys, values], axis=-1).reshape(len(keys), -1)


@dataclasses.dataclass(frozen=True)
class MQAR:
    """Multi-query associative recall: after ``n`` key-value pairs, give the value of each query.

    ``layout="published"`` is that of the Variational Linear Attention paper,
    ``k₁ v₁ … kₙ vₙ SEP q₁ q₂ …``: keys are distinct, values come from the same ids, the queries go
    through all keys in random order (again and again if there is room), and the answer is the
    target at the query's own position. Positions after the separator are all queries.

    ``layout="zoology"`` follows Arora et al. (2023): keys and values come from separate halves of
    the vocabulary, and after the pairs each key is queried once, at distances drawn from a power
    law, among fillers. Fillers come from the half of the values, so no filler is a query.

    Attributes:
      num_pairs: n.
      vocab_size: number of ids; the last one is the separator of the published layout.
      layout: ``"published"`` or ``"zoology"``.
      seq_len: T; 0 for ``3n + 1`` (published) and ``16n`` (zoology).
      power: exponent ``a`` of the law ``p(gap) ∝ gap^(a−1)`` of the zoology layout.

    Raises:
      ValueError: naming what does not fit.
    """

    num_pairs: int = 8
    vocab_size: int = 128
    layout: str = "published"
    seq_len: int = 0
    power: float = 0.01

    def __post_init__(self) -> None:
        n = self.num_pairs
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if n < 1:
            raise ValueError(f"num_pairs must be at least 1, got {n}")
        if self.num_keys < n:
            raise ValueError(
                f"num_pairs = {n} needs as many distinct keys, and vocab_size = {self.vocab_size} "
                f"has {max(self.num_keys, 0)} in the {self.layout} layout"
            )
        shortest = 2 * n + 2 if self.layout == "published" else 4 * n
        if self.length < shortest:
            raise ValueError(
                f"seq_len must be at least {shortest} for num_pairs = {n} in the {self.layout} "
                f"layout (or 0 for the default), got {self.seq_len}"
            )

    @property
    def num_keys(self) -> int:
        """Ids that may be keys."""
        return self.vocab_size - 1 if self.layout == "published" else self.vocab_size // 2 - 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        if self.seq_len:
            return self.seq_len
        return 3 * self.num_pairs + 1 if self.layout == "published" else 16 * self.num_pairs

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draws ``batch_size`` sequences."""
        draw = self._published if self.layout == "published" else self._zoology
        return Batch(*draw(rng, batch_size))

    def _published(self, rng, batch_size):
        n, separator = self.num_pairs, self.vocab_size - 1
        keys = _distinct(rng, batch_size, 0, separator, n)
        values = rng.integers(separator, size=keys.shape, dtype=np.int32)
        queries = self.length - 2 * n - 1
        rounds = [_distinct(rng, batch_size, 0, n, n) for _ in range(-(-queries // n))]
        asked = np.concatenate(rounds, axis=1)[:, :queries]
        inputs = np.full((batch_size, self.length), separator, np.int32)
        inputs[:, : 2 * n] = _interleave(keys, values)
        inputs[:, 2 * n + 1 :] = np.take_along_axis(keys, asked, axis=1)
        targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
        targets[:, 2 * n + 1 :] = np.take_along_axis(values, asked, axis=1)
        weights[:, 2 * n + 1 :] = 1
        return inputs, targets, weights

    def _zoology(self, rng, batch_size):
        n, half = self.num_pairs, self.vocab_size // 2
        keys = _distinct(rng, batch_size, 1, half, n)
        values = rng.integers(half, self.vocab_size, size=keys.shape, dtype=np.int32)
        inputs = rng.integers(half, self.vocab_size, (batch_size, self.length), dtype=np.int32)
        inputs[:, : 2 * n] = _interleave(keys, values)
        # Weighted sampling of n different slots: the n largest of log p + Gumbel noise.
        slots = (self.length - 2 * n) // 2
        log_p = (self.power - 1) * np.log(np.arange(1, slots + 1))
        noisy = log_p + rng.gumbel(size=(batch_size, slots))
        position = 2 * n + 2 * np.argsort(-noisy, axis=1)[:, :n]
        targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
        np.put_along_axis(inputs, position, keys, axis=1)
        np.put_along_axis(targets, position, values, axis=1)
        np.put_along_axis(weights, position, 1, axis=1)
        return inputs, targets, weights


@dataclasses.dataclass(frozen=True)
class Copy:
    """Repeat ``x₁ … xₙ`` after a separator, each token predicted *before* it is seen.

    The input is ``x₁ … xₙ SEP x₁ … xₙ₋₁`` and the target at each of the last ``n`` positions is the
    token that comes next. A model that returns its current input scores at chance.

    Attributes:
      num_tokens: n.
      vocab_size: number of ids; the last one is the separator.

    Raises:
      ValueError: naming what does not fit.
    """

    num_tokens: int = 16
    vocab_size: int = 128

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {self.num_tokens}")
        if self.vocab_size < 3:
            raise ValueError(f"vocab_size must be at least 3, got {self.vocab_size}")

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return 2 * self.num_tokens

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draws ``batch_size`` sequences."""
        n, separator = self.num_tokens, self.vocab_size - 1
        tokens = rng.integers(separator, size=(batch_size, n), dtype=np.int32)
        middle = np.full((batch_size, 1), separator, np.int32)
        whole = np.concatenate([tokens, middle, tokens], axis=1)
        weights = np.zeros((batch_size, 2 * n), np.float32)
        weights[:, n:] = 1
        return Batch(whole[:, :-1], whole[:, 1:], weights)


@dataclasses.dataclass(frozen=True)
class Group:
    """Words of a group: at each position, the product of all elements read so far.

    ``group="parity"`` is Z₂, the number of ones modulo 2; ``"s3"`` the six permutations of three
    things, which do not commute. A model whose steps only shrink its memory can do neither at a
    length that it has not seen (Grazzi et al., 2024; Merrill et al., "The illusion of state in
    state-space models", 2024).

    Attributes:
      group: ``"parity"`` or ``"s3"``.
      seq_len: T.

    Raises:
      ValueError: naming what does not fit.
    """

    group: str = "parity"
    seq_len: int = 64

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {self.group!r}")
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")

    @property
    def vocab_size(self) -> int:
        """Elements of the group."""
        return len(self._elements())

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.seq_len

    def _elements(self) -> list[tuple[int, ...]]:
        return list(itertools.permutations(range(GROUPS[self.group])))

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        """Draws ``batch_size`` words."""
        elements = self._elements()
        number = {element: i for i, element in enumerate(elements)}
        product = np.array([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])
        word = rng.integers(len(elements), size=(batch_size, self.seq_len), dtype=np.int32)
        targets = np.empty_like(word)
        state = np.zeros(batch_size, np.int64)  # the identity comes first
        for t in range(self.seq_len):
            state = product[state, word[:, t]]
            targets[:, t] = state
        return Batch(word, targets, np.ones(word.shape, np.float32))
