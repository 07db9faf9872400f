"""A script is not asked again while nothing changes that it read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsat.memory.remembered_script import RememberedScript, ScriptModel
from dsat.memory.simulation_client import SimulationUnavailable, Simulator
from dsat.values.files import stamp
from testing.simulation_host import MIB, FakeSimulationHost, by_formula, facts_of

FACTS = facts_of(50 * MIB)
START = {"program": "train.py"}


class Host(FakeSimulationHost):
    """Counts how often its script is started, and says which files that read."""

    def __init__(self, files: list[list[Any]] | None, **more: Any) -> None:
        super().__init__(FACTS, by_formula(FACTS), **more)
        self._hello["files"] = files
        self.starts = 0

    def start_simulation_server(self, *args: Any) -> Path:
        self.starts += 1
        return super().start_simulation_server(*args)


def ask(host: Host, cache: Path, micro_batch: int = 4, start: Any = START, **more: Any) -> Any:
    with Simulator(host, as_cpu=False, cache=cache, start=start, **more) as simulator:
        facts = simulator.facts({})
        assert simulator.sequence_length is None
        return facts, simulator.estimate({}, micro_batch=micro_batch, slots=1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("1")
    return path


def test_what_was_asked_before_starts_nothing(script: Path, tmp_path: Path) -> None:
    host = Host([stamp(str(script)), stamp(str(tmp_path / "absent"))])
    first = ask(host, tmp_path / "cache")
    assert ask(host, tmp_path / "cache") == first
    assert host.starts == 1
    ask(host, tmp_path / "cache", micro_batch=8)  # which is new
    assert host.starts == 2


@pytest.mark.parametrize("change", ["source", "new file", "start", "switch", "environment"])
def test_what_has_changed_is_asked_again(
    change: str, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent"
    host = Host([stamp(str(script)), stamp(str(absent))])
    ask(host, tmp_path / "cache")
    more: dict[str, Any] = {}
    if change == "source":
        os.utime(script, ns=(1, 1))
    elif change == "new file":
        absent.write_text("")
    elif change == "start":
        more["start"] = {"program": "other.py"}
    elif change == "switch":
        more["script_args"] = {"gradient_checkpointing": True}
    else:
        monkeypatch.setenv("HIDDEN_SIZE", "512")
    ask(host, tmp_path / "cache", **more)
    assert host.starts == 2


def test_a_script_that_asked_the_network_is_asked_again(tmp_path: Path) -> None:
    host = Host(None)
    for _ in range(2):
        ask(host, tmp_path / "cache")
    assert host.starts == 2


def test_a_script_that_fails_is_not_remembered(tmp_path: Path) -> None:
    host = Host([], fails_early="no such file")
    for _ in range(2):
        with pytest.raises(SimulationUnavailable, match="no such file"):
            ask(host, tmp_path / "cache")
    assert host.starts == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"script": []}', "null"])
def test_a_torn_file_is_as_none(text: str, tmp_path: Path) -> None:
    model = ScriptModel({"num_params": 1}, None, [])
    RememberedScript(tmp_path, START).keep(model, {"a": {"failed": "no"}, "b": {}})
    found = RememberedScript(tmp_path, START)
    assert (found.model, found.answers) == (model, {"b": {}})
    [path] = tmp_path.iterdir()
    path.write_text(text)
    assert RememberedScript(tmp_path, START).model is None


def test_a_cache_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    host = Host([])
    assert ask(host, tmp_path / "cache") == ask(host, tmp_path / "cache")
