"""One run of a command: its set-up, what it prints where, and its results as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from qkv.cli.finite import finite
from qkv.cli.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Run:
    """One run of a command.

    Args:
        json_path: the file for the results, ``-`` for standard output, or None. It is checked at once, not after the
            work.
        seed: of torch's random numbers.
        threads: of torch; None: its own choice.

    Attributes:
        out: the console for people, which is standard error if the JSON goes to standard output.
        progress: reports on standard error.

    Raises:
        ValueError: ``json_path`` cannot be written.
    """

    def __init__(self, json_path: str | None, seed: int, threads: int | None) -> None:
        self._json = json_path
        self._setup: dict[str, Any] = {}
        if json_path not in (None, "-"):
            _check_writable(Path(str(json_path)))
        self.out = _console(stderr=json_path == "-")
        self.progress = Progress(Console(stderr=True))

        import huggingface_hub
        import torch
        import transformers

        torch.manual_seed(seed)
        if threads is not None:
            torch.set_num_threads(threads)
        self._setup.update(seed=seed)
        # Weights load in no time, and downloads keep their bars.
        transformers.logging.disable_progress_bar()
        huggingface_hub.utils.enable_progress_bars()
        transformers.logging.set_verbosity_error()

    @property
    def threads(self) -> int:
        """The processor threads that torch uses."""
        import torch

        return torch.get_num_threads()

    def load_model(self, name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the model of this run; see ``qkv.models.load_model``."""
        from qkv.models import check_dtype, find_model, load_model

        check_dtype(dtype)
        find_model(name)
        # No live bar: what a hub or a GGUF reader shows of its own would run through it.
        with self.progress.step(f"loading {name}"):
            loaded = load_model(name, dtype)
        self._setup.update(model=name, dtype=dtype)
        return loaded

    def table(
        self, title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], caption: str = ""
    ) -> None:
        """Prints rows as a table. ``columns``: key of a row -> "heading", or "heading|format spec" for numbers."""
        table = Table(
            title=title,
            caption=caption or None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for heading in columns.values():
            name, _, spec = heading.partition("|")
            table.add_column(name, justify="right" if spec else "left", no_wrap=True)
        for row in rows:
            cells = []
            for key, heading in columns.items():
                value, spec = row.get(key), heading.partition("|")[2]
                cells.append("-" if value is None else format(value, spec) if spec else str(value))
            table.add_row(*cells)
        self.out.print(table)

    def warn(self, message: str) -> None:
        """Prints one line on standard error."""
        self.progress.console.print(f"note: {message}", markup=False, highlight=False, soft_wrap=True)

    def finish(self, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        """Writes the results as JSON where ``--json`` says, if it was given.

        Args:
            rows: the rows of the table.
            more: further results beside ``rows``; ``meta``, a dictionary, goes into the results' own ``meta``.

        A number that is not finite becomes null, since JSON has no word for it.

        Raises:
            ValueError: the file cannot be written.
        """
        if self._json is None:
            return
        results = {"meta": {**describe_setup(), **self._setup, **more.pop("meta", {})}, "rows": list(rows), **more}
        text = json.dumps(finite(results), indent=2, allow_nan=False) + "\n"
        if self._json == "-":
            sys.stdout.write(text)
            return
        path = Path(self._json)
        unfinished = path.with_name(f".{path.name}.writing")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise ValueError(f"cannot write {self._json!r}: {error.strerror}") from error
        self.progress.console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _console(stderr: bool) -> Console:
    """Returns a console that does not fold tables at 80 columns where nobody has said how wide the output is."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def describe_setup() -> dict[str, Any]:
    """Returns what a figure depends on besides the work: versions, processor, threads, date (UTC, ISO 8601)."""
    import platform
    from datetime import UTC, datetime
    from importlib.metadata import version

    import torch
    import transformers

    return {
        "version": version("qkv"),
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Returns the commit of the work tree of this file, with ``-dirty`` if it is changed; None outside of one."""
    import subprocess

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    import platform

    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _check_writable(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"--json: {str(path)!r} is a folder; give a file")
    if not folder.is_dir():
        raise ValueError(f"--json: there is no folder {str(folder)!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--json: {str(path)!r} may not be written")
