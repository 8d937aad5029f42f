"""The `qkv` command: what it prints where, how it exits, and that it starts quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command

from qkv.cli import app
from qkv.cli.options import parse_ints, parse_list, parse_shapes


def assert_refused(done: SimpleNamespace, *words: str) -> None:
    """Assert that a command ended with status 2, one line on standard error, and nothing on standard output."""
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("qkv: error: ")
    for word in words:
        assert word in done.err


def test_version_is_that_of_the_installed_package(command: Command) -> None:
    done = command("--version")
    assert (done.status, done.out) == (0, f"qkv {version('qkv')}\n")


def test_help_lists_the_commands_of_both_packages(command: Command) -> None:
    done = command("--help")
    assert done.status == 0
    for name in ("generate", "compare", "bench"):
        assert name in done.out


def test_a_bare_command_shows_the_help_and_exits_2(command: Command) -> None:
    done = command()
    assert done.status == 2
    assert "Usage: qkv" in done.out


def test_the_command_line_is_built_without_importing_transformers() -> None:
    code = "import sys; from qkv.cli.app import build_app; build_app(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        (["generate"], ["--prompt"]),
        (["generate", "-p", "hi", "-n", "0"], ["--max-new-tokens"]),
        (["generate", "-p", "hi", "-f", "int9"], ["int9", "int8", "int4_rot", "k5v4", "dynamic", "hf-hqq4"]),
        (["generate", "-p", "hi", "-f", "missing.yaml"], ["missing.yaml"]),
        (["generate", "-p", "hi", "--model", "/no/such/model"], ["/no/such/model", "smollm2"]),
        (["generate", "-p", "hi", "--model", "model.gguf"], ["model.gguf"]),
        (["generate", "-p", "hi", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["generate", "-p", "  "], ["prompt"]),
        (["compare", "--formats", ","], ["--formats"]),
        (["compare", "--text", "/no/such/text"], ["/no/such/text"]),
        (["compare", "--json", "/no/such/folder/x.json"], ["--json", "/no/such/folder"]),
        (["compare", "--threads", "0"], ["--threads"]),
        (["bench", "decode", "--batch", "1,x"], ["--batch", "'x'"]),
        (["bench", "decode", "--caches", "int9"], ["int9"]),
        (["bench", "kernel", "--shape", "3x3"], ["--shape", "'3x3'"]),
        (["bench", "kernel", "--formats", "dynamic"], ["dynamic"]),
        (["bench", "kernel", "--kv-len", "0"], ["--kv-len"]),
    ],
)
def test_bad_arguments_exit_2_with_one_clear_line(
    command: Command, tiny_folder: Path, arguments: list[str], words: list[str]
) -> None:
    if "--model" not in arguments and arguments[0] != "bench" and "nonsense" not in arguments:
        arguments = [*arguments, "--model", str(tiny_folder)]
    assert_refused(command(*arguments), *words)


def test_a_prompt_too_long_for_the_model_is_refused(command: Command, tiny_folder: Path) -> None:
    done = command("generate", "-p", "a" * 1020, "-n", 10, "--model", tiny_folder)
    assert done.status == 2
    assert "1024" in done.err.splitlines()[-1]


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "k5v4"])
def test_generate_writes_text_and_results(format: str, command: Command, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    prompt = "hello" * 100
    done = command("generate", "-p", prompt, "-n", 8, "--model", tiny_folder, "--format", format, "--json", file)
    assert done.status == 0
    results = json.loads(file.read_text())
    (row,) = results["rows"]
    assert done.out == row["text"] + "\n"
    assert row["format"] == format
    assert row["prompt_tokens"] == 500
    assert 1 <= row["new_tokens"] <= 8
    assert 0 < row["kv_bytes"] < 2 * 2 * 508 * 16 * 4 / 2  # layers, keys and values, tokens, channels: half of float32
    assert results["meta"]["model"] == str(tiny_folder)


def test_streamed_text_is_the_text(command: Command, tiny_folder: Path) -> None:
    arguments = ["generate", "-p", "h\u00e9llo", "-n", "40", "--model", tiny_folder, "--format", "none"]
    whole, streamed = command(*arguments), command(*arguments, "--stream")
    assert whole.out.strip()
    assert streamed.out == whole.out


def test_json_to_standard_output_stands_there_alone(command: Command, tiny_folder: Path) -> None:
    done = command("generate", "-p", "hello", "-n", 4, "--model", tiny_folder, "--stream", "--json", "-")
    (row,) = json.loads(done.out)["rows"]
    assert row["text"] in done.err


def test_the_prompt_can_come_from_standard_input(
    command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "from a pipe"))
    done = command("generate", "-p", "-", "-n", 2, "--model", tiny_folder, "--json", "-")
    assert json.loads(done.out)["rows"][0]["prompt_tokens"] == len("from a pipe")


def test_a_seed_fixes_what_is_sampled(command: Command, tiny_folder: Path) -> None:
    arguments = ["generate", "-p", "x", "-n", 24, "--model", tiny_folder, "--temperature", 1.5, "--seed"]
    assert command(*arguments, 1).out == command(*arguments, 1).out
    assert command(*arguments, 1).out != command(*arguments, 2).out


def test_threads_are_set_and_reported(command: Command, tiny_folder: Path) -> None:
    done = command("generate", "-p", "x", "-n", 1, "--model", tiny_folder, "--threads", 1, "--json", "-")
    assert json.loads(done.out)["meta"]["threads"] == 1
    assert torch.get_num_threads() == 1


def test_meta_says_what_the_figures_depend_on(command: Command, tiny_folder: Path) -> None:
    done = command("generate", "-p", "x", "-n", 1, "--model", tiny_folder, "--dtype", "bfloat16", "--json", "-")
    meta = json.loads(done.out)["meta"]
    assert meta["dtype"] == "bfloat16"
    assert meta["torch"] == torch.__version__
    assert meta["version"] == version("qkv")
    for key in ("commit", "model", "transformers", "processor", "threads", "date", "seed"):
        assert key in meta


def test_a_figure_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    from qkv.cli.run import Run

    file = tmp_path / "out.json"
    Run(str(file), 0, None).finish([{"a": float("inf"), "b": [float("nan"), 1.5]}])
    assert json.loads(file.read_text())["rows"] == [{"a": None, "b": [None, 1.5]}]
    assert list(tmp_path.iterdir()) == [file]


def test_a_command_that_cannot_be_loaded_costs_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("its author forgot something")

    monkeypatch.setattr(app, "entry_points", lambda group: [SimpleNamespace(name="broken", load=fail)])
    done = command("--help")
    assert done.status == 0
    assert "generate" in done.out
    assert done.err.splitlines() == ["qkv: error: the command 'broken' is left out: its author forgot something"]


def test_lists_keep_their_order_and_lose_repeats() -> None:
    assert parse_list(" b, a,b,", "--x") == ("b", "a")
    assert parse_ints("4096,128", "--x") == (4096, 128)
    assert parse_shapes("3x3x64,8x4x128", "--x") == ((3, 3, 64), (8, 4, 128))


@pytest.mark.parametrize(("parse", "text"), [(parse_ints, "1.5"), (parse_shapes, "0x3x64"), (parse_shapes, "axbxc")])
def test_a_bad_item_of_a_list_is_named(parse: Callable[[str, str], Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"--x: '{text}'"):
        parse(text, "--x")
