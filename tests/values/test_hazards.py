"""Known faults of DeepSpeed: which versions and trainings have them."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dsat.values import hazards
from dsat.values.hazards import FAILS, GRADIENTS, Training, find, find_by_version, table


def training(stage: int, gas: int = 1, precision: str = "fp32", **config: Any) -> Training:
    return Training(config, stage, precision, gas, ranks=2)


@pytest.mark.parametrize(
    ("version", "met", "is_hit"),
    [
        ("0.18.2", training(2, gas=4), True),
        ("0.18.2+cu128", training(2, gas=4), True),
        ("0.18.2", training(2), False),
        ("0.18.2", training(1, gas=4), False),
        ("0.19.8", training(2, gas=4), False),
        (
            "0.18.6",
            training(2, 4, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
            True,
        ),
        ("0.18.6", training(2, gas=4), False),
        ("0.18.6", training(1, 4, "bf16", data_types={"grad_accum_dtype": "fp32"}), True),
        ("0.18.6", training(1, 4, "bf16"), False),
        ("not a version", training(2, gas=4), False),
        (None, training(2, gas=4), False),
    ],
)
def test_a_fault_needs_its_version_and_its_condition(
    version: str | None, met: Training, is_hit: bool
) -> None:
    assert bool([h for h in find(version, met, GRADIENTS) if not h.unseen]) is is_hit


def test_failures_on_processor_cores_are_no_failures_on_gpus() -> None:
    on_cpu = Training({}, 2, "fp32", 1, ranks=2, on_cpu=True)
    assert find("0.18.8", on_cpu, FAILS)
    assert not find("0.18.8", training(2), FAILS)


def test_the_version_to_install_has_no_known_fault() -> None:
    for each in table():
        assert Version(each.good) not in SpecifierSet(each.versions), each.name
    assert not find_by_version(hazards.unaffected_version(find_by_version("0.18.2")))
    assert not find_by_version(hazards.unaffected_version(find_by_version("0.18.6")))


def test_every_row_says_where_it_comes_from() -> None:
    for each in table():
        assert each.checked and each.effect, each.name
        assert each.sources or each.kind == FAILS or "65,536" in each.effect


def test_the_version_is_read_from_a_journal() -> None:
    assert hazards.version_in("Python 3.11, torch 2.9.1, deepspeed 0.18.5") == "0.18.5"
    assert hazards.version_in("") is None
