"""The script for the first minutes with a GPU runs, so that the day one comes costs nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks.gpu import first_minutes, report
from dsat.engines.machines.hosts import Host
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf


@pytest.mark.slow
@pytest.mark.nightly
def test_every_step_runs_on_devices_that_compute_nothing(
    null_cuda: MachineOf,
    imported: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "Host", functools.partial(Host, prefix=imported))
    null_cuda(Device(), Device(), reclaim_s=2.0)
    assert first_minutes.main([str(tmp_path), "--short"]) == 0, capsys.readouterr().out
    assert first_minutes.main([str(tmp_path), "--short"]) == 0
    assert capsys.readouterr().out.count("done before") == len(first_minutes.STEPS)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == set(first_minutes.STEPS)
    assert found["forks"]["with NVML"] == "ranks can be forked"
    assert found["forks"]["NVML hidden"] == "ranks can be forked"
    assert found["gpt2_medium"]["gain"] and found["llama_1b"]["search"]
    for phase in ("forward", "backward", "step"):
        assert found["out_of_memory"][f"in the {phase}"].startswith("OOM")
    stats = json.loads((tmp_path / "precisions" / "bf16.memory_stats.json").read_text())
    assert stats["allocated_bytes.all.peak"] > 0
    assert all(each["took (s)"] >= 0 for each in found.values())
