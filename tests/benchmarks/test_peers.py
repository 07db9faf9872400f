"""Every tuner runs on the same table."""

from __future__ import annotations

from unittest import mock

import pytest

from benchmarks.ledger import OBJECTIVE, Ledger
from benchmarks.peers import PEERS, player
from benchmarks.replay import play
from benchmarks.tables import Table
from tests.benchmarks.conftest import HEADER, config_of

# DeepSpeed's autotuner leaves files open, and Determined deprecates parts of itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:determined",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def _asked(table: Table, name: str, max_trials: int = 30) -> list[tuple[int, int, int]]:
    """Return stage, micro batch and accumulation of the trials after the profile."""
    ledger = Ledger(table, max_trials)
    with mock.patch.object(ledger, "run", wraps=ledger.run) as run:
        player(name)(ledger, 1, max_trials)
    configs = [call.args[0] for call in run.call_args_list]
    assert ledger.outcomes[0].profile is not None
    assert len(ledger.outcomes) == 1 + len(configs[: max_trials - 1])
    return [
        (
            config.get("zero_optimization", {}).get("stage", 0),
            config["train_micro_batch_size_per_gpu"],
            config["gradient_accumulation_steps"],
        )
        for config in configs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_every_tuner_runs_and_finds_something(table: Table, name: str) -> None:
    episode = play(table, name, 1, 30, noisy=False)
    assert episode.best_after(30) > 0.6
    assert max(value for value in episode.values if value is not None) <= 1.0
    repeated = play(table, name, 1, 30, noisy=False)
    assert repeated.values == episode.values


@pytest.mark.parametrize("method", ["asha", "binary"])
def test_determined_begins_in_the_middle_of_its_own_prediction(table: Table, method: str) -> None:
    (stage, size, gas), second, *_ = _asked(table, f"Determined {method}")
    # 16 bytes for each parameter, and one sample's activations.
    profile = HEADER.profile
    sample = profile.activation_bytes_per_sample
    predicted = (profile.slot_memory_bytes - 16 * profile.num_params - sample) // sample
    assert (size, gas) == ((1 + predicted) // 2, 1)
    assert second[0] == stage and second[1] != size


def test_deepspeed_walks_through_the_stages_as_its_fast_mode_does(table: Table) -> None:
    asked = _asked(table, "DeepSpeed fast", max_trials=50)
    largest = table.largest_micro_batch
    assert asked[:2] == [(0, 1, 1), (0, largest, 1)]
    assert (0, largest // 2, 2) in asked, "half the micro batch, accumulated twice"
    assert len(asked) < 49


@pytest.mark.parametrize("name", ["Optuna TPE", "no search"])
def test_who_has_no_memory_model_gets_dsats_gate_and_start(table: Table, name: str) -> None:
    asked = _asked(table, name, max_trials=40)
    assert asked[0] == (0, 1, 1)
    assert {stage for stage, _, _ in asked} == {0, 1, 2, 3}
    assert all(1 <= size <= 2 * table.largest_micro_batch for _, size, _ in asked)


def test_what_is_measured_varies_with_the_seed_and_not_what_counts(table: Table) -> None:
    config = config_of(1, 4)
    ledgers = [Ledger(table, 5, noise=seed) for seed in (1, 1, 2)]
    told = [[ledger.run(config).metrics for _ in range(3)] for ledger in ledgers]
    assert told[0] == told[1] != told[2]
    assert len({metrics.throughput for metrics in told[0] if metrics}) == 3
    true = table.answer(config).value(OBJECTIVE)
    assert {ledger.outcomes[0].value(OBJECTIVE) for ledger in ledgers} == {true}
