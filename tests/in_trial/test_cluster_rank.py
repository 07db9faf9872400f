"""A cluster's trial from inside: what it reports, and what it leaves in its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from dsat.errors import InvalidTrial
from dsat.in_trial import cluster_rank
from dsat.in_trial.cluster_rank import LOG_MARK, OUTCOME_KEY, Task, log_line, numbers
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import MemoryUse, Outcome, OutcomeKind
from dsat.values.trial import TrialOptions
from testing.helpers import ran, weightless
from testing.metered import CoreContext
from tests.conftest import ROOT

SPEC = MeterSpec(TrialOptions(timeout_s=60.0), micro_batch=4, gas=1, stage=1, slots=2)


class FakeMeter:
    """As much of a meter as a task asks."""

    spec = SPEC
    device_name: str | None = None
    watches = False
    outcome: Outcome | None = None

    @property
    def shortfall(self) -> InvalidTrial:
        problem = "the script ended after 2 optimizer steps"
        return InvalidTrial(problem, smaller_may_run=self.watches)


@pytest.fixture
def meter() -> Any:
    return FakeMeter()


def measured(meter: Any) -> Outcome:
    """The outcome of a meter that has measured something."""
    meter.device_name = "A100"
    meter.outcome = replace(ran(5.0), memory=MemoryUse(), warnings=("slow",), device_name="A100")
    found: Outcome = meter.outcome
    return found


def reported(context: CoreContext) -> Outcome:
    """What the searcher gets, after the way through JSON."""
    [metric] = [what for kind, what in context.calls if kind == "completed"]
    return Outcome.from_json(json.loads(json.dumps(metric))[OUTCOME_KEY])


def test_a_measurement_is_reported_to_be_plotted_and_to_be_searched(meter: Any) -> None:
    context, rank = CoreContext(), Task(meter)
    expected = measured(meter)
    rank.report(context, context, rank.ended(), 7)
    assert [kind for kind, _ in context.calls] == ["metrics", "completed"]
    plotted = context.calls[0][1]
    assert plotted["throughput"] == 5.0
    assert all(isinstance(value, int | float) for value in plotted.values())
    assert replace(reported(context), duration_s=0.0) == expected
    assert context.calls[1][1]["throughput"] == 5.0


def test_only_the_chief_reports_and_only_once(meter: Any) -> None:
    measured(meter)
    worker, chief = CoreContext(rank=1), CoreContext()
    for context in (worker, chief):
        rank = Task(meter)
        rank.report(context, context, rank.ended(), 7)
        rank.report(context, context, rank.ended(), 7)
    assert worker.calls == []
    assert [kind for kind, _ in chief.calls] == ["metrics", "completed"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no"), OutcomeKind.OOM),
        (OSError(12, "Cannot allocate memory"), OutcomeKind.HOST_OOM),
        (InvalidTrial("other settings"), OutcomeKind.INVALID),
        (KeyError("x"), None),
    ],
)
def test_a_failure_that_would_only_repeat_itself_is_reported(
    meter: Any, error: BaseException, kind: OutcomeKind | None
) -> None:
    context, rank = CoreContext(), Task(meter)
    rank.report_failure(context, context, error, 7)
    assert [name for name, _ in context.calls] == ["completed"] * (kind is not None)
    if kind is not None:
        assert reported(context).kind is kind
        assert reported(context).message.startswith("rank 0: ")


def test_a_failure_is_the_scripts_own_until_it_asks_for_an_engine(meter: Any) -> None:
    rank = Task(meter)
    assert rank.failed(KeyError("x")).before_engine and rank.ended().before_engine
    meter.device_name = "A100"
    assert rank.failed(KeyError("x")).device_name == rank.ended().device_name == "A100"
    assert not rank.failed(KeyError("x")).before_engine and not rank.ended().before_engine


@pytest.mark.parametrize("enough", [False, True])
def test_a_script_that_completes_the_operation_itself_reports_what_was_measured(
    meter: Any, enough: bool
) -> None:
    context, rank = CoreContext(), Task(meter)
    rank.follow(context, context, 7)
    rank.follow(context, context, 7)  # the context is entered once a step, perhaps
    meter.watches = True
    expected = measured(meter) if enough else None
    context.report_completed(0.25)
    names = [name for name, _ in context.calls]
    assert (names[0], names[-1]) == ("progress", "completed")
    outcome = reported(context)
    if expected is not None:
        assert outcome.metrics == expected.metrics
    else:
        assert outcome.kind is OutcomeKind.INVALID and outcome.smaller_may_run
        assert outcome.message == str(meter.shortfall)


def test_a_profile_is_plotted_without_what_would_rank_it() -> None:
    values = numbers(replace(ran(), profile=weightless(15)), measures=False)
    assert values["slot_memory_bytes"] == 150 and "throughput" not in values
    assert all(isinstance(value, int | float) for value in values.values())
    assert numbers(Outcome(OutcomeKind.OOM)) == {}


def test_a_line_of_the_log_holds_a_whole_outcome() -> None:
    line = log_line(ran(3.0), run="1.a.0", ended=True).decode()
    assert line.startswith(LOG_MARK) and line.count("\n") == 1
    data = json.loads(line.removeprefix(LOG_MARK))
    assert (data["run"], data["ended"]) == ("1.a.0", True)
    assert Outcome.from_json(data) == ran(3.0)


def test_a_line_of_the_log_is_never_too_long_to_be_written_at_once() -> None:
    detail = "".join(f'line "{number}"\n' for number in range(10_000))
    outcome = Outcome(OutcomeKind.ERROR, message="m", detail=detail)
    line = log_line(outcome, run="1", ended=False)
    assert 1000 < len(line) <= os.pathconf("/", "PC_PIPE_BUF")
    kept = json.loads(line.decode().removeprefix(LOG_MARK))["detail"]
    assert detail.endswith(kept) and kept.endswith('line "9999"\n')


@pytest.mark.parametrize(
    "hparams",
    [
        None,
        {"_use_dsat_mode": True},
        {"_dsat_trial": {"id": 1, "spec": "{}"}},
        {"_use_dsat_mode": False, "_dsat_trial": {"id": 1, "spec": "{}"}},
    ],
)
def test_other_trials_are_left_alone(hparams: Any) -> None:
    assert cluster_rank.attach(hparams) is None


SCRIPT = """
import sys, time
from types import SimpleNamespace
from dsat.in_trial.meter import Meter
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.cluster_rank import Task
from dsat.values.trial import TrialOptions

