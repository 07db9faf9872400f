"""What is said of the best configuration: by what gain, how sure, at which batch size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dsat.in_trial.batches import OF_ITS_OWN, UNCOUNTED, UNSEEN
from dsat.report.longest_sequence import memory_warning
from dsat.report.run_view import best_config
from dsat.report.verdict import gain, learning_rate_advice, say_gain, verdict
from dsat.tuning.comparison import Gain
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import MemoryUse, SequenceLengths
from dsat.values.trial import BatchTriple
from testing.helpers import FakeClock, World, failed, plan_of, profiled, ran, weightless
from tests.report.test_summary import run_of
from tests.tuning.test_finals_phase import ran_to_the_end


def test_the_best_is_compared_with_the_users_own() -> None:
    said = " ".join(verdict(run_of((1, 8, ran(150)), baseline=ran(100))))
    assert "Best: t2, 150 samples/s" in said
    assert said.startswith("Gain: 1.50x (1.48 to 1.52) over your own")
    assert "unconfirmed" in said and "no finals were run" in said


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (101.0, "No significant difference: keep your own configuration."),
        (103.0, "The gain does not justify a global batch of 16 instead of 8: keep your own"),
    ],
)
def test_without_finals_a_gain_within_the_noise_or_not_worth_its_batch_is_not_recommended(
    value: float, why: str
) -> None:
    plan = plan_of(finals=None, max_trials=3, indifference=0.05)
    run = run_of((1, 8, ran(value)), baseline=ran(100), plan=plan)
    said = " ".join(verdict(run))
    assert run.best is run.baseline
    assert f"{why}" in said and f"t2, is {value / 100:.2f}" in said
    assert "which need a budget of 8 trials" in said
    assert "learning rate" not in said


def test_smaller_is_better_for_latency() -> None:
    plan = plan_of(metric="latency")
    slow, fast = ran(30, "latency"), ran(20, "latency")
    run = run_of((1, 8, fast), baseline=slow, plan=plan)
    assert run.best is not None
    assert run.best.name == "t2"
    assert "1.50x (1.48 to 1.52) over your own" in " ".join(verdict(run))


def test_the_users_own_may_be_the_best() -> None:
    said = verdict(run_of((1, 8, ran(50)), baseline=ran(100)))
    assert said[0] == "Keep your own configuration: nothing faster was found."


def test_the_users_own_may_not_run_or_not_be_measured() -> None:
    said = " ".join(verdict(run_of((1, 8, ran(50)), baseline=failed("OOM", "too big"))))
    assert "Your own configuration did not run: OOM: too big" in said
    assert "was not measured" in " ".join(verdict(run_of((1, 8, ran(50)))))


def test_nothing_ran() -> None:
    assert verdict(run_of((1, 8, failed("OOM")))) == ["No configuration ran."]


@pytest.mark.parametrize(
    ("optimizer", "advice"),
    [
        ({"type": "AdamW"}, "sqrt(32/8) = 2."),
        ({"type": "SGD"}, "multiply it by 32/8 = 4."),
        (None, "with an Adam-like optimizer multiply it by sqrt(32/8) = 2, with SGD multiply it"),
    ],
)
def test_learning_rate_advice(optimizer: dict[str, str] | None, advice: str) -> None:
    base = {"optimizer": optimizer} if optimizer else {}
    said = learning_rate_advice(run_of((1, 16, ran(150)), base=base))
    assert len(said) == 1
    assert advice in said[0]
    assert "from 8 to 32" in said[0]


def test_no_learning_rate_advice_for_the_same_batch() -> None:
    assert learning_rate_advice(run_of((1, 4, ran(150)))) == []


# -- after finals


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Gain(1.4209, 1.3811, 1.4604), "1.42x (1.38 to 1.46)"),
        (Gain(1.0153, 1.0121, 1.0185), "1.015x (1.012 to 1.018)"),
    ],
)
def test_a_gain_with_its_interval(found: Gain, said: str) -> None:
    assert say_gain(found) == said


def test_a_confirmed_gain_is_that_of_the_finals() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, luck={10: 1.2})
    assert run.best is not None and run.best is run.leader
    said = " ".join(verdict(run))
    found = gain(run)
    assert found is not None and found.low < 1.5 < found.high < 1.7, "1.8 by the search"
    assert f"Gain: {say_gain(found)} over your own configuration; 95 % interval of 2 pairs" in said
    assert "Run-to-run variation" in said


def test_a_gain_that_is_luck_leaves_the_users_own() -> None:
    run = ran_to_the_end(speeds={10: 1.0}, luck={10: 1.2})
    assert run.best is run.baseline and run.leader is not run.baseline
    said = " ".join(verdict(run))
    assert "No significant difference: keep your own configuration." in said
    assert run.best is not None
    own = run.plan.config({}) if run.plan else {}
    config = best_config(run) or {}
    assert config["zero_optimization"] == own["zero_optimization"]


def test_the_gain_at_the_same_global_batch_is_told() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, batches=True)
    said = " ".join(verdict(run))
    assert re.search(r"At your global batch size of 8 the gain is 1\.\d+x \(", said)
    assert "so the learning rate should too" in said


def test_a_batch_alone_is_no_gain_at_the_same_batch() -> None:
    run = ran_to_the_end(speeds={}, batches=True)
    said = " ".join(verdict(run))
    assert "nothing faster was found: the whole gain comes from the larger batch." in said


# -- sequences


def of_sequences(
    longest: int, *, shortest: int | None = None, takes: int | None = None, used: int | None = None
) -> Run:
    """Profiled with 100 tokens, where a sample's activations are 1 GB; the best has 8 samples. The
    model's parameters and optimizer take 3.6 GB of the 44 GB."""
    memory = None if used is None else MemoryUse({"forward": used})
    sequences = SequenceLengths(shortest or longest, longest, takes)
    run = run_of(
        (1, 8, replace(ran(150), sequences=sequences, memory=memory)),
        baseline=ran(100),
        profile=replace(profiled(World.profile), sequences=SequenceLengths(100, 100, takes)),
    )
    assert run.best is not None and run.best.name == "t2"
    return run


