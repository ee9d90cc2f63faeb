"""Packed rows of bytes for the stacks: Python's own sources through Grain."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

VOCAB_SIZE = 256
_FILES = ("argparse.py", "difflib.py", "inspect.py", "pathlib.py", "tarfile.py", "typing.py")


def documents(longest: int) -> list[dict[str, np.ndarray]]:
    """The functions and classes of some modules of the standard library, cut at ``longest``."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for name in _FILES if (path := root / name).is_file()]
    parts = [part for text in texts for part in text.split(b"\n\n\n") if part]
    return [{"tokens": np.frombuffer(part, np.uint8)[:longest].astype(np.int32)} for part in parts]


def batches(batch_size: int, seq_len: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Batches without end: ``tokens`` and ``tokens_segment_ids`` ``[B, T + 1]``.

    Ids are 1, 2, … for the documents of a row and 0 for the padding behind them.
    """
    source = grain.MapDataset.source(documents(seq_len + 1)).seed(seed).shuffle().repeat()
    packed = FirstFitPackIterDataset(
        source.to_iter_dataset(),
        length_struct={"tokens": seq_len + 1},
        num_packing_bins=batch_size,
        seed=seed,
    )
    return iter(packed.batch(batch_size, drop_remainder=True))
