"""What the benchmark of whole tunings reads and says."""

from __future__ import annotations

import pytest

from benchmarks import real_scripts
from benchmarks.real_scripts import Answered, Failed
from dsat.report.log_lines import Narrator
from dsat.values.trial import TrialKind
from testing.made_up_runs import run_of_world


def test_the_first_useful_line_is_of_the_first_configuration_that_is_not_the_users() -> None:
    run = run_of_world()
    narrator, useful = Narrator(), []
    for trial_id, outcome in run.outcomes.items():
        trial = run.trials[trial_id]
        if any(map(real_scripts.FIRST.search, narrator.result(run, trial, outcome))):
            useful.append(trial.kind)
    assert useful and useful[0] is TrialKind.SEARCH
    assert not {TrialKind.PROFILE, TrialKind.BASELINE} & set(useful)


@pytest.mark.parametrize(
    ("first_s", "verdict_s", "status", "met"),
    [(59, 239, 0, True), (61, 100, 0, False), (20, 241, 0, False), (20, 100, 1, False)],
)
def test_both_bars_count(first_s: float, verdict_s: float, status: int, met: bool) -> None:
    answered = Answered("gpt", first_s, verdict_s, status)
    assert answered.met is met
    assert ("missed" in real_scripts.lines([answered], [])[2]) is not met


def test_an_error_may_come_two_seconds_later() -> None:
    assert Failed("a typo", 3.0, 4.9).met and not Failed("a typo", 3.0, 5.1).met
