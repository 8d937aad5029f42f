"""`qkv report`: what it reads and refuses, that what is in a file stays text, and that a browser shows the page."""

from __future__ import annotations

import html
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

pytest.importorskip("matplotlib", reason="a report needs matplotlib (pip install 'qkv[report]')")
pytest.importorskip("jinja2", reason="a report needs jinja2 (pip install 'qkv[report]')")

from qkv_eval.report import build_page, load_runs, write_page
from qkv_eval.report.charts import pareto
from qkv_eval.report.load import KINDS, OTHER, Run, number
from qkv_eval.report.series import short
from qkv_eval.report.tables import make_table

META = {
    "version": "0.1.0",
    "commit": "0123456789ab",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "processor": "Some Processor",
    "threads": 2,
    "date": "2026-01-02T03:04:05+00:00",
    "model": "smollm2",
    "dtype": "float32",
}
TEXT = {"name": "a text", "sha256": "ab" * 32, "windows": 4, "window": 2048}
# name -> bits per value, KL divergence, change of the perplexity
CACHES = {
    "dynamic": (32.0, 0.0, 0.0),
    "none": (32.0, 0.0, 0.0),
    "int8": (8.25, 6e-4, 0.12),
    "fp8_e4m3": (8.25, 4.5e-3, 0.45),
    "int4": (4.5, 4e-2, 5.1),
    "int2": (2.5, 0.8, 60.0),
}


def ppl_rows() -> list[dict[str, Any]]:
    return [
        {
            "format": name,
            "scoring": "chunked",
            "tokens": 8188,
            "ppl": 14.6 * (1 + change / 100),
            "ppl_stderr": 0.4,
            "dppl_percent": change,
            "dppl_percent_stderr": change / 10,
            "kld_mean": kld,
            "kld_median": kld / 3,
            "kld_p99": kld * 9,
            "kld_p999": kld * 30,
            "kld_max": kld * 90,
            "same_top_percent": 100 - 30 * math.sqrt(kld),
            "bits_per_value": bits,
            "by_position": [
                {"from": i * 256, "to": i * 256 + 255, "kld_mean": kld * (1 + i / 8), "same_top_percent": 99 - i}
                for i in range(8)
            ],
        }
        for name, (bits, kld, change) in {**CACHES, "noise floor": (32.0, 3e-9, 0.0)}.items()
    ]


