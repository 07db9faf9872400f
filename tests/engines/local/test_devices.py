"""The local engine on accelerators, before a supervisor that does as it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.engines.local import accelerators, machine
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import Machine
from dsat.engines.local.running import Running, Start, Way
from dsat.errors import EngineError
from dsat.in_trial.rank_files import MODULES_FILE
from dsat.inputs import entrypoint, experiment
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions
from testing.helpers import ran
from testing.local import PATIENCE_S, PROGRAMS

GPUS = Machine("cuda", "test", ("0", "1", "2", "3"), ("CUDA_VISIBLE_DEVICES",), 8 * 2**30)
A100, T4 = ("A100", 80 * 2**30), ("T4", 15 * 2**30)
TWO_HOSTS = [Host(GPUS, "a"), Host(GPUS, "b")]
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


class Scripted:
    """A supervisor whose ranks end at once, well or stuck in the driver of a device.

    Attributes:
        stuck: devices on which every rank gets stuck.
        measures: trials that are measured before ranks of them get stuck.
        holds: ranks go on until they are let go.
        launched: by trial, the devices it was started on, one start after the other.
        lost: hosts, whose loss is yet to be reported or was.
        imported: modules that were imported in advance.
    """

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        self.measures: set[int] = set()
        self.holds = False
        self.launched: dict[int, list[str]] = {}
        self.lost: set[int] = set()
        self.imported: list[str] = []
        self._requests: list[tuple[int, Mapping[str, Any]]] = []
        self._reported: set[int] = set()

    def send(self, host: int, request: Mapping[str, Any]) -> None:
        if request["op"] == "launch" and host not in self.lost:
            devices = request["ranks"][0]["env"]["CUDA_VISIBLE_DEVICES"]
            self.launched.setdefault(request["trial"], []).append(devices)
            self._requests.append((host, request))

    def receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        new, self._reported = self.lost - self._reported, set(self.lost)
        answers: list[tuple[int, dict[str, Any]]]
        answers = [(host, {"event": "lost", "reason": "it burnt"}) for host in new]
        if not self.holds:
            requests, self._requests = self._requests, []
            answers += [(host, self._answer(r)) for host, r in requests if host not in self.lost]
        return answers

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        devices = self.launched[request["trial"]][-1].split(",")
        stuck = [device in self.stuck for device in devices]
        assert len(stuck) == len(request["ranks"])
        if request["trial"] in self.measures or not any(stuck):
            outcome = json.dumps(ran().to_json())
            (Path(request["folder"]) / "metrics.json").write_text(outcome)
        return {
            "event": "ended",
            "trial": request["trial"],
            "statuses": [-9 if any(stuck) else 0 for _ in stuck],
            "killed": [any(stuck) for _ in stuck],
            "stuck": stuck,
        }

    def warm_up(self, modules: Sequence[str] = (), **more: Any) -> str:
        self.imported += modules
        return ""

    def close(self) -> None:
        pass


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr("dsat.engines.local.engine.Supervisors", lambda *args, **more: scripted)
    return scripted


@pytest.fixture
def slots_per_trial() -> int:
    return 1


@pytest.fixture
def hosts() -> list[Host]:
    return [Host(GPUS)]


@pytest.fixture
def engine(
    supervisor: Scripted, tmp_path: Path, slots_per_trial: int, hosts: list[Host]
) -> Iterator[LocalEngine]:
    user = experiment.read(PROGRAMS / "tiny" / "deepspeed.yaml", PROGRAMS / "tiny")
    program = entrypoint.parse(user.entrypoint, user.model_dir)
    options = LocalOptions(TrialOptions(timeout_s=PATIENCE_S))
    engine = LocalEngine(user, program, hosts, tmp_path, options, slots_per_trial=slots_per_trial)
    yield engine
    engine.close()


def trial(number: int, **zero: Any) -> Trial:
    batch = BatchTriple(1, 1, 1)
    overrides = {**batch.config(), "zero_optimization": {"stage": 1, **zero}}
    return Trial(number, TrialKind.SEARCH, f"t{number}", 1, batch, overrides=overrides)


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


def test_a_device_whose_driver_is_stuck_is_left_and_its_trial_runs_elsewhere(
    supervisor: Scripted, engine: LocalEngine
) -> None:
    supervisor.stuck = {"0"}
    engine.launch(trial(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok
    assert supervisor.launched[1] == ["0", "1"]
    assert engine.num_slots == 3
    [warning] = outcome.warnings
    assert warning.startswith("cuda 0 is not used any more: a rank waits for the device's driver")
    engine.launch(trial(2))
    [(_, outcome)] = engine.poll(1)
    assert (outcome.warnings, supervisor.launched[2]) == ((), ["1"]), "said once"


def test_imports_are_not_checked_on_a_device_that_is_stuck(
    supervisor: Scripted, engine: LocalEngine, tmp_path: Path
) -> None:
    """The check would wait for its driver until the run ends."""
    (tmp_path / MODULES_FILE).write_text('["json"]')
    engine.import_modules_of(tmp_path)
    assert supervisor.imported == ["json"]
    supervisor.stuck = {"0"}
    engine.launch(trial(1))
    engine.poll(1)
    engine.import_modules_of(tmp_path)
    assert supervisor.imported == ["json"]


@pytest.mark.parametrize("hosts", [TWO_HOSTS])
def test_no_simulation_is_waited_for_after_the_first_host_is_lost(
    supervisor: Scripted, engine: LocalEngine, tmp_path: Path
) -> None:
    supervisor.lost = {0}
    engine.launch(trial(1))
    [(_, outcome)] = engine.poll(5)
    assert outcome.ok and engine.num_slots == 4
    engine.start_simulation_server(tmp_path / "s", {})
    assert not engine.has_simulation_server()
    engine.stop_simulation_server()


@pytest.mark.parametrize("hosts", [TWO_HOSTS])
def test_a_host_that_is_cut_off_cannot_write_into_the_trial_that_runs_again(
    supervisor: Scripted, engine: LocalEngine, tmp_path: Path
) -> None:
    supervisor.holds = True
    engine.launch(trial(1))
    folder = tmp_path / "trials" / "t1"
    supervisor.lost = {0}
    engine.poll(2)  # it has begun again
    assert len(supervisor.launched[1]) == 2
    (folder / "metrics.json").write_text(json.dumps(ran(7.0).to_json()))
    supervisor.stuck, supervisor.holds = {"0", "1", "2", "3"}, False
    [(_, outcome)] = engine.poll(5)
    assert not outcome.ok, "it was not measured"
    assert [path.name for path in folder.parent.iterdir()] == ["t1"]
    assert not (folder / "metrics.json").exists()


@pytest.mark.parametrize("slots_per_trial", [2])
def test_of_a_trial_only_the_device_is_left_whose_rank_is_stuck(
    supervisor: Scripted, engine: LocalEngine
) -> None:
    supervisor.stuck = {"1"}
    engine.launch(trial(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok
    assert supervisor.launched[1] == ["0,1", "0,2"]
    [warning] = outcome.warnings
    assert warning.startswith("cuda 1 is not used any more")


def test_a_device_is_left_whose_rank_gets_stuck_after_its_trial_was_measured(
    supervisor: Scripted, engine: LocalEngine
) -> None:
    supervisor.stuck, supervisor.measures = {"0"}, {1}
    engine.launch(trial(1))
    [(_, outcome)] = engine.poll(1)
    assert outcome.ok and engine.num_slots == 3


def test_all_devices_are_left_of_a_command_that_is_stuck() -> None:
    """What it has started, and where, is its own affair."""
    share = Share(1, Host(GPUS, "b"), (1, 3))
    stuck: dict[int, Mapping[str, Any]] = {1: {"stuck": [True]}}
    running = Running(Start(trial(1), Path(), None), (share,), Way.COMMAND, ended=stuck)
    assert running.stuck == {1: {1, 3}}


def test_a_configuration_that_breaks_every_device_is_given_up_before_there_are_none(
    supervisor: Scripted, engine: LocalEngine
) -> None:
    supervisor.stuck = {"0", "1", "2", "3"}
    engine.launch(trial(1))
    [(_, outcome)] = engine.poll(1)
    assert not outcome.ok
    assert supervisor.launched[1] == ["0", "1", "2"]
    assert (engine.num_slots, len(outcome.warnings)) == (1, 3)
    engine.launch(trial(2))
    with pytest.raises(EngineError, match=r"1 slots, and 0 of 4 still work .*cuda 3: a rank waits"):
        engine.poll(1)


@pytest.mark.parametrize("slots_per_trial", [2])
def test_what_has_ended_is_told_before_the_last_device_is_missed(
    supervisor: Scripted, engine: LocalEngine
) -> None:
    supervisor.stuck, supervisor.measures = {"0", "1", "2", "3"}, {1}
    engine.launch(trial(1))
    engine.launch(trial(2))
    [(number, outcome)] = engine.poll(1)
    assert number == 1 and outcome.ok
    with pytest.raises(EngineError, match="a trial needs 2 slots, and 0 of 4 still work"):
        engine.poll(1)


def test_an_offloading_trial_runs_alone(supervisor: Scripted, engine: LocalEngine) -> None:
    supervisor.holds = True
    for number in (1, 2):
        engine.launch(trial(number))
    engine.launch(trial(3, **OFFLOAD))
    engine.launch(trial(4))
    assert list(supervisor.launched) == [1, 2]
    supervisor.holds = False
    assert {number for number, _ in engine.poll(1)} == {1, 2}
    assert [number for number, _ in engine.poll(1)] == [3]
    assert list(supervisor.launched) == [1, 2, 3], "the fourth waits for it"
    assert [number for number, _ in engine.poll(1)] == [4]


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
