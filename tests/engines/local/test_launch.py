"""What memory and speed depend on besides the configuration: the ranks' environment."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.engines.local import launch, leftovers, machine
from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.leftovers import CompilerLocks
from dsat.engines.local.rank_settings import binding_options, offloads, settings_of_ranks, share_of
from dsat.engines.local.running import Start
from dsat.in_trial.meter_spec import MeterSpec
from dsat.inputs import experiment
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.placement import Launch
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions
from testing.local import cpu_machine

# Eight cores of two hardware threads each: 0 and 8, 1 and 9, ...
GPUS = replace(
    cpu_machine(4),
    accelerator="cuda",
    expandable_segments=True,
    cores=tuple(range(8)),
    threads=16,
)
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
PROGRAM = Entrypoint(script="train.py", launch=Launch(passes_local_rank=True))


def test_ranks_share_the_cores_and_an_offloading_trial_has_them_all() -> None:
    threads = {
        (ranks, bool(config)): settings_of_ranks(GPUS, PROGRAM, config, ranks, {})
        for ranks in (1, 2, 4)
        for config in ({}, OFFLOAD)
    }
    assert {key: found.get("OMP_NUM_THREADS") for key, found in threads.items()} == {
        (1, False): "4",
        (2, False): "4",
        (4, False): "4",
        (1, True): None,  # one rank, alone: torch's own choice
        (2, True): "8",
        (4, True): "4",
    }
    torchrun = replace(PROGRAM, launch=Launch())
    assert settings_of_ranks(GPUS, torchrun, {}, 2, {})["OMP_NUM_THREADS"] == "1"


def test_of_each_core_the_first_hardware_thread_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for core in range(16):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path)
    assert machine.physical_cores() == list(GPUS.cores)


def test_bound_ranks_have_whole_cores_and_training_has_the_same() -> None:
    shares = [share_of(GPUS.cores, place, 4) for place in range(4)]
    assert shares == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert share_of(GPUS.cores, 9, 16) == [1], "there are fewer cores than ranks"
    binds = replace(PROGRAM, launch=Launch(binds_cores=True, passes_local_rank=True))
    for ranks, config, threads, listed in (
        (4, {}, "2", None),
        (2, {}, "2", "0,1,2,3"),  # as beside another trial
        (2, OFFLOAD, "4", None),  # as alone
    ):
        own = {"OMP_NUM_THREADS": "3"}  # which the launcher replaces
        assert settings_of_ranks(GPUS, binds, config, ranks, own)["OMP_NUM_THREADS"] == threads
        options = binding_options(GPUS, binds, config, ranks)
        list_option = ["--bind_core_list", listed] if listed else []
        assert options == ["--bind_cores_to_rank", *list_option]


def test_the_users_own_list_of_cores_is_shared_out() -> None:
    binds = replace(PROGRAM, launch=Launch(binds_cores=True, core_list=(1, 3, 5, 7, 9, 11, 13, 15)))
    shares = [share_of(binds.launch.core_list, place, 4) for place in (0, 3)]
    assert shares == [[1, 3], [13, 15]]
    for ranks, config, threads, listed in (
        (4, {}, "2", "1,3,5,7,9,11,13,15"),
        (2, {}, "2", "1,3,5,7"),
        (1, OFFLOAD, "8", "1,3,5,7,9,11,13,15"),
    ):
        assert settings_of_ranks(GPUS, binds, config, ranks, {})["OMP_NUM_THREADS"] == threads
        options = ["--bind_cores_to_rank", "--bind_core_list", listed]
        assert binding_options(GPUS, binds, config, ranks) == options


def test_what_the_user_has_set_is_left_alone() -> None:
    given = {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings_of_ranks(GPUS, PROGRAM, OFFLOAD, 2, given) == {}
    expandable = settings_of_ranks(GPUS, PROGRAM, {}, 2, {})["PYTORCH_CUDA_ALLOC_CONF"]
    assert expandable == "expandable_segments:True"


def test_trials_that_swap_to_nvme_have_folders_of_their_own(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}}
    assert offloads(config)
    own, folders = leftovers.with_own_swap_folder(config, "run-z3")
    assert own["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path / "run-z3")
    assert config["zero_optimization"]["offload_param"] == nvme
    (tmp_path / "run-z3" / "zero_stage_3").mkdir()
    leftovers.remove(folders)
    assert list(tmp_path.iterdir()) == []
    assert not offloads({"zero_optimization": {"offload_param": {"device": "none"}}})


def test_only_a_training_in_full_length_sees_the_users_own_searcher(tmp_path: Path) -> None:
    """Determined's callback compares its length with the arguments, which need not agree."""
    config = {"searcher": {"name": "single", "metric": "loss", "max_length": 20}}
    user = experiment.of_command(["train.py"], "x", tmp_path, {"train_micro_batch_size_per_gpu": 1})
    trial = Trial(0, TrialKind.SEARCH, "z0", 0, BatchTriple(1, 1, 1), {})
    options = TrialOptions(timeout_s=1.0)

    def shown(meter: MeterSpec | None, socket: Path | None) -> Any:
        spec = launch.Launch(
            experiment=replace(user, config=config),
            program=PROGRAM,
            start=Start(trial, tmp_path, meter, socket),
            shares=(Share(0, Host(cpu_machine(1)), (0,)),),
            config={},
            ports=(1, 2, 3),
            options=launch.LocalOptions(options),
            is_forked=True,
        ).spec()
        return spec.task["experiment_config"]["searcher"], spec.task["length"]

    in_trials = {**config["searcher"], "name": "custom"}
    meter = MeterSpec.of_trial(trial, options, slots=1)
    assert shown(None, None) == (config["searcher"], 20)
    assert shown(meter, None) == (in_trials, meter.longest)
    assert shown(None, tmp_path) == (in_trials, 20)


