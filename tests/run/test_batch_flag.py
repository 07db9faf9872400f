"""Which flag of the script follows the micro batch."""

from __future__ import annotations

from dsat.run.batch_flag import BatchFlag
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import ran

OWN = 4


def trial_of(number: int, micro_batch: int, flag: str = "") -> Trial:
    batch = BatchTriple(micro_batch, 1, micro_batch)
    return Trial(number, TrialKind.SEARCH, f"t{number}", 1, batch, {}, batch_flag=flag)


def test_a_guess_is_taken_back_for_good_where_a_trial_ran_without() -> None:
    """Of concurrent trials, one with the guessed flag may end after one that needed none."""
    outcomes: dict[int, Outcome] = {}
    found = BatchFlag(outcomes)
    error = Outcome(OutcomeKind.ERROR, message="out of luck", batch_flag="--batch_size")
    ended = [
        (trial_of(1, 8), error, "--batch_size"),
        (trial_of(2, 16), ran(1.0), ""),
        (trial_of(3, 8, "--batch_size"), ran(1.0), ""),
    ]
    for trial, outcome, expected in ended:
        outcomes[trial.id] = outcome
        found.update(trial, outcome, OWN)
        assert found.name == expected
    assert not found.is_guess and not found.supersedes(ended[0][0])
