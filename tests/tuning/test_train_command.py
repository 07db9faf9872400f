"""The training command has the conditions of the trials."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.cli import output
from dsat.command.entrypoint import Entrypoint
from dsat.command.placement import Launch
from dsat.command.switches import OF_CODE
from dsat.engines.machines.hosts import Host, Share
from dsat.engines.machines.machine import Machine
from dsat.engines.rank_settings import find_cores
from dsat.engines.retries import COMMAND_AGAIN
from dsat.tuning import train_command
from dsat.tuning.command_line import CommandLine
from dsat.tuning.preparation import Prepared
from dsat.tuning.train_command import reproduce_conditions
from dsat.values.outcome import ScriptSwitch
from dsat.values.text import hide_secrets
from testing.local import PROGRAMS, cpu_machine
from testing.printed import prepared, printed_line

FOLDER = PROGRAMS / "conditions"

FOUR = replace(cpu_machine(4), devices=("0", "2", "3", "5"))


@pytest.mark.parametrize(
    ("machine", "slots", "memory_is_limited", "words"),
    [
        (FOUR, 2, False, "OMP_NUM_THREADS=1 taskset --cpu-list 0,2"),
        (FOUR, 4, False, "OMP_NUM_THREADS=1"),
        (FOUR, 4, True, "OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=262144"),
        (replace(FOUR, accelerator="cuda"), 2, False, ""),
    ],
)
def test_conditions_of_a_trial(
    machine: Machine, slots: int, memory_is_limited: bool, words: str
) -> None:
    found = reproduce_conditions(machine, slots, memory_is_limited=memory_is_limited)
    assert " ".join(found).startswith(words) and bool(found) is bool(words)


def test_a_quota_of_processor_time_names_no_cores() -> None:
    limited = replace(FOUR, threads=2, allowed=FOUR.devices)
    assert reproduce_conditions(limited, 1, memory_is_limited=False) == ["OMP_NUM_THREADS=1"]
    share = Share(0, Host(limited), (0, 1))
    assert find_cores(share, 0, Entrypoint(), {}) == []
    unlimited = replace(share, host=Host(replace(limited, threads=4)))
    assert find_cores(unlimited, 0, Entrypoint(), {}) == [0, 2]


SCRIPT = "train.py --deepspeed_config ds_config.json"


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Prepare a command with DeepSpeed's launcher."""
    return prepared(f"deepspeed --num_gpus 1 {SCRIPT}", FOLDER, monkeypatch)


def test_variables_of_the_command_are_written_down_but_for_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"HF_TOKEN=abc KIND='a b' python3 {SCRIPT} --hub_token 'd e'"
    ready = prepared(command, FOLDER, monkeypatch)
    again = replace(ready, program=replace(ready.program, needs_command="they are spawned"))
    for each in (again, ready):
        line = printed_line(each, tmp_path)
        assert "HF_TOKEN=\"${HF_TOKEN:?as in your command}\" KIND='a b'" in line
        assert '--hub_token "${HUB_TOKEN:?as in your command}"' in line
        assert "abc" not in line and hide_secrets(line) == line
    words, _, _ = line.partition(" torchrun")
    line = f"{words} {shlex.quote(sys.executable)} -c 'import os; print(os.environ[\"HF_TOKEN\"])'"
    for given, said in (("two words", "two words"), ("", "HF_TOKEN: as in your command")):
        told = subprocess.run(
            ["bash", "-c", line],
            env={**os.environ, "HF_TOKEN": given},
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(told.returncode) == (not given) and said in told.stdout + told.stderr


def test_options_of_env_stay_in_front_of_the_command(ready: Prepared, tmp_path: Path) -> None:
    command = ("env", "-u", "FOO", "torchrun", "--nproc-per-node", "1", *SCRIPT.split())
    program = replace(ready.program, launch=Launch(), slots=1, started_by=command)
    assert " env -u FOO torchrun " in printed_line(replace(ready, program=program), tmp_path)


@pytest.mark.parametrize("warnings", [(), (COMMAND_AGAIN,)])
def test_a_script_that_reads_a_file_has_a_launcher_too(
    ready: Prepared, tmp_path: Path, warnings: tuple[str, ...]
) -> None:
    """This includes trials that ran the user's command again, with a launcher's variables from
    dsat."""
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "conf.yaml").write_text("deepspeed: ds.json\n")
    command = ("python3", "train.py", "--config", "conf.yaml")
    program = replace(ready.program, launch=Launch(), args=command[2:], started_by=command)
    started = replace(program, started_in=str(tmp_path))
    line = printed_line(replace(ready, program=started), tmp_path, warnings=warnings)
    assert (
        "torchrun --standalone" in line
        and f"train.py --config {tmp_path}/best_files/conf.yaml" in line
    )