spec = MeterSpec(TrialOptions(timeout_s={timeout_s}), micro_batch=4, gas=1, stage=1, slots=2)
meter = Meter(spec, print)
engine = SimpleNamespace(basic_optimizer=1, forward=print, backward=print, step=print)
Task(meter).watch()
{body}
"""


@pytest.mark.parametrize(
    ("body", "status", "kind", "ended"),
    [
        ("time.sleep(30)", 1, "TIMEOUT", False),
        ("raise MemoryError", 1, "OOM", False),
        ("meter.watch(engine)", 0, "INVALID", True),
        ("sys.exit(3)", 3, "INVALID", True),
    ],
)
def test_a_process_says_in_its_log_why_it_ends(
    body: str, status: int, kind: str, ended: bool
) -> None:
    code = SCRIPT.format(timeout_s=0.3 if "sleep" in body else 60.0, body=body)
    env = {**os.environ, "RANK": "1", "DET_ALLOCATION_ID": "7.a.0"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == status, process.stderr
    [line] = [text for text in process.stderr.splitlines() if LOG_MARK in text]
    data = json.loads(line.partition(LOG_MARK)[2])
    assert (data["kind"], data["ended"], data["run"]) == (kind, ended, "7.a.0")
    assert Outcome.from_json(data).smaller_may_run == (body == "meter.watch(engine)")
