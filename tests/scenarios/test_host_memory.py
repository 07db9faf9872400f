"""A host whose memory ends in some strategies."""

from __future__ import annotations

from dataclasses import replace

from testing.scenarios import User
from testing.world import Failure


def first_of_stage_3(user: User) -> int:
    told = user.tunes("--max-trials", 12, "--finals", 0, "--zero-stages", 1, 2, 3)
    row = next(row for row in told.trials if row["stage"] == 3)
    micro_batch = row["train_micro_batch_size_per_gpu"]
    assert isinstance(micro_batch, int)
    return micro_batch


def test_a_host_without_memory_in_one_strategy_says_nothing_of_others(user: User) -> None:
    other = replace(user, folder=user.folder / "other")
    other.has()
    other.world = replace(user.world, failures=(Failure("HOST_OOM", {"stage": [1, 2]}),))
    assert 2 * first_of_stage_3(other) > first_of_stage_3(user)
