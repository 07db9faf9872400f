"""What is said of the best configuration: by what gain, how sure, at which batch size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.in_trial.batches import OF_ITS_OWN, OWN_ACCUMULATION, UNCOUNTED, UNSEEN
from dsat.in_trial.config_injection import SEVERAL_ENGINES, ZERO_INIT
from dsat.inputs.switches import OTHER_ACCUMULATION, OTHER_BATCH, OTHER_CONFIG
from dsat.report import advice
from dsat.report import format as fmt
from dsat.report.longest_sequence import memory_warning
from dsat.report.run_view import RunView, best_config
from dsat.report.verdict import gain, say_gain, verdict
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import (
    MemoryUse,
    Outcome,
    OwnOptimizer,
    SequenceLengths,
    StepFacts,
    TrainingCurve,
)
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import FakeClock, World, drive, failed, plan_of, profiled, ran, weightless
from testing.made_up_runs import Steady, run_of_world
from tests.report.test_summary import run_of
from tests.tuning.test_finals_phase import (
    OWN_BUCKET,
    Buckets,
    finals_plan,
    ran_to_the_end,
    tuner_of,
)


def test_the_first_lines_are_the_gain_what_changed_and_how_sure_it_is() -> None:
    said = verdict(run_of((1, 12, ran(150)), baseline=ran(100))).lines
    assert said[:3] == (
        "Gain 1.50x, unconfirmed: 100 -> 150 samples/s with a global batch of 24 instead of 8. "
        "Use t2.",
        "Changed: ZeRO stage 0 -> 1, micro batch 4 -> 12.",
        "Confidence: low, because each was measured once and the luckiest looks best. Finals would "
        "confirm it (--finals).",
    )
    assert [line.partition(":")[0] for line in said[3:]] == ["Batch", "Learning rate"]


def test_programs_get_the_values_of_the_verdict() -> None:
    """The finals', where there were any: the rows are single trials, and tell another gain."""
    run = run_of_world(Steady(), finals=None, trials=60)
    told = RunView.of(run).to_json(Path())
    change = fmt.change("throughput", told["own_value"], told["best_value"])
    assert told["gain"] != 1 and change in verdict(run).headline
    assert told["best_value"] != told["best"]["metrics"]["throughput"]


def test_measurements_that_say_little_are_warned_of() -> None:
    measured = ran(150).metrics
    assert measured is not None
    noisy = replace(ran(150), metrics=replace(measured, ci95=0.8))
    [said] = verdict(run_of((1, 4, noisy), baseline=ran(100))).warnings
    assert said.startswith("measurements are uncertain by ±80.0 %, so smaller gains go unseen. End")


def test_what_the_scripts_code_has_to_say_is_written_down() -> None:
    said = replace(ran(150), warnings=(OTHER_BATCH, OTHER_CONFIG, OTHER_ACCUMULATION))
    [script] = [t for t in verdict(run_of((1, 4, said), baseline=ran(100))).advice if "Script" in t]
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=1)" in script
    assert "best_ds_config.json in place of" in script
    assert "lightning.Trainer(accumulate_grad_batches=1)" in script


def test_a_default_that_is_written_out_is_no_change() -> None:
    run = run_of((1, 4, ran(150)), baseline=ran(100))
    best = run.best
    assert best is not None
    its = {"stage": 1, "reduce_scatter": True, "contiguous_gradients": False}
    overrides = {**best.overrides, "zero_optimization": its}
    run.trials[best.id] = run.leader = replace(best, overrides=overrides)
    said = "ZeRO stage 0 -> 1, contiguous_gradients true -> false."
    assert verdict(run).changed == said


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (101.0, "t2 is not significantly faster, 1.01x ("),
        (103.0, "does not justify a global batch of 16 instead of 8."),
    ],
)
def test_without_finals_a_gain_within_the_noise_or_not_worth_its_batch_is_not_recommended(
    value: float, why: str
) -> None:
    plan = plan_of(finals=None, max_trials=3, indifference=0.05)
    run = run_of((1, 8, ran(value)), baseline=ran(100), plan=plan)
    found = verdict(run)
    assert run.best is run.baseline
    assert found.headline.startswith("Keep your configuration (100 samples/s): ")
    assert why in found.headline and f"{value / 100:.2f}" in found.headline
    assert "(--max-trials 8 or more)" in found.confidence
    assert (found.changed, found.advice) == ("", ())


