"""What `qkv report` draws of the benchmarks, from the rows that they really write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Command

pytest.importorskip("matplotlib", reason="a report needs matplotlib (pip install 'qkv[report]')")
pytest.importorskip("jinja2", reason="a report needs jinja2 (pip install 'qkv[report]')")

from qkv_eval.bench import bandwidth, kernel, prefill

MODELS = {
    "decode": ["--share", "--context", "40,80,160", "--rounds", 2],
    "prefill": ["--context", "40,80", "--rounds", 2],
    "memory": ["--context", "40,80"],
}
KERNEL = ["--shape", "1x2x64", "--kv-len", "64,128", "--dtype", "fp32,bf16", "--rounds", 2]
DRAWN = {
    "decode": (
        "Time of a decode step",
        "own share of a step",
        "1,000 tokens more add: dynamic",
        "Speed against DynamicCache",
        "Size of the cache",
    ),
    "prefill": ("Time of a prompt", "Speed against DynamicCache", "Most memory in use for a prompt"),
    "memory": ("Size of the cache", "Most memory in use for a prompt"),
    "kernel": ("Time of attention", "Speed against torch", "Speed against torch in bf16", "int8, bf16", "torch, bf16"),
}


@pytest.mark.parametrize("name", list(DRAWN))
def test_the_report_draws_every_benchmark(
    name: str, command: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bandwidth, kernel):
        monkeypatch.setattr(module, "last_level_cache", lambda: 1 << 18)
    monkeypatch.setattr(prefill, "peak_resident", lambda call: call())
    caches = KERNEL if name == "kernel" else [*MODELS[name], "--caches", "int8", "--model", tiny_folder]
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    done = command("bench", name, *caches, "--json", results)
    assert done.status == 0, done.err
    assert command("report", results, "-o", page).status == 0
    text = page.read_text().replace("&#39;", "'")
    for words in DRAWN[name]:
        assert words in text, words
    assert json.loads(results.read_text())["meta"]["command"] == f"bench {name}"
