"""The text to score and its windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import make_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from qkv_eval.text import Text, cut_windows, embedded_text, load_text


def test_the_embedded_text_is_long_prose_that_does_not_repeat() -> None:
    text = embedded_text()
    paragraphs = text.content.split("\n\n")
    assert len(text.content) > 200_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any(mark in text.content for mark in ("::=", ">>>", "*****"))
    assert embedded_text() == text


def test_windows_hold_the_text_in_order(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    windows = cut_windows(tiny_tokenizer, Text("letters", "abcdefghij"), window=3)
    assert windows.shape == (3, 3)
    assert tiny_tokenizer.decode(windows.flatten()) == "abcdefghi"


def test_a_limit_takes_the_first_windows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    windows = cut_windows(tiny_tokenizer, Text("letters", "abcdefghij"), window=2, limit=2)
    assert tiny_tokenizer.decode(windows.flatten()) == "abcd"


def test_each_window_begins_with_the_token_that_the_tokenizer_puts_before_a_text() -> None:
    tokenizer = make_tiny_tokenizer(begins_with_bos=True)
    windows = cut_windows(tokenizer, Text("letters", "abcdef"), window=4)
    assert windows[:, 0].tolist() == [tokenizer.bos_token_id] * 2
    assert tokenizer.decode(windows[:, 1:].flatten()) == "abcdef"


def test_a_text_shorter_than_a_window_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="'letters' has 3 tokens, less than one window of 4"):
        cut_windows(tiny_tokenizer, Text("letters", "abc"), window=4)


@pytest.mark.parametrize(("window", "limit", "word"), [(1, None, "window=1"), (2, 0, "limit=0")])
def test_sizes_that_leave_nothing_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, window: int, limit: int | None, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        cut_windows(tiny_tokenizer, Text("letters", "abc"), window, limit)


def test_a_file_is_named_and_told_apart_by_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    one = load_text(str(file))
    file.write_text("two")
    two = load_text(str(file))
    assert one.name == two.name == "a.txt"
    assert one.sha256 != two.sha256


@pytest.mark.parametrize(
    ("contents", "message"), [(b" \n", "is empty"), (b"caf\xe9", r"not UTF-8 \(byte 3\)"), (None, "No such file")]
)
def test_a_file_without_text_is_refused(tmp_path: Path, contents: bytes | None, message: str) -> None:
    file = tmp_path / "a.txt"
    if contents is not None:
        file.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        load_text(str(file))
