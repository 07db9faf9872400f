"""Variables, cores and folders of ranks, on which memory and speed depend too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.command import entrypoint
from dsat.engines import ports
from dsat.engines.machines import machine
from dsat.engines.machines.hosts import Host
from dsat.engines.rank_settings import binding_options
from testing.local import PROGRAMS
from testing.scripted_hosts import GPUS, Given, ScriptedHosts, scripted_engine, trial_of

# Eight cores of two hardware threads each: 0 and 8, 1 and 9, ...
MACHINE = replace(GPUS, expandable_segments=True, cores=tuple(range(8)), threads=16)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SCRIPT = "train.py --deepspeed_config ds_config.json"
Start = Callable[..., Given]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> ScriptedHosts:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    scripted = ScriptedHosts()
    scripted.replace_those_of(monkeypatch)
    return scripted


@pytest.fixture
def given(hosts: ScriptedHosts, tmp_path: Path) -> Start:
    """Return a function that launches a trial and returns what its ranks get."""

    def start(ranks: int, launcher: str = "deepspeed", **zero: Any) -> Given:
        entry = f"{launcher} {SCRIPT}"
        engine = scripted_engine(tmp_path, [Host(MACHINE)], ranks, entry=entry)
        engine.launch(trial_of(1, **zero))
        engine.close()
        return hosts.given[1][-1]

    return start


def test_the_next_dsat_does_not_end_what_a_user_starts_from_cmd_txt(
    given: Start, tmp_path: Path
) -> None:
    marks = {"DSAT_OWNER", "DSAT_RUN_DIR"}
    assert marks <= given(1).ranks[0]["env"].keys()
    [command] = tmp_path.rglob("cmd.txt")
    assert "DSAT_TRIAL_DIR" in command.read_text()
    assert [mark for mark in marks if mark in command.read_text()] == []


def test_ranks_share_the_cores_and_an_offloading_trial_has_them_all(given: Start) -> None:
    for launcher, ranks, zero, threads in (
        ("deepspeed", 1, {}, "4"),
        ("deepspeed", 2, {}, "4"),
        ("deepspeed", 4, {}, "4"),
        ("deepspeed", 1, OFFLOAD, None),  # a single rank: torch's default
        ("deepspeed", 2, OFFLOAD, "8"),
        ("deepspeed", 4, OFFLOAD, "4"),
        ("torchrun", 2, {}, "1"),
    ):
        found = given(ranks, launcher, **zero)
        assert found.env("OMP_NUM_THREADS") == [threads] * ranks, (launcher, ranks, zero)
        assert found.cores == [[]] * ranks, "they are bound to none"


@pytest.mark.parametrize(
    ("ranks", "zero", "listed", "cores"),
    [
        (4, {}, "", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, {}, "", [[0, 1], [2, 3]]),  # as beside another trial
        (2, OFFLOAD, "", [[0, 1, 2, 3], [4, 5, 6, 7]]),  # as alone
        (4, {}, "1,3,5,7,9,11,13,15", [[1, 3], [5, 7], [9, 11], [13, 15]]),
        (2, {}, "1,3,5,7,9,11,13,15", [[1, 3], [5, 7]]),
        (1, OFFLOAD, "1,3,5,7,9,11,13,15", [[1, 3, 5, 7, 9, 11, 13, 15]]),
        (4, {}, "5,6", [[5], [6], [5], [6]]),  # there are fewer cores than ranks
    ],
)
def test_bound_ranks_have_whole_cores_and_training_has_the_same(
    ranks: int,
    zero: Mapping[str, Any],
    listed: str,
    cores: list[list[int]],
    given: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the launcher replaces it
    words = "deepspeed --bind_cores_to_rank" + (f" --bind_core_list {listed}" if listed else "")
    found = given(ranks, words, **zero)
    assert found.cores == cores
    assert found.env("OMP_NUM_THREADS") == [str(len(cores[0]))] * ranks
    if listed == "5,6":
        return
    program = entrypoint.parse(f"{words} {SCRIPT}", PROGRAMS / "tiny")
    config = {"zero_optimization": zero}
    option, *more = binding_options(MACHINE, program, config, ranks)
    used = ",".join(str(core) for of_rank in cores for core in of_rank)
    assert option == "--bind_cores_to_rank"
    assert more == (["--bind_core_list", used] if listed or len(cores[0]) * ranks < 8 else [])


def test_of_each_core_the_first_hardware_thread_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for core in range(16):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path)
    assert machine.physical_cores() == list(range(8))


def test_what_the_user_has_set_is_left_alone(given: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert given(2).env("PYTORCH_CUDA_ALLOC_CONF") == ["expandable_segments:True"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    found = given(2, **OFFLOAD)
    assert found.env("OMP_NUM_THREADS") == ["3", "3"]
    assert found.env("PYTORCH_CUDA_ALLOC_CONF") == [None, None]
    assert found.env("PYTORCH_ALLOC_CONF") == ["max_split_size_mb:64"] * 2


def test_trials_that_swap_to_nvme_have_folders_of_their_own(
    hosts: ScriptedHosts, tmp_path: Path
) -> None:
    disk, run = tmp_path / "nvme", tmp_path / "run"
    disk.mkdir()
    run.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    engine, hosts.holds = scripted_engine(run, [Host(MACHINE)]), True
    engine.launch(trial_of(1, stage=3, offload_optimizer=nvme, offload_param=nvme))
    folder = Path(hosts.given[1][0].folder)
    written = json.loads((folder / "ds_config.json").read_text())
    hparams = json.loads((folder / "trial.json").read_text())["task"]["hparams"]
    (theirs := disk / "t1").mkdir()
    for part in ("offload_optimizer", "offload_param"):
        own = Path(written["zero_optimization"][part]["nvme_path"])
        assert own.parent == disk and own != theirs
        for_scripts = hparams["overwrite_deepspeed_args"]["zero_optimization"][part]
        assert for_scripts["nvme_path"] == str(own), "for get_ds_config_from_hparams"
    [(_, request)] = hosts.requests
    assert request["swap"] == [str(own)], "one, which each host removes"


def test_a_folder_shows_the_model_and_the_includes_together(
    hosts: ScriptedHosts, tmp_path: Path
) -> None:
    shared = tmp_path / "elsewhere" / "shared.py"
    shared.parent.mkdir()
    shared.write_text("# shared")
    for number in (1, 2):  # also when it is resumed
        engine = scripted_engine(tmp_path, includes=[shared])
        engine.launch(trial_of(number))
        together = Path(hosts.given[number][0].cwd)
        assert (together / "shared.py").read_text() == "# shared"
        assert (together / "train.py").samefile(PROGRAMS / "tiny" / "train.py")
    engine = scripted_engine(tmp_path)
    engine.launch(trial_of(3))
    assert Path(hosts.given[3][0].cwd) == (PROGRAMS / "tiny").resolve()


def test_ports_are_found_where_the_kernel_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    assert len(set(ports.free_ports(3))) == 3
