"""Where an engine places trials, on devices and hosts that fail and hosts that are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.engines.local import accelerators, machine
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.machine import Machine
from dsat.errors import EngineError
from dsat.in_trial import loopback
from dsat.in_trial.rank_files import MODULES_FILE
from testing.helpers import ran
from testing.scripted_hosts import GPUS, ScriptedHosts, hosts_of, scripted_engine, trial_of

A100, T4 = ("A100", 80 * 2**30), ("T4", 15 * 2**30)
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


@pytest.mark.parametrize(
    ("kinds", "slots", "kept"),
    [
        ([A100, T4, A100], 1, "02"),
        ([T4, A100, A100], 1, "0"),
        ([A100, A100, T4, T4], 2, "01"),
        ([A100, T4, T4], 2, "01"),  # as the command has them
        ([A100, T4, T4], 3, "012"),
        ([A100, T4], 16, "01"),
        ([A100, ("A100", 79 * 2**30), ("A100", 40 * 2**30)], 1, "01"),
    ],
)
def test_trials_run_on_devices_like_those_of_the_command(
    kinds: list[tuple[str, int]], slots: int, kept: str
) -> None:
    names, sizes = zip(*kinds, strict=True)
    found = replace(
        GPUS,
        devices=tuple(map(str, range(len(kinds)))),
        device_names=names,
        device_memory_bytes=sizes,
    ).comparable(slots)
    assert found.devices == tuple(kept)
    own = [kinds[int(device)] for device in kept]
    assert found.device_name == ", ".join(dict.fromkeys(name for name, _ in own))
    assert found.memory_bytes == min(size for _, size in own)
    left = [text.split(" is left out: ")[0] for text in found.left_out]
    assert left == [
        f"cuda {n} ({name}, {size >> 30} GiB)"
        for n, (name, size) in enumerate(kinds)
        if str(n) not in kept
    ]
    assert GPUS.comparable(1) == GPUS  # as processor cores, which have no names


def test_devices_are_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asks a stuck driver does not come back."""
    monkeypatch.setattr(machine, "_FIND_LIMIT_S", 0.3)
    with pytest.raises(EngineError, match=r"no answer within 0\.3 s: imports are that slow"):
        machine.find_machines({"this machine": ("sh", "-c", "exec sleep 600")})


def test_a_choice_of_amd_devices_follows_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm looks at its own variable first: ranks would share what that names."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1,2,3")
    rocm = SimpleNamespace(visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"])
    variables = accelerators._visible_devices_variables(rocm)
    assert variables == ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]


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
    with pytest.raises(EngineError, match="a trial needs 8 slots and 0 are free"):
        engine.launch(trial_of(3))
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


# -- devices that fail


def test_a_device_whose_driver_is_stuck_is_left_and_its_trial_runs_elsewhere(
    hosts: ScriptedHosts, engine_of: Make, tmp_path: Path
) -> None:
    (tmp_path / MODULES_FILE).write_text('["json"]')
    engine, hosts.stuck = engine_of(), {"0"}
    engine.import_modules_of(tmp_path)
    assert hosts.imported == ["json"]
    engine.launch(trial_of(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok
    assert hosts.devices(1) == ["0", "1"]
    assert engine.num_slots == 3
    [warning] = outcome.warnings
    assert warning.startswith("cuda 0 is not used any more: a rank waits for the device's driver")
    engine.launch(trial_of(2))
    [(_, outcome)] = engine.poll(1)
    assert (outcome.warnings, hosts.devices(2)) == ((), ["1"]), "said once"
    # The check behind an import would wait for its driver until the run ends.
    engine.import_modules_of(tmp_path)
    assert hosts.imported == ["json"]


def test_of_a_trial_only_the_device_is_left_whose_rank_is_stuck(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.stuck = engine_of(slots_per_trial=2), {"1"}
    engine.launch(trial_of(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok
    assert hosts.devices(1) == ["0,1", "0,2"]
    [warning] = outcome.warnings
    assert warning.startswith("cuda 1 is not used any more")


def test_a_device_is_left_whose_rank_gets_stuck_after_its_trial_was_measured(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.stuck, hosts.measures = engine_of(), {"0"}, {1}
    engine.launch(trial_of(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok and engine.num_slots == 3


def test_a_configuration_that_breaks_every_device_is_given_up_before_there_are_none(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.stuck = engine_of(), {"0", "1", "2", "3"}
    engine.launch(trial_of(1))
    [(_, outcome)] = engine.poll(1)
    assert not outcome.ok
    assert hosts.devices(1) == ["0", "1", "2"]
    assert (engine.num_slots, len(outcome.warnings)) == (1, 3)
    engine.launch(trial_of(2))
    with pytest.raises(EngineError, match=r"1 slots, and 0 of 4 still work .*cuda 3: a rank waits"):
        engine.poll(1)


def test_what_has_ended_is_told_before_the_last_device_is_missed(
    hosts: ScriptedHosts, engine_of: Make
) -> None:
    engine, hosts.stuck, hosts.measures = engine_of(slots_per_trial=2), set("0123"), {1}
    engine.launch(trial_of(1))
    engine.launch(trial_of(2))
    [(number, outcome)] = engine.poll(1)
    assert number == 1 and outcome.ok
    with pytest.raises(EngineError, match="a trial needs 2 slots, and 0 of 4 still work"):
        engine.poll(1)


def test_all_devices_are_left_of_a_command_that_is_stuck(
    hosts: ScriptedHosts, tmp_path: Path
) -> None:
    """What it has started, and where, is its own affair."""
    command = ("bash", "-c", "python train.py")
    engine = scripted_engine(tmp_path, slots_per_trial=4, command=command)
    hosts.stuck = {""}
    engine.launch(trial_of(1))
    with pytest.raises(EngineError, match="4 slots, and 0 of 4 still work"):
        [engine.poll(1) for _ in range(2)]


def test_the_other_devices_of_a_trial_with_a_stuck_one_are_looked_at(
    hosts: ScriptedHosts, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[int]] = []

    def problems(machine: Machine, at: list[int], prefix: Any = ()) -> dict[int, str]:
        looks.append(at)
        return {3: "ECC error"}

    monkeypatch.setattr("dsat.engines.local.slots.problems_with", problems)
    engine, hosts.stuck, hosts.holds = engine_of(2, 4), {"2"}, True
    engine.launch(trial_of(1))
    folder = Path(hosts.given[1][0].folder)
    said = {"kind": "ERROR", "message": "RuntimeError: CUDA error: launch failure"}
    (folder / "rank0.json").write_text(json.dumps({**ran().to_json(), **said, "metrics": None}))
    hosts.holds = False
    with pytest.raises(
        EngineError, match=r"cuda 2 of host a: a rank waits.* cuda 3 of host a: ECC"
    ):
        [engine.poll(1) for _ in range(3)]
    assert looks[0] == [0, 1, 3]


# -- hosts that are lost


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
    assert "host b is not used any more: it burnt" in outcome.warnings
    hosts.lost = {1, 2}
    engine.launch(trial_of(2))
    told = r"8 slots, and 4 of 12 still work \(host b: it burnt; host c: it burnt\).*--resume"
    with pytest.raises(EngineError, match=told):
        [engine.poll(1) for _ in range(3)]


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
    hosts.stuck, hosts.holds = {"0", "1", "2", "3"}, False
    [(_, outcome)] = engine.poll(5)
    assert not outcome.ok, "it was not measured"
    assert [path.name for path in folder.parent.iterdir()] == ["t1"]
    assert not (folder / "metrics.json").exists()
