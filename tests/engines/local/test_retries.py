"""Trials that are run again in other surroundings."""

from __future__ import annotations

from pathlib import Path

from dsat.engines.local.retries import Again, Retries
from dsat.engines.local.running import Running, Start, Way
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import failed

REFUSED = failed(OutcomeKind.ERROR, "AssertionError: 3 is not a multiple of 2")


def running(number: int, *, alone: bool = False) -> Running:
    """A trial of the search, alone or beside another one."""
    trial = Trial(number, TrialKind.SEARCH, f"t{number}", 1, BatchTriple(1, 1, 1), {})
    start = Start(trial, Path(), None, alone=alone)
    return Running(start, (), Way.FRESH, alone=alone, beside=not alone)


def test_an_error_that_came_again_alone_is_the_settings_own() -> None:
    retries = Retries([Way.FRESH])
    assert retries.decide(running(1), REFUSED, broken=False) is Again.ALONE
    assert retries.decide(running(1, alone=True), REFUSED, broken=False) is None
    assert retries.decide(running(2), REFUSED, broken=False) is None
    other = failed(OutcomeKind.ERROR, "RuntimeError: no space left in /dev/shm")
    assert retries.decide(running(3), other, broken=False) is Again.ALONE


def test_a_trial_that_a_warning_of_slurms_killed_runs_again() -> None:
    retries = Retries([Way.FORKED])
    warned = failed(OutcomeKind.ERROR, "rank 0 was killed by SIGUSR1")
    assert retries.decide(running(1), warned, broken=False) is Again.ELSEWHERE