def with_option(run: Run, length: int) -> Run:
    assert run.plan is not None
    run.plan = replace(run.plan, max_seq_length=length)
    return run


def test_longer_sequences_that_would_not_fit_are_warned_of() -> None:
    [said] = memory_warning(with_option(of_sequences(100, used=10 * 10**9), 1000))
    # 10 GB, and 8 samples of 1 GB nine times more: 82 GB.
    need = re.search(r"With 1000 \(--max-seq-length\) it is predicted to need ([\d.]+) GiB", said)
    assert need is not None and float(need[1]) * 2**30 == pytest.approx(82e9, rel=0.02)
    assert "a micro batch of 4 is predicted to fit (--max-micro-batch 4)" in said
    assert said in verdict(with_option(of_sequences(100, used=10 * 10**9), 1000))


def test_sequences_that_fit_are_not_warned_of() -> None:
    assert memory_warning(with_option(of_sequences(100, used=10 * 10**9), 500)) == []
    assert memory_warning(with_option(of_sequences(100, used=10 * 10**9), 50)) == []
    assert memory_warning(run_of((1, 8, ran(150)), baseline=ran(100))) == []


def test_a_prediction_stands_in_for_memory_that_was_not_counted() -> None:
    [said] = memory_warning(with_option(of_sequences(100), 1000))
    need = re.search(r"need ([\d.]+) GiB", said)
    assert need is not None and 80e9 < float(need[1]) * 2**30 < 90e9
    assert memory_warning(with_option(of_sequences(100), 400)) == []


def test_what_the_model_takes_counts_where_lengths_vary() -> None:
    [said] = memory_warning(of_sequences(100, shortest=60, takes=1000, used=10 * 10**9))
    assert "With 1000 (the model's max_position_embeddings)" in said
    assert "say so with --max-seq-length" in said
    assert memory_warning(of_sequences(100, takes=1000, used=10 * 10**9)) == []


def test_not_even_one_sample_may_fit() -> None:
    [said] = memory_warning(with_option(of_sequences(100, used=10 * 10**9), 5000))
    assert "no micro batch is predicted to fit" in said


def test_tokens_are_told_beside_the_metric() -> None:
    measured = ran(150).metrics
    assert measured is not None
    outcome = replace(ran(150), metrics=replace(measured, tokens_per_second=76_800.0))
    assert verdict(run_of((1, 8, outcome)))[1].endswith("steps), 76,800 tokens/s.")
    assert "tokens/s" not in verdict(run_of((1, 8, ran(150))))[1]


def test_samples_that_cannot_be_counted_are_told_of_once() -> None:
    uncounted = replace(ran(150), warnings=(UNCOUNTED,))
    said = verdict(run_of((1, 8, uncounted), (1, 4, uncounted), baseline=ran(100)))
    assert [line for line in said if "cannot be counted" in line] == [
        f"{UNCOUNTED[0].upper()}{UNCOUNTED[1:]}."
    ]
    assert "cannot be counted" not in " ".join(verdict(run_of((1, 8, ran(150)))))
    # What it is compared with counts as well.
    own = replace(
        ran(100), warnings=(UNSEEN, OF_ITS_OWN.format(rows=12, micro_batch=4, advice=""), "hot")
    )
    said = verdict(run_of((1, 8, ran(150)), baseline=own))
    assert [line[:26] for line in said if "script feeds" in line] == [
        "The samples that the scrip",
        "The script feeds 12 sample",
    ]


def test_an_interrupted_run_does_not_claim_to_have_searched() -> None:
    journal = MemoryJournal()
    tuner = Tuner(plan_of(own_batch=BatchTriple(4, 4, 1)), journal, clock=FakeClock())
    tuner.next_trials(1)
    tuner.record(0, profiled(weightless(15)))
    tuner.next_trials(1)
    tuner.record(1, ran(3.0))
    before_s = tuner.run.running_s
    tuner.pause()
    assert verdict(tuner.run)[0] == "Keep your own configuration: nothing else was measured yet."
    assert tuner.run.running_s > before_s, "the time up to the interrupt counts"
    Tuner(tuner.plan, MemoryJournal(), events=journal.events)  # may be continued
