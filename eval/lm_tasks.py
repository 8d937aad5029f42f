"""Tasks for ``qkv eval lm``: ours over local files of JSON lines, and every task of lm-eval.

The files of ``tasks/`` describe ARC-Easy, PIQA and LAMBADA in lm-eval's own format, with its prompts, so that their
figures compare with those of lm-eval's tasks of the same names. They need no network: the documents come from
``<data>/<task>.jsonl``, one JSON object a line, and nothing is copied into a cache folder.

This module imports lm-eval only inside its functions.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parent / "tasks"
INSTALL = "pip install 'qkv[eval]'"
# The only split that our task files know.
_SPLIT = "test"


def local_tasks() -> dict[str, Path]:
    """Returns our task files by the names of their tasks."""
    return {path.stem: path for path in sorted(TASKS.glob("*.yaml"))}


def check_installed() -> None:
    """Raises ``ValueError`` unless lm-eval is installed; the message says how to get it."""
    if find_spec("lm_eval") is None:
        raise ValueError(f"this evaluation needs the package lm-eval; run: {INSTALL}")


def local_documents(*, file: str, columns: Sequence[str], data: str | None = None, **_: Any) -> dict[str, Any]:
    """Reads the documents of a task from a local file: what lm-eval calls a custom data set.

    Args:
        file: the file's name in the folder ``data``; one JSON object a line.
        columns: the keys that every object must have. ``gold`` is a place in the list ``choices``, the first is 0.
        data: the folder.
        _: whatever else lm-eval knows of the task and the model.

    Returns:
        The split ``test``, a ``datasets.Dataset`` of these columns.

    Raises:
        ValueError: no folder is given, it or the file is missing, or a line is not as it should be; the message says
            which file, line and column.
    """
    from datasets import Dataset

    if data is None:
        raise ValueError(
            f"{file} is read from a local folder; give it with --data DIR (in lm-eval's own command line: "
            '--metadata \'{"data": "DIR"}\')'
        )
    rows = read_documents(check_folder(data) / file, columns)
    return {_SPLIT: Dataset.from_list([{column: row[column] for column in columns} for row in rows])}


def check_folder(data: str | Path) -> Path:
    """Returns the folder of the data.

    Raises:
        ValueError: there is no such folder.
    """
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--data: there is no folder {str(data)!r}")
    return folder


def read_documents(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; empty lines are left out.

    Raises:
        ValueError: the file cannot be read, holds no document, or a line is no object, lacks a column, or has a
            ``gold`` that is no place in its ``choices``.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may hold other line breaks
    except UnicodeDecodeError as error:
        raise ValueError(f"the task file {str(path)!r} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"cannot read the task file {str(path)!r}: {error.strerror}") from error
    documents = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{str(path)!r}, line {number}"
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg})") from error
        if not isinstance(document, dict):
            raise ValueError(f"{where}: not a JSON object but {type(document).__name__}")
        missing = [column for column in columns if column not in document]
        if missing:
            raise ValueError(
                f"{where}: the column {missing[0]!r} is missing; this task needs {', '.join(columns)}, and there is "
                f"{', '.join(document) or 'nothing'}"
            )
        _check_values(document, columns, where)
        documents.append(document)
    if not documents:
        raise ValueError(f"the task file {str(path)!r} holds no documents")
    return documents


def _check_values(document: dict[str, Any], columns: Sequence[str], where: str) -> None:
    for column in columns:
        value = document[column]
        if column == "choices":
            if not (isinstance(value, list) and len(value) > 1 and all(isinstance(choice, str) for choice in value)):
                raise ValueError(f"{where}: 'choices' must be a list of at least two texts")
        elif column == "gold":
            count = len(document.get("choices", ()))
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
                raise ValueError(f"{where}: 'gold' must be the place of a choice, 0 to {count - 1}, not {value!r}")
        elif not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {column!r} must be a text, not {value!r}")


def load_tasks(names: Sequence[str], data: str | None = None, seed: int = 0) -> dict[str, Any]:
    """Loads tasks with their documents, ready for ``lm_eval.evaluate``.

    Args:
        names: with ``data``, ``arc_easy``, ``piqa`` and ``lambada_openai`` are ours; every other name, and without
            ``data`` these as well, is a task, group or tag of lm-eval, whose documents come from the hub.
        data: the folder with the files of our tasks.
        seed: of the choice of examples, for tasks that show some.

    Returns:
        lm-eval's own dictionary: ``tasks`` by name, ``groups`` and ``group_map``.

    Raises:
        ValueError: an unknown task, a folder or file that is not as it should be, or documents that cannot be had.
    """
    check_installed()
    from lm_eval.tasks import TaskManager

    ours = local_tasks() if data is not None else {}
    if data is not None:
        check_folder(data)
    others = [name for name in names if name not in ours]
    with quiet():
        # lm-eval has thousands of task files, and reading them takes a while: not where only ours are wanted.
        manager = TaskManager(
            include_path=str(TASKS) if ours else None,
            include_defaults=bool(others),
            metadata={"data": str(data)} if ours else {},
        )
        for name in others:
            if name not in manager.all_tasks:
                raise ValueError(_unknown(name, manager.all_tasks))
        try:
            loaded: dict[str, Any] = manager.load(list(names))
        except ValueError:
            raise
        except Exception as error:  # of a data set that cannot be had, every library says something else
            raise ValueError(
                f"cannot load {', '.join(names)}: {_first_line(error)} (lm-eval's tasks have their documents on the "
                f"hub; with --data DIR these are read from local files: {', '.join(local_tasks())})"
            ) from error
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=seed)
    return loaded


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps lm-eval from writing: its log, its bars on standard error, and what it prints on standard output."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


def _unknown(name: str, known: Sequence[str]) -> str:
    import difflib

    similar = difflib.get_close_matches(name, known, n=5)
    hint = f"; similar names: {', '.join(similar)}" if similar else ""
    return (
        f"unknown task {name!r}{hint}; with --data DIR there are {', '.join(local_tasks())}, and lm-eval's own are "
        "listed by: lm_eval ls tasks"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
