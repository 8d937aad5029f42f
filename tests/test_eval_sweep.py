"""`qkv eval sweep`: what its YAML refuses, what a cell's key depends on, and that no kill or full disk costs a cell."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from qkv_eval import results_file, sweep, sweep_config
from qkv_eval.report import build_page, load_runs
from qkv_eval.results_file import ResultsFile, read_results
from qkv_eval.sweep_config import Evaluation, find_evaluation, read_sweep, register_evaluation

pytestmark = pytest.mark.usefixtures("plain_int8")

ROOT = Path(__file__).resolve().parent.parent
SETUP = {"version": "1", "torch": "2", "transformers": "5", "python": "3.11", "processor": "a", "threads": 1}

# An evaluation that leaves a trace of what it computes, in a module of its own so that a subprocess can have it too.
FAKE = """
import json, os, time
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class FakeSettings:
    formats: tuple[str, ...] = ()
    size: int = 3
    weights: tuple[float, ...] = (1.0,)
    text: str | None = None
    hang_at: str = ""
    fail_at: str = ""
    rows: int = 1
    seed: int = 0

def run(model, tokenizer, settings, progress=None):
    rows = []
    for name in dict.fromkeys(["dynamic", *settings.formats]):
        with open(os.environ["TRACE"], "a") as trace:
            trace.write(f"{name} {settings.size}\\n")
        if name == settings.hang_at and not Path(os.environ["TRACE"] + ".go").exists():
            time.sleep(60)
        if name == settings.fail_at:
            raise RuntimeError("no luck today\\nand more lines")
        for number in range(settings.rows):
            rows.append({"format": name, "ppl": 10.0 + len(name), "stderr": float("nan"), "part": number,
                         "by_position": [{"from": 0, "to": 8, "kld_mean": 0.5}]})
    samples = [{"format": name, "text": name.upper()} for name in settings.formats]
    return {"rows": rows, "samples": samples, "text": {"name": "a text"}, "notes": ["a note"]}

def run_wrong(settings):
    return {"rows": [{"format": name, "value": object()} for name in settings.formats]}

def run_nothing(settings):
    return {"rows": []}
