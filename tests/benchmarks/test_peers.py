"""Every tuner is played on the same table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ledger import OBJECTIVE, Ledger
from benchmarks.peers import PEERS, player
from benchmarks.replay import play
from benchmarks.tables import Table
from dsat.values.outcome import Outcome
from tests.benchmarks.conftest import (
    PARAMS,
    SAMPLE_BYTES,
    SLOT_BYTES,
    config_of,
)

# DeepSpeed's autotuner leaves files open, and Determined deprecates parts of its own.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:determined",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

# The GP sampler needs SciPy, which `make bench` installs; it differs from TPE in a class name.
PLAYED = [name for name in PEERS if name != "Optuna GP"]


class _Watched(Ledger):
    """Remembers what was asked."""

    def __init__(self, table: Table, max_trials: int) -> None:
        super().__init__(table, max_trials)
        self.asked: list[tuple[int, int, int]] = []

    def profile(self) -> Outcome:
        outcome = super().profile()
        self.asked.append((-1, 0, 0))
        return outcome

    def run(self, config: Any) -> Outcome:
        outcome = super().run(config)
        stage = config.get("zero_optimization", {}).get("stage", 0)
        size = config["train_micro_batch_size_per_gpu"]
        self.asked.append((stage, size, config["gradient_accumulation_steps"]))
        return outcome


def _asked(
    table: Table, name: str, seed: int = 1, max_trials: int = 30
) -> list[tuple[int, int, int]]:
    ledger = _Watched(table, max_trials)
    player(name)(ledger, seed, max_trials)
    assert len(ledger.asked) == len(ledger.outcomes) <= max_trials
    return ledger.asked


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_every_tuner_runs_and_finds_something(table: Table, name: str) -> None:
    episode = play(table, name, 1, 30, noisy=False)
    assert episode.best_after(30) > 0.6
    assert max(value for value in episode.values if value is not None) <= 1.0
    assert episode.slot_s > 0
    repeated = play(table, name, 1, 30, noisy=False)
    assert repeated.values == episode.values


@pytest.mark.parametrize("method", ["asha", "binary"])
def test_determined_begins_in_the_middle_of_its_own_prediction(table: Table, method: str) -> None:
    asked = _asked(table, f"Determined {method}")
    # 16 bytes for each parameter of a model in fp32, and one sample's activations.
    predicted = (SLOT_BYTES - 16 * PARAMS - SAMPLE_BYTES) // SAMPLE_BYTES
    assert asked[0] == (-1, 0, 0)
    assert asked[1][1:] == ((1 + predicted) // 2, 1)
    stage, size, _ = asked[1]
    assert asked[2][0] == stage
    assert asked[2][1] != size
    assert len(asked) == 30


def test_deepspeed_walks_through_the_stages_as_its_fast_mode_does(table: Table) -> None:
    asked = _asked(table, "DeepSpeed fast", max_trials=50)
    largest = table.largest_micro_batch
    assert asked[:3] == [(-1, 0, 0), (0, 1, 1), (0, largest, 1)]
    assert (0, largest // 2, 2) in asked, "half the micro batch, accumulated twice"
    assert len(asked) < 50


@pytest.mark.parametrize("name", ["Optuna TPE", "no search"])
def test_who_has_no_memory_model_gets_dsats_gate_and_start(table: Table, name: str) -> None:
    asked = _asked(table, name, max_trials=40)
    assert asked[:2] == [(-1, 0, 0), (0, 1, 1)]
    assert {stage for stage, _, _ in asked[1:]} == {0, 1, 2, 3}
    assert all(1 <= size <= 2 * table.largest_micro_batch for _, size, _ in asked[1:])


def test_what_is_measured_varies_with_the_seed_and_not_what_counts(table: Table) -> None:
    config = config_of(1, 4)
    ledgers = [Ledger(table, 5, noise=seed) for seed in (1, 1, 2)]
    told = [[ledger.run(config).metrics for _ in range(3)] for ledger in ledgers]
    assert told[0] == told[1] != told[2]
    assert len({metrics.throughput for metrics in told[0] if metrics}) == 3
    assert {ledger.outcomes[0].value(OBJECTIVE) for ledger in ledgers} == {
        table.answer(config).value(OBJECTIVE)
    }