def results() -> dict[str, dict[str, Any]]:
    """A results file of every kind, by the command that makes it; half of them do not say which command that was."""
    layers = [
        {
            "format": name,
            "layer": layer,
            "head": head,
            **{f"{what}_error": (layer + 1) * (head + 1) * scale for what in ("key", "value", "score", "output")},
            "kld_alone": scale / (layer + 1),
        }
        for name, scale in (("int8", 0.004), ("int4", 0.07))
        for layer in range(6)
        for head in range(3)
    ]
    recall = [
        {"task": task, "format": name, "context": context, "depth": depth, "n": 8, "exact_match": right}
        for task, depths in (("passkey", (0.1, 0.5, 0.9)), ("copy", (None,)))
        for context in (512, 1024)
        for depth in depths
        for name, right in (("dynamic", 1.0), ("int8", 1.0), ("int2", 0.25))
    ]
    lm = [
        {"format": name, "task": task, "metric": "acc", "value": 0.6 + drift, "stderr": 0.012, "baseline": 0.6,
         "drift": drift, "answers_changed": 3, "n": 400}
        for task in ("arc_easy", "piqa")
        for name, drift in (("dynamic", 0.0), ("int8", 0.002), ("int4", -0.03))
    ]  # fmt: skip
    decode = [
        {"cache": name, "batch": batch, "context": context, "ms_per_step": 60 + context * batch * bits / 1e4,
         "ratio_to_dynamic": 32 / bits, "kv_bytes": 2880 * batch * context * bits, "tokens_per_s": 20.0, "spread": 0.03}
        for batch in (1, 4)
        for context in (128, 4096)
        for name, (bits, _, _) in list(CACHES.items())[:4]
    ]  # fmt: skip
    kernel = [
        {"format": name, "backend": "cpu", "batch": 1, "kv_heads": 3, "q_per_kv": 3, "head_dim": 64, "kv_len": length,
         "ms": length / 1e4, "sdpa_ms": length / 2e3, "speedup": 5.0, "gb_per_s": 19.0, "read_gb_per_s": 30.0,
         "fraction_of_read_bandwidth": 0.63}
        for length in (1024, 8192)
        for name in ("int8", "fp8_e4m3")
    ]  # fmt: skip
    prefill = [
        {"cache": name, "batch": 1, "context": context, "seconds": context / 500, "ratio_to_dynamic": 0.9,
         "peak_bytes": 40000 * context}
        for context in (512, 4096)
        for name in ("dynamic", "int8")
    ]  # fmt: skip
    memory = [
        {"cache": name, "batch": 1, "context": context, "kv_bytes": 2880 * context * bits,
         "bytes_per_token": 2880 * bits, "peak_bytes": 50000 * context, "ratio_to_fp16": 16 / bits}
        for context in (512, 4096)
        for name, (bits, _, _) in list(CACHES.items())[:4]
    ]  # fmt: skip
    tune = [
        {"layer": layer, "side": side, "format": name, "bits_per_value": bits, "kld": kld * (layer + 1),
         "kld_stderr": kld / 9, "time_share": None, "chosen": (name == "int4") == (layer > 0)}
        for layer in range(2)
        for side in ("key", "value")
        for name, (bits, kld, _) in {name: CACHES[name] for name in ("int8", "int4")}.items()
    ]  # fmt: skip
    front = [
        {"budget": bits, "bits_per_value": bits - 0.01, "kld_predicted": 2.0**-bits, "kld_validation": 2.1**-bits,
         "kld_held_out": None if bits == 5 else 2.2**-bits, "format": f"tuned {bits}"}
        for bits in (4.5, 5, 6, 8.25)
    ]  # fmt: skip
    compare = [
        {**row, "kv_bytes": 755e6, "ms_per_step": 100.0 + i, "ratio_to_dynamic": 1.0 + i, "batch": 4, "context": 4096}
        for i, row in enumerate(ppl_rows()[:4])
    ]
    samples = [
        {"format": "dynamic", "text": "The sky is blue.", "tokens": 4, "same": 0, "same_text": ""},
        {"format": "int8", "text": "The sky is red.", "tokens": 4, "same": 3, "same_text": "The sky is "},
    ]
    nameless = {"model": None, "dtype": None}
    return {
        "compare": {"meta": {**META, "model": "other", "text": TEXT}, "rows": compare, "samples": samples},
        "eval ppl": {"meta": {**META, "command": "eval ppl", "text": TEXT, "notes": ["a note"]}, "rows": ppl_rows()},
        "eval lm": {"meta": {**META, "command": "qkv eval lm --limit 9"}, "rows": lm},
        "eval recall": {"meta": {**META, "command": "eval recall"}, "rows": recall},
        "eval layers": {"meta": META, "rows": layers},
        "tune": {"meta": {**META, "text": TEXT}, "rows": tune, "front": front},
        "bench kernel": {"meta": {**META, **nameless}, "rows": kernel},
        "bench memory": {"meta": META, "rows": memory},
        "bench prefill": {"meta": META, "rows": prefill},
        "bench decode": {"meta": {**META, "command": "bench decode"}, "rows": decode},
    }


def redundancy() -> dict[str, Any]:
    """Results of a kind that has a page of its own: all kinds together make too long a one."""
    rows = [
        {"cache": name, "prompt": 8, "generated": 4, "positions_computed": 4 * often, "factor": often, "expected": 38,
         "tokens": [{"position": 8 + i, "ms": 2.0 + i * often, "positions_computed": 9 * (i + 1)} for i in range(4)],
         "counts": [often] * 8 + [3, 2, 1, 0]}
        for name, often in (("no cache", 4), ("dynamic", 1))
    ]  # fmt: skip
    return {"meta": {**META, "command": "bench redundancy"}, "rows": rows}


