"""How trials end on a cluster, as their reports and logs show, and what users read about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.in_trial.cluster_rank import ATTACHED_MARK, OUTCOME_KEY, log_line
from dsat.values.outcome import Metrics, Outcome, OutcomeKind
from testing.helpers import failed
from testing.master.made_up import Ending
from testing.on_cluster import RUNNER, SEARCH, changed, measured, quick_cluster

pytestmark = pytest.mark.slow
RAN = Outcome(
    OutcomeKind.OK, metrics=Metrics(3.0, 1.0, 1.0, 1.0, 1.0, 1e6, 3, 0.01), duration_s=1.0
)
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    print({}["x"])',
    "KeyError: 'x'",
)
SERVER_SOCKET = (
    "The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def line(outcome: Outcome, *, run: str = "5.a.0", ended: bool = False) -> str:
    """Return the line that a rank writes into the log."""
    return log_line(outcome, run=run, ended=ended).decode().rstrip("\n")


def crash(*log: str) -> Ending:
    return Ending(log=log, status=1)


def leave(*log: str) -> Ending:
    return Ending(log=log)


OOM, ERROR, INVALID, OK = "OOM", "ERROR", "INVALID", "OK"
REPORTS = [
    # Only the last run of a trial counts.
    (crash(line(failed(OOM), run="5.a.0"), line(failed(ERROR, "x"), run="5.a.1")), (ERROR, "x")),
    # A measurement in the log counts: the script has no reporting context.
    (leave("warning: Address already in use, trying the next port", line(RAN, ended=True)), (OK,)),
    (crash(line(RAN, ended=True)), (OK,)),
    (leave("no config", line(failed(INVALID, "too short"), ended=True)), (INVALID, "too short")),
    # An exception says more than the report of the end; a launcher's error status says less.
    (crash(*TRACEBACK, line(failed(INVALID, "too short"), ended=True)), (ERROR, "KeyError: 'x'")),
    (crash("no config", line(failed(INVALID, "too short"), ended=True)), (INVALID, "too short")),
    (crash(line(failed(OOM))[:-20]), (ERROR, "failed")),  # cut off by another writer
    (crash(line(RAN).replace("3.0", "NaN")), (ERROR, "failed")),
    # One rank's report explains the failures of the others.
    (
        crash(
            "loading",
            line(failed(ERROR, "rank 0: NCCL error")),
            line(failed(OOM, "rank 1: out of memory: tried to allocate 10 MiB")),
        ),
        (OOM, "rank 1:"),
    ),
]
TEXTS = [
    (crash("ValueError: no such model"), (ERROR, "ValueError: no such model")),
    (crash("nothing in particular"), (ERROR, "failed")),
    (
        crash("KeyError: 'a'", *TRACEBACK, *(f"bye {n}" for n in range(30))),
        (ERROR, "KeyError: 'x'"),
    ),
    (crash(*(f"[rank1]: {text}" for text in TRACEBACK)), (ERROR, "KeyError: 'x'")),
    (Ending(log=("determined.InvalidHP: no",), rejects=True), (INVALID, "InvalidHP")),
    (leave(), (INVALID, "without a report", "get_ds_config_from_hparams")),
    (Ending(status=137), ("HOST_OOM", "SIGKILL")),
    (crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), (OOM, "log")),
    (crash("torch.cuda.OutOfMemoryError: CUDA out of memory."), (OOM, "log")),
    (crash("RuntimeError: CUDA error: out of memory"), (OOM, "log")),
]
PORTS = [  # where ranks meet, but another trial uses them
    (
        crash("RuntimeError: Address already in use"),
        (ERROR, "EADDRINUSE", "--max-concurrent-trials 1"),
    ),
    (
        crash(f"torch.distributed.DistNetworkError: {SERVER_SOCKET}"),
        (ERROR, "--max-concurrent-trials 1"),
    ),
    (
        crash(line(failed(ERROR, f"rank 0: {SERVER_SOCKET}"))),
        (ERROR, "EADDRINUSE", "--max-concurrent-trials 1"),
    ),
]
OWN_METRICS: tuple[Any, ...] = (0.0, 1.5, "NaN", {"loss": 2.0}, [], {})
METRICS = [
    (Ending(metric), (INVALID, "its own searcher metric", json.dumps(metric)))
    for metric in OWN_METRICS
] + [(Ending({OUTCOME_KEY: {"kind": "OK", "metrics": {}}}), (INVALID, "report is damaged"))]


@pytest.mark.parametrize("endings", [REPORTS, TEXTS, PORTS, METRICS])
def test_every_way_in_which_a_trial_ends(
    endings: Sequence[tuple[Ending, tuple[str, ...]]], tmp_path: Path
) -> None:
    """All ends are in one search, after a first trial that is measured."""

    def behave(hparams: Mapping[str, Any]) -> Ending:
        number = hparams["_dsat_trial"]["id"]
        return measured(hparams) if number == 0 else endings[number - 1][0]

    with quick_cluster(tmp_path, behave) as there:
        most = ("--max-trials", 1 + len(endings), "--finals", 0)
        told = there.search("pretend", *most, "--json")
        assert told.status == 0, told
        first, *rows = json.loads(told.out)["trials"]
        assert first["outcome"] == OK
        for row, (ending, (kind, *words)) in zip(rows, endings, strict=True):
            assert row["outcome"] == kind, ending
            assert bool(row["message"]) == (kind != OK), ending
            assert all(word in row["message"] for word in words), (row["message"], ending)
            assert (row["metrics"] is not None) == (kind == OK), ending
            assert "\n" not in row["message"]
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")


@pytest.mark.parametrize(
    ("ending", "is_before_engine"),
    [
        (crash(*TRACEBACK), True),
        (crash(f"{ATTACHED_MARK}5.a.0", *TRACEBACK), False),
        (crash(f"{ATTACHED_MARK}5.a.0", "ValueError: that is a sentence."), False),
        (crash("nobody knows why"), False),
        (crash(line(failed("ERROR"), ended=True)), False),
        (crash(line(replace(failed("ERROR"), before_engine=True), ended=True)), True),
        (crash(line(replace(failed("ERROR"), before_engine=True))), True),
    ],
)
def test_a_script_that_fails_before_its_engine_is_run_once(
    ending: Ending, is_before_engine: bool, tmp_path: Path
) -> None:
    """No other configuration would run. After the engine, the configuration may be the cause."""
    with quick_cluster(tmp_path, lambda hparams: ending) as there:
        told = there.search("pretend", "--max-trials", 3, "--json")
        assert told.status == 1, told
        assert (len(there.master.trials(SEARCH)) == 1) is is_before_engine
        assert json.loads(told.out)["best"] is None
        assert ATTACHED_MARK.strip() not in told.err and ".." not in told.err


def test_a_search_that_failed_says_why_wherever_users_look(tmp_path: Path) -> None:
    """The state alone would not show the reason. No secret may be shown."""
    hparams = {"auth_token": "hunter2"}
    environment = {"environment_variables": ["HF_TOKEN=hunter2"]}
    program = changed(
        tmp_path,
        hyperparameters=hparams,
        environment=environment,
        description="my try",
    )
    with quick_cluster(tmp_path, lambda hparams: crash("loading", *TRACEBACK)) as there:
        told = there.search(program)
        assert told.status == 1, told
        assert set(TRACEBACK) <= set(told.err.splitlines()) and "loading" not in told.err
        assert there.state(RUNNER) == "CANCELED" and there.state(SEARCH) == "ERROR"
        said = there.master.experiment(RUNNER).config["description"]
        assert said.startswith("my try - FAILED: ") and said.endswith("KeyError: 'x'")
        assert there.master.metrics(there.runner) == [{"search_failed": 1}]
        ours = [each for each in there.said.splitlines() if "[dsat" in each]
        assert "hunter2" not in "\n".join([told.out, told.err, *ours, str(there.result())])


def test_how_long_a_trial_took_is_what_it_says_or_the_time_since_its_launch(
    tmp_path: Path,
) -> None:
    def behave(hparams: Mapping[str, Any]) -> Ending:
        number = hparams["_dsat_trial"]["id"]
        return measured(hparams, duration_s=5000.0) if number == 0 else crash("ValueError: no")

    with quick_cluster(tmp_path, behave) as there:
        there.search("pretend", "--max-trials", 2, "--finals", 0)
        own, other = there.outcomes().values()
        assert own.duration_s == 5000.0 and 0 < other.duration_s < 5000.0


def test_a_runner_that_cannot_run_says_why(tmp_path: Path) -> None:
    """Otherwise users would have to look for its log in the web UI."""
    (tmp_path / "file").write_text("no folder")
    storage = {"type": "shared_fs", "host_path": str(tmp_path / "file")}
    program = changed(tmp_path, checkpoint_storage=storage)
    with quick_cluster(tmp_path) as there:
        told = there.search(program, "--max-search-runner-restarts", 0)
        assert told.status == 1, told
        assert f"experiment {RUNNER} ended: error (NotADirectoryError" in told.err, there.said[
            -2000:
        ]


def test_a_script_that_hangs_before_it_calls_dsat_is_killed_at_the_time_limit(
    tmp_path: Path,
) -> None:
    def behave(hparams: Mapping[str, Any]) -> Ending | None:
        return measured(hparams) if hparams["_dsat_trial"]["id"] != 1 else None

    with quick_cluster(tmp_path, behave) as there:
        options = ("--max-trials", 3, "--finals", 0, "--trial-timeout", "10s", "--json")
        told = there.search("pretend", *options)
        assert told.status == 0, told
        first, hangs, last = json.loads(told.out)["trials"]
        assert (first["outcome"], hangs["outcome"], last["outcome"]) == (OK, "TIMEOUT", OK)
        assert "--trial-timeout" in hangs["message"]