def test_the_users_own_may_be_the_best_or_not_run_or_not_be_measured() -> None:
    said = verdict(run_of((1, 8, ran(50)), baseline=ran(100))).lines
    assert said == ("Keep your configuration (100 samples/s): nothing faster was found.",)
    found = verdict(run_of((1, 8, failed("OOM"))))
    assert found.lines == ("No configuration ran.", "Warning: t1 failed: OOM.")
    failing = verdict(run_of((1, 8, ran(50)), baseline=failed("ERROR", "no")))
    assert failing.headline.endswith(": your configuration did not run (ERROR: no).")
    assert failing.headline.startswith("Use t2 (50 samples/s): ")
    unmeasured = run_of((1, 8, ran(50)))
    assert "was not measured" in verdict(unmeasured).headline
    del unmeasured.outcomes[0]
    assert "was not measured" in verdict(unmeasured).headline, "the first trial has not ended"


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ({"type": "AdamW"}, "multiply it by sqrt(32/8) = 2, because"),
        ({"type": "SGD"}, "multiply it by 32/8 = 4, because"),
        (None, "sqrt(32/8) = 2 with an Adam-like optimizer, by 32/8 = 4 with SGD, because"),
    ],
)
def test_learning_rate_advice(optimizer: dict[str, str] | None, factor: str) -> None:
    base = {"optimizer": optimizer} if optimizer else {}
    said = advice.of_learning_rate(run_of((1, 16, ran(150)), base=base))
    assert len(said) == 1
    assert factor in said[0]


def test_a_schedule_in_steps_is_scaled_with_the_batch() -> None:
    lengths = {"warmup_num_steps": 1, "total_num_steps": 5001, "cycle_first_step_size": "auto"}
    base = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 4, **lengths}}}
    _, said = advice.of_learning_rate(run_of((1, 16, ran(150)), base=base))
    assert "set warmup_num_steps 1 -> 1, total_num_steps 5001 -> 1250. A Trainer" in said


@pytest.mark.parametrize(("own", "best", "is_said"), [(0, 3, True), (3, 3, False), (0, 2, False)])
def test_a_script_that_first_trains_in_stage_3_must_save_otherwise(
    own: int, best: int, is_said: bool
) -> None:
    base = {"zero_optimization": {"stage": own}}
    said = verdict(run_of((best, 4, ran(150)), baseline=ran(100), base=base)).advice
    assert any(line.startswith("Saving: in stage 3 state_dict()") for line in said) is is_said


def test_what_a_script_must_change_for_its_best_is_warned_of() -> None:
    partitioned = replace(ran(150), warnings=(ZERO_INIT,))
    assert verdict(run_of((2, 4, partitioned), baseline=ran(100))).warnings == (f"{ZERO_INIT}.",)
    assert verdict(run_of((3, 4, ran(150)), (2, 4, partitioned), baseline=ran(9))).warnings == ()


@pytest.mark.parametrize(("own", "best", "is_said"), [(0.25, 0.0, True), (1.0, 0.95, False)])
def test_work_beside_the_training_must_be_alike(own: float, best: float, is_said: bool) -> None:
    """Generations of GRPO come every so many micro steps, whatever the accumulation."""
    first = replace(ran(100), training=TrainingCurve(facts=StepFacts(1, evaluated=own)))
    other = replace(ran(590), training=TrainingCurve(facts=StepFacts(1, evaluated=best)))
    said = " ".join(verdict(run_of((1, 4, other), baseline=first)).warnings)
    assert ("not be comparable" in said and "25.0 % of" in said and "0.0 % of" in said) is is_said


@pytest.mark.parametrize(
    ("own", "best", "said"), [((8, 16), (8, 12, 16), True), ((8, 16), (8, 12), False)]
)
def test_steps_that_are_late_in_both_are_work_of_the_training(
    own: tuple[int, ...], best: tuple[int, ...], said: bool
) -> None:
    first = replace(ran(100), training=TrainingCurve(facts=StepFacts(1, late=own)))
    other = replace(ran(150), training=TrainingCurve(facts=StepFacts(1, late=best)))
    warnings = verdict(run_of((1, 4, other), baseline=first)).warnings
    assert [text.startswith("optimizer steps 8, 16 took far") for text in warnings] == [True] * said