def write_results(folder: Path) -> list[Path]:
    paths = []
    for command, content in results().items():
        paths.append(folder / f"{command.replace(' ', '-')}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def write_redundancy(folder: Path) -> Path:
    path = folder / "redundancy.json"
    path.write_text(json.dumps(redundancy()))
    return path


class Page(HTMLParser):
    """What is in a page: tags, attributes, text, and sections by their id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("results")
    return build_page(load_runs([*write_results(folder), write_redundancy(folder)]))


# ---- what is read --------------------------------------------------------------------------------------------------


def test_each_kind_of_rows_is_known_by_its_command_or_else_by_its_keys(tmp_path: Path) -> None:
    runs = load_runs(write_results(tmp_path))
    assert [run.kind for run in runs] == list(results())
    assert [run.number for run in runs] == list(range(1, 11))
    every = {**results(), "bench redundancy": redundancy()}
    for command, content in every.items():
        content["meta"].pop("command", None)
        (tmp_path / "nameless.json").write_text(json.dumps(content))
        assert load_runs([tmp_path / "nameless.json"])[0].kind == command
    assert set(every) == set(KINDS)


def test_rows_of_an_unknown_kind_are_a_table(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    rows = [{"thing": "a", "size": 1.5, "more": [1]}, {"thing": "b", "size": None, "more": []}]
    path.write_text(json.dumps({"meta": META, "rows": rows}))
    (run,) = load_runs([path])
    assert run.kind == OTHER
    table = make_table(run)
    assert [column.heading for column in table.columns] == ["thing", "size"]
    assert table.cells == (("a", "1.5"), ("b", "-"))
    assert "Other results" in Page(build_page([run])).text


def sweep_lines() -> list[dict[str, Any]]:
    common = {"model": "smollm2", "dtype": "float32", "evaluation": "ppl", "settings": {"window": 2048}, "seconds": 1.0}
    return [
        {"key": f"{i:032x}", **common, "cache": row["format"], "rows": [row],
         "meta": {**META, "command": "eval ppl", "text": TEXT, "date": f"2026-01-0{i + 1}", "notes": ["a note"]}}
        for i, row in enumerate(ppl_rows()[:4])
    ]  # fmt: skip


def test_the_cells_of_a_sweep_that_share_a_setup_are_one_run(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    lines = sweep_lines()
    lines[3]["settings"] = {"window": 1024}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = load_runs([path])
    assert first.kind == second.kind == "eval ppl"
    assert [row["format"] for row in first.rows] == ["dynamic", "none", "int8"]
    assert first.meta["date"] == "2026-01-01 to 2026-01-03"
    assert first.notes == ("a note",)
    assert second.settings == {"window": 1024}
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"meta": {**META, "command": "eval sweep"}, "rows": lines}, indent=2))
    assert [len(run.rows) for run in load_runs([whole])] == [3, 1]


def test_of_a_sweep_that_was_killed_the_finished_cells_are_read_and_the_page_says_so(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in sweep_lines())
    path.write_text(whole[:-100])
    (run,) = load_runs([path])
    assert len(run.rows) == 3
    assert "is half-written and is left out" in Page(build_page([run])).text
    path.write_text(whole[:100])
    with pytest.raises(ValueError, match=r"the results file '.*sweep\.jsonl' holds no finished cell"):
        load_runs([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ('{"meta": {"a": 1}, "rows": [{"format": "in', "is cut off or damaged at line 1"),
        ('{\n "meta": {},\n "rows": [\n', "is cut off or damaged at line"),
        ("[1, 2", "is cut off or damaged"),
        ("format: int8", "is no results file: it is not JSON"),
        ("null", 'it has no {"meta": ..., "rows":'),
        ("[]", 'it has no {"meta": ..., "rows":'),
        ('{"rows": []}', 'it has no {"meta": ..., "rows":'),
        ('{"meta": {}, "rows": [1]}', 'it has no {"meta": ..., "rows":'),
        ("[" * 100000, "is no results file: it is nested too deeply"),
        ('{"key": "a", "other": 1}\n', "is no results file of a sweep"),
        (b"\xff\xfe{}", "it is not UTF-8 text"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_results_file_is_refused_by_name(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_runs([path])
    assert "results.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = json.dumps(results()["eval lm"])
    path = tmp_path / "cut.json"
    for cut in range(0, len(content), 97):
        path.write_text(content[:cut])
        with pytest.raises(ValueError, match=r"cut\.json"):
            load_runs([path])


# ---- the page ------------------------------------------------------------------------------------------------------


def test_all_kinds_together_fill_every_panel(full_page: str) -> None:
    page = Page(full_page)
    names = ("quality", "tails", "positions", "layers", "tuning", "recall", "tasks", "speed", "memory", "redundancy")
    for name in (*names, "samples", "tables"):
        assert name in page.ids
    assert "missing" not in page.ids
    assert len(page.ids) == len(set(page.ids))
    assert sum(name == "id" and value.startswith("run-") for _, name, value in page.attributes) == 11
    for words in (
        "Some Processor",
        "0123456789ab",
        "2026-01-02T03:04:05",
        "a note",
        "Pareto front",
        "8.25",
        "arc_easy",
    ):
        assert words in page.text
    assert "The sky is " in page.text


def test_panels_without_data_are_left_out_and_listed(tmp_path: Path) -> None:
    paths = write_results(tmp_path)
    page = Page(build_page(load_runs([path for path in paths if "decode" in path.name])))
    assert {"speed", "memory", "tables", "setup", "missing"} <= set(page.ids)
    assert not {"quality", "positions", "layers", "tuning", "recall", "tasks", "samples"} & set(page.ids)
    assert re.search("Recall by depth . from qkv eval recall", page.text)
    assert "Not on this page" in page.text


def test_the_page_loads_nothing_and_runs_no_script(full_page: str) -> None:
    page = Page(full_page)
    assert not page.tags & {"script", "iframe", "object", "embed", "img", "base", "form"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src"):
            assert value.startswith("#") or value == "data:,", (tag, value)
            assert value == "data:," or value[1:] in page.ids
    assert not re.search(r"url\((?!#)", full_page)
    assert "://" not in full_page
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    assert "default-src 'none'" in policy


BAD = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$x^2$ font-family: x"


def test_what_comes_from_files_stays_text(tmp_path: Path) -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return value + BAD if isinstance(value, str) else value

    paths = []
    for number_, (command, content) in enumerate(results().items()):
        spoilt = spoil(content)
        spoilt["meta"] |= {"command": command, BAD: BAD}
        paths.append(tmp_path / f"{number_}{BAD.replace('/', '')}.json")
        paths[-1].write_text(json.dumps(spoilt))
    text = build_page(load_runs(paths), title=BAD)
    page = Page(text)
    assert not page.tags & {"script", "img"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert text.count("<style>") == text.count("</style>") == 1
    assert f"int8{BAD}" in page.text
    assert text.count("<svg") == text.count("</svg>")
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("command", list(results()))
@pytest.mark.parametrize(
    "value", ["text", None, True, [], {"a": 1}, math.nan, 10**400, -1, 0], ids=lambda v: str(v)[:5]
)
def test_values_that_cannot_be_drawn_are_left_out(command: str, value: Any) -> None:
    content = results()[command]
    names = ("format", "cache", "task", "metric")
    rows = [{key: item if key in names else value for key, item in row.items()} for row in content["rows"][:3]]
    run = Run(1, "x.json", command, tuple(rows), {**META, "text": value}, samples=({"text": "a"}, {}))
    assert command in KINDS
    assert "Set-up of every run" in build_page([run])


def test_a_cache_of_two_runs_is_drawn_twice_under_its_own_names(tmp_path: Path) -> None:
    paths = []
    for name, shift in (("first", 1.0), ("second", 2.0)):
        content = results()["eval ppl"]
        content["rows"] = [{**row, "kld_mean": row["kld_mean"] * shift} for row in content["rows"][:3]]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    page = Page(build_page(load_runs(paths)))
    assert "int8 · run 1" in page.text
    assert "int8 · run 2" in page.text


def test_what_a_tuning_verified_is_drawn_in_its_front_and_with_the_results_of_eval_ppl(tmp_path: Path) -> None:
    content = results()["tune"]
    kinds = {"dynamic": "baseline", "int8": "preset", "int4": "uniform", "int2": "uniform"}
    scored = [{**row, "kind": kinds[row["format"]]} for row in ppl_rows() if row["format"] in kinds]
    content["verified"] = [*scored, {**scored[-1], "format": "tuned", "kind": "tuned", "kld_mean": 0.3}]
    path = tmp_path / "tune.json"
    path.write_text(json.dumps(content))
    tuning, ppl = load_runs([path])
    assert (tuning.kind, ppl.kind) == ("tune", "eval ppl")
    assert [row["format"] for row in ppl.rows] == ["dynamic", "int8", "int4", "int2", "tuned"]
    page = build_page([tuning, ppl])
    text = Page(page).text
    assert {"tuning", "quality"} <= set(Page(page).ids)
    for words in ("tuned, predicted", "tuned, held-out text", "uniform, held-out text", "What was chosen"):
        assert words in text
    assert "int4: 4.50 bits per value, KL 0.04 nats" in page
    assert "tuned: 2.50 bits per value, KL 0.3 nats" in page
    assert "tuned, held-out text, 5.00 bits" not in page


def test_machines_are_not_mixed_in_one_drawing_of_times(tmp_path: Path) -> None:
    content = results()["bench decode"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(content))
    content["meta"]["processor"] = "Another Processor"
    paths[1].write_text(json.dumps(content))
    page = Page(build_page(load_runs(paths)))
    assert "Decode step: smollm2, float32, Some Processor, 2 threads" in page.text
    assert "Decode step: smollm2, float32, Another Processor, 2 threads" in page.text


def test_the_same_results_make_the_same_page(tmp_path: Path) -> None:
    runs = load_runs(write_results(tmp_path)[:2])
    one, other = (re.sub(r"\d+:\d+ UTC", "", build_page(runs)) for _ in range(2))
    assert one == other


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_the_front_has_the_points_that_no_other_beats() -> None:
    points = [(8.0, 0.1), (4.0, 1.0), (8.0, 0.2), (32.0, 0.0), (16.0, 0.1), (5.0, 2.0), (4.0, 1.0)]
    assert pareto(points) == [(4.0, 1.0), (8.0, 0.1), (32.0, 0.0)]
    assert pareto([]) == []


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (0.00063, "0.00063"), (6.3e-7, "6.3e-7"), (1.0, "1"), (8.25, "8.25"), (32768.0, "32,768"),
     (1234567.0, "1.23e6"), (-0.5, "-0.5"), (2e-9, "2e-9"), (0.1, "0.1"), (100.0, "100")],
)  # fmt: skip
def test_numbers_are_short(value: float, written: str) -> None:
    assert short(value) == written


@pytest.mark.parametrize(
    ("value", "known"),
    [(1, 1.0), (2.5, 2.5), (True, None), ("1", None), (None, None), (math.inf, None), (10**400, None)],
    ids=lambda value: str(value)[:5],
)
def test_only_finite_numbers_are_numbers(value: Any, known: float | None) -> None:
    assert number(value) == known


# ---- the command ---------------------------------------------------------------------------------------------------


def run_command(*arguments: object) -> None:
    from qkv_eval.cli_report import report

    app: Callable[..., Any] = typer.Typer(add_completion=False)
    app.command()(report)  # type: ignore[attr-defined]
    app(args=[str(argument) for argument in arguments], standalone_mode=False)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [path for path in write_results(tmp_path) if "lm" in path.name]
    run_command(*paths, "-o", tmp_path / "page.html", "--title", "A & B")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'page.html'}\n"
    assert "<h1>A &amp; B</h1>" in (tmp_path / "page.html").read_text()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_results(tmp_path)[2]
    with pytest.raises(ValueError, match="there is no folder"):
        run_command(path, "-o", tmp_path / "no" / "page.html")
    with pytest.raises(ValueError, match="is a folder; give a file"):
        run_command(path, "-o", tmp_path)
    (tmp_path / "page.html").write_text("before")

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_up)
    with pytest.raises(ValueError, match=r"cannot write the report .*: No space left on device"):
        write_page("after", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "before"


def test_without_results_or_matplotlib_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there are no results to report"):
        build_page([])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs the package matplotlib; run: pip install 'qkv\[report\]'"):
        build_page([Run(1, "x.json", OTHER, (), META)])


# ---- in a browser --------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 1280, 16380
# Put into a copy of the page: it writes down where things lie.
MEASURE = """<script>
const boxes = [];
for (const one of document.querySelectorAll(".panel, svg.chart, figcaption, h1, .scroll")) {
  const box = one.getBoundingClientRect();
  boxes.push({what: one.classList[0] || one.tagName, x: box.x, y: box.y, width: box.width, height: box.height});
}
const pre = document.createElement("pre");
pre.id = "boxes";
pre.textContent = JSON.stringify({boxes, wide: document.documentElement.scrollWidth});
document.body.append(pre);
</script></body>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium on this machine")
    profile = tmp_path_factory.mktemp("profile")

    def run(page: Path, *options: str, dark: bool = False, width: int = WIDTH) -> SimpleNamespace:
        done = subprocess.run(
            [
                found[0],
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                f"--window-size={width},{HEIGHT}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
        return SimpleNamespace(out=done.stdout.decode(), console=said)

    return run


def measure(browser: Callable[..., SimpleNamespace], page: Path, text: str, width: int = WIDTH) -> dict[str, Any]:
    copy = page.with_name("measured.html")
    copy.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", MEASURE))
    dumped = re.search(r'<pre id="boxes">(.*?)</pre>', browser(copy, "--dump-dom", width=width).out, re.DOTALL)
    assert dumped
    return dict(json.loads(html.unescape(dumped[1])))


# Everything on one page would be higher than a picture can be.
PARTS = {"redundancy": (3, 3), "all else": (12, 25)}  # panels, and charts at least


@pytest.fixture(scope="module", params=list(PARTS))
def part(
    request: pytest.FixtureRequest, browser: Callable[..., SimpleNamespace], tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A page, where things lie in it, and how many panels and charts it should have."""
    folder = tmp_path_factory.mktemp("layout")
    text = build_page(load_runs([write_redundancy(folder)] if request.param == "redundancy" else write_results(folder)))
    panels, charts = PARTS[request.param]
    return SimpleNamespace(text=text, layout=measure(browser, folder / "page.html", text), panels=panels, charts=charts)


def is_blank(part: Any) -> bool:
    """Whether hardly anything in a picture differs from its background, or nothing differs much."""
    colours = part.histogram()
    low, high = part.getextrema()
    return bool(sum(colours) - max(colours) <= 0.005 * sum(colours) or high - low <= 90)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser_every_panel_and_drawing_shows_something(
    browser: Callable[..., SimpleNamespace], part: SimpleNamespace, tmp_path: Path, dark: bool
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    page = tmp_path / "page.html"
    page.write_text(part.text)
    picture = tmp_path / "page.png"
    shown = browser(page, f"--screenshot={picture}", dark=dark)
    assert shown.console == []
    assert part.layout["wide"] <= WIDTH
    seen = image.open(io.BytesIO(picture.read_bytes())).convert("L")
    corner = seen.getpixel((2, 2))
    assert corner < 60 if dark else corner > 200
    panels = [box for box in part.layout["boxes"] if box["what"] == "panel"]
    charts = [box for box in part.layout["boxes"] if box["what"] == "chart"]
    assert len(panels) == part.panels
    assert len(charts) >= part.charts
    assert max(box["y"] + box["height"] for box in panels) < HEIGHT
    for box in [*panels, *charts]:
        assert box["width"] > 300
        assert box["height"] > 60
        assert not is_blank(seen.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))), box
    assert is_blank(seen.crop((0, 0, WIDTH, 30)))


def test_the_browser_would_tell_of_what_the_page_may_not_do(
    browser: Callable[..., SimpleNamespace], full_page: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(full_page.replace("<main>", "<main><script>document.title = 'changed'</script><img src='x.png'>"))
    shown = browser(page, "--dump-dom")
    assert len(shown.console) >= 2
    assert all("Content Security Policy" in line for line in shown.console)
    assert "<title>changed" not in shown.out


def test_on_a_phone_nothing_sticks_out(browser: Callable[..., SimpleNamespace], full_page: str, tmp_path: Path) -> None:
    found = measure(browser, tmp_path / "page.html", full_page, width=500)
    assert found["wide"] <= 500


def test_it_prints(browser: Callable[..., SimpleNamespace], full_page: str, tmp_path: Path) -> None:
    page, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(full_page)
    shown = browser(page, f"--print-to-pdf={printed}", "--no-pdf-header-footer", dark=True)
    assert shown.console == []
    content = printed.read_bytes()
    assert content.startswith(b"%PDF")
    assert len(content) > 50_000
    assert len(re.findall(rb"/Type\s*/Page\b", content)) >= 4
