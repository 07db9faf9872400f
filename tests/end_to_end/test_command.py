"""Real searches with the real command, from the user's files to a configuration to use."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialKind
from testing.command import (
    FAST,
    Background,
    command_of,
    dsat,
    experiment_of,
    inline,
    kinds_of,
    run_of,
    searched,
)
from testing.local import (
    buffers_of,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)

pytestmark = pytest.mark.slow


def own_configuration(**more: Any) -> Mapping[str, Any]:
    """Return hyperparameters with a configuration whose buckets are small."""
    buckets = {"stage": 2, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    return inline(train_micro_batch_size_per_gpu=4, zero_optimization=buckets, **more)


def assert_a_result(run_dir: Path, status: int, said: str) -> Run:
    """Check the files that every successful run leaves; return the run."""
    assert status == 0 and "Traceback" not in said, said
    run = run_of(run_dir)
    assert run.best is not None and run.stop_reason is not None
    assert run.outcomes.keys() == run.trials.keys()
    best = read_json(run_dir / "best_ds_config.json")
    assert best == run.plan.config(run.best.overrides)
    metrics = read_json(run_dir / "best_ds_metrics.json")
    assert metrics["trial"] == run.best.name
    measured = [t for t in run.trials.values() if t.kind is not TrialKind.PROFILE]
    values = [run.value(trial) for trial in measured]
    assert metrics[run.plan.metric] == max(value for value in values if value is not None)
    summary = (run_dir / "summary.md").read_text()
    assert all(trial.name in summary for trial in run.trials.values())
    assert str(run_dir / "best_ds_config.json") in said
    names = [trial.name for trial in run.trials.values()]
    assert len(set(names)) == len(names)
    assert sorted(path.name for path in (run_dir / "trials").iterdir()) == sorted(names)
    assert processes_of(run_dir) == []
    wait_until(lambda: buffers_of(run_dir) == [], "the end of its buffers")  # ports are used again
    return run


# -- asha, two ranks, then the full-length run


def test_asha_on_two_ranks_keeps_what_the_user_chose_and_trains(tmp_path: Path) -> None:
    own = own_configuration(autotuning={"enabled": True})  # it must not end the full-length run
    config = experiment_of(tmp_path, "tiny", hyperparameters=own)
    options = [*FAST, "--slot-memory", "400MiB", "-mt", 5, "-m", "throughput", "--finals", 0]
    options += ["--max-micro-batch", 16, "--run-full-experiment", "--json"]
    run_dir = tmp_path / "run"
    told = dsat("asha", "tiny", run_dir, *options, config=config)
    run = assert_a_result(run_dir, told.status, told.err)  # with --json, text is on stderr
    assert len(run.trials) == 5 and run.trials[0].kind is TrialKind.BASELINE
    assert any("rung" in trial.note for trial in searched(run))
    assert {trial.stage for trial in searched(run)} <= {0, 1, 2, 3}
    assert OutcomeKind.OK in kinds_of(run)
    assert not {OutcomeKind.ERROR, OutcomeKind.INVALID} & set(kinds_of(run))
    for trial in run.trials.values():
        content = read_json(run_dir / "trials" / trial.name / "ds_config.json")
        assert content["zero_optimization"]["reduce_bucket_size"] == 10**6
    assert run.best is not None
    result, best = json.loads(told.out), (run_dir / "best_ds_config.json").read_text()
    assert result["best"]["name"] == run.best.name
    assert result["best_ds_config"] == json.loads(best)
    assert [trial["name"] for trial in result["trials"]] == [t.name for t in run.trials.values()]
    assert result["gain"] > 0
    # The full-length run trains 20 steps, as searcher.max_length says; rank 0 reports.
    assert f"training with {run.best.name}" in told.err
    shown = (run_dir / "full" / "stdout.log").read_text().strip()
    assert shown and shown in told.err
    assert "autotuning" not in best and "dsat" not in best and "overwrite" not in best
    assert read_json(run_dir / "full" / "ds_config.json") == json.loads(best)
    [line] = (run_dir / "full" / "reports.jsonl").read_text().splitlines()
    report = json.loads(line)
    assert report["steps_completed"] == 20
    assert report["metrics"].keys() == {"loss"}
    assert not (run_dir / "full" / "metrics.json").exists()


# -- interrupted, killed and resumed


@pytest.mark.nightly
def test_ctrl_c_tells_the_best_so_far(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = experiment_of(tmp_path, "tiny", hyperparameters=own_configuration())
    options = [*FAST, "-mt", 50, "--slots", 1, "-mct", 1]
    background = Background(command_of("asha", "tiny", run_dir, *options, config=config))
    background.until_events(run_dir, 6)  # the third trial runs
    below = background.below()
    os.killpg(background.process.pid, signal.SIGINT)
    told = background.end()
    assert told.status == 130 and "Traceback" not in told.err
    run = run_of(run_dir)
    assert run.best is not None and run.stop_reason is None
    assert f"best: {run.best.name}, " in told.out
    assert f"--run-dir {run_dir} " in told.err and " --resume" in told.err
    assert (run_dir / "best_ds_config.json").exists()
    assert "interrupted" in (run_dir / "summary.md").read_text()
    assert [pid for pid in below if is_alive(pid)] == []
    assert processes_of(run_dir) == []
    wait_until(lambda: buffers_of(run_dir) == [], "the end of its buffers")  # ports are used again


def test_no_orphan_when_it_is_killed_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    behaviour = "leaves and hangs: child, session, daemon"
    own = inline(train_micro_batch_size_per_gpu=2, behaviour=behaviour)
    config = experiment_of(tmp_path, "behaviours", hyperparameters=own)
    command = command_of("asha", "behaviours", run_dir, "--slots", 2, config=config)
    background = Background(command)
    marks = [f"trials/*/left{rank}.json" for rank in (0, 1)]
    wait_until(lambda: all(list(run_dir.glob(mark)) for mark in marks), "both ranks")
    # The supervisor, two ranks, and three helpers of each rank.
    assert len([pid for pid in background.below() if is_alive(pid)]) == 1 + 2 + 2 * 3
    assert len(buffers_of(run_dir)) == 2
    background.kill()
    assert processes_of(run_dir) == []
    wait_until(lambda: buffers_of(run_dir) == [], "the end of its buffers")  # ports are used again
