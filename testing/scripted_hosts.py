"""An engine on made-up accelerators: scripted supervisors record the launch requests they get.

A test inspects what each rank was given: its host, variables and cores. Trials end at once, or when
the test says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.agent.leftovers import CompilerLocks
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import ran
from testing.local import engine_of

GPUS = Machine("cuda", "test", ("0", "1", "2", "3"), ("CUDA_VISIBLE_DEVICES",), 8 * 2**30)


def hosts_of(count: int, machine: Machine = GPUS) -> list[Host]:
    """Make `count` hosts `a`, `b`, ... that are copies of a machine; a single host has no name."""
    return [Host(machine, name) for name in "abcdefgh"[:count]] if count > 1 else [Host(machine)]


@dataclass(frozen=True)
class Given:
    """A request to launch ranks of a trial on a host."""

    host: int
    ranks: Sequence[Mapping[str, Any]]
    folder: str
    cwd: str

    @property
    def devices(self) -> str:
        devices: str = self.ranks[0]["env"]["CUDA_VISIBLE_DEVICES"]
        return devices

    def env(self, name: str) -> list[str | None]:
        """Return the value of a variable in each rank."""
        return [rank["env"].get(name) for rank in self.ranks]

    @property
    def cores(self) -> list[list[int]]:
        return [list(rank["cores"]) for rank in self.ranks]


class ScriptedHosts:
    """Supervisors of made-up hosts.

    Attributes:
        holds: whether ranks run on; or the ids of the trials whose ranks do.
        ends: by trial, another end of its ranks: exit statuses, and whether dsat killed each rank.
        given: by trial, its launch requests in order.
        lost: the lost hosts; a new one is reported at the next `receive`.
        requests: launch requests of ranks that still run.
    """

    def __init__(self) -> None:
        self.holds: bool | set[int] = False
        self.ends: dict[int, tuple[Sequence[int], Sequence[bool]]] = {}
        self.given: dict[int, list[Given]] = {}
        self.lost: set[int] = set()
        self.requests: list[tuple[int, Mapping[str, Any]]] = []
        self._reported: set[int] = set()
        self._killed: set[tuple[int, int]] = set()

    def replace_those_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make every engine created from now on use these supervisors."""
        monkeypatch.setattr("dsat.engines.engine.Supervisors", lambda *_, **__: self)

    def devices(self, trial: int) -> list[str]:
        """Return the devices of each launch of a trial."""
        return [given.devices for given in self.given.get(trial, [])]

    def places(self, trial: int) -> dict[str, str]:
        """Return the devices of a trial, by the letter of the host."""
        return {"abcdefgh"[given.host]: given.devices for given in self.given[trial]}

    # -- methods that an engine calls

    def send(self, host: int, request: Mapping[str, Any]) -> None:
        if request["op"] == "launch" and host not in self.lost:
            given = Given(host, request["ranks"], request["folder"], request["cwd"])
            self.given.setdefault(request["trial"], []).append(given)
            self.requests.append((host, request))
            self._killed.discard((host, request["trial"]))
        elif request["op"] == "kill":
            self._killed.add((host, request["trial"]))

    def receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        new, self._reported = self.lost - self._reported, set(self.lost)
        answers: list[tuple[int, dict[str, Any]]]
        answers = [(host, {"event": "lost", "reason": "it burnt"}) for host in new]
        ends = [each for each in self.requests if not self._goes_on(*each)]
        self.requests = [each for each in self.requests if each not in ends]
        return answers + [(h, self._answer(h, r)) for h, r in ends if h not in self.lost]

    def warm_up(self, modules: Sequence[str] = (), **more: Any) -> str:
        return ""

    def check_files(self, folder: Path, files: Iterable[Path]) -> None: ...

    @property
    def locks(self) -> CompilerLocks:
        return CompilerLocks(os.environ)

    def close(self) -> None: ...

    kill = close

    def _goes_on(self, host: int, request: Mapping[str, Any]) -> bool:
        trial = request["trial"]
        holds = trial in self.holds if isinstance(self.holds, set) else self.holds
        return holds and (host, trial) not in self._killed

    def _answer(self, host: int, request: Mapping[str, Any]) -> dict[str, Any]:
        trial, ranks = request["trial"], request["ranks"]
        if trial in self.ends:
            statuses, killed_by_us = self.ends[trial]
            found = {"statuses": list(statuses), "killed": list(killed_by_us)}
            return {"event": "ended", "trial": trial, **found}
        killed = (host, trial) in self._killed
        if not killed:
            outcome = json.dumps(ran().to_json())
            (Path(request["folder"]) / "metrics.json").write_text(outcome)
        return {
            "event": "ended",
            "trial": trial,
            "statuses": [-9 if killed else 0 for _ in ranks],
            "killed": [killed for _ in ranks],
        }


def scripted_engine(
    folder: Path, hosts: Sequence[Host] | None = None, slots_per_trial: int = 1, **more: Any
) -> LocalEngine:
    """Make an engine for the program `tiny`, whose supervisors are scripted."""
    chosen = hosts_of(1) if hosts is None else hosts
    return engine_of("tiny", folder, hosts=chosen, slots_per_trial=slots_per_trial, **more)


def trial_of(number: int, **zero: Any) -> Trial:
    """Make a trial of ZeRO stage 1, or with other ZeRO settings."""
    batch = BatchTriple(1, 1, 1)
    overrides = {**batch.config(), "zero_optimization": {"stage": 1, **zero}}
    return Trial(number, TrialKind.SEARCH, f"t{number}", 1, batch, overrides=overrides)
