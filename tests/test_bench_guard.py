"""The guard over benchmarks: which ratios got worse, on made-up rows; nothing is timed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from qkv_eval.bench import cli_guard, guard
from qkv_eval.bench.guard import BETTER, HELD, MISSING, SKIPPED, WORSE, Check, Expected, judge, read_expected, updated

META = {"command": "bench kernel", "processor": "A Processor", "threads": 2, "version": "1", "date": "2026-01-02"}
SPEEDUP: dict[str, Any] = {
    "name": "int8 against torch",
    "command": "bench kernel",
    "key": "speedup",
    "row": {"format": "int8", "kv_len": 8192},
    "better": "higher",
    "expected": 6.0,
    "tolerance": 0.1,
}
TIME: dict[str, Any] = {
    "name": "time of int4 against int8",
    "command": "bench kernel",
    "key": "ms",
    "row": {"format": "int4", "kv_len": 8192},
    "over": {"format": "int8"},
    "better": "lower",
    "expected": 0.7,
    "tolerance": 0.1,
}


def kernel_results(speedup: float = 6.0, int8: float = 1.0, int4: float = 0.7, spread: float = 0.02) -> dict[str, Any]:
    rows = [
        {"format": name, "kv_len": length, "ms": ms * length / 8192, "speedup": speedup, "spread": spread}
        for name, ms in (("int8", int8), ("int4", int4))
        for length in (8192, 32768)
    ]
    return {"meta": META, "rows": rows}


def expect(*checks: dict[str, Any], **more: Any) -> Expected:
    made = tuple(Check(**check) for check in checks)
    return Expected(Path("expected.json"), more.get("measured_on", {}), more.get("runs", ()), made)


def outcomes(expected: Expected, *results: dict[str, Any]) -> list[str]:
    return [verdict.outcome for verdict in judge(expected, results).verdicts]


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [(6.0, HELD), (5.41, HELD), (5.39, WORSE), (6.59, HELD), (6.61, BETTER)],
)
def test_a_ratio_may_be_off_by_its_tolerance(measured: float, outcome: str) -> None:
    assert outcomes(expect(SPEEDUP), kernel_results(speedup=measured)) == [outcome]


@pytest.mark.parametrize(("int4", "outcome"), [(0.7, HELD), (0.76, HELD), (0.78, WORSE), (0.62, BETTER)])
def test_of_a_time_less_is_better(int4: float, outcome: str) -> None:
    assert outcomes(expect(TIME), kernel_results(int4=int4)) == [outcome]


def test_a_slower_machine_changes_no_ratio() -> None:
    assert outcomes(expect(TIME), kernel_results(int8=17.0, int4=17.0 * 0.7)) == [HELD]


def test_the_other_row_is_like_the_first_in_all_that_it_does_not_name() -> None:
    results = kernel_results()
    results["rows"][1]["ms"] = 1e9  # int8 at another length
    assert outcomes(expect(TIME), results) == [HELD]


def test_limits_and_changes_are_told_in_the_direction_that_is_better() -> None:
    verdicts = judge(expect(SPEEDUP, TIME), [kernel_results(speedup=5.0, int4=0.84)]).verdicts
    assert [verdict.check.limit for verdict in verdicts] == pytest.approx([5.4, 0.77])
    assert [verdict.change_percent for verdict in verdicts] == pytest.approx([-100 / 6, -20])
    assert verdicts[0].as_row()["outcome"] == WORSE


def test_a_noisy_regression_says_so_and_fails_all_the_same() -> None:
    judgement = judge(expect(SPEEDUP), [kernel_results(speedup=4.0, spread=0.3)])
    assert [verdict.outcome for verdict in judgement.failures] == [WORSE]
    assert judgement.verdicts[0].note.startswith("noisy")


def test_noise_is_told_of_times_and_not_of_sizes() -> None:
    sizes = {**TIME, "key": "peak_bytes", "expected": 0.5}
    results = kernel_results(spread=0.3)
    for row in results["rows"]:
        row["peak_bytes"] = 50 if row["format"] == "int4" else 100
    time, size = judge(expect(TIME, {**sizes, "name": "size"}), [results]).verdicts
    assert (time.outcome, time.spread, time.note[:5]) == (HELD, 0.3, "noisy")
    assert (size.outcome, size.spread, size.note) == (HELD, None, "")


def test_a_row_that_should_be_there_and_is_not_fails() -> None:
    results = kernel_results()
    results["rows"] = [row for row in results["rows"] if row["format"] != "int8"]
    judgement = judge(expect(SPEEDUP, TIME), [results])
    assert [verdict.outcome for verdict in judgement.verdicts] == [MISSING, MISSING]
    assert judgement.verdicts[0].note == "no rows with format int8, kv_len 8192"
    assert len(judgement.failures) == 2


def test_a_row_that_is_not_the_only_one_is_refused() -> None:
    check = {**SPEEDUP, "row": {"format": "int8"}}
    (verdict,) = judge(expect(check), [kernel_results()]).verdicts
    assert verdict.outcome == MISSING
    assert verdict.note == "2 rows with format int8; say which one"


@pytest.mark.parametrize("value", [None, 0, -1.0, "fast", True, float("nan"), float("inf")], ids=str)
def test_what_is_no_number_makes_no_ratio(value: Any) -> None:
    results = kernel_results()
    results["rows"][0]["speedup"] = value
    assert outcomes(expect(SPEEDUP), results) == [MISSING]


def test_checks_of_commands_without_results_are_skipped_but_never_all() -> None:
    decode = {**SPEEDUP, "name": "decode", "command": "bench decode"}
    judgement = judge(expect(SPEEDUP, decode), [kernel_results()])
    assert [verdict.outcome for verdict in judgement.verdicts] == [HELD, SKIPPED]
    assert judgement.failures == []
    with pytest.raises(ValueError, match="nothing to check: no results of bench decode were given"):
        judge(expect(decode), [kernel_results()])


def test_another_machine_is_noted() -> None:
    measured_on = {"processor": "A Processor", "threads": 8}
    (note,) = judge(expect(SPEEDUP, measured_on=measured_on), [kernel_results()]).notes
    assert note == "expected ratios are of threads 8, these of 2"


@pytest.fixture
def expected_file(tmp_path: Path) -> Path:
    path = tmp_path / "expected.json"
    decode = {**SPEEDUP, "name": "decode", "command": "bench decode", "key": "ratio_to_dynamic"}
    path.write_text(json.dumps({"runs": ["kernel"], "checks": [SPEEDUP, TIME, decode]}))
    return path


def test_an_update_expects_what_was_measured_and_leaves_the_rest(expected_file: Path) -> None:
    expected = read_expected(expected_file)
    results = [kernel_results(speedup=7.12345)]
    content = updated(expected, judge(expected, results), results)
    assert [check["expected"] for check in content["checks"]] == [7.123, 0.7, 6.0]
    assert [check["tolerance"] for check in content["checks"]] == [0.1] * 3
    assert content["runs"] == ["kernel"]
    assert json.loads(guard.as_text(content)) == content
    assert content["measured_on"]["processor"] == "A Processor"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(checks=[]), "has no checks"),
        (lambda c: c.update(runs=[" "]), "runs in .* must be arguments"),
        (lambda c: c.update(measured_on=3), "measured_on in .* must be an object"),
        (lambda c: c.update(checks=[1]), "check 1 in .* must be an object"),
        (lambda c: c["checks"][1].pop("key"), "check 2 in .* needs key; its keys are"),
        (lambda c: c["checks"][1].update(tolerence=1), "check 2 in .* does not know tolerence; its keys are"),
        (lambda c: c["checks"][0].update(better="up"), "better must be 'higher' or 'lower', not 'up'"),
        (lambda c: c["checks"][0].update(expected=0), "expected must be a number above 0"),
        (lambda c: c["checks"][0].update(tolerance=1.5), "tolerance must be a number above 0 and below 1"),
        (lambda c: c["checks"][0].update(row=[]), "row must name keys of a row"),
        (lambda c: c["checks"][0].update(name=""), "name must be text"),
        (lambda c: c["checks"][1].update(name="int8 against torch"), "two checks .* 'int8 against torch'"),
    ],
)
def test_a_wrong_file_of_expectations_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str, expected_file: Path
) -> None:
    content = json.loads(expected_file.read_text())
    change(content)
    expected_file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_expected(expected_file)


def test_the_expectations_of_the_repository_can_be_read_and_its_runs_make_every_row() -> None:
    """Each check names lengths, batches and formats that one of the runs measures."""
    expected = read_expected()
    assert {check.command for check in expected.checks} == {f"bench {run[0]}" for run in expected.runs}
    lists = {"format": "--formats", "cache": "--caches", "context": "--context", "kv_len": "--kv-len"}
    for check in expected.checks:
        runs = [run for run in expected.runs if f"bench {run[0]}" == check.command]
        for key, option in lists.items():
            for row in (check.row, {**check.row, **(check.over or {})}):
                given = {item for run in runs if option in run for item in run[run.index(option) + 1].split(",")}
                assert key not in row or str(row[key]) in given, (check.name, key)


# ---- the command ---------------------------------------------------------------------------------------------------


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_command_passes_where_nothing_got_worse(command: Command, expected_file: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "kernel.json", kernel_results())
    done = command("bench", "guard", file, "--expected", expected_file, "--json", tmp_path / "guard.json")
    assert done.status == 0, done.err
    assert "REGRESSION" not in done.err
    rows = json.loads((tmp_path / "guard.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == [HELD, HELD, SKIPPED]


def test_the_command_fails_where_a_ratio_got_worse_and_says_which(
    command: Command, expected_file: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "kernel.json", kernel_results(speedup=4.8))
    done = command("bench", "guard", file, "--expected", expected_file, "--json", "-")
    assert done.status == 1
    assert "REGRESSION: int8 against torch: 20.0 % worse than expected" in done.err
    assert done.err.count("REGRESSION") == 1
    assert json.loads(done.out)["rows"][0]["measured"] == 4.8


def test_the_command_takes_what_was_measured_as_expected_if_asked(
    command: Command, expected_file: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "kernel.json", kernel_results(speedup=4.8))
    assert command("bench", "guard", file, "--expected", expected_file, "--update").status == 0
    assert command("bench", "guard", file, "--expected", expected_file).status == 0


def test_without_results_the_command_runs_the_benchmarks(
    command: Command, expected_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    class Done:
        returncode = 0
        stdout = json.dumps(kernel_results(speedup=1.0))

    def run(arguments: list[str], **_: Any) -> Done:
        asked.append(arguments[3:])
        return Done()

    monkeypatch.setattr(cli_guard.subprocess, "run", run)
    assert command("bench", "guard", "--expected", expected_file, "--threads", 1).status == 1
    assert asked == [["bench", "kernel", "--json", "-", "--threads", "1"]]
    monkeypatch.setattr(Done, "returncode", 2)
    done = command("bench", "guard", "--expected", expected_file)
    assert done.status == 2
    assert "qkv bench kernel failed" in done.err


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"rows": []}', '{"meta": {"command": 1}, "rows": []}'])
def test_what_is_no_results_file_gets_one_line(content: str | None, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    done = command("bench", "guard", file)
    assert done.status == 2
    assert done.err.startswith("qkv: error: ")
    assert done.err.count("\n") == 1
    assert str(file) in done.err


def test_expectations_that_are_missing_get_one_line(command: Command, tmp_path: Path) -> None:
    done = command("bench", "guard", "--expected", tmp_path / "no.json")
    assert done.status == 2
    assert "cannot read the expectations" in done.err
    with pytest.raises(ValueError, match="name no runs"):
        cli_guard._run_benchmarks((), None)
    assert guard.EXPECTED.is_file()
