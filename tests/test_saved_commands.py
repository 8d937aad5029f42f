"""Saved caches on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


@pytest.fixture(autouse=True)
def _one_thread(keep_threads: None) -> None:
    """For tensors this small."""
    torch.set_num_threads(1)


# ---- the command line ------------------------------------------------------------------------------------------------


def answer(command: Command, folder: Path, prompt: str, *more: object) -> tuple[dict[str, Any], str]:
    """The row of results, and what stands on standard error."""
    options = ("-n", 12, "--model", folder, "--json", "-", *more)
    done = command("generate", "-p", prompt, *options)
    assert done.status == 0, done.err
    return json.loads(done.out)["rows"][0], done.err


@pytest.mark.parametrize("format", ["none", "int8", "k5v4"])
def test_generate_goes_on_from_the_cache_of_the_prompts_first_tokens(
    format: str, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    prefix, file = "the quick brown fox jumps over the lazy dog; " * 5, tmp_path / "p.kv"
    more = ("--format", format, "--prefix-cache", file)
    first, said = answer(command, tiny_folder, prefix, *more)
    assert f"saved it to {file}" in said
    assert first["loaded_tokens"] == 0
    content = file.read_bytes()
    again, said = answer(command, tiny_folder, prefix, *more)
    assert f"{first['prompt_tokens'] - 1} tokens from {file}" in said
    assert again["loaded_tokens"] == again["prompt_tokens"] - 1
    assert again["text"] == first["text"]
    longer, said = answer(command, tiny_folder, prefix + "and then", *more)
    assert f"{first['prompt_tokens'] - 1} tokens from {file}" in said
    assert file.read_bytes() == content
    alone, _ = answer(command, tiny_folder, prefix + "and then", "--format", format)
    assert alone["prompt_tokens"] == longer["prompt_tokens"] == longer["loaded_tokens"] + 9
    if format == "none":
        assert longer["text"] == alone["text"]


def test_prompts_that_share_no_beginning_leave_no_file(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    done = command(
        *("generate", "--no-chat", "-p", "Apple", "-p", "Zebra", "-n", 2, "--model", tiny_folder),
        *("--prefix-cache", tmp_path / "p.kv"),
    )
    assert done.status == 0
    assert "the prompts begin with different tokens: there is no prefix to keep" in done.err
    assert not (tmp_path / "p.kv").exists()


@pytest.mark.parametrize("format", ["none", "int8", "dynamic"])
def test_several_prompts_are_answered_on_forks_of_what_they_begin_with(
    format: str, command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    prefix = "a long text about which there are questions. " * 6
    questions = [prefix + "what?", prefix + "where is it?", prefix + "w"]
    ours = format != "dynamic"
    more = ["--format", format, "-n", 8, "--model", tiny_folder, "--json", "-"]
    more += ["--prefix-cache", tmp_path / "p.kv"] if ours else []
    options = [word for question in questions for word in ("-p", question)]
    rows = []
    for said in ("saved it to", "tokens from"):
        done = command("generate", *options, *more)
        assert done.status == 0
        assert said in done.err or not ours
        rows.append(json.loads(done.out)["rows"])
    first, again = rows
    assert [row["text"] for row in first] == [row["text"] for row in again]
    assert [row["prompt_tokens"] - len(question) for row, question in zip(first, questions, strict=True)] == [
        first[0]["prompt_tokens"] - len(questions[0])
    ] * 3
    assert all(row["loaded_tokens"] >= len(prefix) - 1 for row in again) == ours
    if format in ("none", "dynamic"):
        alone = [json.loads(command("generate", "-p", text, *more[:8]).out)["rows"][0]["text"] for text in questions]
        assert [row["text"] for row in first] == alone
    if ours:
        # The file of one prompt holds less than what these three begin with.
        (tmp_path / "p.kv").unlink()
        command("generate", "-p", prefix[:90], *more)
        done = command("generate", *options, *more)
        assert "loaded the cache of" in done.err
        rows = json.loads(done.out)["rows"]
        assert 0 < rows[0]["loaded_tokens"] <= 100
        assert [row["text"] for row in rows] == [row["text"] for row in first] or format != "none"


def test_generate_computes_anew_what_does_not_match_and_says_why(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.kv"
    prompt = "hello, world; " * 9
    for changes, word in (
        ((prompt, "--prefix-cache", file), "saved it to"),
        (("goodbye " + prompt, "--prefix-cache", file), "other tokens"),
        ((prompt, "--prefix-cache", file), "other tokens"),
        ((prompt, "--prefix-cache", file, "--format", "int4"), "format is 'int8' there"),
        ((prompt, "--prefix-cache", file, "--format", "int4", "--dtype", "bfloat16"), "of another dtype"),
        ((prompt[:40], "--prefix-cache", file, "--format", "int4", "--dtype", "bfloat16"), "other tokens"),
    ):
        row, said = answer(command, tiny_folder, *changes)
        assert word in said
        assert "saved it to" in said
        assert row["loaded_tokens"] == 0
    data = file.read_bytes()
    file.write_bytes(data[:-7])
    _, said = answer(command, tiny_folder, prompt[:40], "--prefix-cache", file)
    assert "is damaged" in said


def test_generate_writes_over_no_other_file(command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("do not lose this")
    for more, word in (
        (("--prefix-cache", mine), "no cache that qkv saved"),
        (("--prefix-cache", tmp_path), "is a folder"),
        (("--prefix-cache", tmp_path / "no" / "x"), "there is no folder"),
        (("--prefix-cache", tmp_path / "x", "--format", "dynamic"), "caches of qkv"),
    ):
        done = command("generate", "-p", "hello", "--model", tiny_folder, *more)
        assert done.status == 2
        assert word in done.err.splitlines()[-1]
    assert mine.read_text() == "do not lose this"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
