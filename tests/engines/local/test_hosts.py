"""The engine over several hosts: children of this machine, real processes, and hosts that die."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.engines.local import heartbeats
from dsat.engines.local.hosts import Host
from dsat.engines.local.machine import Machine
from dsat.engines.local.slots import Slots
from dsat.errors import EngineError
from dsat.in_trial import loopback
from dsat.values.outcome import Outcome, OutcomeKind
from testing.hosts_contract import HostsContract
from testing.local import (
    PATIENCE_S,
    Bench,
    bench_of,
    buffers_of,
    engine_of,
    hosts_here,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)

GPUS = Machine("cuda", "test", ("0", "1", "2", "3"), ("CUDA_VISIBLE_DEVICES",), 8 * 2**30)
FAILED = Outcome(OutcomeKind.ERROR, message="it failed")


# -- where trials are placed


def gpu_hosts(count: int) -> list[Host]:
    return [Host(GPUS, name) for name in "abcdefgh"[:count]]


def placed(slots: Slots) -> dict[str, tuple[int, ...]] | None:
    shares = slots.take()
    return None if shares is None else {share.host.name: share.slots for share in shares}


def test_trials_leave_hosts_whole_as_long_as_others_have_room() -> None:
    slots = Slots(gpu_hosts(2), 2)
    assert slots.usable == 8
    first = slots.take()
    assert first is not None
    assert placed(slots) == {"a": (2, 3)}
    assert placed(slots) == {"b": (0, 1)}
    slots.give_back(first)
    assert placed(slots) == {"a": (0, 1)}
    assert placed(slots) == {"b": (2, 3)}
    assert placed(slots) is None


def test_a_trial_that_needs_more_than_a_host_gets_whole_hosts() -> None:
    slots = Slots(gpu_hosts(5), 8)
    assert slots.usable == 16, "the fifth host is of no use"
    assert placed(slots) == {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
    assert placed(slots) == {"c": (0, 1, 2, 3), "d": (0, 1, 2, 3)}
    assert placed(slots) is None
    with pytest.raises(EngineError, match="a trial needs 8 slots and 0 are free"):
        slots.check_free(waiting=0)
    assert Slots(gpu_hosts(2), 3).usable == 6, "two trials of three, though there are eight"


def test_a_host_that_is_lost_takes_its_slots_along() -> None:
    slots = Slots(gpu_hosts(3), 8)
    shares = slots.take()
    assert shares is not None
    assert slots.lose(1, "it burnt") == "host b is not used any more: it burnt"
    slots.give_back(shares)
    assert slots.usable == 8
    assert placed(slots) == {"a": (0, 1, 2, 3), "c": (0, 1, 2, 3)}
    slots.check_enough()
    slots.lose(2, "it drowned")
    told = r"8 slots, and 4 of 12 still work \(host b: it burnt; host c: it drowned\).*--resume"
    with pytest.raises(EngineError, match=told):
        slots.check_enough()


def test_a_stuck_device_is_taken_out_on_its_host_alone() -> None:
    slots = Slots(gpu_hosts(2), 8)
    shares = slots.take()
    assert shares is not None
    said = slots.check(shares, FAILED, stuck={0: set(), 1: {2}})
    assert [line.partition(" is not")[0] for line in said] == ["cuda 2 of host b"]
    with pytest.raises(EngineError, match=r"7 of 8 still work \(cuda 2 of host b: a rank waits"):
        slots.check_enough()


def test_the_other_devices_of_a_trial_with_a_stuck_one_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[str, Sequence[int]]] = []

    def problems(machine: Machine, at: Sequence[int], prefix: Sequence[str] = ()) -> dict[int, str]:
        looks.append((prefix[0], at))
        return {3: "ECC error"} if prefix == ("b",) else {}

    monkeypatch.setattr("dsat.engines.local.slots.problems_with", problems)
    slots = Slots([replace(host, prefix=(host.name,)) for host in gpu_hosts(2)], 8)
    shares = slots.take()
    assert shares is not None
    slots.check(shares, Outcome(OutcomeKind.TIMEOUT), stuck={0: {0, 1, 2, 3}, 1: {2}})
    assert looks == [("b", [0, 1, 3])], "none is left to be looked at on a"
    with pytest.raises(EngineError, match="2 of 8 still work"):
        slots.check_enough()


def test_the_interface_to_an_address_is_found() -> None:
    assert loopback.interface_to("127.0.0.1") == "lo"
    assert loopback.interface_to("256.1.1.1") == ""


# -- trials


@pytest.mark.slow
@pytest.mark.nightly  # as on one host, in test_engine.py
class TestEngineOverTwoHosts(HostsContract):
    """Both of them this machine."""

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return hosts_here(2, imported=True)


@pytest.fixture(scope="module")
def across(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Trials of two ranks on two hosts that have one slot each."""
    folder = tmp_path_factory.mktemp("across")
    hosts = hosts_here(2, imported=True)
    with bench_of("behaviours", folder, slots_per_trial=2, hosts=hosts) as bench:
        yield bench