def test_a_folder_shows_the_model_and_the_includes_together(tmp_path: Path) -> None:
    model, shared = tmp_path / "model", tmp_path / "elsewhere" / "shared.py"
    for path in (model / "train.py", shared):
        path.parent.mkdir()
        path.write_text(f"# {path.name}")
    user = experiment.of_command(["train.py"], "x", model, {"train_micro_batch_size_per_gpu": 1})
    assert launch.working_folder(user, tmp_path) == model
    for _ in range(2):  # also when it is resumed
        together = launch.working_folder(replace(user, includes=(shared,)), tmp_path)
    assert {path.name: path.read_text() for path in together.iterdir()} == {
        "train.py": "# train.py",
        "shared.py": "# shared.py",
    }


def test_a_lock_is_removed_only_if_nobody_holds_it(tmp_path: Path) -> None:
    stale, held = tmp_path / "fused_adam" / "lock", tmp_path / "cpu_adam" / "lock"
    for path in (stale, held):
        path.parent.mkdir()
    stale.touch()
    descriptor = os.open(held, os.O_CREAT | os.O_EXCL)
    try:
        env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
        CompilerLocks(env).remove()
        assert held.exists() and not stale.exists()
    finally:
        os.close(descriptor)


def test_a_young_lock_is_left_where_another_host_may_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}  # as torch does
    young, old = (tmp_path / "torch_extensions" / name / "lock" for name in ("new", "old"))
    for path in (young, old):
        path.parent.mkdir(parents=True)
        path.touch()
    for path, age_s in ((young, 1), (old, 3600)):
        os.utime(path, (time.time() - age_s,) * 2)
    mounted = [("/", "ext4"), (str(tmp_path), "nfs4")]
    parts = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounted]
    monkeypatch.setattr("psutil.disk_partitions", lambda *, all: parts)
    locks = CompilerLocks(env)
    locks.remove()
    assert young.exists() and not old.exists()
    locks.remove(own=True)
    assert young.exists(), "it was there before"
    young.touch()
    locks.remove()
    assert young.exists()
    locks.remove(own=True)
    assert not young.exists()
    young.touch()
    del parts[1]
    locks.remove()
    assert not young.exists()
