"""The commands that look at runs, on runs of a machine that does not exist."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.app.folder_lock import FolderLock
from dsat.cli.main import main
from dsat.report import terminal
from dsat.report.run_view import RunView
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind
from testing.helpers import failed, ran
from testing.made_up_runs import HOSTILE, Measured, Steady, run_of_world, write_run

ESCAPE = "\x1b[2J\x1b]0;owned\x07"


class Hostile(Measured):
    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        return found if found.ok else failed("ERROR", f"{ESCAPE}{HOSTILE}")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "dsat_runs" / "model-1", Steady(), trials=25)
    return folder, write_run(folder / "dsat_runs" / "model-2", Steady())


@pytest.fixture
def run(two_runs: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The newer of two runs in the current folder."""
    folder, newer = two_runs
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    os.utime("dsat_runs/model-1/journal.jsonl", (1e9, 1e9))
    return newer


def said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    told = capsys.readouterr()
    return told.out if status == 0 else told.err


def test_the_newest_run_is_the_same_for_all_commands(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (2, 1):
        os.utime(f"dsat_runs/model-{number}/journal.jsonl", (1e9 - number, 1e9 - number))
    rows = json.loads(said(capsys, "runs", "--json"))
    assert [Path(row["run_dir"]).name for row in rows] == ["model-1", "model-2"]
    text = said(capsys, "show")
    assert "random search in dsat_runs/model-1 (over)" in text and "best: " in text


def test_every_trial_has_a_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", "model-2", "--trials")
    for trial in run.trials.values():
        assert any(line.strip("│ ").startswith(trial.name) for line in text.splitlines())
    assert text.count("(best)") == text.count("(yours)") == 1
    rows = json.loads(said(capsys, "show", "model-2", "--trials", "--json"))
    assert [row["name"] for row in rows] == [trial.name for trial in run.trials.values()]


def test_a_trial_of_a_killed_run_does_not_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("dsat_runs/model-2")
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] in ("start", "proposed")][:2]
    (folder / "journal.jsonl").write_text("".join(kept))
    lock = FolderLock(folder)
    assert "running" in said(capsys, "show", "model-2", "--trials")
    lock.close()
    text = said(capsys, "show", "model-2", "--trials")
    assert "interrupted" in text and "running" not in text