def test_accelerates_default_file_is_in_the_home_that_the_command_sets(
    ready: Prepared, tmp_path: Path
) -> None:
    own, run = tmp_path / "hf/accelerate/default_config.yaml", tmp_path / "run"
    own.parent.mkdir(parents=True)
    own.write_text("distributed_type: DEEPSPEED\n")
    run.mkdir()
    words = ("env", "HF_HOME=hf", "accelerate", "launch", "train.py")
    program = replace(
        ready.program,
        args=(),
        started_by=words,
        started_in=str(tmp_path),
        env={"ACCELERATE_USE_DEEPSPEED": "true"},
        needs_command="it is made up",
    )
    line = printed_line(replace(ready, program=program), run)
    assert f" accelerate launch --config_file {run}/best_files/default_config.yaml " in line


def test_another_interpreter_has_its_own_launchers(ready: Prepared, tmp_path: Path) -> None:
    inside = replace(ready.program, started_by=("bash", "run.sh"))
    other = replace(inside, interpreter="/other/bin/python", python_options=("-O",))
    line = printed_line(replace(ready, program=other), tmp_path)
    assert "/other/bin/python -m deepspeed.launcher.runner --num_gpus 1 --no_python" in line
    assert "/other/bin/python -O train.py" in line
    plain = replace(other, launch=Launch())
    line = printed_line(replace(ready, program=plain), tmp_path)
    assert "/other/bin/python -m torch.distributed.run --standalone" in line


def test_programs_have_their_paths_where_the_environment_is_not_active(
    ready: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = replace(ready.program, started_by=("bash", "run.sh"))
    again = replace(started, needs_command="they are spawned")
    launched = replace(ready, program=started)
    by_dsat = replace(ready, program=again, line=CommandLine("tune", (), started.started_by))
    here = Path(sys.executable).parent
    for path, folder in ((str(here), ""), ("/usr/bin:/bin", f"{here}/")):
        monkeypatch.setenv("PATH", path)
        assert f" {folder}deepspeed --num_gpus 1 " in printed_line(launched, tmp_path)
        assert f"&& {folder}python3 -m dsat tune " in printed_line(by_dsat, tmp_path)


def test_a_command_that_is_run_again_has_its_scripts_arguments_replaced(
    ready: Prepared, tmp_path: Path
) -> None:
    program = replace(ready.program, needs_command="they are spawned", started_in=str(tmp_path))
    typed = replace(program, started_by=("tool", "run", *program.args))
    line = printed_line(replace(ready, program=typed), tmp_path)
    assert line.startswith(f"cd {tmp_path} && ") and "torchrun" not in line
    assert " tool run --deepspeed_config /" in line and "best_ds_config.json" in line
    within = replace(ready, program=replace(program, started_by=("bash", "run.sh")))
    assert BY_DSAT in printed_line(within, tmp_path)
    typed_line = CommandLine("tune", ("--run-dir", "."), ("bash", "run.sh", "."))
    line = printed_line(replace(within, line=typed_line), tmp_path)
    assert line.startswith(f"cd {FOLDER} && python3 -m dsat tune --run-dir . --resume ")
    assert line.count("--run-dir") == 1 and line.endswith(" bash run.sh .")


BY_DSAT = "--run-full-experiment"  # sets what no flag of the script can set


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"--workers": "4"}, "best_ds_config.json --workers 4"),
        ({"ENV:NCCL_ALGO": "a:tree;b:ring"}, "NCCL_ALGO='a:tree;b:ring' OMP_NUM_THREADS"),
        ({"bind_cores_to_rank": True}, "deepspeed --bind_cores_to_rank --num_gpus 1 "),
        ({"attn_implementation": "eager"}, BY_DSAT),
    ],
)
def test_every_switch_is_in_the_command(
    ready: Prepared, tmp_path: Path, switches: dict[str, Any], expected: str
) -> None:
    assert expected in printed_line(ready, tmp_path, **switches)


def test_a_launcher_that_is_written_anew_has_the_users_devices(
    ready: Prepared, tmp_path: Path
) -> None:
    for launch, device in ((Launch(devices=(1, 0)), 1), (Launch(not_devices=(1, 2)), 0)):
        launch = replace(launch, passes_local_rank=True)
        program = replace(ready.program, launch=launch, started_by=("bash", "run.sh"))
        line = printed_line(replace(ready, program=program), tmp_path, bind_cores_to_rank=True)
        assert f"deepspeed --include localhost:{device} --bind_cores_to_rank" in line


