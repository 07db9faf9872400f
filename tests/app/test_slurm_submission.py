"""A search that is submitted to Slurm: its job script, what is said while it is followed, its end.

Slurm's commands are scripts here; real daemons are in tests/engines/test_slurm.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import dsat
from dsat.app import slurm_submission
from dsat.app.words_of_settings import words_of
from dsat.cli import settings_from_argv
from dsat.cli.main import main
from dsat.engines import slurm_jobs
from dsat.errors import DsatError, SearchFailed
from dsat.inputs.settings import Settings
from testing.local import PROGRAMS
from testing.made_up_runs import Steady, write_run

SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/given
[ -e {folder}/refusal ] && {{ cat {folder}/refusal >&2; exit 1; }}
echo '41;other'
"""
# Answers with one line of `states` after the other, the last one for ever, once what is to happen
# before it has happened.
SQUEUE = """#!/bin/sh
run=$(echo dsat_runs/*)
asked=$(($(cat {folder}/asked) + 1))
echo $asked > {folder}/asked
[ -e {folder}/before$asked ] && . {folder}/before$asked
line=$(sed -n "${{asked}}p" {folder}/states)
[ -n "$line" ] || line=$(tail -n 1 {folder}/states)
case $line in !*) echo "${{line#!}}" >&2; exit 1;; esac
echo "$line"
"""
PYTHON = """#!/bin/sh
printf '%s\\0' "$PWD" "$@"
"""


