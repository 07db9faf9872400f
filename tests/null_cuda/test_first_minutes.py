"""The script for the first minutes with a GPU runs, so that no time on a real one is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import first_minutes
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

_GIB = 2**30


GROUPS = [
    ["machine", "gpt2_medium", "projection"],
    ["llama_1b", "llama_8b_lora", "failures", "published"],
    ["cost_of_measuring", "operators", "tuners"],
]


def test_the_groups_are_all_steps() -> None:
    assert {step for steps in GROUPS for step in steps} == set(first_minutes.STEPS)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", GROUPS)
def test_every_step_runs_on_devices_that_compute_nothing(
    null_cuda: MachineOf, steps: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    null_cuda(Device(140 * _GIB, name="NVIDIA H200"), reclaim_s=2.0)
    call = [str(tmp_path), "--short", "--seconds", "5400", "--steps", *steps]
    assert first_minutes.main(call) == 0, capfd.readouterr().out
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in steps}
    if "failures" in steps:
        outcomes = found["failures"]
        for phase in ("forward", "backward", "step"):
            assert outcomes[f"out of memory in the {phase}"].startswith("OOM")
        assert outcomes["outcomes that are wrong"] == []
        assert outcomes["killed with the memory taken"].startswith("HOST_OOM")
        assert found["published"]["step 2 (GiB)"]["driver"] > 0
    assert (tmp_path / "results.tar.gz").exists()
    assert not set(steps) & set(first_minutes.unfinished(tmp_path))
