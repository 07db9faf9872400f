"""GPUs, found by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.errors import UserInputError
from dsat.search import gpus
from dsat.search.step_time import CPU_CORE, Job, hardware_of
from testing.helpers import weightless

NAMES = {
    "h100": "H100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "A100": "A100-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
    "A100 80G": "A100-80GB",
    "A100-SXM4": "A100-80GB",
    "rtx4090": "RTX-4090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA L40S 48GB": "L40S",
    "B200-192GB": "B200",
}


@pytest.mark.parametrize("given", NAMES)
def test_gpus_are_found_as_people_and_drivers_name_them(given: str) -> None:
    assert gpus.find(given).name == NAMES[given]


@pytest.mark.parametrize(
    "given",
    [
        *("A10", "L4", "L40", "H20", "GH200", "H100 NVL", "RTX 4090 Laptop GPU", "V100", "-"),
        *("RTX", "PCIe", "40GB", "80G PCIe"),  # of several GPUs
        *("H100-64GB", "H100 94GB", "A100-64GB"),  # with another memory
    ],
)
def test_another_gpu_of_a_similar_name_is_not_taken_for_it(given: str) -> None:
    with pytest.raises(UserInputError, match=r"unknown GPU .*; known GPUs: A100-40GB"):
        gpus.find(given)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        *(("NVIDIA H100 96GB HBM3", "H100"), ("NVIDIA H100 64GB HBM2", "H100")),
        *(("NVIDIA A100-SXM-64GB", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB")),
        *(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GH200 480GB", None)),
    ],
)
def test_a_device_with_an_unusual_memory_is_as_fast_as_its_gpu(
    device: str, gpu: str | None
) -> None:
    assert Job.of_profile(replace(weightless(9), device_name=device), slots=1).hardware == (
        hardware_of(gpus.find(gpu), 2) if gpu else CPU_CORE
    )


def test_every_gpu_has_sources_for_its_numbers() -> None:
    data = json.loads(Path(gpus.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for name in data["gpus"]:
        assert any(name.startswith(known) for known in data["sources"]), name