class FakeSlurm:
    """Its commands, what they are given, and what they answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "asked").write_text("0\n")
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE}.items():
            write_program(folder / name, text.format(folder=folder))

    @property
    def given(self) -> list[str]:
        """What sbatch was given."""
        return (self._folder / "given").read_text().splitlines()

    def refuses(self, *lines: str) -> None:
        (self._folder / "refusal").write_text("\n".join(lines) + "\n")

    def answers(self, *states: str) -> None:
        """What squeue answers; what follows a `!` on standard error, with exit status 1."""
        (self._folder / "states").write_text("\n".join(states) + "\n")

    def before(self, answer: int, command: str) -> None:
        """What a shell does before an answer, counted from 1; the run's folder is `$run`."""
        (self._folder / f"before{answer}").write_text(command + "\n")


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands, a working folder with a script in it, and no allocation."""
    work, programs = tmp_path / "wo'rk %", tmp_path / "bin"
    shutil.copytree(PROGRAMS / "tiny", work)
    programs.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_jobs, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(slurm_jobs, "_READ_EVERY_S", 0.0)
    return FakeSlurm(programs)


JOB = ("--engine", "slurm", "--nodes", "2", "--gpus-per-node", "a100:8", "--time", "2:00:00")
TINY = ("random", "deepspeed.yaml", ".", *JOB)


def parsed(*words: str) -> Settings:
    found = settings_from_argv.parse(words)
    assert isinstance(found, Settings)
    return found


# -- what is submitted


@pytest.mark.parametrize(
    "words",
    [
        "asha a.yaml m -i x y -mt 7 -z 3 0 --tune overlap_comm --fix sub_group_size --cold "
        "--trial-timeout 1000001s --slot-memory 24GiB --divisor 4 --search-range-factor 1.5 "
        "--arg-mapping train_micro_batch_size_per_gpu=batch-size --no-memory-model --resume "
        "--end-profile-step 9 --indifference 3% --run-full-experiment -m latency",
        "model --max-profile-steps 3 --engine slurm --nodes 2 --sbatch-options '--exclusive -p x' "
        "--run-dir 'a b' -- torchrun train.py --engine local -- 'c d'",
        "gridsearch --engine slurm --sbatch-options=--exclusive --time -1 a.yaml m",
    ],
)
def test_settings_become_words_that_mean_the_same(words: str) -> None:
    settings = parsed(*shlex.split(words))
    assert parsed(*words_of(settings)) == settings


def test_options_of_a_job_are_for_slurm_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--nodes=2", "--gpus-per-node=8", "--time=5", "--sbatch-options=--exclusive"):
        with pytest.raises(SystemExit):
            main(["random", "a.yaml", ".", option])
        assert f"{option.partition('=')[0]} goes with --engine slurm" in capsys.readouterr().err


def test_what_sbatch_is_given(slurm: FakeSlurm, tmp_path: Path) -> None:
    own = ("--sbatch-options", "--partition=a --no-requeue", "--detach", "--run-dir", "r")
    assert main([*TINY, *own]) == 0
    folder = Path("r").resolve()
    *options, script = slurm.given
    assert script == str(folder / "job.sh")
    assert "%" in str(folder), "which stands for something in names of logs"
    log = str(folder).replace("%", "%%") + "/slurm-%j.log"
    assert options == [
        "--job-name=r",
        "--requeue",
        "--nodes=2",
        "--gpus-per-node=a100:8",
        "--time=2:00:00",
        "--partition=a",
        "--no-requeue",
        "--open-mode=append",
        f"--output={log}",
        f"--error={log}",
        "--parsable",
    ]


def test_the_job_script_begins_the_run_or_goes_on_with_it(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "py $(th)on"
    write_program(python, PYTHON)
    monkeypatch.setattr(sys, "executable", str(python))
    hostile = "a'b $(touch hacked)\n; touch hacked"
    command = ("--", "train.py", "--deepspeed_config", "ds_config.json", hostile)
    assert main(["model", *JOB, "--detach", "--json", "-mt", "9", *command]) == 0
    folder = (Path("dsat_runs") / "train-1").resolve()
    script = folder / "job.sh"
    assert script.stat().st_mode & 0o077 == 0

    def run() -> list[str]:
        told = subprocess.run(["sh", script], cwd="/", capture_output=True, text=True, check=True)
        where, *words = told.stdout.removesuffix("\0").split("\0")
        assert (where, words[:2]) == (os.getcwd(), ["-m", "dsat"])
        return words[2:]

    begun = run()
    settings = parsed(*begun)
    assert settings.command == command[1:]
    assert (settings.engine, settings.nodes, settings.run_dir) == ("slurm", 2, folder)
    assert (settings.max_trials, settings.resume, settings.detach) == (9, False, False)
    (folder / "journal.jsonl").touch()
    assert parsed(*run()) == replace(settings, resume=True)
    assert not Path("hacked").exists() and not Path("/hacked").exists()


def test_a_dry_run_shows_the_script_and_writes_nothing(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--dry-run"]) == 0
    assert "--nodes=2 --gpus-per-node=a100:8" in capsys.readouterr().out
    assert not Path("dsat_runs").exists()


# -- what is refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sbatch-options", "--wait"), "--wait is not for a search, which is one job"),
        (("--sbatch-options", "-p x --array=1-3"), "--array=1-3 is not for a search"),
        (("--watch",), "--watch: is for a search on this machine"),
        (("--resume",), "there is no run"),
    ],
)
def test_what_a_job_cannot_be_is_told_in_one_line(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main([*TINY, *words]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_without_sbatch_nothing_is_written(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert main(list(TINY)) == 2
    err = capsys.readouterr().err
    assert "--engine slurm: there is no sbatch here" in err and err.count("\n") == 1
    assert not Path("dsat_runs").exists()


def test_what_sbatch_refuses_is_told_in_one_line(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.refuses(
        "sbatch: error: invalid partition specified: x",
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
    )
    assert main(list(TINY)) == 1
    assert capsys.readouterr().err == (
        "dsat: error: sbatch: invalid partition specified: x; Batch job submission failed: Invalid "
        "partition name specified\n"
    )


def test_another_number_of_nodes_than_the_allocations_is_refused(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ID": "7", "NODELIST": "n[1-3]", "NUM_NODES": "3"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    assert main(list(TINY)) == 2
    assert "--nodes 2: the Slurm allocation around dsat has 3 nodes" in capsys.readouterr().err


# -- following


def test_a_job_is_followed_to_its_result(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made_up = tmp_path / "made-up"
    write_run(made_up, Steady())
    slurm.answers(
        "PENDING|Priority",
        "PENDING|Priority",
        "!squeue: error: Unable to contact slurm controller (connect failure)",
        "RUNNING|None",
        "PENDING|BeginTime",
        "PENDING|BeginTime",
        "RUNNING|None",
        "COMPLETED|None",
    )
    slurm.before(4, "printf 'one\\ntw' > $run/slurm-41.log")
    slurm.before(6, "printf 'o\\n' >> $run/slurm-41.log")
    slurm.before(8, f"cp {made_up}/journal.jsonl $run; echo three >> $run/slurm-41.log")
    assert main([*TINY, "--json"]) == 0
    told = capsys.readouterr()
    said = told.err.splitlines()[1:]
    assert said == [
        "job 41 is PENDING (Priority)",
        "the state of job 41 cannot be told now: squeue: Unable to contact slurm controller "
        "(connect failure)",
        "job 41 is RUNNING",
        "one",
        "job 41 was requeued, and goes on with the run when it starts again",
        "job 41 is PENDING (BeginTime)",
        "two",
        "job 41 is RUNNING",
        "three",
        "job 41 is COMPLETED",
    ]
    found = json.loads(told.out)
    assert found["stop_reason"] and found["best"]


@pytest.mark.parametrize("state", ["TIMEOUT|TimeLimit", "CANCELLED|None", "NODE_FAIL|None"])
def test_a_job_that_is_ended_leaves_a_run_that_goes_on(slurm: FakeSlurm, state: str) -> None:
    slurm.answers("RUNNING|None", state)
    slurm.before(2, "touch $run/journal.jsonl")
    with pytest.raises(SearchFailed, match=r"its log is .*slurm-41\.log") as raised:
        dsat.tune("deepspeed.yaml", method="random", engine="slurm", nodes=2)
    assert f"Slurm job 41 is {state.partition('|')[0]}" in str(raised.value)
    *_, command = str(raised.value).partition("Go on with the run: python3 -m dsat ")
    again = parsed(*shlex.split(command))
    assert again.resume and again.nodes == 2 and again.engine == "slurm"
    assert again.run_dir == next(Path("dsat_runs").resolve().iterdir())


@pytest.mark.parametrize("is_over", [True, False])
def test_of_a_job_that_slurm_has_forgotten_the_journal_tells(
    slurm: FakeSlurm, tmp_path: Path, is_over: bool
) -> None:
    made_up = tmp_path / "made-up"
    write_run(made_up, Steady())
    lines = (made_up / "journal.jsonl").read_text().splitlines(keepends=True)
    (made_up / "journal.jsonl").write_text("".join(lines if is_over else lines[:9]))
    slurm.answers("!slurm_load_jobs error: Invalid job id specified")
    slurm.before(1, f"cp {made_up}/journal.jsonl $run")
    ends = pytest.raises(DsatError, match=r"job 41 is not known any more; .* Go on with the run")
    with contextlib.nullcontext() if is_over else ends:
        assert dsat.tune("deepspeed.yaml", method="random", engine="slurm").best is not None


def test_ctrl_c_leaves_the_job_and_says_how_to_go_on(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answers("RUNNING|None")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_jobs, "_say_all", interrupt)
    assert main(list(TINY)) == 130
    said = capsys.readouterr().out
    [folder] = Path("dsat_runs").resolve().iterdir()
    log = shlex.quote(str(folder / "slurm-41.log"))
    for line in ("detached: job 41 goes on", f"tail -F {log}", "scancel 41", "dsat show"):
        assert line in said


def test_a_detached_search_is_a_result_without_trials(slurm: FakeSlurm) -> None:
    found = dsat.tune("deepspeed.yaml", method="random", engine="slurm", detach=True)
    assert found.run_dir is not None and (found.run_dir / slurm_submission.SCRIPT_FILE).is_file()
    assert found.best is None
