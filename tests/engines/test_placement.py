"""Where an engine places trials if devices and hosts fail or hosts are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.engines.engine import LocalEngine
from dsat.engines.machines import accelerators, machine
from dsat.engines.machines.machine import Machine
from dsat.engines.retries import FIXED_PORT
from dsat.errors import EngineError
from dsat.in_trial import loopback
from testing.helpers import ran
from testing.scripted_hosts import GPUS, ScriptedHosts, hosts_of, scripted_engine, trial_of

OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
Make = Callable[..., LocalEngine]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> ScriptedHosts:
    scripted = ScriptedHosts()
    scripted.replace_those_of(monkeypatch)
    return scripted


@pytest.fixture
def engine_of(hosts: ScriptedHosts, tmp_path: Path) -> Make:
    def make(count: int = 1, slots_per_trial: int = 1, gpus: Machine = GPUS) -> LocalEngine:
        return scripted_engine(tmp_path, hosts_of(count, gpus), slots_per_trial)

    return make


# -- which devices a machine offers


@pytest.mark.slow
def test_devices_are_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that queries a stuck driver never returns."""
    monkeypatch.setattr(machine, "_FIND_LIMIT_S", 0.3)
    with pytest.raises(EngineError, match=r"no answer within 0\.3 s: imports are slow"):
        machine.find_machines({"this machine": ("sh", "-c", "exec sleep 600")})


@pytest.mark.parametrize(("rocm", "chosen"), [("6.4", ["2", "3"]), (None, ["0", "1"])])
def test_a_choice_of_amd_devices_follows_the_trial(
    monkeypatch: pytest.MonkeyPatch, rocm: str | None, chosen: list[str]
) -> None:
    """ROCm reads its own variable first, so all ranks would share the devices in it."""
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    accelerator = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"])
    variables = accelerators._visible_devices_variables(accelerator)
    assert set(variables) == {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}
    assert accelerators.find_chosen_devices(variables) == chosen


def test_the_interface_to_an_address_is_found() -> None:
    assert loopback.interface_to("127.0.0.1") == "lo"
    assert loopback.interface_to("256.1.1.1") == ""


# -- placement


