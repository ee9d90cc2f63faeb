"""Reads a text of any length in bounded memory and prints how much each line surprised the model.

    python examples/stream.py --run=runs/lm --file=huge.log --threshold=3

A line is printed as soon as it has been read: bits, bits per byte, and its beginning. ``--file=-``
reads standard input. ``--session=FILE`` saves where it is every ``--save_every`` blocks, and goes
on from there: killed at any time, at most that many blocks are read again.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import BinaryIO

from absl import app, flags
from commands import check_arguments, replaceable, said
from lm import Line, Reader, describe
from training import load_model

_RUN = flags.DEFINE_string("run", "runs/lm", "Directory of a run of train_lm.py.")
_FILE = flags.DEFINE_string("file", None, "What to read; - for standard input.", required=True)
_BLOCK = flags.DEFINE_integer("block", 256, "Bytes read at a time.", lower_bound=1)
_THRESHOLD = flags.DEFINE_float("threshold", 0, "Print lines of at least so many bits per byte.")
_WIDTH = flags.DEFINE_integer("width", 100, "Characters of a line that are printed.", lower_bound=1)
_SESSION = flags.DEFINE_string("session", None, "File to go on from and to save to.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 64, "Blocks between saves.", lower_bound=1)


def main(argv: list[str]) -> None:
    """Reads."""
    check_arguments("stream", argv)
    try:
        if _SESSION.value is not None:
            replaceable(_SESSION.value, "session")
        if _FILE.value == "-":
            _stream(sys.stdin.buffer)
        else:
            with open(_FILE.value, "rb") as file:
                _stream(file)
    except (ValueError, OSError) as error:
        sys.exit(f"stream: {said(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def _stream(file: BinaryIO) -> None:
    model, config = load_model(_RUN.value)
    if config.capacity is not None:
        raise ValueError(
            f"the model can keep {config.capacity} bytes of a text: train one with "
            "--layers of vla alone"
        )
    reader = Reader(model, _BLOCK.value)
    session = _SESSION.value
    if session is not None and pathlib.Path(session).exists():
        reader.load(session)
        if not file.seekable():
            raise ValueError("--session can only go on from a --file that can be read again")
        file.seek(reader.bytes_read)
    start, first, blocks, bits = time.perf_counter(), reader.bytes_read, 0, 0.0
    while data := file.read(_BLOCK.value):
        for line in reader.read(data):
            bits += line.bits
            _show(line)
        blocks += 1
        if session is not None and blocks % _SAVE_EVERY.value == 0:
            reader.save(session)
    if session is not None:
        reader.save(session)
    for line in reader.finish():
        bits += line.bits
        _show(line)
    read, seconds = reader.bytes_read - first, time.perf_counter() - start
    print(
        f"{read:,} bytes, {bits / max(read, 1):.3f} bits per byte, "
        f"{read / seconds:,.0f} bytes per second, {describe(model, config, reader.state)}",
        file=sys.stderr,
    )


def _show(line: Line) -> None:
    if line.bits / line.size >= _THRESHOLD.value:
        text = line.text.decode("utf-8", "replace")[: _WIDTH.value]
        print(
            f"{line.number:>8} {line.bits:>8.1f} {line.bits / line.size:>6.2f}  {text}", flush=True
        )


if __name__ == "__main__":
    app.run(main)
