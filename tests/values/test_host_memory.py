"""Memory within control groups, of made-up folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from dsat.values import host_memory

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712


def machine(folder: Path, groups: str, files: Mapping[str, object]) -> dict[str, Path]:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    (folder / "proc" / "meminfo").write_text(
        f"MemTotal: {4096 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {3072 * 1024} kB\n"
    )
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return {"proc": folder / "proc", "cgroups": folder / "cgroup"}


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    files = {
        "memory.max": 512 * MIB,
        "memory.current": 400 * MIB,
        "memory.stat": f"anon 1\ninactive_file {100 * MIB}\nactive_file 5",
    }
    there = machine(tmp_path, "0::/\n", files)
    assert host_memory.total_bytes(**there) == 512 * MIB
    assert host_memory.available_bytes(**there) == 212 * MIB


@pytest.mark.parametrize("high", [300 * MIB, 600 * MIB, "max"])
def test_the_lower_of_both_limits_counts(tmp_path: Path, high: object) -> None:
    files = {"memory.max": 512 * MIB, "memory.high": high, "memory.current": 100 * MIB}
    limit = min(512 * MIB, high) if isinstance(high, int) else 512 * MIB
    there = machine(tmp_path, "0::/\n", files)
    assert host_memory.total_bytes(**there) == limit
    assert host_memory.available_bytes(**there) == limit - 100 * MIB


def test_the_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    """Slurm limits the job, and the task is in a group of its own below."""
    job = "system.slice/slurmstepd.scope/job_7"
    files = {
        f"{job}/memory.max": 300 * MIB,
        f"{job}/memory.current": 50 * MIB,
        f"{job}/step_0/user/task_0/memory.max": "max",
        f"{job}/step_0/user/task_0/memory.current": 50 * MIB,
    }
    there = machine(tmp_path, f"0::/{job}/step_0/user/task_0\n", files)
    assert host_memory.total_bytes(**there) == 300 * MIB
    assert host_memory.available_bytes(**there) == 250 * MIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    """The path is the host's, and the container sees its own group as the root."""
    files = {
        "memory/memory.limit_in_bytes": 256 * MIB,
        "memory/memory.usage_in_bytes": 300 * MIB,
        "memory/memory.stat": f"total_inactive_file {20 * MIB}",
    }
    there = machine(tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n", files)
    assert host_memory.total_bytes(**there) == 256 * MIB
    assert host_memory.available_bytes(**there) == 0


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/user.slice\n", {"user.slice/memory.max": "max"}),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/memory.usage_in_bytes": MIB,
            },
        ),
        ("", {}),
    ],
)
def test_without_a_limit_the_whole_host_is_there(
    tmp_path: Path, groups: str, files: Mapping[str, object]
) -> None:
    there = machine(tmp_path, groups, files)
    assert host_memory.total_bytes(**there) == 4096 * MIB
    assert host_memory.available_bytes(**there) == 3072 * MIB


def test_this_machines_own() -> None:
    """Whatever control groups the tests are in."""
    assert 0 < host_memory.available_bytes() <= host_memory.total_bytes()
    assert host_memory.total_bytes() <= psutil.virtual_memory().total
