"""Division of slots, by configurations and by settings."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.values.parallelism import SEQUENCE_SIZE, TENSOR_SIZE, Parallelism, of_config, of_settings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Parallelism()),
        ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 4}, Parallelism(2, 4)),
        ({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": "auto"}, Parallelism()),
        ({"tensor_parallel": None, "sequence_parallel_size": True}, Parallelism()),
    ],
)
def test_of_a_configuration(config: dict[str, Any], expected: Parallelism) -> None:
    assert of_config(config) == expected


def test_settings_go_before_the_configuration() -> None:
    own = Parallelism(2, 1)
    assert of_settings({}, own) == own
    assert of_settings({TENSOR_SIZE: 1, SEQUENCE_SIZE: 4}, own) == Parallelism(1, 4)
    assert of_settings(own.settings, Parallelism()) == own


def test_slots_are_the_product() -> None:
    assert Parallelism(2, 2).data(8) == 2
    assert Parallelism(2).groups(8) == "4 groups of 2 slots (tensor parallel 2)"
    assert Parallelism().groups(8) == "8 slots"
