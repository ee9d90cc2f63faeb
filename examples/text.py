"""Bytes of files as a task: documents packed into rows, with a split by file that never moves."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

START = 0  # the byte before each document
SPLITS = ("train", "validation", "test")  # numbered like the streams of training.py
_HELD_OUT = 5  # per cent of the files, for validation and again for the test


class Packed(NamedTuple):
    """A batch of rows, all ``[B, T]``: each may hold the end of one document and others after it.

    Attributes:
      inputs, targets: int32 bytes, and the byte after each.
      weights: float32, 0 where that byte belongs to another document.
      segment_ids: int32, the document of each input.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray


class Split:
    """Documents one after the other, each behind a ``START``.

    Args:
      documents: their bytes.
      length: T, of a row.
      once: whether ``batch`` gives no row twice.
    """

    def __init__(self, documents: list[bytes], length: int, once: bool = False):
        self.documents, self.length, self.once = documents, length, once
        self.num_bytes = sum(map(len, documents))
        joined = b"".join(bytes([START]) + document for document in documents)
        self._bytes = np.frombuffer(joined, np.uint8)
        self._starts = np.cumsum([0, *(len(d) + 1 for d in documents)])[:-1]
        self._orders: dict[int, np.ndarray] = {}

    @property
    def num_rows(self) -> int:
        """Rows that have no byte in common."""
        return max((len(self._bytes) - 1) // self.length, 1)

    def batch(self, seed: int, index: int, batch_size: int) -> Packed:
        """Batch ``index`` of a pass over the rows, in an order that ``seed`` decides.

        Raises:
          ValueError: if the rows do not suffice.
        """
        rows = self._order(seed)[index * batch_size : (index + 1) * batch_size]
        if len(rows) < batch_size:
            raise ValueError(
                f"one pass over {self.num_rows} rows is {self.num_rows // batch_size} batches of "
                f"{batch_size}, asked for number {index + 1}"
            )
        return self._rows(rows * self.length)

    def _order(self, seed: int) -> np.ndarray:
        if seed not in self._orders:
            self._orders = {seed: np.random.default_rng([seed]).permutation(self.num_rows)}
        return self._orders[seed]

    def sample(self, rng: np.random.Generator, batch_size: int) -> Packed:
        """``batch_size`` rows from places drawn uniformly."""
        first = rng.integers(max(len(self._bytes) - self.length, 1), size=batch_size)
        return self._rows(first)

    def windows(self, batch_size: int) -> Iterator[Packed]:
        """Rows in which every byte of every document has a weight exactly once.

        Consecutive rows overlap by half, so that all but the first bytes of a document are
        predicted from at least ``length // 2`` bytes or from all that precede them.
        """
        stride = max(self.length // 2, 1)
        first = np.arange(0, max(len(self._bytes) - 1, 1), stride)
        first = first[: max(-(-(len(self._bytes) - 1 - self.length) // stride), 0) + 1]
        for i in range(0, len(first), batch_size):
            part = first[i : i + batch_size]
            rows = self._rows(np.pad(part, (0, batch_size - len(part)), mode="edge"))
            new = np.arange(self.length) >= self.length - stride
            weights = rows.weights * (new | (np.arange(batch_size)[:, None] + i == 0))
            weights[len(part) :] = 0
            yield rows._replace(weights=weights.astype(np.float32))

    def head(self, num_bytes: int) -> Split:
        """The first so many bytes of the documents; 0 for all."""
        kept: list[bytes] = []
        for document in self.documents:
            room = num_bytes - sum(map(len, kept)) if num_bytes else len(document)
            if room <= 0:
                break
            kept.append(document[:room])
        return Split(kept, self.length)

    def gzip_bits_per_byte(self) -> dict[str, float]:
        """What ``gzip -9`` needs for the documents: all in one file, and each in its own."""
        apart = sum(len(gzip.compress(document, 9)) for document in self.documents)
        together = len(gzip.compress(b"".join(self.documents), 9))
        return {
            "gzip_bits_per_byte": 8 * together / self.num_bytes,
            "gzip_each_bits_per_byte": 8 * apart / self.num_bytes,
        }

    def _rows(self, first: np.ndarray) -> Packed:
        places = first[:, None] + np.arange(self.length + 1)
        inside = places < len(self._bytes)
        rows = self._bytes[np.minimum(places, len(self._bytes) - 1)].astype(np.int32)
        document = np.searchsorted(self._starts, places, side="right").astype(np.int32)
        document = np.where(inside, document, len(self._starts) + 1)
        weights = (document[:, 1:] == document[:, :-1]) & inside[:, 1:]
        return Packed(rows[:, :-1], rows[:, 1:], weights.astype(np.float32), document[:, :-1])


@dataclasses.dataclass(frozen=True)
class Text:
    """Predict the next byte of files.

    A folder is split by file: the SHA-256 of a file's path in the folder decides (with ``once``,
    of its content), so a file stays where it is whatever other files come and go. A single file is
    split by position.

    Attributes:
      data: a file or a folder; ``""`` for the sources of Python's standard library.
      seq_len: bytes of a row, T.
      pattern: which files of a folder, as in ``pathlib.Path.rglob``; ``""`` for ``*`` (``*.py`` of
        the standard library). Hidden files, ``site-packages`` and ``__pycache__`` are left out.
      once: whether no byte of the training files is read twice: rows are drawn without repetition,
        files are split by their content, so that copies come to the same split, and of those one
        is kept. A run can have no more steps than one pass.
      digest: SHA-256 of what was read, so that a run is not resumed on other data.
      train_bytes, validation_bytes, test_bytes: the sizes found.

    Raises:
      ValueError: naming the path, if a split is too small for one row.
    """

    data: str = ""
    seq_len: int = 256
    pattern: str = ""
    once: bool = False
    digest: str = dataclasses.field(init=False, default="")
    train_bytes: int = dataclasses.field(init=False, default=0)
    validation_bytes: int = dataclasses.field(init=False, default=0)
    test_bytes: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"seq_len must be at least 2, got {self.seq_len}")
        documents = self._read()
        digest = hashlib.sha256()
        for group in documents:
            for document in group:
                digest.update(len(document).to_bytes(8, "big") + document)
        splits = tuple(
            Split(group, self.seq_len, self.once and i == 0) for i, group in enumerate(documents)
        )
        for name, split in zip(SPLITS, splits, strict=True):
            if split.num_bytes < self.seq_len:
                raise ValueError(
                    f"data must have at least seq_len = {self.seq_len} bytes to hold out for each "
                    f"split, got {split.num_bytes} for {name} in {self.path}: give more text"
                )
            object.__setattr__(self, f"{name}_bytes", split.num_bytes)
        object.__setattr__(self, "digest", digest.hexdigest()[:16])
        object.__setattr__(self, "_splits", splits)

    @property
    def path(self) -> pathlib.Path:
        """Where the files are."""
        return pathlib.Path(self.data or sysconfig.get_paths()["stdlib"]).resolve()

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return 256

    @property
    def length(self) -> int:
        """Bytes of a row."""
        return self.seq_len

    def split(self, stream: int) -> Split:
        """The documents of a stream of ``training.py``."""
        return self._splits[stream]  # type: ignore[attr-defined]

    def sample(self, rng: np.random.Generator, batch_size: int) -> Packed:
        """Rows of the training split."""
        return self.split(0).sample(rng, batch_size)

    def describe(self) -> str:
        """One line: where the bytes come from and how they are split."""
        sizes = ", ".join(f"{getattr(self, f'{name}_bytes'):,} {name}" for name in SPLITS)
        return f"{self.path}: bytes: {sizes}"

    def _read(self) -> list[list[bytes]]:
        path = self.path
        if path.is_file():
            data = path.read_bytes()
            held_out = len(data) * _HELD_OUT // 100
            cuts = (0, len(data) - 2 * held_out, len(data) - held_out, len(data))
            return [[data[a:b]] for a, b in itertools.pairwise(cuts)]
        if not path.is_dir():
            raise ValueError(f"data must be a file or a folder, got {path}")
        pattern = self.pattern or ("*" if self.data else "*.py")
        files: dict[bytes, pathlib.Path] = {}
        for file in path.rglob(pattern):
            name = file.relative_to(path)
            skipped = {"site-packages", "dist-packages", "__pycache__"} & set(name.parts)
            if skipped or any(part.startswith(".") for part in name.parts) or not file.is_file():
                continue
            key = file.read_bytes() if self.once else os.fsencode(name.as_posix())
            files[hashlib.sha256(key).digest()] = file
        documents: list[list[bytes]] = [[], [], []]
        for digest, file in sorted(files.items()):  # by the digests: shuffled, always alike
            if data := file.read_bytes():
                place = int.from_bytes(digest[:8], "big") % 100
                documents[2 if place < _HELD_OUT else 1 if place < 2 * _HELD_OUT else 0].append(
                    data
                )
        return documents
