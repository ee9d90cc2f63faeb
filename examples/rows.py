"""Rows of an experiment in a directory: ``runs.csv``, and ``cells.jsonl`` with what rows share.

A line of ``runs.csv`` is a row: the columns of its `Table`, of which those that are not text are
JSON (numbers, ``null``, lists), empty where the row has no such entry. All else of a row, such as
settings, device and versions, is a line of ``cells.jsonl``, written once and named by its key in
the column ``cell``. Both files only grow, each by one write; a line that a kill cut short is no
line, and ``cells.jsonl`` is written first, so that every row finds its cell.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from vla_jax.files import replacing

Row = dict[str, Any]


def digest(data: Any) -> str:
    """Identifies JSON data, whatever the order of its keys."""
    return hashlib.sha1(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Table:
    """How the rows of an experiment are kept.

    Attributes:
      columns: what each row has of its own.
      text: those of the columns that are strings.
      name: of the CSV file.
      shared: whether rows have more than their columns, which is kept in ``cells.jsonl``.
    """

    columns: tuple[str, ...]
    text: tuple[str, ...] = ()
    name: str = "runs"
    shared: bool = True

    def path(self, directory: pathlib.Path) -> pathlib.Path:
        """The CSV file."""
        return directory / f"{self.name}.csv"

    def read(self, directory: pathlib.Path) -> list[Row]:
        """The rows that are there, in the order in which they were appended.

        Raises:
          ValueError: if the file has other columns or a damaged line, or names a cell that is not
        there.
        """
        path = self.path(directory)
        lines = list(csv.reader(_lines(path)))
        if not lines:
            return []
        if tuple(lines[0]) != self._header:
            raise ValueError(
                f"{path} must have the columns {', '.join(self._header)}; "
                f"found {', '.join(lines[0])}"
            )
        cells = self._cells(directory)
        rows = []
        for number, line in enumerate(lines[1:], 2):
            try:
                row = {
                    name: field if name in self._text else json.loads(field)
                    for name, field in zip(self._header, line, strict=True)
                    if field
                }
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged at line {number} ({error}): remove that line, and its run "
                    "is made again"
                ) from error
            if self.shared:
                key = row.pop("cell")
                if key not in cells:
                    raise ValueError(f"{path} names the cell {key}, which cells.jsonl has not")
                row = cells[key] | row
            rows.append(row)
        return rows

    def append(self, directory: pathlib.Path, rows: Sequence[Row]) -> None:
        """Adds rows, in one write."""
        directory.mkdir(parents=True, exist_ok=True)
        known = self._cells(directory)
        cells: dict[str, Row] = {}
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        if not _lines(self.path(directory)):
            writer.writerow(self._header)
        for row in rows:
            line = {n: x if n in self.text else _json(x) for n, x in row.items()}
            if self.shared:
                cell = {n: x for n, x in row.items() if n not in self.columns}
                line["cell"] = digest(cell)
                cells[line["cell"]] = cell
            writer.writerow([line.get(name, "") for name in self._header])
        new = [_json({"cell": key} | x) + "\n" for key, x in cells.items() if key not in known]
        if new:
            _append(directory / "cells.jsonl", "".join(new))
        _append(self.path(directory), file.getvalue())

    @property
    def _header(self) -> tuple[str, ...]:
        return ("cell", *self.columns) if self.shared else self.columns

    @property
    def _text(self) -> tuple[str, ...]:
        return ("cell", *self.text)

    def _cells(self, directory: pathlib.Path) -> dict[str, Row]:
        cells = [json.loads(line) for line in _lines(directory / "cells.jsonl")]
        return {cell.pop("cell"): cell for cell in cells}


def _json(data: Any) -> str:
    return json.dumps(data, allow_nan=False, ensure_ascii=False)


def _lines(path: pathlib.Path) -> list[str]:
    """The whole lines of a file; none if there is no file."""
    return path.read_text("utf-8").split("\n")[:-1] if path.exists() else []


def _append(path: pathlib.Path, text: str) -> None:
    """Appends in one write; what an earlier write left without an end is cut off first."""
    if path.exists():
        old = path.read_bytes()
        if old and not old.endswith(b"\n"):
            with replacing(path) as temporary:
                temporary.write_bytes(old[: old.rfind(b"\n") + 1])
    data = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.write(file, data) != len(data):
            raise OSError(f"{path} could not be written whole: is the disk full?")
        os.fsync(file)
    finally:
        os.close(file)
