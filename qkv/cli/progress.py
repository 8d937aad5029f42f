"""Progress of long work on standard error: live bars on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Reports progress of named stages; an instance is called as ``progress(what, done, total)``.

    That call is all that the library functions know of it. A stage begins with its first call and ends when ``done``
    reaches ``total``; stages may overlap. Use the instance as a context manager.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began: dict[str, float] = {}
        self._spoke: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # no thread of ours may run while something is timed
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.console.is_terminal:
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(self._tasks[what], completed=done, total=total, refresh=True)
        else:
            self._write_line(what, done, total)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Reports work that cannot be counted, such as loading a model, by a line before and after it."""
        self._write_line(what, 0, 1)
        yield
        self._write_line(what, 1, 1)

    def _write_line(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what not in self._began:
            self._began[what] = self._spoke[what] = now
            self._print(f"{what} ...")
        if done >= total:
            self._print(f"{what}: done in {now - self._began.pop(what):.0f} s")
        elif now - self._spoke[what] >= _SECONDS_BETWEEN_LINES:
            self._spoke[what] = now
            self._print(f"{what}: {done} of {total}")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