def test_one_trial_is_told_in_full(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    best = run.best
    assert best is not None
    text = said(capsys, "show", "--trial", best.name)
    assert f"step 39 of {best.name}" in text and f"step 27 of {best.name}" not in text
    assert "20.00 GiB" in text and "30.00 GiB" in text and "backward" in text
    told = json.loads(said(capsys, "show", "--trial", str(best.id), "--json"))
    size = {"own": "4", "here": str(best.batch.micro_batch)}
    assert told["changes"]["train_micro_batch_size_per_gpu"] == size
    assert "train_micro_batch_size_per_gpu" in text


def test_runs_are_listed_the_newest_first(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Path("dsat_runs/model-1/journal.jsonl")
    *begun, stopped = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(begun))
    os.utime(journal, (1e9, 1e9))
    lock = FolderLock(journal.parent)
    try:
        rows = json.loads(said(capsys, "runs", "--json"))
        assert [Path(row["run_dir"]).name for row in rows] == ["model-2", "model-1"]
        assert [row["state"] for row in rows] == ["over", "goes on"]
        # As it looks from another host, whose /proc/locks does not list it.
        Path("dsat_runs/model-1/.dsat").write_text('{"pid": 1, "host": "elsewhere"}')
        rows = json.loads(said(capsys, "runs", "--json"))
        assert [row["state"] for row in rows] == ["over", "goes on"]
        # Its process may still train in full length.
        journal.write_text("".join([*begun, stopped]))
        os.utime(journal, (1e9, 1e9))
        rows = json.loads(said(capsys, "runs", "--json"))
        assert [row["state"] for row in rows] == ["over", "over"]
    finally:
        lock.close()
    Path("dsat_runs/torn-1").mkdir()
    Path("dsat_runs/torn-1/journal.jsonl").write_text('{"event":"other"}\nno\n')
    Path("dsat_runs/bad-1").mkdir()
    Path("dsat_runs/bad-1/journal.jsonl").write_text('{"a":1}\n')
    start = Path("dsat_runs/model-2/journal.jsonl").read_text().splitlines()[0]
    finals = {"event": "finals", "reason": "", "trials": 1, "indifference": 0.1}
    finals |= {"leaders": [], "same_batch": []}
    Path("dsat_runs/odd-1").mkdir()
    Path("dsat_runs/odd-1/journal.jsonl").write_text(f"{start}\n{json.dumps(finals)}\n")
    assert main(["runs"]) == 0
    told = capsys.readouterr()
    assert "model-1" in told.out and "model-2" in told.out
    assert "torn-1/journal.jsonl: line 2 is damaged" in told.err
    assert "bad-1/journal.jsonl: line 1 is damaged, or the file is no journal of a run" in told.err
    assert "line 2 of dsat_runs/odd-1/journal.jsonl does not fit what is before it" in told.err


def test_two_runs_side_by_side(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "compare", "model-1", "dsat_runs/model-2")
    assert run.best is not None and run.best.name in text
    # What the made-up machine makes of a configuration in a search depends on its name alone.
    shared = next(line for line in text.splitlines() if " measured in model-1 and in" in line)
    assert "1.000 times as good (median, " in shared and int(shared.split()[0]) > 10


def test_runs_are_compared_by_the_median_of_what_ran_again() -> None:
    run = run_of_world(Steady(), finals=None, trials=60)
    other, steady = copy.deepcopy(run), RunView.of(run)
    again = next(t for t in run.trials.values() if t.kind is TrialKind.FINAL)
    other.outcomes[again.id] = ran(1.0)  # one accident
    told = terminal.comparison_to_json(
        {"a": steady, "b": RunView.of(other)}, dict.fromkeys("ab", Path())
    )
    assert len(told["caveats"]) == 1, "journals of earlier versions name no software"
    assert " measured in a and in b: in the latter 1.000 times" in told["caveats"][0]
    assert float(told["caveats"][0].split("median, ")[1].split()[0]) > 0.9
    run.info = {"software": "torch 2.9", "script_digest": "a"}
    other.info = {"software": "torch 2.0", "script_digest": "b"}
    told = terminal.comparison_to_json(
        {"a": RunView.of(run), "b": RunView.of(other)}, dict.fromkeys("ab", Path())
    )
    assert told["caveats"][:2] == [
        "They ran with different software.",
        "They ran different scripts, or the script changed.",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("show", "model-9"), "model-9: is no run. `dsat runs` lists those that there are."),
        (("show", "--trial", "z9"), "--trial z9: is no trial of this run. `dsat show --trials`"),
        (("runs", "nowhere"), "nowhere: is not a folder"),
        (("compare", "model-1", "dsat_runs/model-1"), "compare: a run is named twice"),
        (("compare", "model-1", "model-1"), "compare: a run is named twice"),
    ],
)
def test_mistakes(
    run: Run, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert message in said(capsys, *argv, status=2)


def test_what_a_script_says_cannot_move_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no run in dsat_runs" in said(capsys, "show", status=2)
    assert "last change" in said(capsys, "runs")
    hostile = write_run(tmp_path / "dsat_runs" / "hostile-1", Hostile())
    lost = next(trial for trial in hostile.trials.values() if not hostile.outcomes[trial.id].ok)
    log = tmp_path / "dsat_runs" / "hostile-1" / "trials" / lost.name / "stderr.log"
    log.write_bytes(b"\xff" + ESCAPE.encode() + b"x" * 10_000)
    for argv in (["show"], ["show", "--trials"], ["show", "--trial", lost.name], ["runs"]):
        text = said(capsys, *argv)
        assert "\x1b" not in text and "\x07" not in text
    assert "\\x1b[2J" in said(capsys, "show", "--trial", lost.name)


@pytest.mark.slow
def test_a_shell_completes_commands_options_and_choices(tmp_path: Path) -> None:
    def completed(line: str) -> set[str]:
        env = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        code = "from dsat.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=600)
        return {word.strip() for word in (tmp_path / "found").read_text().splitlines()}

    assert completed("dsat comp") == {"compare"}
    assert completed("dsat model --trial-time") == {"--trial-timeout"}
    assert {"throughput", "latency"} <= completed("dsat model --metric ")


def test_a_run_is_shared_and_taken_in(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "Read it before you give it away" in said(capsys, "export", "--share", "run.json")
    assert "exists already" in said(capsys, "export", "--share", "run.json", status=2)
    [row] = json.loads(said(capsys, "import", "run.json", "--json"))
    assert row["schema"] == "dsat-run" and len(row["trials"]) == len(run.outcomes)
    assert "parameters" in said(capsys, "import", "run.json")
    (tmp_path / "other.json").write_text("{}")
    assert "is not a shared run" in said(capsys, "import", "other.json", status=2)
