"""Whose error it is, in the message of a run in which nothing ran."""

from __future__ import annotations

import pytest

from dsat.app.local import _blame
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind


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
