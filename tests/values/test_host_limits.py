"""Memory and CPU cores within control groups, in made-up folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from dsat.engines.machines.machine import machine_of_cores
from dsat.values import host_limits

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712
JOB = "system.slice/slurmstepd.scope/job_7"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder for control groups of a host with 4 GiB and six cores."""
    monkeypatch.setattr(host_limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {11, 10, 9, 8, 5, 3})
    return tmp_path


def make(folder: Path, lines: str, files: Mapping[str, object]) -> None:
    meminfo = f"MemTotal: {4096 * 1024} kB\nMemAvailable: {3072 * 1024} kB"
    for name, text in {"proc/self/cgroup": lines, "proc/meminfo": meminfo, **files}.items():
        path = folder / name if name.startswith("proc") else folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if text else "")


@pytest.mark.parametrize(
    ("lines", "files", "total", "available"),
    [
        pytest.param(
            "0::/",
            {
                "memory.max": 512 * MIB,
                "memory.current": 400 * MIB,
                "memory.stat": f"anon 1\ninactive_file {100 * MIB}\nactive_file 5",
            },
            *(512, 212),
            id="files in memory are given up first",
        ),
        pytest.param(
            "0::/",
            {"memory.max": 512 * MIB, "memory.high": 300 * MIB, "memory.current": 100 * MIB},
            *(300, 200),
            id="the lower of both limits",
        ),
        pytest.param(
            f"0::/{JOB}/step_0/user/task_0",
            {
                f"{JOB}/memory.max": 300 * MIB,
                f"{JOB}/memory.current": 50 * MIB,
                f"{JOB}/step_0/user/task_0/memory.max": "max",
                f"{JOB}/step_0/user/task_0/memory.current": 50 * MIB,
            },
            *(300, 250),
            id="Slurm limits the job, and the task is in a group of its own below",
        ),
        pytest.param(
            "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x",
            {
                "memory/memory.limit_in_bytes": 256 * MIB,
                "memory/memory.usage_in_bytes": 300 * MIB,
                "memory/memory.stat": f"total_inactive_file {20 * MIB}",
            },
            *(256, 0),
            id="first version: the path is the host's, and the container sees its group as root",
        ),
        pytest.param("0::/a", {"a/memory.max": "max"}, *(4096, 3072), id="no limit"),
        pytest.param(
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/memory.usage_in_bytes": MIB,
            },
            *(4096, 3072),
            id="no limit in the first version",
        ),
        pytest.param("", {}, *(4096, 3072), id="no group"),
    ],
)
def test_memory(
    groups: Path, lines: str, files: Mapping[str, object], total: int, available: int
) -> None:
    make(groups, lines, files)
    assert host_limits.total_bytes() == total * MIB
    assert host_limits.available_bytes() == available * MIB


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/", {"cpu.max": "450000 100000"}, [3, 5, 8, 9]),
        ("0::/", {"cpu.max": "50000 100000"}, [3]),
        ("0::/", {"cpu.max": "6400000 100000"}, [3, 5, 8, 9, 10, 11]),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, [3, 5]),
        (
            "5:cpuset:/\n4:cpuacct,cpu:/docker/x",
            {"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000},
            [3, 5, 8],
        ),
        (
            "4:cpu:/",
            {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000},
            [3, 5, 8, 9, 10, 11],
        ),
    ],
)
def test_there_are_as_many_cores_as_there_is_time_for(
    groups: Path, lines: str, files: Mapping[str, object], cores: list[int]
) -> None:
    make(groups, lines, files)
    assert host_limits.usable_cores() == cores


def test_slots_are_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's launcher divides all cores among its ranks, whatever the quota."""
    before = machine_of_cores()
    monkeypatch.setattr(host_limits, "usable_cores", lambda: [7])
    found = machine_of_cores()
    assert (found.devices, found.threads, found.cores) == (("7",), 1, before.cores)
    assert found.allowed == before.devices and not before.has_quota
    assert 0 < host_limits.available_bytes() <= host_limits.total_bytes()
    assert host_limits.total_bytes() <= psutil.virtual_memory().total
