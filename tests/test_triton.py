"""Triton's kernels without a GPU: what they compute, in Triton's interpreter, and that they compile for GPUs.

Triton decides when it is imported whether kernels are interpreted, so each half has a process of its own:
triton_interpreted.py, which are tests, and triton_ahead.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.attention import choose, triton_decode
from qkv.config import CacheConfig
from qkv.native import SlowPathWarning
from qkv.storage import LayerStore
from qkv.view import KVView

HERE = Path(__file__).parent
ROOT = HERE.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without the compiled kernels codes may lie as on a GPU; with one thread tests that run beside these keep theirs.
    settings = {"QKV_KERNELS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", **environment}
    command = [sys.executable, "-W", "ignore", *args]
    return subprocess.run(
        command, env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=900
    )


@needs_triton
@linux_only
def test_the_kernels_equal_the_oracle_in_the_interpreter() -> None:
    tests = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE / "triton_interpreted.py"),
    ]
    done = run(*tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def jobs(arch: int, *which: tuple[Any, ...]) -> list[dict[str, Any]]:
    names = ("format", "kv_heads", "group", "dim", "q_len", "kernels")
    return [{"arch": arch, **dict(zip(names, job, strict=True))} for job in which]


# The shape of Llama 3 for all; that of Gemma 3, and the smaller kernels, for one.
DECODING = [("int8", 8, 4, 128, 1, ["attend"]), ("int4", 8, 4, 128, 1, ["attend"])]
REST = [("int8", 8, 4, 128, 1, ["fold", "merge", "key"]), ("int4_rot", 8, 4, 128, 1, ["merge", "value"])]
AHEAD = {
    "sm_80": jobs(80, *DECODING, *REST),
    "sm_89": jobs(89, *DECODING),
    "sm_90": jobs(90, *DECODING, ("fp8_e4m3", 8, 4, 128, 1, ["attend"])),
    "sm_100": jobs(100, *DECODING, ("int8", 1, 4, 256, 8, ["attend"])),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    every = [job for of_arch in AHEAD.values() for job in of_arch]
    cache = str(tmp_path_factory.mktemp("triton"))
    done = run(str(HERE / "triton_ahead.py"), json.dumps(every), TRITON_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@linux_only
@pytest.mark.parametrize("arch", AHEAD)
def test_the_kernels_compile_for_gpus_and_keep_everything_in_registers(
    arch: str, compiled: list[dict[str, Any]]
) -> None:
    found = [kernel for kernel in compiled if f"sm_{kernel['arch']}" == arch]
    assert len(found) == sum(len(job["kernels"]) for job in AHEAD[arch])
    for kernel in found:
        assert 0 < kernel["registers"] <= 255
        assert kernel["stack"] == kernel["local"] == 0, f"registers are spilled: {kernel}"


def small_view() -> tuple[torch.Tensor, KVView]:
    store = LayerStore(CacheConfig("int8"))
    store.append(torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16))
    return torch.randn(1, 1, 1, 16), KVView(store)


def test_without_triton_it_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_tried", False)
    monkeypatch.setattr(triton_decode, "_missing", None)
    monkeypatch.setitem(sys.modules, "qkv.attention.triton_kernels", None)
    monkeypatch.delattr("qkv.attention.triton_kernels", raising=False)
    with pytest.raises(ValueError, match="pip install triton"):
        choose(*small_view(), "triton")


@needs_triton
def test_on_a_cpu_it_is_refused_and_auto_does_not_take_it() -> None:
    query, view = small_view()
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose(query, view, "triton")
    assert choose(query, view) in ("cpu", "dense")


@pytest.mark.filterwarnings("error")
def test_auto_takes_it_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = torch.device("cuda")
        shape = torch.Size((1, 1, 1, 16))

    _, view = small_view()
    monkeypatch.setattr(triton_decode, "available", lambda: None)
    monkeypatch.setattr(triton_decode, "supports", lambda query, view: None)
    assert choose(OnGpu(), view) == "triton"  # type: ignore[arg-type]
    monkeypatch.setattr(triton_decode, "supports", lambda query, view: "it is a test")
    with pytest.warns(SlowPathWarning, match="it is a test"):
        assert choose(OnGpu(), view) == "dense"  # type: ignore[arg-type]


GPU_CHECK = str(ROOT / "tools" / "gpu_check.py")


def test_gpu_check_says_what_it_needs() -> None:
    assert "--interpret" in run(GPU_CHECK, "--help").stdout
    done = run(GPU_CHECK, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GPU" in done.stderr
    assert done.stdout == ""


@needs_triton
@linux_only
def test_gpu_check_runs_its_checks_in_the_interpreter(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(GPU_CHECK, "--interpret", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said = json.loads(file.read_text())
    assert said["meta"]["device"] == "interpreter"
    assert {row["check"] for row in said["rows"]} >= {"attention", "encode", "lengths", "offload"}
    assert all(row["ok"] for row in said["rows"])
