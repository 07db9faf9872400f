"""The script for the first minutes with a GPU runs, so that the day one comes costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import first_minutes
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf


@pytest.mark.slow
def test_every_step_runs_on_devices_that_compute_nothing(
    null_cuda: MachineOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    null_cuda(Device(), Device())
    assert set(first_minutes.STEPS) >= {"devices", "forks", "simulations", "search", "memory_back"}
    assert first_minutes.main([str(tmp_path), "--short"]) == 0, capsys.readouterr().out
    reports = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(reports) == set(first_minutes.STEPS)
    assert reports["forks"]["with NVML"] == "ranks can be forked"
    assert reports["forks"]["NVML hidden"] == "ranks can be forked"
    assert all(report.get("left out") or report["took (s)"] > 0 for report in reports.values())
