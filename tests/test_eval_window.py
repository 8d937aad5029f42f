"""``qkv eval window``: the perplexity of a text far longer than a cache that keeps a window of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import PROSE, Command
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv_eval.window import WindowSettings, run


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text(PROSE)
    return tmp_path / "prose.txt"


def test_while_nothing_has_left_all_ways_say_the_same(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = WindowSettings(
        PROSE, ("window", "no-sinks", "recomputed", "whole"), "none", window=60, tokens=200, block=50, chunk=25
    )
    rows = {row["way"]: row for row in run(tiny_model, tiny_tokenizer, settings)["rows"]}
    for way in ("window", "no-sinks", "recomputed"):
        assert rows[way]["blocks"][0] == pytest.approx(rows["whole"]["blocks"][0], rel=1e-5)
        assert rows[way]["blocks"][-1] != pytest.approx(rows["whole"]["blocks"][-1], rel=1e-5)
    for row in rows.values():
        assert math.log(row["ppl"]) == pytest.approx(sum(map(math.log, row["blocks"])) / 4, rel=1e-6)
    late = [math.log(a / b) for a, b in zip(*(rows[w]["blocks"][2:] for w in ("window", "recomputed")), strict=True)]
    assert math.log(rows["window"]["over_recomputed"]) == pytest.approx(sum(late) / 2)
    assert rows["window"]["kv_bytes"] < rows["whole"]["kv_bytes"]
    assert rows["recomputed"]["kv_bytes"] is None
    assert tiny_model.config._attn_implementation != qkv.layers.ATTENTION_NAME


def test_the_command_shows_at_most_ten_blocks_and_writes_all(command: Command, tiny_folder: Path, prose: Path) -> None:
    words = ("eval", "window", "--model", tiny_folder, "--text", prose, "--tokens", 240, "--block", 10, "--window", 40)
    done = command(*words, "--ways", "window,recomputed", "--format", "none")
    assert done.status == 0
    assert "Of 24 blocks, 8 by the token that they begin with" in done.out
    (head,) = [line.split() for line in done.out.splitlines() if line.split()[:1] == ["cache"]]
    assert head == ["cache", *map(str, range(20, 240, 30)), "all", "ratio", "MB", "s"]
    rows = json.loads(command(*words, "--ways", "window", "--json", "-").out)["rows"]
    assert [len(row["blocks"]) for row in rows] == [24]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ways", "nothing"], ["'nothing'", "recomputed"]),
        (["--block", 300], ["two blocks", "block=300"]),
        (["--tokens", 10**7], ["tokens=10000000"]),
    ],
    ids=str,
)
def test_bad_input_costs_one_line(
    more: list[object], words: list[str], command: Command, tiny_folder: Path, prose: Path
) -> None:
    done = command("eval", "window", "--model", tiny_folder, "--text", prose, "--tokens", 400, *more)
    assert done.status == 2
    assert all(word in done.err.splitlines()[-1] for word in words)
