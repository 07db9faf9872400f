"""A trial on a cluster from the inside: what it reports, and what it writes into its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dsat.in_trial.cluster_rank import LOG_MARK, OUTCOME_KEY, log_line, spec_for_hparams
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import TrialOptions
from testing import warm_host
from testing.helpers import ran
from testing.local import PATIENCE_S, environment_of_a_rank
from testing.scripts import CONFIG, PLAIN
from tests.conftest import ROOT

SPEC = MeterSpec(TrialOptions(timeout_s=60.0, end_step=5), micro_batch=2, gas=1, stage=1, slots=1)
FLAGS = {"--per_device_train_batch_size": 8}  # that the script of a Trainer must have
# A script in a container; Determined's package is its only view of the cluster.
CONTAINER = """
import json, sys, time
from types import SimpleNamespace
import determined
import dsat
from dsat.in_trial import runner_watch
from testing.metered import CoreContext

HPARAMS = {hparams}
trial = SimpleNamespace(hparams=HPARAMS, experiment_id=2, trial_id=7)
determined.get_cluster_info = lambda: SimpleNamespace(task_type="TRIAL", trial=trial)
runner_watch.start = lambda runner_id: None  # there is no master
{plain}
core = CoreContext()
try:
    config = dsat.get_ds_config_from_hparams(HPARAMS)
{body}
finally:
    Path("calls.json").write_text(json.dumps([*core.calls, ["steps", core.steps_completed]]))
"""
TRAINS = """
engine = make_engine(config=config)
with dsat.dsat_reporting_context(core, core):
    train(engine, {steps})
"""


@dataclass(frozen=True)
class Rank:
    """A rank of a trial that has ended.

    Attributes:
        calls: calls of the core context.
        steps: the step with which it reported its metrics; -1 if it did not.
        told: outcomes in its log.
    """

    status: int
    calls: list[Any]
    steps: int
    told: list[dict[str, Any]]
    err: str

    @property
    def reported(self) -> Outcome:
        """The outcome that the searcher gets, read back from JSON."""
        [metric] = [what for kind, what in self.calls if kind == "completed"]
        return Outcome.from_json(metric[OUTCOME_KEY])

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.calls]


def rank_of(
    folder: Path,
    body: str,
    *,
    hparams: Any = None,
    switches: Any = None,
    **spec: Any,
) -> Rank:
    """Run a script as a rank of a trial on a cluster, with values of its switches."""
    trial = spec_for_hparams(replace(SPEC, **spec), 1, 1, FLAGS)
    given = {"_use_dsat_mode": True, "_dsat_trial": trial, "deepspeed_config": CONFIG}
    given |= {"_dsat_switches": switches} if switches else {}
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    code = CONTAINER.format(
        hparams=repr(given if hparams is None else hparams), plain=PLAIN, body=indented
    )
    env = environment_of_a_rank(
        DET_ALLOCATION_ID="7.a.0", DSAT_TRIAL_DIR=str(folder), PYTHONPATH=str(ROOT)
    )
    words = [*warm_host.prefix(), sys.executable, "-c", code]
    done = subprocess.run(
        words, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (folder / "calls.json").exists(), done.stderr
    lines = [text.partition(LOG_MARK)[2] for text in done.stderr.splitlines() if LOG_MARK in text]
    *calls, [_, steps] = json.loads((folder / "calls.json").read_text())
    return Rank(done.returncode, calls, steps, [json.loads(line) for line in lines], done.stderr)


@pytest.mark.slow
def test_a_measurement_is_reported_to_be_plotted_and_to_be_searched(tmp_path: Path) -> None:
    found = rank_of(tmp_path, TRAINS.format(steps=1000))
    assert found.kinds() == ["progress", "metrics", "completed", "over"], found.err
    assert found.told == []
    outcome, plotted = found.reported, found.calls[1][1]
    assert outcome.ok and outcome.metrics is not None and not outcome.before_engine
    assert plotted["throughput"] == outcome.metrics.throughput
    assert all(isinstance(value, int | float) for value in plotted.values())
    assert found.calls[2][1]["throughput"] == outcome.metrics.throughput
    assert found.steps == SPEC.options.end_step, "that all trials have"


@pytest.mark.slow
def test_a_profile_is_plotted_without_what_would_rank_it(tmp_path: Path) -> None:
    found = rank_of(tmp_path, TRAINS.format(steps=1000), profile=True, measures=False)
    [plotted] = [what for kind, what in found.calls if kind == "metrics"]
    assert plotted["num_params"] == 17 and "throughput" not in plotted
    assert found.reported.profile is not None


FAILS = """
with dsat.dsat_reporting_context(core, core):
    {engine}
    {error}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "error", "kind", "is_reported"),
    [
        ("", "raise MemoryError", "OOM", True),
        ("make_engine(config=config)", "raise OSError(12, 'no memory')", "HOST_OOM", True),
        ("", "raise KeyError('x')", "ERROR", False),
        ("make_engine(config=config)", "raise KeyError('x')", "ERROR", False),
    ],
)
def test_a_failure_that_would_only_repeat_itself_is_reported(
    tmp_path: Path, engine: str, error: str, kind: str, is_reported: bool
) -> None:
    """Other failures are only logged, so the master tries again."""
    found = rank_of(tmp_path, FAILS.format(engine=engine or "pass", error=error))
    assert ("completed" in found.kinds()) is is_reported
    outcome = found.reported if is_reported else Outcome.from_json(found.told[0])
    assert outcome.kind is OutcomeKind(kind) and outcome.message.startswith("rank 0: ")
    assert outcome.before_engine is not bool(engine), "it is the script's own until then"


