"""Whose error it is, in the message of a run in which nothing ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsat.app.local import _blame, _failure
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import failed, plan_of, ran, tuner_of, weightless


@pytest.mark.parametrize(
    ("kind", "message", "detail", "before_engine", "told"),
    [
        ("baseline", "rank 0: ValueError", "Traceback", False, "your script's own error"),
        ("profile", "rank 0: ValueError", "Traceback", True, "your script's own error"),
        ("profile", "rank 0: ValueError", "Traceback", False, "z3_offload with micro batch 2"),
        ("baseline", "an error inside dsat, not of your script: KeyError", "x", False, "a bug of"),
        ("search", "an error inside dsat, not of your script: KeyError", "x", False, "a bug of"),
        ("search", "rank 0: ValueError", "Traceback", False, ""),
        # A lost host, say: the script said nothing.
        ("baseline", "node-3 is lost: its supervisor has ended", "", False, ""),
    ],
)
def test_only_what_the_script_itself_did_is_its_own(
    kind: str, message: str, detail: str, before_engine: bool, told: str
) -> None:
    batch = BatchTriple(train_batch_size=2, micro_batch=2, gas=1)
    trial = Trial(1, TrialKind(kind), "t", 3, batch, {}, strategy="z3_offload")
    outcome = Outcome(
        OutcomeKind.ERROR, message=message, detail=detail, before_engine=before_engine
    )
    said = _blame(trial, outcome)
    assert told in said
    assert bool(said) == bool(told)
    assert ("your script's own" in said) == ("your script's own" in told)


@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_model_of_which_anything_ran_is_not_said_to_be_too_large(is_profiled: bool) -> None:
    tuner, _ = tuner_of(plan_of(max_trials=4))
    tuner.next_trials(1)
    tuner.record(0, failed("OOM", "tried to allocate 1.86 GiB"))
    tuner.next_trials(1)
    tuner.record(1, replace(ran(), profile=weightless(15)) if is_profiled else failed("OOM"))
    while not tuner.finished:
        for trial in tuner.next_trials(1):
            tuner.record(trial.id, failed("OOM"))
    error = str(_failure(tuner.run, Path("trials")))
    assert "ran out of memory" in error
    assert ("The model does not fit" in error) is not is_profiled
    assert ("Only profile_" in error) is is_profiled
