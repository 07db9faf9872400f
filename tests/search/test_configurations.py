"""Settings as the model-based search compares them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsat.search.base import Problem
from dsat.search.configurations import Configurations
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.zero_strategy import plain
from testing.helpers import weightless


def test_two_ways_to_share_a_sample_are_one_setting_like_any_other() -> None:
    """They are different settings to the search, which explores the neighbourhood of the best
    one."""
    freedom = Freedom(tune=("tensor_parallel.autotp_size", "sequence_parallel_size"))
    space = Space(
        strategies=plain(1), micro_batches=range(1, 9), slots=8, freedom=freedom, heads=16
    )
    profile = replace(weightless(15), num_params=10**8, trainable_params=10**8)
    problem = Problem(profile, Objective("throughput"), space, seed=0)
    known, [branch] = Configurations(problem), space.branches
    ways = branch.list_parallelisms()
    indices = [
        next(index for index in range(branch.count) if branch.settings(index) == way)
        for way in ways
    ]
    traits = np.array([known.row((0, index)).traits for index in indices])
    assert len(ways) > 3 and len(np.unique(traits, axis=0)) == len(ways)
    for index in (*indices, branch.count - 1):
        first, *others = known.changes(0, branch.settings(index))
        assert first == (0, index) and first not in others