def test_trials_leave_hosts_whole_as_long_as_others_have_room(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.holds = engine_of(2, 2), {1, 2, 3, 4}
    assert engine.num_slots == 8
    for number in (1, 2, 3):
        engine.launch(trial_of(number))
    assert [hosts.places(number) for number in (1, 2, 3)] == [
        {"a": "0,1"},
        {"a": "2,3"},
        {"b": "0,1"},
    ]
    hosts.holds = {3, 4}
    assert {number for number, _ in engine.poll(1)} == {1, 2}
    engine.launch(trial_of(4))
    assert hosts.places(4) == {"b": "2,3"}, "host a is whole, and stays so"
    engine.launch(trial_of(5))
    assert hosts.places(5) == {"a": "0,1"}


def test_a_trial_that_needs_more_than_a_host_gets_whole_hosts(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.holds = engine_of(5, 8), True
    assert engine.num_slots == 16, "the fifth host is of no use"
    for number in (1, 2):
        engine.launch(trial_of(number))
    assert hosts.places(1) == {"a": "0,1,2,3", "b": "0,1,2,3"}
    assert hosts.places(2) == {"c": "0,1,2,3", "d": "0,1,2,3"}
    assert engine_of(2, 3).num_slots == 6, "two trials of three, though there are eight"


def test_an_offloading_trial_runs_alone(hosts: ScriptedHosts, engine_of: Make) -> None:
    engine, hosts.holds = engine_of(), True
    for number in (1, 2):
        engine.launch(trial_of(number))
    engine.launch(trial_of(3, **OFFLOAD))
    engine.launch(trial_of(4))
    assert list(hosts.given) == [1, 2]
    hosts.holds = False
    assert {number for number, _ in engine.poll(1)} == {1, 2}
    assert [number for number, _ in engine.poll(1)] == [3]
    assert list(hosts.given) == [1, 2, 3], "the fourth waits for it"
    assert [number for number, _ in engine.poll(1)] == [4]


def test_trials_that_need_the_same_port_run_one_at_a_time(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    """The script sets MASTER_PORT itself, as the documentation of transformers does."""
    engine, hosts.holds = engine_of(), {1, 2, 3}
    for number in (1, 2, 3):
        engine.launch(trial_of(number))
    for number in (2, 3):
        assert fails(engine, hosts, number, "OSError: [Errno 98] Address already in use") == []
    hosts.holds = False
    told = dict(ended for _ in range(3) for ended in engine.poll(1))
    assert [number for number in told if told[number].ok] == [1, 2, 3]
    assert [FIXED_PORT in told[number].warnings for number in told] == [False, False, True]
    assert engine.num_slots == 1


# -- devices that fail


def fails(engine: LocalEngine, hosts: ScriptedHosts, number: int, message: str) -> Any:
    """Have the last start of a trial end with an error; return what is told."""
    folder = Path(hosts.given[number][-1].folder)
    said = {"kind": "ERROR", "message": message}
    (folder / "rank0.json").write_text(json.dumps({**ran().to_json(), **said, "metrics": None}))
    others, hosts.ends[number] = hosts.holds, ([1], [False])
    hosts.holds = others - {number} if isinstance(others, set) else False
    told = engine.poll(0)
    del hosts.ends[number]
    hosts.holds = others
    return told


def fails_by_device(engine: LocalEngine, hosts: ScriptedHosts, number: int) -> Any:
    return fails(engine, hosts, number, "RuntimeError: CUDA error: launch failure")


def test_a_device_error_is_tried_again_once_and_the_second_ends_the_run(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.holds = engine_of(), True
    engine.launch(trial_of(1))
    assert fails_by_device(engine, hosts, 1) == []
    hosts.holds = False
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok and len(hosts.given[1]) == 2
    hosts.holds = True
    engine.launch(trial_of(2))
    assert fails_by_device(engine, hosts, 2) == []
    assert engine.poll(0) == [], "it runs again"
    [(number, outcome)] = fails_by_device(engine, hosts, 2)
    assert number == 2 and not outcome.ok
    with pytest.raises(
        EngineError, match=r"device errors ended two attempts: .*launch failure.*--resume"
    ):
        engine.poll(1)


# -- hosts that are lost


@pytest.mark.slow
def test_a_host_that_is_lost_takes_its_slots_along(hosts: ScriptedHosts, engine_of: Make) -> None:
    engine, hosts.holds = engine_of(3, 8), True
    engine.launch(trial_of(1))
    assert hosts.places(1) == {"a": "0,1,2,3", "b": "0,1,2,3"}
    hosts.lost = {1}
    assert engine.poll(0) == []
    hosts.holds = False
    [(_, outcome)] = engine.poll(5)
    assert outcome.ok and engine.num_slots == 8
    assert [given.host for given in hosts.given[1]] == [0, 1, 0, 2]
    assert "host b is no longer used: it burnt" in outcome.warnings
    hosts.lost = {1, 2}
    engine.launch(trial_of(2))
    told = (
        r"8 devices, but only 4 of 12 still work \(host b: it burnt; host c: it burnt\).*--resume"
    )
    with pytest.raises(EngineError, match=told):
        [engine.poll(1) for _ in range(3)]


@pytest.mark.slow
def test_no_simulation_is_waited_for_after_the_first_host_is_lost(
    hosts: ScriptedHosts, engine_of: Make, tmp_path: Path
) -> None:
    engine, hosts.lost = engine_of(2), {0}
    engine.launch(trial_of(1))
    [(_, outcome)] = engine.poll(5)
    assert outcome.ok and engine.num_slots == 4
    engine.start_simulation_server(tmp_path / "s", {})
    assert not engine.has_simulation_server()
    engine.stop_simulation_server()


@pytest.mark.slow
def test_a_host_that_is_cut_off_cannot_write_into_the_trial_that_runs_again(
    hosts: ScriptedHosts, engine_of: Make, tmp_path: Path
) -> None:
    engine, hosts.holds = engine_of(2), True
    engine.launch(trial_of(1))
    folder = tmp_path / "trials" / "t1"
    hosts.lost = {0}
    engine.poll(2)  # it has begun again
    assert len(hosts.given[1]) == 2
    (folder / "metrics.json").write_text(json.dumps(ran(7.0).to_json()))
    hosts.ends[1], hosts.holds = ([1], [False]), False
    [(_, outcome)] = engine.poll(5)
    assert not outcome.ok, "it was not measured"
    assert [path.name for path in folder.parent.iterdir()] == ["t1"]
    assert not (folder / "metrics.json").exists()