def test_several_engines_are_warned_of_whichever_is_the_best() -> None:
    first = replace(ran(100), warnings=(SEVERAL_ENGINES,))
    said = verdict(run_of((1, 4, ran(150)), baseline=first)).warnings
    assert said == (f"{SEVERAL_ENGINES}.",)


@pytest.mark.parametrize(("own", "best", "is_said"), [(0, 2, True), (1, 0, True), (1, 3, False)])
def test_an_optimizer_of_shapes_is_not_the_same_on_both_sides_of_stage_0(
    own: int, best: int, is_said: bool
) -> None:
    base = {"zero_optimization": {"stage": own}}
    profile = profiled(
        replace(World.profile, optimizer=OwnOptimizer("Adafactor", by_element=False))
    )
    run = run_of((best, 4, ran(150)), baseline=ran(100), base=base, profile=profile)
    assert any(text.startswith("Adafactor may") for text in verdict(run).warnings) is is_said


# -- after finals


def test_a_confirmed_gain_is_that_of_the_finals() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, luck={10: 1.2})
    assert run.best is not None and run.best is run.leader
    said, found = verdict(run), gain(run)
    assert found is not None and found.low < 1.5 < found.high < 1.7, "1.8 by the search"
    assert said.headline.startswith(f"Gain {say_gain(found)}: ")
    assert said.confidence.startswith("95 % interval of 2 pairs of runs in turns; run-to-run ")


def test_a_gain_that_is_luck_leaves_the_users_own() -> None:
    run = ran_to_the_end(speeds={10: 1.0}, luck={10: 1.2})
    assert run.best is run.baseline and run.leader is not run.baseline
    said = verdict(run)
    assert said.headline.startswith("Keep your configuration")
    assert "is not significantly faster, " in said.headline and "pairs of runs" in said.confidence
    assert run.best is not None
    own = run.plan.config({}) if run.plan else {}
    config = best_config(run) or {}
    assert config["zero_optimization"] == own["zero_optimization"]


@pytest.mark.parametrize(
    ("fails", "own_batch", "why"),
    [
        (OWN_BUCKET, BatchTriple(8, 8, 1), "your configuration failed when it was run again"),
        (
            10,
            BatchTriple(16, 16, 1),
            "none of the leading configurations was confirmed on a re-run",
        ),
    ],
)
def test_a_gain_without_a_pair_of_finals_says_why(
    fails: int, own_batch: BatchTriple, why: str
) -> None:
    class Fragile(Buckets):
        def outcome(self, trial: Trial) -> Outcome:
            bucket = trial.overrides.get("zero_optimization", {}).get("reduce_bucket_size", 1)
            again = trial.kind is TrialKind.FINAL and bucket == fails
            return failed("OOM") if again else super().outcome(trial)

    plan = finals_plan(own_batch=own_batch, train_batch_size=8, finals=3)
    tuner, _ = tuner_of(plan)
    drive(tuner, Fragile({10: 1.5}))
    said = verdict(tuner.run)
    assert said.headline.startswith("Gain 1.") and ", unconfirmed: " in said.headline
    assert said.confidence.startswith(f"low, because {why}")


def test_the_gain_at_the_same_global_batch_is_told() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, batches=True)
    batch, learning_rate = verdict(run).advice
    assert re.search(r"^Batch: at your global batch of 8, \S+ gains 1\.\d+x \(", batch)
    assert learning_rate.startswith("Learning rate: multiply it by ")


def test_a_batch_alone_is_no_gain_at_the_same_batch() -> None:
    run = ran_to_the_end(speeds={}, batches=True)
    said = verdict(run).advice[0]
    assert "nothing faster was found: the whole gain comes from the larger batch; to keep" in said


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
    run.plan = replace(run.plan, max_seq_length=length)
    return run


def test_longer_sequences_that_would_not_fit_are_warned_of() -> None:
    [said] = memory_warning(with_option(of_sequences(100, used=10 * 10**9), 1000))
    # 10 GB, and 8 samples of 1 GB nine times more: 82 GB.
    need = re.search(r"With 1000 \(--max-seq-length\) it is predicted to need ([\d.]+) GiB", said)
    assert need is not None and float(need[1]) * 2**30 == pytest.approx(82e9, rel=0.02)
    assert "a micro batch of 4 is predicted to fit (--max-micro-batch 4)" in said
    assert said in verdict(with_option(of_sequences(100, used=10 * 10**9), 1000)).warnings


