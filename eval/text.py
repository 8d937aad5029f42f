"""The text to score: a file, or prose that every Python carries; cut into windows of tokens."""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Text:
    """A text with its name for tables and results."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """The digest of the text in UTF-8, since the same name need not mean the same text."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: str | None = None) -> Text:
    """Reads a UTF-8 text file, or without a path returns the embedded text.

    Raises:
        ValueError: the file is missing, is not UTF-8, or holds only white space.
    """
    if path is None:
        return embedded_text()
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text file {path!r} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"cannot read the text file {path!r}: {error.strerror}") from error
    if not content.strip():
        raise ValueError(f"the text file {path!r} is empty")
    return Text(Path(path).name, content)


def load_dataset_text(name: str) -> Text:
    """Reads a text out of a data set of the Hugging Face hub, or of a folder in its form.

    Args:
        name: ``NAME``, ``NAME:CONFIG``, ``NAME:CONFIG:SPLIT`` or ``NAME:CONFIG:SPLIT:COLUMN``; what is empty or left
            out is the data set's only configuration, the split ``test``, and the column ``text``. Rows are joined by
            blank lines.

    Raises:
        ValueError: the package ``datasets`` is missing, or the data set, its split or its column.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError("a data set by name needs the package datasets; run: pip install 'qkv[eval]'") from error
    repository, config, split, column = (*name.split(":"), "", "", "")[:4]
    split, column = split or "test", column or "text"
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # of many kinds: no network, no such set, no such split
        raise ValueError(f"cannot load the data set {name!r}: {' '.join(str(error).split())}") from error
    if column not in rows.column_names:
        raise ValueError(f"the data set {name!r} has no column {column!r}; it has {', '.join(rows.column_names)}")
    content = "\n\n".join(text for text in rows[column] if text.strip())
    if not content:
        raise ValueError(f"the data set {name!r} holds no text in {column!r}")
    return Text(name, content)


def embedded_text() -> Text:
    """Returns the running prose of Python's own language reference, from the module ``pydoc_data.topics``.

    About 300,000 characters of English without code, grammar or headings, each paragraph once. The text changes a
    little from one Python to the next, so figures compare within one version only; the name says which one it is.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            if _is_prose(block.splitlines()):
                paragraphs[" ".join(block.split())] = None
    return Text(f"Python {platform.python_version()} reference", "\n\n".join(paragraphs))


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, text: Text, window: int, limit: int | None = None, stride: int | None = None
) -> torch.Tensor:
    """Cuts a text into windows of tokens.

    Each window begins with the token that the tokenizer puts before a text, if it does that (Gemma needs it); what is
    left over at the end is dropped.

    Args:
        tokenizer: the model's.
        text: what to cut.
        window: tokens in a window, the token before the text included.
        limit: windows at most; None: all.
        stride: tokens from the start of a window to that of the next; None: they do not overlap.

    Returns:
        int64 ``[windows, window]``.

    Raises:
        ValueError: the text is shorter than one window, or the stride longer.
    """
    if window < 2:
        raise ValueError(f"window={window} is too short; a window needs at least 2 tokens")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves nothing to score; use 1 or more windows")
    tokens = _encode(tokenizer, text.content)
    first = _encode(tokenizer, "", add_special_tokens=True)[:1]
    held = window - len(first)
    step = stride if stride is not None else held
    if not 1 <= step <= held:
        raise ValueError(f"stride={stride} must be from 1 to {held}, the tokens of text in a window")
    count = (len(tokens) - held) // step + 1
    if len(tokens) < held:
        raise ValueError(
            f"the text {text.name!r} has {len(tokens)} tokens, less than one window of {window}; "
            "use a longer text or a shorter window"
        )
    if limit is not None:
        count = min(count, limit)
    windows = torch.tensor(tokens, dtype=torch.int64).unfold(0, held, step)[:count]
    if first:
        windows = torch.cat([torch.tensor(first, dtype=torch.int64).expand(count, 1), windows], dim=1)
    return windows


def _encode(tokenizer: PreTrainedTokenizerBase, content: str, add_special_tokens: bool = False) -> list[int]:
    # verbose: a whole text is longer than the model's limit, of which the tokenizer would warn.
    encoded = tokenizer(content, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])


def _is_prose(lines: list[str]) -> bool:
    if any(line.startswith("    ") or "::=" in line or ">>>" in line for line in lines):
        return False
    if any(line.strip() and not re.search(r"\w", line) for line in lines):  # the line under a heading
        return False
    words = " ".join(lines).split()
    return len(words) >= 8 and words[-1][-1] in ".:;"
