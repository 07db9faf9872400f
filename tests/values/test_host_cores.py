"""Processor cores within control groups, of made-up folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsat.engines.local.machine import machine_of_cores
from dsat.values import host_cores
from tests.values.test_host_memory import machine


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "450000 100000"}, [3, 5, 8, 9]),
        ("0::/\n", {"cpu.max": "50000 100000"}, [3]),
        ("0::/\n", {"cpu.max": "6400000 100000"}, [3, 5, 8, 9, 10, 11]),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, [3, 5]),
        (
            "5:cpuset:/\n4:cpuacct,cpu:/docker/x\n",
            {"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000},
            [3, 5, 8],
        ),
        (
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000},
            [3, 5, 8, 9, 10, 11],
        ),
        ("", {}, [3, 5, 8, 9, 10, 11]),
    ],
)
def test_there_are_as_many_as_there_is_time_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: Mapping[str, object],
    cores: list[int],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {11, 10, 9, 8, 5, 3})
    assert host_cores.usable(**machine(tmp_path, groups, files)) == cores


def test_slots_are_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's launcher shares out all cores among its ranks, whatever the quota."""
    before = machine_of_cores()
    monkeypatch.setattr(host_cores, "usable", lambda: [7])
    found = machine_of_cores()
    assert (found.devices, found.threads, found.cores) == (("7",), 1, before.cores)
    assert found.allowed == before.devices and not before.has_quota