@pytest.mark.parametrize("is_exported", [False, True])
def test_a_launcher_that_is_written_anew_has_visible_devices(
    is_exported: bool, ready: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --num_gpus, DeepSpeed's launcher would ignore the variable."""
    visible = {"CUDA_VISIBLE_DEVICES": "2,3"}
    if is_exported:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    machine = replace(
        ready.machine, accelerator="cuda", devices=("2", "3"), visible_devices=tuple(visible)
    )
    program = replace(
        ready.program, env={} if is_exported else visible, started_by=("bash", "run.sh")
    )
    host = replace(ready.hosts[0], machine=machine)
    line = printed_line(replace(ready, hosts=(host,), program=program), tmp_path)
    assert " deepspeed --include localhost:2 train.py " in line


@pytest.mark.parametrize(
    ("launcher", "printed"),
    [
        ("deepspeed --master_port 29600", ""),
        ("torchrun --nproc-per-node 1 --max-restarts 0", ""),
        (
            "deepspeed --bind_core_list=0 --num_gpus 1 --bind_cores_to_rank --save_pid",
            "deepspeed --bind_cores_to_rank --bind_core_list 0 --num_gpus 1 --save_pid",
        ),
        (
            "deepspeed --num_gpus 1 --bind_cores_to_rank --bind_core_list 0 --save_pid",
            "deepspeed --bind_cores_to_rank --bind_core_list 0 --num_gpus 1 --save_pid",
        ),
    ],
)
def test_the_launchers_other_options_stay(
    launcher: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared(f"{launcher} {SCRIPT}", FOLDER, monkeypatch)
    assert f" {printed or launcher} train.py --deepspeed_config " in printed_line(ready, tmp_path)


def test_what_the_scripts_code_switches_on_is_switched_off_by_dsat(
    ready: Prepared, tmp_path: Path
) -> None:
    """A Trainer flag that is off does not undo `gradient_checkpointing_enable()`."""
    ready = replace(ready, program=replace(ready.program, takes_hf_flags=True))
    for in_arguments in (False, True):
        found = {
            "gradient_checkpointing": ScriptSwitch((True, False), in_arguments=in_arguments),
            "dataloader_num_workers": ScriptSwitch((0, 2), in_arguments=True),
        }
        line = printed_line(ready, tmp_path, found=found, gradient_checkpointing=False)
        assert (BY_DSAT in line) is not in_arguments


def test_what_the_scripts_code_decides_is_decided_by_dsat(ready: Prepared, tmp_path: Path) -> None:
    """accelerate's file has the configuration, but TrainingArguments in code set the batch
    sizes."""
    command = f"accelerate launch --config_file acc.yaml {SCRIPT}"
    started = replace(ready.program, started_by=tuple(command.split()), slots=1)
    ready = replace(ready, program=started)
    for warning in ("something else", *OF_CODE):
        line = printed_line(ready, tmp_path, warnings=(warning,))
        assert ("accelerate launch" in line) is (warning == "something else"), line
        assert (BY_DSAT in line) is (warning != "something else")


def test_files_that_were_included_are_beside_the_script(ready: Prepared, tmp_path: Path) -> None:
    (tmp_path / "more.py").touch()
    both = replace(ready.experiment, includes=(tmp_path / "more.py",))
    line = printed_line(replace(ready, experiment=both), tmp_path)
    folder = Path(shlex.split(line)[1])
    assert {"more.py", "train.py"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "devices", "does_too"),
    [
        (f"deepspeed --num_gpus 1 {SCRIPT}", 1, True),
        (f"python3 {SCRIPT}", 1, True),
        (f"python3 {SCRIPT}", 2, False),
    ],
)
def test_a_configuration_that_is_kept_needs_no_other_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, devices: int, does_too: bool
) -> None:
    ready = prepared(command, FOLDER, monkeypatch)
    best = object()
    monkeypatch.setattr(train_command, "make_line", lambda *_: "train it")
    run = SimpleNamespace(best=best, baseline=best, outcomes={})
    for accelerator, no_other in (("cuda", does_too), ("cpu", False)):
        machine = replace(ready.machine, accelerator=accelerator)
        plan = replace(ready.plan, slots_per_trial=devices)
        here = SimpleNamespace(program=ready.program, plan=plan, machine=machine)
        search: Any = SimpleNamespace(ready=here, run=run, folder=tmp_path)
        said = "\n".join(map(str, output.result_of(search)))
        assert ("Train with your own command" in said) == no_other
        assert ("Train with it: train it" in said) != no_other
        assert ("it has this configuration" in said) == no_other
