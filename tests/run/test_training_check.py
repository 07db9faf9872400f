"""Which of two trainings with different gradients is likely wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.in_trial.batches import UNCOUNTED
from dsat.run.run import Run
from dsat.run.training_check import TrainingCheck
from dsat.values.outcome import Outcome, OutcomeKind, TrainingCurve
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import plan_of, ran

RIGHT, WRONG = 4.737, 1.626
BATCH = BatchTriple(16, 2, 8)
NAMES = {0: "your own configuration", 1: "this configuration"}


def disqualification(norms: dict[int, float], own: int, pick: int, version: str | None) -> str:
    """Judge trials by stage, with these gradient norms; return the reason of the
    disqualification."""
    trials, outcomes = {}, {}
    plan = plan_of(base_config={"zero_optimization": {"stage": own}}, own_batch=BATCH)
    for number, stage in enumerate((own, *(each for each in norms if each != own))):
        kind = TrialKind.SEARCH if number else TrialKind.BASELINE
        overrides = {"zero_optimization": {"stage": stage}} if number else {}
        trials[number] = Trial(number, kind, f"z{stage}", stage, BATCH, overrides)
        curve = TrainingCurve((1, 2, 3), (5.0, 4.9, 4.8), gradient_norm=norms[stage])
        outcomes[number] = replace(ran(), training=curve)
    trials[9] = replace(trials[0], id=9, kind=TrialKind.FINAL)
    outcomes[9] = outcomes[0]
    check = TrainingCheck(plan, trials[0], trials, outcomes, {9: 0}, lambda trial: {}, version)
    chosen = next(trial for trial in trials.values() if trial.stage == pick and trial.id != 9)
    found = check.disqualification(chosen)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("norms", "own", "pick", "version", "verdict"),
    [
        ({2: WRONG, 1: RIGHT}, 1, 2, "0.18.2", f"Likely wrong: {NAMES[1]}"),
        ({2: WRONG, 1: RIGHT}, 2, 1, "0.18.2", f"Likely wrong: {NAMES[0]}"),
        ({2: WRONG, 1: RIGHT, 3: RIGHT}, 2, 1, "0.19.8", f"Likely wrong: {NAMES[0]}"),
        ({2: WRONG, 1: RIGHT, 3: RIGHT}, 1, 2, None, f"Likely wrong: {NAMES[1]}"),
        ({2: WRONG, 1: RIGHT}, 2, 1, None, "Either may be wrong"),
    ],
    ids=["fault", "own fault", "own, by a third", "by a third", "without a third"],
)
def test_the_wrong_one_is_named(
    norms: dict[int, float], own: int, pick: int, version: str | None, verdict: str
) -> None:
    said = disqualification(norms, own, pick, version)
    assert verdict in said
    assert ("DeepSpeed#7718" in said) == (version == "0.18.2")


@pytest.mark.parametrize(
    ("software", "reported", "version"),
    [
        ("torch 2.15.0, deepspeed 0.19.8", "0.18.2", "0.19.8"),
        ("", "0.18.2", "0.18.2"),  # of a cluster's image
        ("", "", None),
    ],
)
def test_the_version_is_that_of_the_trials(
    software: str, reported: str, version: str | None
) -> None:
    run = Run()
    run.info = {"software": software}
    run.outcomes[0] = Outcome(OutcomeKind.OK, training=TrainingCurve(deepspeed_version=reported))
    assert run.deepspeed_version == version


@pytest.mark.parametrize("counted", [(), (0,), (1,)])  # none, the script's own, the others
@pytest.mark.parametrize(("tokens", "is_other"), [(16_000.0, False), (4_000.0, True)])
def test_batches_of_the_loaders_own_are_no_gain(
    tokens: float, *, is_other: bool, counted: tuple[int, ...]
) -> None:
    """The throughput counts each micro batch as full: four of 2 samples count as four of 100."""
    own, pick = (
        Trial(i, kind, f"z{i}", 1, BatchTriple(8, *sizes), {})
        for i, (kind, sizes) in enumerate(
            [(TrialKind.BASELINE, (2, 4)), (TrialKind.SEARCH, (8, 1))]
        )
    )
    outcomes = {}
    for trial, fed in ((own, 16_000.0), (pick, tokens)):
        outcome = ran(10.0)
        assert outcome.metrics is not None
        metrics = replace(outcome.metrics, tokens_per_second=fed)
        warnings = () if trial.id in counted else (UNCOUNTED,)
        outcomes[trial.id] = replace(outcome, metrics=metrics, warnings=warnings)
    plan, trials = plan_of(own_batch=own.batch), {0: own, 1: pick}
    found = TrainingCheck(plan, own, trials, outcomes, {}, lambda trial: {}).disqualification(pick)
    assert (found is not None) == (is_other and pick.id not in counted)


@pytest.mark.parametrize("same_strategy", [True, False])
def test_a_run_at_ones_own_batch_that_trains_differently_is_excluded(
    *, same_strategy: bool
) -> None:
    """If it has the pick's strategy, the pick trains differently, too: its losses at its own batch
    cannot be compared."""
    batches = {0: BATCH, 1: BatchTriple(32, 4, 8), 2: BATCH}
    stages = {0: 1, 1: 2, 2: 2 if same_strategy else 3}
    trials, outcomes = {}, {}
    for i, batch in batches.items():
        kind = TrialKind.SEARCH if i else TrialKind.BASELINE
        trials[i] = Trial(i, kind, f"t{i}", stages[i], batch, {})
        curve = TrainingCurve((1, 2, 3), (5.0, 4.9, 3.0 if i == 2 else 4.8))
        outcomes[i] = replace(ran(), training=curve)
    trials[9], outcomes[9] = replace(trials[0], id=9, kind=TrialKind.FINAL), outcomes[0]
    plan = plan_of(own_batch=BATCH)
    check = TrainingCheck(plan, trials[0], trials, outcomes, {9: 0}, lambda trial: {})
    [(excluded, why)] = check.find_excluded(trials[1], trials[2]).items()
    assert excluded == (1 if same_strategy else 2)
    assert why.startswith("at your global batch, ") == same_strategy
    assert "Its loss in step 3 is 3 instead of 4.8" in why
