"""The command ``qkv plan``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Command

import qkv
from qkv.model_shape import ModelShape, load_config
from qkv.named_caches import as_argument
from qkv.plan import CachePlan
from qkv.shapes import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")


def test_the_command_prints_a_table_and_writes_its_rows(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["--context", 4096, "--batch", 2, "--memory", "24GiB", "--formats", "none,k5v4", "--json", file]
    done = command("plan", "llama-3.1-8b", *arguments)
    assert done.status == 0
    assert "8.03 billion weights, 16.06 GB in bfloat16; layers: 32 full" in done.out
    assert "context in 24GiB" in done.out
    results = json.loads(file.read_text())
    none, k5v4 = results["rows"]
    figures = ["bits_per_value", "bytes_per_token", "kv_bytes", "max_context", "max_batch", "read_ms_per_token"]
    figures += ["memory_bytes", "file_bytes", "reading_bytes", "window", "refused"]
    assert list(none) == ["format", "context", "batch", *figures]
    assert none["kv_bytes"] == 2 * 4096 * 131072
    assert k5v4["kv_bytes"] == CachePlan(ModelShape.of(load_config("llama-3.1-8b")), "k5v4").nbytes(4096, 2)
    assert f"{k5v4['max_context']:,}" in done.out
    meta = results["meta"]
    assert meta["weights_bytes"] == meta["parameters"] * 2 == 2 * 8030261248
    assert (meta["layers"], meta["memory_bytes"], meta["dtype"]) == ({"full": 32}, 24 << 30, "bfloat16")


def test_a_folder_is_planned_as_its_model_fills_its_cache(command: Command, tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    cache = qkv.QKVCache(model.config, "int8")
    with torch.no_grad():
        model(torch.zeros(1, 200, dtype=torch.long), **as_argument(cache))
    arguments = ["--context", 200, "--formats", "int8", "--json", "-"]
    for name in ([tiny_folder], ["--model", tiny_folder]):
        results = json.loads(command("plan", *name, *arguments).out)
        assert results["rows"][0]["kv_bytes"] == cache.nbytes()
        assert results["rows"][0]["max_context"] is None
        assert results["meta"]["parameters"] == sum(x.numel() for x in model.parameters())


def test_the_embedded_model_needs_no_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.model_shape.find_model", None)
    done = command("plan", "--formats", "none", "--dtype", "float32")
    assert "smollm2: 0.13 billion weights, 0.54 GB in float32" in done.out
    assert "46,080" in done.out  # 30 layers x 2 x 3 heads x 64 x 4 bytes


def test_quantized_weights_leave_more_room(command: Command) -> None:
    arguments = ["plan", "llama-2-7b", "--memory", "24GiB", "--formats", "none", "--json", "-"]
    rows = [json.loads(command(*arguments, *more).out)["rows"][0] for more in ([], ["--weights-dtype", "int4"])]
    assert rows[1]["max_context"] - rows[0]["max_context"] == pytest.approx(6738415616 * 1.5 / 524288, abs=256)
    assert rows[0]["kv_bytes"] == rows[1]["kv_bytes"]


def test_weights_that_do_not_fit_and_positions_that_there_are_not_are_noted(command: Command) -> None:
    done = command("plan", "llama-2-7b", "--memory", "8GB", "--context", "5000", "--formats", "int8")
    assert done.status == 0
    assert "note: the weights alone take 13.5 GB of 8GB: no cache fits; see --weights-dtype" in done.err
    assert "note: the model was made for 4,096 positions; 5,000 were asked for" in done.err


def test_several_contexts_and_batches_make_a_row_each(command: Command) -> None:
    done = command("plan", "--context", "512,1024", "--batch", "1,2", "--formats", "none,int8", "--json", "-")
    rows = json.loads(done.out)["rows"]
    assert [(row["context"], row["batch"], row["format"]) for row in rows[:3]] == [
        (512, 1, "none"),
        (512, 1, "int8"),
        (512, 2, "none"),
    ]
    assert [row["kv_bytes"] / rows[0]["kv_bytes"] for row in rows if row["format"] == "none"] == [1, 2, 2, 4]
    (heading,) = [line for line in done.err.splitlines() if "bits/value" in line]
    assert heading.split()[:3] == ["cache", "context", "batch"]


def test_the_command_plans_windows(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none,int8", "--max-tokens", 516, "--on-full", "window"]
    done = command("plan", "llama-3.1-8b", *arguments, "--json", "-")
    assert done.status == 0
    results = json.loads(done.out)
    for row in results["rows"]:
        plan = CachePlan(
            ModelShape.of(SHAPES["llama-3.1-8b"].config()), row["format"], on_full="window", max_tokens=516
        )
        assert row["kv_bytes"] == row["memory_bytes"] == plan.nbytes(4096)
        assert (row["window"], row["max_context"], row["bytes_per_token"], row["refused"]) == (516, None, 0, False)
    assert (results["meta"]["max_tokens"], results["meta"]["on_full"]) == (516, "window")
    (none,) = [line.split() for line in done.err.splitlines() if line.split()[:1] == ["none"]]
    assert none[-3:-1] == ["516", "any"]


def test_the_command_plans_files(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none", "--max-bytes", "200MB", "--on-full", "offload", "--json", "-"]
    done = command("plan", "llama-3.1-8b", *arguments)
    (row,) = json.loads(done.out)["rows"]
    assert row["kv_bytes"] == 4096 * 131072
    assert row["file_bytes"] >= row["kv_bytes"] - 200_000_000
    assert row["memory_bytes"] < row["reading_bytes"] <= 200_000_000
    # A layer takes 4,096 bytes a token, and has to have room beside what of the others does not move.
    assert 40_000 < row["max_context"] < 200_000_000 / 4096
    assert "in the file" in done.err


def test_a_window_without_room_is_one_row_that_is_refused_among_others(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "int8", "--max-bytes", "60MB", "--on-full", "window"]
    done = command("plan", "llama-3.1-8b", *arguments, "--batch", "1,64", "--json", "-")
    assert done.status == 0
    one, many = json.loads(done.out)["rows"]
    assert (one["refused"], many["refused"]) == (False, True)
    assert (many["window"], many["max_context"]) == (None, 0)
    assert one["window"] > 4
    assert "note: int8: its limits do not let 4,096 tokens x 64 come" in done.err


def test_what_the_limits_of_a_cache_refuse_is_noted(command: Command) -> None:
    arguments = ["--context", 4096, "--formats", "none,int8", "--max-bytes", "400MB", "--json", "-"]
    done = command("plan", "llama-3.1-8b", *arguments)
    assert done.status == 0
    none, int8 = json.loads(done.out)["rows"]
    assert (none["refused"], int8["refused"]) == (True, False)
    assert none["max_context"] == 400_000_000 // 131072 // 256 * 256
    assert "note: none: its limits do not let 4,096 tokens x 1 come" in done.err


def test_the_list_names_every_shape(command: Command) -> None:
    done = command("plan", "--list")
    assert done.status == 0
    for name in SHAPES:
        assert name in done.out
    rows = json.loads(command("plan", "--list", "--json", "-").out)["rows"]
    assert [row["name"] for row in rows] == list(SHAPES)
    assert rows[1]["source"] == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such/model"], ["no-such/model", "llama-3.1-8b"]),
        (["./nowhere"], ["no model at './nowhere'", "llama-3.1-8b"]),
        (["--formats", "int9"], ["int9", "k5v4"]),
        (["--formats", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--formats", ","], ["--formats"]),
        (["--memory", "lots"], ["--memory", "'lots'", "24GiB"]),
        (["--bandwidth", "fast"], ["--bandwidth", "'fast'", "50GB/s"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--weights-dtype", "int9"], ["--weights-dtype", "int9", "int4"]),
        (["--context", "0"], ["--context"]),
        (["llama-2-7b", "--model", "qwen3-8b"], ["two models", "qwen3-8b"]),
        (["--batch", "1,x"], ["--batch", "'x'"]),
        (["--on-full", "window"], ["on_full='window'", "max_tokens or max_bytes"]),
        (["--on-full", "offload"], ["on_full='offload'", "max_bytes"]),
        (["--on-full", "offload", "--max-bytes", "1GiB", "--max-tokens", "9"], ["not max_tokens"]),
        (["--on-full", "drop", "--max-tokens", "9"], ["'drop'", "error, window, offload"]),
        (["--max-tokens", "4", "--on-full", "window"], ["max_tokens=4", "sink_tokens=4"]),
        (["--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["--max-tokens", "4096"], ["max_tokens=4096", "8192", "--on-full window"]),
        (["--max-bytes", "much"], ["--max-bytes", "'much'"]),
        (["--max-tokens", "99", "--on-full", "window", "--static"], ["on_full='window'", "max_cache_len"]),
        (["phi-3-mini", "--formats", "int8,bnb8", "--dtype", "float64"], ["float64"]),
    ],
)
def test_bad_input_costs_one_line(command: Command, arguments: list[str], words: list[str]) -> None:
    done = command("plan", *arguments)
    assert done.status == 2
    assert done.out == ""
    (line,) = [line for line in done.err.splitlines() if line.startswith("qkv: error: ")]
    for word in words:
        assert word in line


def test_a_damaged_configuration_costs_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    done = command("plan", tmp_path)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("qkv: error: cannot read the configuration of the folder")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00")
    done = command("plan", tmp_path / "broken.gguf")
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("qkv: error: cannot read the configuration of the file")


def test_importing_qkv_does_not_import_the_plan() -> None:
    names = ("qkv.plan", "qkv.plan_rows", "qkv.model_shape", "qkv.shapes")
    code = f"import sys, qkv, qkv.cli; print([m for m in sys.modules if m in {names}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
