"""A host whose memory ends in some strategies."""

from __future__ import annotations

from dataclasses import replace

from testing.scenarios import User
from testing.world import Failure


def largest_of_stage_3(user: User) -> int:
    told = user.tunes("--max-trials", 12, "--finals", 0, "--zero-stages", 1, 2, 3)
    rows = [row for row in told.trials if row["stage"] == 3 and row["outcome"] == "OK"]
    return max(int(row["train_micro_batch_size_per_gpu"]) for row in rows)


def test_a_host_without_memory_in_one_strategy_says_nothing_of_others(user: User) -> None:
    other = replace(user, folder=user.folder / "other")
    other.has()
    other.world = replace(user.world, failures=(Failure("HOST_OOM", {"stage": [1, 2]}),))
    assert largest_of_stage_3(other) >= 0.9 * largest_of_stage_3(user)