@pytest.mark.slow
def test_a_trial_over_two_hosts(across: Bench) -> None:
    trial = across.trial(stage=2)
    outcome = across.run(trial)
    assert outcome.ok, across.log(trial)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "GROUP_RANK")
    for rank, expected in enumerate(("0 0 2 1 0 0", "1 0 2 1 1 1")):
        env = read_json(across.path(trial) / f"facts{rank}.json")["environment"]
        assert [env[name] for name in names] == expected.split()
        assert (env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "127.0.0.1")
    assert "rank 0 runs" in across.read(trial, "stdout.log")
    assert "rank 1 runs" in across.read(trial, "stdout-1.log")
    assert "# on host1\n" in across.read(trial, "cmd.txt")
    assert processes_of(across.path(trial)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("crashes on 1", "ERROR", "rank 1: ValueError: the data set has no labels"),
        ("exhausts memory on 1", "OOM", "rank 1: out of memory"),
    ],
)
def test_a_failure_on_one_host_ends_the_trial_on_the_other(
    across: Bench, behaviour: str, kind: str, message: str
) -> None:
    trial = across.trial(behaviour)
    outcome = across.run(trial)
    assert outcome.kind is OutcomeKind(kind), outcome
    assert message in outcome.message
    assert outcome.duration_s < PATIENCE_S / 3, "no time-out was waited for"
    wait_until(lambda: not processes_of(across.path(trial)), "the end of both ranks")


@pytest.mark.slow
@pytest.mark.nightly
def test_hosts_that_stop_or_die_leave_the_run_and_a_trial_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "PING_EVERY_S", 0.5)
    monkeypatch.setattr(heartbeats, "SILENT_AFTER_S", 6.0)
    with bench_of("behaviours", tmp_path, slots_per_trial=2, hosts=hosts_here(3)) as bench:
        trial = bench.trial("hangs at first")
        bench.engine.launch(trial)
        mark = tmp_path / "trials" / f"{trial.name}.began1"
        wait_until(mark.exists, "the ranks", PATIENCE_S)
        others = [bench.supervisor(host).pid for host in (0, 2)]
        first = [read_json(bench.path(trial) / f"facts{rank}.json")["pid"] for rank in (0, 1)]
        bench.supervisor(1).suspend()
        [(_, outcome)] = bench.engine.poll(PATIENCE_S)
        assert outcome.ok, (outcome, bench.log(trial))
        [warning] = [line for line in outcome.warnings if "host" in line]
        assert warning == "host host1 is not used any more: it has not answered for 6 s"
        assert [path.name for path in (tmp_path / "trials").iterdir() if path.is_dir()] == [
            trial.name
        ]
        assert not any(map(is_alive, first))
        assert all(map(is_alive, others)), "supervisors of other hosts go on"
        assert "# on host2\n" in bench.read(trial, "cmd.txt")
        assert bench.engine.num_slots == 2
        again = bench.trial("hangs")
        bench.engine.launch(again)
        wait_until((bench.path(again) / "facts1.json").exists, "the ranks", PATIENCE_S)
        bench.supervisor(2).kill()
        with pytest.raises(EngineError, match=r"host host2: the process .* Continue with --resume"):
            bench.engine.poll(PATIENCE_S)
    assert processes_of(tmp_path) == []
    assert buffers_of(tmp_path) == []


# A supervisor for which other files are there.
SEES = """
import pathlib
from dsat.engines.local import supervisor
digest = supervisor.digest
changed = lambda path: {answer} if path.name.startswith("{name}") else digest(path)
supervisor.digest = changed
supervisor.Supervisor().run()
"""


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        (".seen-", "''", r"host1 does not share the run's folder .*--run-dir"),
        ("train.py", "''", "host1 has no .*/train.py: put it on a file system"),
        ("ds_config.json", "'f00'", "host1 has another .*/ds_config.json than this machine"),
    ],
)
def test_hosts_with_other_files_are_refused(
    tmp_path: Path, name: str, answer: str, told: str
) -> None:
    here, there = hosts_here(2)
    code = SEES.format(name=name, answer=answer)
    there = replace(there, prefix=(sys.executable, "-c", code))
    with pytest.raises(EngineError, match=told):
        engine_of("behaviours", tmp_path, hosts=[here, there])
    assert processes_of(tmp_path) == []