@pytest.mark.parametrize("used", [10 * 10**9, None])
def test_sequences_that_fit_are_not_warned_of(used: int | None) -> None:
    """A prediction stands in for memory that was not counted."""
    assert memory_warning(with_option(of_sequences(100, used=used), 1000))
    assert memory_warning(with_option(of_sequences(100, used=used), 400)) == []
    assert memory_warning(with_option(of_sequences(100, used=used), 50)) == []
    assert memory_warning(run_of((1, 8, ran(150)), baseline=ran(100))) == []


def test_what_the_model_takes_counts_where_lengths_vary() -> None:
    [said] = memory_warning(of_sequences(100, shortest=60, takes=1000, used=10 * 10**9))
    assert "With 1000 (the model's max_position_embeddings)" in said
    assert "say so with --max-seq-length" in said
    assert memory_warning(of_sequences(100, takes=1000, used=10 * 10**9)) == []


def test_tokens_are_told_beside_the_metric() -> None:
    measured = ran(150).metrics
    assert measured is not None
    outcome = replace(ran(150), metrics=replace(measured, tokens_per_second=76_800.0))
    facts = RunView.of(run_of((1, 8, outcome))).facts
    assert facts[1].startswith("best: t1, 150 samples/s (±")
    assert facts[1].endswith("steps), 76,800 tokens/s")
    assert "tokens/s" not in " ".join(RunView.of(run_of((1, 8, ran(150)))).facts)


def test_samples_that_cannot_be_counted_are_told_of_once() -> None:
    uncounted = replace(ran(150), warnings=(UNCOUNTED,))
    said = verdict(run_of((1, 8, uncounted), (1, 4, uncounted), baseline=ran(100)))
    assert said.warnings == (f"{UNCOUNTED}.",)
    assert verdict(run_of((1, 8, ran(150)))).warnings == ()
    # What it is compared with counts as well.
    other = OF_ITS_OWN.format(rows=12, micro_batch=4, advice="")
    own = replace(ran(100), warnings=(UNSEEN, other, "hot", OWN_ACCUMULATION.format(k=4)))
    said = verdict(run_of((1, 8, ran(150)), baseline=own))
    assert [line[:26] for line in said.warnings] == [
        "the samples that the scrip",
        "the script feeds 12 sample",
        "each optimizer step of the",
    ]


def test_an_interrupted_run_does_not_claim_to_have_searched() -> None:
    journal = MemoryJournal()
    tuner = Tuner(plan_of(own_batch=BatchTriple(4, 4, 1)), journal, clock=FakeClock())
    tuner.next_trials(1)
    tuner.record(0, replace(ran(3.0), profile=weightless(15)))
    before_s = tuner.run.running_s
    tuner.pause()
    assert verdict(tuner.run).headline.endswith(": nothing else was measured yet.")
    assert tuner.run.running_s > before_s, "the time up to the interrupt counts"
    Tuner(tuner.plan, MemoryJournal(), events=journal.events)  # may be continued


def test_smaller_is_better_for_latency() -> None:
    plan = plan_of(metric="latency")
    slow, fast = ran(30, "latency"), ran(20, "latency")
    run = run_of((1, 4, fast), baseline=slow, plan=plan)
    assert run.best is not None
    assert run.best.name == "t2"
    assert verdict(run).headline == "Gain 1.50x, unconfirmed: latency 30 -> 20 ms. Use t2."


def test_a_noisy_measurement_does_not_hide_a_sure_gain() -> None:
    noisy = ran(200).metrics
    assert noisy is not None
    unsure = replace(ran(200), metrics=replace(noisy, ci95=1.5))
    run = run_of((1, 4, ran(150)), (2, 4, unsure), baseline=ran(100))
    assert run.best is not None and run.leader is not None
    assert (run.leader.stage, run.best.stage) == (2, 1)
    assert verdict(run).headline.startswith("Gain 1.50x, unconfirmed: 100 -> 150")
    assert run_of((2, 4, unsure), baseline=ran(100)).best.stage == 0  # type: ignore[union-attr]
