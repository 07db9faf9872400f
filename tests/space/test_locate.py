"""Locating a configuration in the search space: the inverse of the settings of a point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsat.space.locate import Locator, Point
from dsat.space.overrides import overrides_for
from dsat.space.space import Freedom, Space
from dsat.values.outcome import ScriptSwitch
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import CPU, Strategy, plain

CONFIG = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
GAS = "gradient_accumulation_steps"
SPACES = {
    "stages": Space(strategies=plain(0, 1, 2, 3), micro_batches=range(1, 65), slots=8),
    "on GPUs": Space(
        strategies=(*plain(1, 3), Strategy(3, CPU, CPU)),
        micro_batches=range(1, 65),
        slots=8,
        freedom=Freedom(base_config=CONFIG, offload_helps=True, tune=("compile",)),
        num_params=3 * 10**7,
        roomy_bucket=10**7,
    ),
    "switches": Space(
        strategies=plain(1, 2),
        micro_batches=(1, 2, 4),
        slots=2,
        freedom=Freedom(base_config=CONFIG, switches={"gradient_checkpointing": True}),
        found_switches={"optim": ScriptSwitch(("adamw_torch", "adamw_torch_fused"))},
    ),
    "accumulation": Space(
        strategies=plain(1),
        micro_batches=range(1, 9),
        slots=2,
        freedom=Freedom(choices={GAS: (1, 2, 4), "reduce_bucket_size": (10**6, 10**7)}),
    ),
    "a fixed batch": Space(
        strategies=plain(2), micro_batches=(1, 2, 4, 8), slots=2, train_batch_size=16
    ),
    "parallelism": Space(
        strategies=plain(1),
        micro_batches=range(1, 9),
        slots=8,
        freedom=Freedom(tune=("tensor_parallel.autotp_size", "sequence_parallel_size")),
        heads=16,
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_every_point_is_found_again(name: str) -> None:
    space, rng = SPACES[name], np.random.default_rng(0)
    locator = Locator(space)
    for number, branch in enumerate(space.branches):
        for index in {0, branch.count - 1, *rng.integers(branch.count, size=40).tolist()}:
            size = int(rng.choice(space.micro_batches))
            settings = branch.settings(index)
            batch = space.batch(size, settings)
            found = locator.locate(
                overrides_for(settings, batch), space.script_args(settings), batch
            )
            assert found == (Point(number, index, size), True)


@pytest.mark.parametrize(
    ("config", "roomy_bucket", "change", "exact"),
    [
        ({}, None, {}, True),
        ({}, 10**7, {}, True),  # a small GPU, whose first settings have smaller buckets
        ({"reduce_bucket_size": 10**6}, None, {}, True),  # left alone
        ({}, None, {"gas": 4}, False),  # other accumulation than the space has
        ({}, None, {"micro_batch": 100}, False),
        ({}, None, {"overlap_comm": "odd"}, False),
    ],
)
def test_the_users_own_configuration_is_found(
    config: dict[str, Any], roomy_bucket: int | None, change: dict[str, Any], exact: bool
) -> None:
    zero = {"stage": 2, **config, **{k: v for k, v in change.items() if k == "overlap_comm"}}
    plain_space = SPACES["stages"]
    freedom = Freedom(base_config={"zero_optimization": {"stage": 2, **config}})
    space = replace(plain_space, freedom=freedom, roomy_bucket=roomy_bucket, num_params=10**9)
    size, gas = change.get("micro_batch", 4), change.get("gas", 1)
    batch = BatchTriple(8 * size * gas, size, gas)
    overrides = {"zero_optimization": zero, **batch.config()}
    point, is_exact = Locator(space).locate(overrides, {}, batch)
    assert point is not None and is_exact is exact
    assert point.micro_batch == size
    settings = space.branches[point.branch].settings(point.index)
    assert settings["stage"] == 2
    if "reduce_bucket_size" in settings:
        assert settings["reduce_bucket_size"] == 5 * 10**8


def test_a_strategy_that_is_not_searched_has_no_point() -> None:
    batch = BatchTriple(8, 1, 1)
    overrides = {"zero_optimization": {"stage": 3}, **batch.config()}
    space = replace(SPACES["stages"], strategies=plain(1))
    assert Locator(space).locate(overrides, {}, batch) == (None, False)