COMPLETES = """
engine = make_engine(config=config)
try:
    with dsat.dsat_reporting_context(core, core):
        for _ in range(2):  # the context is entered once a step, perhaps
            with dsat.dsat_reporting_context(core, core):
                train(engine, {steps})
except SystemExit:
    pass
core.report_completed(0.25)
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 100])
def test_a_script_that_completes_the_operation_itself_reports_what_was_measured(
    tmp_path: Path, steps: int
) -> None:
    found = rank_of(tmp_path, COMPLETES.format(steps=steps))
    assert found.kinds()[0] == "progress" and found.kinds().count("completed") == 1
    if steps == 100:
        assert found.reported.ok
    else:
        assert found.reported.kind is OutcomeKind.INVALID and found.reported.smaller_may_run
        assert "after 2 optimizer steps" in found.reported.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "kind", "ended"),
    [
        ("time.sleep(30)", 1, "TIMEOUT", False),
        ("raise MemoryError", 1, "OOM", False),
        ("train(make_engine(config=config), 2)", 0, "INVALID", True),
        ("sys.exit(3)", 3, "INVALID", True),
    ],
)
def test_a_process_says_in_its_log_why_it_ends(
    tmp_path: Path, body: str, status: int, kind: str, ended: bool
) -> None:
    if "sleep" in body:
        (tmp_path / "calls.json").write_text('[["steps", -1]]')  # it ends in the middle
    limit = TrialOptions(timeout_s=0.3 if "sleep" in body else 60.0, end_step=5)
    found = rank_of(tmp_path, body, options=limit)
    [told] = found.told
    assert (told["kind"], told["ended"], told["run"]) == (kind, ended, "7.a.0"), found.err
    assert found.calls == []
    assert Outcome.from_json(told).smaller_may_run is ("train" in body)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_batch_sizes_that_dsat_did_not_see_make_a_trial_invalid(tmp_path: Path, size: int) -> None:
    args = ["--deepspeed", "ds.json", f"--per_device_train_batch_size={size}"]
    found = rank_of(tmp_path, f"print(dsat.get_hf_args_with_overwrites({args}, HPARAMS))")
    [told] = found.told
    assert told["kind"] == "INVALID"
    said = "runs with --per_device_train_batch_size 2, but dsat assumed 8"
    assert (said in told["message"]) is (size == 2), told


@pytest.mark.slow
@pytest.mark.parametrize(
    "hparams",
    [
        {"_use_dsat_mode": True},
        {"_dsat_trial": spec_for_hparams(SPEC, 1, 1, {})},
        {"_use_dsat_mode": False, "_dsat_trial": spec_for_hparams(SPEC, 1, 1, {})},
    ],
)
def test_other_trials_are_left_alone(tmp_path: Path, hparams: Any) -> None:
    own = {**hparams, "deepspeed_config": CONFIG}
    found = rank_of(tmp_path, TRAINS.format(steps=9), hparams=own)
    assert found.calls == found.told == []


def test_a_line_of_the_log_holds_a_whole_outcome_and_is_written_at_once() -> None:
    line = log_line(ran(3.0), run="1.a.0", ended=True).decode()
    assert line.startswith(LOG_MARK) and line.count("\n") == 1
    data = json.loads(line.removeprefix(LOG_MARK))
    assert (data["run"], data["ended"]) == ("1.a.0", True)
    assert Outcome.from_json(data) == ran(3.0)
    detail = "".join(f'line "{number}"\n' for number in range(10_000))
    outcome = Outcome(OutcomeKind.ERROR, message="m", detail=detail)
    long = log_line(outcome, run="1", ended=False)
    assert 1000 < len(long) <= os.pathconf("/", "PC_PIPE_BUF")
    kept = json.loads(long.decode().removeprefix(LOG_MARK))["detail"]
    assert detail.endswith(kept) and kept.endswith('line "9999"\n')


SWITCHED = """
import os
from transformers import TrainingArguments
args = TrainingArguments("out", use_cpu=True, deepspeed={config})
core.calls.append(["switched", [os.environ.get("NCCL_BUFFSIZE"), args.dataloader_num_workers]])
"""
TRAINER = SWITCHED.format(config="config") + TRAINS.format(steps=1000)
VARIABLE, WORKERS = {"ENV:NCCL_BUFFSIZE": "8388608"}, {"dataloader_num_workers": 2}


@pytest.mark.slow
def test_a_script_gets_the_switches_of_its_trial(tmp_path: Path) -> None:
    found = rank_of(tmp_path, TRAINER, switches={**VARIABLE, **WORKERS}, profile=True)
    assert found.calls[0] == ["switched", ["8388608", 2]], found.err
    assert found.reported.profile is not None
    assert found.reported.profile.switches["gradient_checkpointing"].values[:2] == (False, True)


@pytest.mark.slow
def test_a_training_after_the_search_has_the_switches_of_the_best(tmp_path: Path) -> None:
    hparams = {"deepspeed_config": CONFIG, "_dsat_switches": {**VARIABLE, **WORKERS}}
    body = SWITCHED.format(config="config") + "train(make_engine(config=config), 30)"
    found = rank_of(tmp_path, body, hparams=hparams)
    assert (found.status, found.kinds()) == (0, ["switched"]), found.err
    assert found.calls[0] == ["switched", ["8388608", 2]]
