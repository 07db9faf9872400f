"""AutoTP and Ulysses on real ranks: the training is the same; samples and tokens count once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsat.space.overrides import overrides_for
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.local import Bench, bench_of
from testing.versions import needs

pytestmark = [pytest.mark.slow, needs("deepspeed", "0.19.8", "divides otherwise, or not at all")]

LENGTH = 32
TENSOR, SEQUENCE = Parallelism(tensor=2), Parallelism(sequence=2)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("parallel")
    with bench_of("parallel", folder, slots_per_trial=2, imported=True, max_steps=5) as found:
        yield found


def trained(bench: Bench, shared: Parallelism, stage: int, micro_batch: int = 2) -> Outcome:
    """Train with a global batch of four samples; return the outcome."""
    slots = bench.slots_per_trial
    gas = 4 // (micro_batch * shared.data(slots))
    batch = BatchTriple.on(slots, shared, micro_batch=micro_batch, gas=gas)
    overrides = overrides_for({"stage": stage, **shared.settings}, batch)
    number = next(_numbers)
    trial = Trial(number, TrialKind.SEARCH, f"{number}", stage, batch, overrides)
    outcome = bench.run(trial)
    assert outcome.ok, (outcome, bench.log(trial))
    return outcome


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Outcome:
    return trained(bench, DATA_ONLY, 1)


@pytest.mark.parametrize(
    ("shared", "stage"),
    [
        pytest.param(shared, stage, marks=[] if stage == 3 else pytest.mark.nightly)
        for shared in (TENSOR, SEQUENCE)
        for stage in range(4)
    ],
)
def test_losses_and_counts_are_those_of_data_parallelism(
    bench: Bench, alone: Outcome, shared: Parallelism, stage: int
) -> None:
    assert_the_same(trained(bench, shared, stage), alone)


def assert_the_same(outcome: Outcome, alone: Outcome) -> None:
    """Check that the training equals pure data parallelism, and that samples and tokens count
    once."""
    assert outcome.training is not None and alone.training is not None
    assert outcome.training.losses == pytest.approx(alone.training.losses, rel=2e-4)
    assert outcome.metrics is not None and outcome.sequences is not None
    step_s = outcome.metrics.latency / 1000
    assert outcome.metrics.throughput * step_s == pytest.approx(4)
    assert outcome.metrics.tokens_per_second is not None
    assert outcome.metrics.tokens_per_second * step_s == pytest.approx(4 * LENGTH)
    assert outcome.sequences.longest == LENGTH


@pytest.mark.nightly
def test_four_ranks_share_layers_or_sequences_and_data(tmp_path: Path) -> None:
    with bench_of("parallel", tmp_path, slots_per_trial=4, imported=True, max_steps=5) as bench:
        alone = trained(bench, DATA_ONLY, 1, 1)
        for shared in (TENSOR, SEQUENCE, Parallelism(sequence=4)):
            for stage in (1, 2, 3):
                assert_the_same(trained(bench, shared, stage, 1), alone)


@pytest.mark.nightly
def test_the_trainer_divides_layers_and_sequences_by_itself(tmp_path: Path) -> None:
    words = "deepspeed trainer.py --deepspeed ds_config.json --learning_rate 0.01 --max_steps 100"
    more: dict[str, Any] = {"slots_per_trial": 2, "imported": True, "max_steps": 5, "entry": words}
    with bench_of("parallel", tmp_path, **more) as bench:
        for stage in (1, 2, 3):
            alone, *shared = (
                trained(bench, each, stage, 1) for each in (DATA_ONLY, SEQUENCE, TENSOR)
            )
            for outcome in shared:
                assert_the_same(outcome, alone)


def test_a_script_that_leaves_the_size_out_is_told_so(tmp_path: Path) -> None:
    with bench_of("seeded", tmp_path, slots_per_trial=2, imported=True) as bench:
        batch = BatchTriple.on(2, SEQUENCE, micro_batch=2)
        overrides = overrides_for({"stage": 1, **SEQUENCE.settings}, batch)
        outcome = bench.run(Trial(0, TrialKind.SEARCH, "0", 1, batch, overrides))
    assert outcome.kind is OutcomeKind.INVALID
    assert json.dumps(outcome.message).count("sequence_parallel_size")
