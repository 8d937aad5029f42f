"""The results file: one JSON object on a line for each finished cell, whole after a kill or on a full disk.

``qkv_eval.sweep`` says what a line holds. A line is written in one go and flushed to the disk when its cell is
finished. A last line that was cut, by a kill or by a full disk, is found when the file is next opened, reported, and
cut off; it was no finished cell.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkv.cli.finite import finite

# How every line begins, which tells a line that was cut from a file that is something else.
_BEGINNING = b'{"key": "'
_REQUIRED = ("key", "model", "cache", "evaluation", "rows")


def read_results(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the finished cells of a results file, and leaves the file as it is.

    Returns:
        The rows, the last one of each key; and one line for each thing that was wrong: half-written or damaged lines
        are left out, and what is before and after them is read.

    Raises:
        ValueError: the file cannot be read, or is no results file of a sweep.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the results {str(path)!r}: {error.strerror}") from error
    lines, problems = _parse(str(path), content)
    return _last_of_each_key(row for row, _ in lines if row is not None), problems


def _parse(path: str, content: bytes) -> tuple[list[tuple[dict[str, Any] | None, bytes]], list[str]]:
    """Splits a results file into (row, or None if it is damaged; the line without its end)."""
    lines: list[tuple[dict[str, Any] | None, bytes]] = []
    problems = []
    raw = content.split(b"\n")
    for number, line in enumerate(raw, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            row = None
        if row is not None and not (isinstance(row, dict) and all(name in row for name in _REQUIRED)):
            raise ValueError(f"{path!r} is no results file of a sweep: line {number} is something else")
        if row is None and number == len(raw):
            problems.append(f"the last line of {path!r} is half-written and is left out ({len(line)} bytes)")
        elif row is None:
            problems.append(f"line {number} of {path!r} is damaged and is left out")
        lines.append((row, line))
    if lines and all(row is None for row, _ in lines):
        first = lines[0][1]
        if len(lines) > 1 or not (first.startswith(_BEGINNING) or _BEGINNING.startswith(first)):
            raise ValueError(f"{path!r} is no results file of a sweep: it holds no line of JSON with a cell")
    return lines, problems


def _last_of_each_key(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({row["key"]: row for row in rows}.values())


class ResultsFile:
    """The results file of a sweep, open for appending; use it as a context manager.

    Opening it repairs it: a half-written last line is cut off, and damaged lines elsewhere are moved into a file beside
    it, ``<name>.damaged``, so that pandas and duckdb can read what remains.

    Attributes:
        rows: the finished cells by key.
        problems: a line for each thing that was repaired.

    Raises:
        ValueError: the file cannot be written, is no results file of a sweep, or another sweep has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self.rows: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(path)
            self._repair()
        except OSError as error:
            self.close()
            raise ValueError(f"cannot write the results {str(path)!r}: {error.strerror}") from error
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, which lets another sweep open it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a finished cell, and returns when it is on the disk.

        Raises:
            ValueError: it cannot be written, because the disk is full for one. The file is as it was before.
            TypeError: there is something in the row that JSON has no word for.
        """
        cell = finite(row)
        line = json.dumps(cell, allow_nan=False).encode() + b"\n"
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            _write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):  # if this fails too, the next sweep finds half a line and cuts it off
                os.ftruncate(self._file, end)
                os.fsync(self._file)
            advice = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to it"
            raise ValueError(
                f"cannot write the results {str(self.path)!r}: {error.strerror}; the {len(self.rows)} finished cells "
                f"in it are whole; {advice} and run the same command again"
            ) from error
        self.rows[cell["key"]] = cell

    def _repair(self) -> None:
        content = self.path.read_bytes()
        lines, self.problems = _parse(str(self.path), content)
        self.rows = {row["key"]: row for row, _ in lines if row is not None}
        damaged = [line for row, line in lines if row is None]
        is_open = bool(lines) and not content.endswith(b"\n")
        if is_open and lines[-1][0] is None:
            os.ftruncate(self._file, content.rfind(b"\n") + 1)
            damaged.pop()
        elif is_open:
            _write(self._file, b"\n")  # whole, but for the end of the line
        if damaged:
            self._move_away(damaged, [line for row, line in lines if row is not None])
        os.fsync(self._file)

    def _move_away(self, damaged: Sequence[bytes], whole: Sequence[bytes]) -> None:
        with self.path.with_name(f"{self.path.name}.damaged").open("ab") as file:
            file.writelines(line + b"\n" for line in damaged)
        repaired = self.path.with_name(f".{self.path.name}.writing")
        with repaired.open("wb") as file:
            file.writelines(line + b"\n" for line in whole)
            file.flush()
            os.fsync(file.fileno())
        repaired.replace(self.path)
        self.close()
        self._file = _open_locked(self.path)


def _open_locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"another sweep is writing to {str(path)!r}; wait for it, or use another output") from None
    except OSError:  # a file system without locks
        pass
    return file


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]