"""

DRIVER = """
import os, signal, sys
from qkv_eval import results_file, sweep
from qkv_eval.sweep_config import Evaluation, read_sweep, register_evaluation
register_evaluation("fake", Evaluation("eval fake", "fake_evaluation:run", "fake_evaluation:FakeSettings"))
if len(sys.argv) > 2:
    whole, left = results_file._write, [int(sys.argv[2])]
    def write_half(file, content):
        left[0] -= 1
        if left[0] < 0:
            os.write(file, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(file, content)
    results_file._write = write_half
setup = {"version": "1", "torch": "2", "transformers": "5", "python": "3.11"}
outcome = sweep.run(read_sweep(sys.argv[1]), lambda name, dtype: (None, None), setup=setup, warn=print)
print(len(outcome.computed), "computed")
"""


class Workplace:
    """A folder with a sweep of the fake evaluation, its results and the trace of what was computed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.trace_file = folder, folder / "out" / "sweep.jsonl", folder / "trace"
        self.warnings: list[str] = []
        self.loaded: list[str] = []

    def write(self, *settings: dict[str, Any], **changes: Any) -> Path:
        content = {
            "output": str(self.output),
            "models": ["some/model"],
            "caches": ["none", "int8", "fp8_e4m3"],
            "evaluations": [{"name": "fake", **each} for each in (settings or [{}])],
            **changes,
        }
        path = self.folder / "sweep.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    def run(self, path: Path | None = None, **changes: Any) -> sweep.Outcome:
        def load(name: str, dtype: str) -> Any:
            self.loaded.append(name)
            return None, None

        wanted = read_sweep(path or self.folder / "sweep.yaml")
        return sweep.run(wanted, load, **{"setup": SETUP, "warn": self.warnings.append, **changes})

    def drive(self, *arguments: object) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.folder), *sys.path])
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def trace(self) -> list[str]:
        return self.trace_file.read_text().split("\n")[:-1] if self.trace_file.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def caches(self) -> list[str]:
        return [line["cache"] for line in self.lines()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    (tmp_path / "fake_evaluation.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setattr(sweep_config, "_EVALUATIONS", dict(sweep_config._EVALUATIONS))
    for name in ("run", "run_wrong", "run_nothing"):
        entry = Evaluation("eval fake", f"fake_evaluation:{name}", "fake_evaluation:FakeSettings")
        register_evaluation(name.replace("run", "fake"), entry)
    monkeypatch.delitem(sys.modules, "fake_evaluation", raising=False)
    return Workplace(tmp_path)


# ---- results -------------------------------------------------------------------------------------------------------


def test_each_cell_is_a_line_with_its_setup_and_the_baseline_comes_along(place: Workplace) -> None:
    place.write({"size": 4})
    outcome = place.run()
    assert place.caches() == ["dynamic", "none", "int8", "fp8_e4m3"]
    assert [cell.cache for cell in outcome.cells] == ["none", "int8", "fp8_e4m3"]
    assert outcome.failed == {}
    line = place.lines()[2]
    assert line["key"] == outcome.cells[1].key
    assert (line["model"], line["dtype"], line["evaluation"], line["command"]) == (
        "some/model",
        "float32",
        "fake",
        "eval fake",
    )
    assert (line["settings"]["size"], line["settings"]["seed"], line["settings"]["weights"]) == (4, 0, [1.0])
    assert "formats" not in line["settings"]
    assert line["rows"][0]["ppl"] == line["ppl"] == 14.0
    assert line["rows"][0]["stderr"] is None
    assert line["more"] == {"samples": [{"format": "int8", "text": "INT8"}]}
    assert line["meta"] == {
        **SETUP,
        "command": "eval fake",
        "model": "some/model",
        "dtype": "float32",
        "text": {"name": "a text"},
        "notes": ["a note"],
    }
    assert line["seconds"] >= 0


def test_a_second_run_computes_nothing_and_loads_no_model(place: Workplace) -> None:
    place.write()
    assert len(place.run().computed) == 4
    before = place.output.read_bytes()
    outcome = place.run()
    assert outcome.computed == set()
    assert len(outcome.rows) == 3
    assert place.loaded == ["some/model"]
    assert place.output.read_bytes() == before


def test_a_new_cache_model_or_setting_adds_its_cells_and_no_others(place: Workplace) -> None:
    place.write(caches=["int8"])
    place.run()
    place.write(caches=["int8", "none"], models=["some/model", {"name": "other/model", "dtype": "bfloat16"}])
    place.run()
    assert [(line["model"], line["dtype"], line["cache"]) for line in place.lines()] == [
        ("some/model", "float32", "dynamic"),
        ("some/model", "float32", "int8"),
        ("some/model", "float32", "none"),
        ("other/model", "bfloat16", "dynamic"),
        ("other/model", "bfloat16", "int8"),
        ("other/model", "bfloat16", "none"),
    ]
    place.write({"size": 3}, {"size": 5}, caches=["int8"])
    assert len(place.run().computed) == 2


def test_cells_that_are_together_share_one_call_and_others_have_their_own(place: Workplace) -> None:
    place.write({"together": True})
    place.run()
    assert place.trace() == ["dynamic 3", "none 3", "int8 3", "fp8_e4m3 3"]
    place.write({"size": 4})
    place.run()
    assert place.trace()[4:] == ["dynamic 4", "none 4", "dynamic 4", "int8 4", "dynamic 4", "fp8_e4m3 4"]


def test_a_listed_baseline_costs_no_call_of_its_own(place: Workplace) -> None:
    place.write(caches=["dynamic", "int8"])
    outcome = place.run()
    assert place.trace() == ["dynamic 3", "int8 3"]
    assert [cell.cache for cell in outcome.cells] == ["dynamic", "int8"]
    assert len(outcome.rows) == 2
    place.write({"size": 4}, caches=["dynamic"])
    place.run()
    assert place.trace()[2:] == ["dynamic 4"]


def test_pandas_reads_the_results(place: Workplace) -> None:
    pandas = pytest.importorskip("pandas")
    place.write({}, {"rows": 3})
    place.run()
    table = pandas.read_json(place.output, lines=True)
    assert len(table) == 8
    assert list(table.loc[table["ppl"].notna(), "cache"]) == ["dynamic", "none", "int8", "fp8_e4m3"]
    assert set(table["key"]) == {line["key"] for line in place.lines()}
    exploded = pandas.json_normalize(place.lines(), "rows", ["model", "evaluation"])
    assert len(exploded) == 16
    assert exploded["ppl"].max() == 18.0


def test_duckdb_reads_the_results(place: Workplace) -> None:
    duckdb = pytest.importorskip("duckdb")
    place.write({}, {"rows": 3})
    place.run()
    file = str(place.output)
    found = duckdb.sql(f"select cache, ppl from read_json_auto('{file}') where ppl is not null order by ppl").fetchall()
    assert found == [("none", 14.0), ("int8", 14.0), ("dynamic", 17.0), ("fp8_e4m3", 18.0)] or found[2:] == [
        ("dynamic", 17.0),
        ("fp8_e4m3", 18.0),
    ]
    unnested = duckdb.sql(f"select model, unnest(rows, recursive := true) from read_json_auto('{file}')").fetchall()
    assert len(unnested) == 16


def test_timings_of_a_real_model_through_the_command(
    place: Workplace,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    keep_threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # the path of the model takes most of a line
    decode = {"name": "decode", "context": [8, 16], "rounds": 2, "warmup": 0}
    path = place.write(models=[str(tiny_folder)], caches=["int8"], evaluations=[decode])
    done = run_command(capsys, path, "--json", place.folder / "all.json", "--threads", 1)
    assert "computed" in done.out
    assert place.caches() == ["dynamic", "int8"]
    assert [row["context"] for row in place.lines()[1]["rows"]] == [8, 16]
    assert place.lines()[1]["meta"]["threads"] == 1
    assert json.loads((place.folder / "all.json").read_text())["rows"] == place.lines()[1:]
    again = run_command(capsys, path, "--threads", 1)
    assert "found finished" in again.out
    assert len(place.lines()) == 2
    listed = run_command(capsys, path, "--dry-run", "--threads", 2)  # timings of another number of threads are others
    assert "to do" in listed.out


@pytest.mark.parametrize(
    ("wanted", "keys", "words"),
    [
        (
            {"name": "prefill", "context": [40, 60], "rounds": 1, "warmup": 0},
            {"seconds", "peak_bytes"},
            "Time of a prompt",
        ),
        (
            {"name": "memory", "context": [40, 60], "steps": 2},
            {"bytes_per_token", "ratio_to_fp16"},
            "Size of the cache",
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_prompts_and_memory_of_a_real_model(
    wanted: dict[str, Any],
    keys: set[str],
    words: str,
    place: Workplace,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    keep_threads: None,
) -> None:
    path = place.write(models=[str(tiny_folder)], caches=["int8", "none"], evaluations=[wanted])
    run_command(capsys, path, "--threads", 1)
    # In one call, in which the baseline is measured once.
    assert place.caches() == ["dynamic", "int8", "none"]
    for line in place.lines():
        assert line["command"] == f"bench {wanted['name']}"
        assert [(row["cache"], row["context"]) for row in line["rows"]] == [(line["cache"], 40), (line["cache"], 60)]
        assert all(set(row) >= keys for row in line["rows"])
    (run,) = load_runs([place.output])
    assert run.kind == f"bench {wanted['name']}"
    if importlib.util.find_spec("matplotlib") and importlib.util.find_spec("jinja2"):
        assert words in build_page([run])


# ---- keys ----------------------------------------------------------------------------------------------------------


def keys(place: Workplace, **setup: Any) -> list[str]:
    return [cell.key for cell in sweep.plan(read_sweep(place.folder / "sweep.yaml"), {**SETUP, **setup})]


def test_a_default_that_is_written_out_and_the_order_of_settings_change_no_key(place: Workplace) -> None:
    place.write()
    plain = keys(place)
    place.write({"size": 3, "weights": 1, "rows": 1, "seed": 0})
    assert keys(place) == plain
    place.write({"together": True})
    assert keys(place) == plain


def test_versions_are_in_every_key_and_the_machine_in_those_of_timings(place: Workplace, tmp_path: Path) -> None:
    place.write()
    assert keys(place, torch="3")[0] != keys(place)[0]
    assert keys(place, processor="b", threads=2) == keys(place)
    place.write(evaluations=["decode"])
    assert not set(keys(place, processor="b")) & set(keys(place))
    assert not set(keys(place, threads=2)) & set(keys(place))


def test_files_count_by_what_is_in_them(place: Workplace, tiny_folder: Path) -> None:
    text, setup = place.folder / "text.txt", place.folder / "mine.yaml"
    text.write_text("one")
    setup.write_text("format: int8\n")
    place.write({"text": str(text)}, caches=[str(setup)])
    first = keys(place)
    text.rename(place.folder / "moved.txt")
    setup.write_text("# the same\nformat: int8\nsink_tokens: 0\n")
    place.write({"text": str(place.folder / "moved.txt")}, caches=[str(setup)])
    assert keys(place) == first
    (place.folder / "moved.txt").write_text("two")
    second = keys(place)
    setup.write_text("format: int8\nsink_tokens: 4\n")
    assert len({*first, *second, *keys(place)}) == 3
    data = place.folder / "data"  # a folder as well, of which any file may matter
    data.mkdir()
    (data / "one").write_text("one")
    place.write({"text": str(data)})
    third = keys(place)
    (data / "two").write_text("two")
    assert keys(place) != third


def test_a_local_model_counts_by_its_files_wherever_it_lies(place: Workplace) -> None:
    for name in ("a", "b"):
        (place.folder / name).mkdir()
        (place.folder / name / "config.json").write_text("{}")
        (place.folder / name / "weights").write_bytes(b"1")
    place.write(models=[str(place.folder / "a"), str(place.folder / "b")], caches=["int8"])
    assert len(keys(place)) == 1
    (place.folder / "b" / "weights").write_bytes(b"2")
    assert len(keys(place)) == 2


# ---- kills and disks -----------------------------------------------------------------------------------------------


def test_after_a_kill_in_the_middle_finished_cells_are_not_computed_again(place: Workplace) -> None:
    path = place.write({"hang_at": "fp8_e4m3"})
    victim = place.drive(path)
    deadline = time.monotonic() + 60
    while "fp8_e4m3 3" not in place.trace():
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert place.caches() == ["dynamic", "none", "int8"]
    finished = place.output.read_bytes()
    place.trace_file.with_name("trace.go").touch()
    second = place.drive(path)
    assert second.communicate()[0] == "1 computed\n"
    assert second.returncode == 0
    assert place.output.read_bytes().startswith(finished)
    assert place.caches() == ["dynamic", "none", "int8", "fp8_e4m3"]
    counts = {name: place.trace().count(f"{name} 3") for name in ("none", "int8", "fp8_e4m3")}
    assert counts == {"none": 1, "int8": 1, "fp8_e4m3": 2}


def test_after_a_kill_while_a_line_is_written_its_half_is_never_read(place: Workplace) -> None:
    path = place.write()
    victim = place.drive(path, 2)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert not place.output.read_text().endswith("\n")
    second = place.drive(path)
    said = second.communicate()[0]
    assert "the last line of" in said
    assert "is half-written and is left out" in said
    assert place.caches() == ["dynamic", "none", "int8", "fp8_e4m3"]
    assert place.trace().count("none 3") == 1
    assert place.trace().count("int8 3") == 2


def test_a_file_cut_at_any_byte_keeps_all_lines_before_the_cut(place: Workplace) -> None:
    place.write(caches=["none", "int8"])
    place.run()
    content = place.output.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    near = {cut for end in (-1, *ends) for cut in range(end - 3, end + 16)}
    for cut in sorted(near & set(range(len(content))) | set(range(0, len(content), 61))):
        place.output.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)  # a line without its end is still whole
        with ResultsFile(place.output) as results:
            assert len(results.rows) == whole
            assert bool(results.problems) == (cut > 0 and cut not in ends and cut - 1 not in ends)
            results.append({"key": "k", "model": "m", "cache": "c", "evaluation": "e", "rows": []})
        assert [json.loads(line) for line in place.output.read_text().splitlines()][-1]["key"] == "k"
        assert len(place.lines()) == whole + 1


def test_a_damaged_line_in_the_middle_costs_that_cell_alone(place: Workplace) -> None:
    place.write()
    place.run()
    lines = place.output.read_bytes().splitlines(keepends=True)
    place.output.write_bytes(lines[0] + lines[1] + b"\0" * 40 + b"\n" + lines[3])
    rows, problems = read_results(place.output)
    assert [row["cache"] for row in rows] == ["dynamic", "none", "fp8_e4m3"]
    assert problems == [f"line 3 of {str(place.output)!r} is damaged and is left out"]
    outcome = place.run()
    assert len(outcome.computed) == 1
    assert place.warnings == problems
    assert place.caches() == ["dynamic", "none", "fp8_e4m3", "int8"]
    assert place.output.with_name("sweep.jsonl.damaged").read_bytes() == b"\0" * 40 + b"\n"


def test_a_full_disk_is_one_clear_error_and_finished_cells_stay(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write()
    whole, left = results_file._write, [2]

    def fill_up(file: int, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.write(file, content[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(file, content)

    monkeypatch.setattr(results_file, "_write", fill_up)
    with pytest.raises(ValueError, match="No space left on device; the 2 finished cells in it are whole; make room"):
        place.run()
    assert place.caches() == ["dynamic", "none"]
    monkeypatch.setattr(results_file, "_write", whole)
    assert len(place.run().computed) == 2
    assert place.warnings == []


def test_a_limit_of_the_system_leaves_no_half_line(place: Workplace) -> None:
    place.write()
    place.run()
    size = place.output.stat().st_size
    place.output.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, before[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot write the results .*: File too large; the 3 finished cells"):
            place.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert place.caches() == ["dynamic", "none", "int8"]


def test_two_sweeps_do_not_write_to_one_file(place: Workplace) -> None:
    place.write()
    with (
        ResultsFile(place.output),
        pytest.raises(ValueError, match=r"another sweep is writing to '.*sweep\.jsonl'; wait for it"),
    ):
        place.run()


@pytest.mark.parametrize(
    "content", ['{"meta": {}, "rows": []}\n', "format: int8\n", "a,b\n1,2\n", '{"meta": {}, "ro', "[1, 2]\n"]
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(place: Workplace, content: str) -> None:
    place.write()
    place.output.parent.mkdir()
    place.output.write_text(content)
    with pytest.raises(ValueError, match="is no results file of a sweep"):
        place.run()
    assert place.output.read_text() == content


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_cell_that_fails_does_not_end_the_sweep_and_is_tried_again(place: Workplace) -> None:
    place.write({"fail_at": "int8"})
    outcome = place.run()
    assert list(outcome.failed.values()) == ["no luck today"]
    assert place.warnings == ["some/model, fake, int8: failed: no luck today"]
    assert place.caches() == ["dynamic", "none", "fp8_e4m3"]
    place.run()
    assert place.trace().count("int8 3") == 2
    assert place.trace().count("none 3") == 1


def test_with_debugging_a_failure_ends_the_sweep(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DEBUG", "1")
    place.write({"fail_at": "int8"})
    with pytest.raises(RuntimeError, match="no luck"):
        place.run()


@pytest.mark.parametrize(
    ("name", "message"), [("fake_wrong", "not JSON serializable"), ("fake_nothing", "gave no row for this cache")]
)
def test_a_result_that_cannot_be_used_is_a_failure(place: Workplace, name: str, message: str) -> None:
    place.write(evaluations=[name], caches=["int8"])
    outcome = place.run()
    assert message in "".join(outcome.failed.values())
    assert message in place.warnings[0]
    assert place.lines() == []


def test_the_command_names_the_cells_that_failed(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    path = place.write({"fail_at": "int8"}, models=[str(place.folder / "model")])
    (place.folder / "model").mkdir()
    (place.folder / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"3 of 3 cells failed, the first .*cannot load the model"):
        run_command(capsys, path)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": None}, "output must name the file"),
        ({"models": []}, "models is missing or empty"),
        ({"models": [3]}, "a model maps names to values"),
        ({"models": [{"nam": "x"}]}, "unknown key 'nam' in a model; known keys: name, dtype"),
        ({"modles": ["x"]}, "unknown key 'modles' in a sweep; known keys: output, models"),
        ({"caches": []}, "caches is missing or empty"),
        ({"caches": [8]}, "each of caches must be text, not 8"),
        ({"caches": None}, r"evaluations\[0\]: there are no caches"),
        ({"evaluations": None}, "evaluations is missing or empty"),
        ({"evaluations": [7]}, r"evaluations\[0\] must be a name"),
        ({"evaluations": ["speed"]}, r"evaluations\[0\]: unknown evaluation 'speed'; use one of compare, ppl"),
        ({"evaluations": [{"name": "fake", "sise": 3}]}, r"\(fake\): unknown setting 'sise'; known settings: size, we"),
        ({"evaluations": [{"name": "fake", "size": "many"}]}, "size must be a whole number, not 'many'"),
        ({"evaluations": [{"name": "fake", "size": True}]}, "size must be a whole number, not True"),
        ({"evaluations": [{"name": "fake", "weights": ["x"]}]}, "weights must be a number, not 'x'"),
        ({"evaluations": [{"name": "fake", "weights": []}]}, "weights is empty"),
        ({"evaluations": [{"name": "fake", "formats": ["int8"]}]}, "list the caches under 'caches', not under 'form"),
        ({"evaluations": [{"name": "fake", "together": 1}]}, "together must be true or false, not 1"),
        ({"evaluations": [{"name": "fake", "caches": "int9"}]}, "unknown cache 'int9'"),
        ({"caches": ["gone.yaml"]}, r"there is no set-up file 'gone\.yaml'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"models": ["/no/such/model"]}, "no model at '/no/such/model'"),
    ],
    ids=str,
)
def test_a_mistake_in_the_yaml_is_refused_before_anything_is_loaded(
    place: Workplace, changes: dict[str, Any], message: str
) -> None:
    place.write(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        place.run()
    assert "\n" not in str(caught.value)
    assert place.loaded == []
    assert not place.output.exists()


@pytest.mark.parametrize(
    ("content", "message"), [("[", "is not valid YAML"), ("", "maps names"), ("- a", "maps names")]
)
def test_a_file_that_is_no_sweep_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_sweep(path)
    assert "wrong.yaml" in str(caught.value)
    with pytest.raises(ValueError, match=r"cannot read the sweep '.*gone\.yaml': No such file"):
        read_sweep(tmp_path / "gone.yaml")


def test_an_evaluation_can_be_registered_once(place: Workplace) -> None:
    entry = find_evaluation("fake")
    with pytest.raises(ValueError, match="already an evaluation 'fake'"):
        register_evaluation("fake", entry)
    register_evaluation("gone", replace(entry, settings="no_such_module:Settings"))
    place.write(evaluations=["gone"])
    with pytest.raises(ValueError, match="the evaluation 'gone' cannot be used here: No module named 'no_such_module'"):
        place.run()


def test_the_sweeps_in_configs_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths in them are relative to the top of the clone
    found = sorted(Path("configs/sweeps").glob("*.yaml"))
    assert found
    for path in found:
        for wanted in read_sweep(path).evaluations:
            assert wanted.caches


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> SimpleNamespace:
    """Run the command by itself, and return what it printed."""
    from qkv_eval.cli_sweep import sweep as command

    app: Callable[..., Any] = typer.Typer(add_completion=False)
    app.command()(command)  # type: ignore[attr-defined]
    app(args=[str(argument) for argument in arguments], standalone_mode=False)
    captured = capsys.readouterr()
    return SimpleNamespace(out=captured.out, err=captured.err)
