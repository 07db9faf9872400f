"""The contracts of engines and ranks, with every method to start ranks, on one host and on two."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from dsat.engines.machines.hosts import Host
from dsat.values.outcome import OutcomeKind
from testing import warm_host
from testing.hosts_contract import HostsContract
from testing.local import cpu_machine, hosts_here
from testing.ranks_contract import RanksContract

pytestmark = pytest.mark.slow

LAUNCHER = """
for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "$0" "$@" &
done
wait -n || exit; wait -n || exit
"""
SCRIPT = ("train.py", "--deepspeed_config", "ds_config.json")
ALONE = ("env", "RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", sys.executable, *SCRIPT)
COMMAND = ("bash", "-c", LAUNCHER, sys.executable, *SCRIPT)


class TestEngine(HostsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return [Host(cpu_machine(2), reach=warm_host.prefix())]


@pytest.mark.nightly
class TestEngineOverTwoHosts(HostsContract):
    """Both hosts are this machine."""

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return hosts_here(2, imported=True)


@pytest.mark.nightly
class TestColdEngine(HostsContract):
    options = {"cold": True}

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return [Host(cpu_machine(2))]


@pytest.mark.nightly
class TestCommandEngine(HostsContract):
    trials_at_once = 1
    options = {"command": ALONE, "entry": f"python3 {' '.join(SCRIPT)}"}

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return [Host(cpu_machine(1))]


class TestForkedRanks(RanksContract):
    options = {"imported": True}


@pytest.mark.nightly
class TestFreshRanks(RanksContract):
    options = {"cold": True}


@pytest.mark.nightly
class TestRanksOfACommand(RanksContract):
    options = {"command": COMMAND, "entry": f"python3 {' '.join(SCRIPT)}"}
    without_engine = OutcomeKind.ERROR
