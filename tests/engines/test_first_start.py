"""Any command that starts a training: its ranks are recorded as their interpreters started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsat.errors import ScriptFailed, UserInputError
from dsat.values import slow
from dsat.values.outcome import OutcomeKind
from testing.command import run_of, typed
from testing.first_start import TRAINS, begun, runnable, seen, user_folder
from testing.local import PATIENCE_S, wait_until
from testing.scripts import CONFIG, PLAIN

BIN = Path(sys.executable).parent
OPTIONS = ("-X", "utf8", "-W", "ignore")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return user_folder(tmp_path, monkeypatch)


def nightly(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "script", "args", "slots"),
    [
        (["env", "COLOUR=blue", "python3", "-u", *OPTIONS, "train.py"], "train.py", (), 1),
        (["bash", "run.sh", "7"], "train.py", ("--steps", "7"), 1),
        nightly(["bash", "-c", "cd .. && python3 work/train.py"], "work/train.py", (), 1),
        nightly(["make", "train", "STEPS=3"], "train.py", ("--steps", "3"), 1),
        nightly(["srun", "-N1", "python3", "train.py"], "train.py", (), 2),
        (["pipx-like", "--steps", "2"], "pipx-like", ("--steps", "2"), 1),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "train.py", (), 2),
        nightly(["uv", "run", "--no-project", "python", "train.py"], "train.py", (), 1),
        nightly([*MPI, "python", "train.py"], "train.py", (), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_command_starts_is_seen(
    command: Sequence[str], script: str, args: tuple[str, ...], slots: int, place: Path
) -> None:
    (place / "run.sh").write_text(
        "set -e\nmodule() { :; }\nexport -f module\nexport COLOUR=red\n"
        "python3 train.py --steps $1\n"
    )
    (place / "Makefile").write_text(
        "train:\n\tpython3 train.py --steps $(STEPS)\n\ttouch went_on\n"
    )
    program = seen(place, *command)
    assert program.script.endswith(script) and not program.needs_command
    assert (program.args, program.slots, program.interpreter) == (args, slots, "")
    of_launchers = ("SET_BY_SCRIPT", "SLURM_PROCID", "OMPI_", "TORCHELASTIC_", "MAKE")
    assert not [name for name in program.env if name.startswith(of_launchers)]
    assert all(map(str.isidentifier, program.env)), "a shell can assign them"
    assert "PYTHONPATH" not in program.env, "what records is no part of the command"
    assert not (place / "went_on").exists(), "the command saw its training fail"
    if "COLOUR=blue" in command:
        assert program.env["COLOUR"] == "blue" and program.python_options == OPTIONS


BOUND = """
for rank in 0 1; do
    cores=("$@")
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 taskset --cpu-list ${cores[$rank]} \\
        python3 train.py --local_rank=$rank &
done; wait
"""


@pytest.mark.slow
def test_the_cores_that_ranks_are_bound_to_are_seen(place: Path) -> None:
    """`deepspeed --bind_cores_to_rank` binds them with numactl; here a script binds them."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2 or shutil.which("taskset") is None:
        pytest.skip("takes two cores, and taskset")
    (place / "bound.sh").write_text(BOUND)
    program = seen(place, "bash", "bound.sh", str(own[1]), str(own[0]))
    assert (program.slots, program.launch.passes_local_rank) == (2, True)
    assert (program.launch.binds_cores, program.launch.core_list) == (True, (own[1], own[0]))


@pytest.mark.slow
def test_one_of_several_nodes_is_refused(place: Path) -> None:
    command = "LOCAL_WORLD_SIZE=1 WORLD_SIZE=4 RANK=0 python3 train.py"
    with pytest.raises(UserInputError, match="1 of its 4 ranks") as caught:
        seen(place, "bash", "-c", command)
    assert "\n" not in str(caught.value) and "torchrun" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_never_begins_is_told(place: Path) -> None:
    one = "WORLD_SIZE=2 RANK=0 LOCAL_WORLD_SIZE=2 python3 train.py"
    there = "until ls $DSAT_TRIAL_DIR/records/rank-*.json; do sleep 0.1; done"
    with pytest.raises(ScriptFailed, match=r"exit status 3 before .* in all of its ranks"):
        seen(place, "bash", "-c", f"{one} & {there}; kill $!; exit 3")


def test_what_a_daemon_started_for_a_command_ends_with_it(place: Path) -> None:
    """The daemons of `srun` and Docker start such tasks, which are no descendants of the
    command."""
    with begun(["bash", "-c", "sleep 2000"], place) as started:
        daemon = subprocess.Popen(["sleep", "2000"], env=started.env, start_new_session=True)
    try:
        assert daemon.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        daemon.kill()


@pytest.mark.slow
def test_what_its_training_waits_for_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "LONG_S", -1)
    monkeypatch.setattr(slow, "AGAIN_S", 0.2)
    caplog.set_level("INFO", logger="dsat")
    with begun(["bash", "-c", "sleep 2000"], place, timeout_s=1.0) as started:
        started.does("compiling DeepSpeed's operator fused_adam")
        with pytest.raises(ScriptFailed):
            started.program()
    assert caplog.messages.count("compiling DeepSpeed's operator fused_adam") == 1
    assert "compiling DeepSpeed's operator fused_adam: 1 s so far" in caplog.messages


def test_a_compilers_lock_of_the_command_does_not_outlive_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it compiles leaves torch's lock, for which others wait."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place))
    own = place / "own" / "lock"
    own.parent.mkdir()
    with begun(["bash", "-c", 'touch "$0"; sleep 2000', str(own)], place):
        wait_until(own.exists, "the command's own lock")
    assert not own.exists()


@pytest.mark.slow
def test_a_script_that_names_no_shell_is_run_by_one(place: Path) -> None:
    runnable(
        place / "run.sh", "mkdir -p lib && export PYTHONPATH=lib:$PYTHONPATH && python3 train.py\n"
    )
    program = seen(place, str(place / "run.sh"))
    assert program.script == "train.py"
    assert program.env["PYTHONPATH"].split(os.pathsep)[0] == str(
        place / "lib"
    )  # in any folder where trials start


@pytest.mark.slow
def test_a_variable_in_front_of_a_command_leaves_the_hook_in_place(place: Path) -> None:
    program = seen(place, "env", "PYTHONPATH=lib", "COLOUR=blue", "python3", "train.py")
    assert program.env["PYTHONPATH"].split(os.pathsep)[0] == str(place / "lib")
    assert program.env["COLOUR"] == "blue"


@pytest.mark.slow
def test_a_program_that_prepares_data_needs_no_hook(place: Path) -> None:
    (place / "run.sh").write_text(
        "PYTHONPATH=$PWD python3 -c 'import time, torch; time.sleep(1.5)'\npython3 train.py\n"
    )
    assert seen(place, "bash", "run.sh").script == "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("PYTHONPATH=$PWD python3 blind.py", r"PYTHONPATH for `.*blind.py`.*src:\$PYTHONPATH"),
        ("python3 -sE blind.py", "hides dsat from `python3 -sE blind.py`.* without -E, -I and -S"),
        (
            'env -i "$(which python3)" blind.py',
            "clears the environment of .*blind.py.*--cleanenv",
        ),
        (
            'PYTHONPATH="${PYTHONPATH%%:*}:lib" python3 blind.py',
            "hides dsat from `python3 blind.py`.* where dsat's folder is visible",
        ),
    ],
    ids=["replaced", "ignored", "cleared", "in a container"],
)
def test_a_training_that_dsat_cannot_see_is_ended_before_it_begins(
    line: str, message: str, place: Path
) -> None:
    """Otherwise it would run in full, and overwrite the user's checkpoints."""
    runnable(place / "lib" / "dsat.py", "raise ImportError('not in this container')\n")
    runnable(place / "run.sh", f"#!/bin/bash\n{line}\n")
    (place / "blind.py").write_text(
        "import socket, time, torch\ntime.sleep(1.5)\n"  # as while it prepares data
        "store = socket.create_server(('127.0.0.1', 0))\ntime.sleep(60)\nopen('trained', 'w')\n"
    )
    with pytest.raises(UserInputError, match=message):
        seen(place, str(place / "run.sh"))
    assert not (place / "trained").exists()


@pytest.mark.slow
def test_a_training_on_a_file_system_that_maps_no_files_is_seen(place: Path) -> None:
    no_maps = "def mmap(*args, **named): raise OSError(19, '')\ndef __getattr__(name): return 0\n"
    runnable(place / "lib" / "mmap.py", no_maps)
    (place / "listens.py").write_text(
        "import socket, time, torch\nstore = socket.create_server(('127.0.0.1', 0))\n"
        f"time.sleep(1.5)\n{TRAINS}\n"
    )
    assert seen(place, "env", "PYTHONPATH=lib", "python3", "listens.py").script == "listens.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "imports"),
    [("python3", "torch"), ("python3", "time"), nightly("torchrun", "torch")],
)
def test_a_helper_that_a_rank_starts_needs_no_hook(
    launcher: str, imports: str, place: Path
) -> None:
    """A server of rewards may have an environment of its own. A script without torch is no rank."""
    (place / "helper.py").write_text(
        "import socket, time, torch\n"
        "store = socket.create_server(('127.0.0.1', 0))\n"
        "open('ready', 'w').close()\ntime.sleep(60)\n"
    )
    (place / "starts.py").write_text(
        f"import os, subprocess, sys, time, {imports}\n"
        "subprocess.Popen([sys.executable, 'helper.py'], env={'COLOUR': 'red'})\n"
        "while not os.path.exists('ready'): time.sleep(0.1)\n"
        f"time.sleep(1.5)\n{TRAINS}\n"
    )
    own = None if launcher == "torchrun" else 1
    with begun((launcher, "starts.py"), place, ranks=own) as started:
        if imports == "torch":
            assert started.ranks() == [(0, 1)]
        else:
            with pytest.raises(UserInputError, match=r"clears the environment of .*helper\.py"):
                started.ranks()


@pytest.mark.slow
def test_a_fork_of_a_process_that_dsat_sees_is_seen(place: Path) -> None:
    (place / "forks.py").write_text(
        "import os, socket, sys, time, torch\n"
        "if os.fork() == 0:\n"
        "    os.closerange(3, 100)\n"
        "    store = socket.create_server(('127.0.0.1', 0))\n"
        "    time.sleep(1.5)\n"
        "    sys.argv = ['train.py']\n"
        f"    {TRAINS}\n"
        "os.wait()\n"
    )
    (place / "sitecustomize.py").touch()  # of the user, which replaces the hook's module
    program = seen(place, "env", "PYTHONPATH=.", "python3", "forks.py")
    assert "multiprocessing" in program.needs_command


EXITS = "sys.exit('no data')", r"status 1 before .*sys\.exit\('no data'\) at leaves\.py:4"
IS_KILLED = "os.kill(os.getpid(), 15)", "a rank of your command was killed by SIGTERM before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "line", "message"),
    [
        nightly("python3", *EXITS),
        ("torchrun", *EXITS),
        ("python3", *IS_KILLED),
        nightly("torchrun", *IS_KILLED),
    ],
)
def test_how_a_script_ended_before_its_engine_is_told(
    launcher: str, line: str, message: str, place: Path
) -> None:
    (place / "leaves.py").write_text(
        f"import os, sys, deepspeed\n\ndef check():\n    {line}\ncheck()"
    )
    with pytest.raises(ScriptFailed, match=message):
        seen(place, launcher, "leaves.py")


def test_a_signal_that_deepspeeds_launcher_logs_is_told(place: Path) -> None:
    """It logs on standard output, and ends with 256 - N."""
    line = "echo '[ERROR] [launch.py:325] [...] exits with return code = -15'; exit 241"
    with pytest.raises(ScriptFailed, match="killed by SIGTERM before"):
        seen(place, "bash", "-c", line)


@pytest.mark.nightly
def test_a_scripts_own_error_is_shown_as_soon_as_it_is_there(place: Path) -> None:
    (place / "broken.py").write_text("import missing\n")
    with pytest.raises(ScriptFailed, match="exit status 2 before") as caught:
        seen(place, "bash", "-c", "python3 train.py --no-such-flag")
    assert "unrecognized arguments: --no-such-flag" in caught.value.detail
    with pytest.raises(ScriptFailed, match="before it called") as caught:
        seen(place, "torchrun", "--nproc_per_node=2", "train.py", "--no-such-flag")
    [*_, last] = caught.value.detail.splitlines()
    assert "unrecognized arguments: --no-such-flag" in last
    with pytest.raises(ScriptFailed, match="ModuleNotFoundError: No module named 'missing'"):
        seen(place, "torchrun", "--nproc_per_node=1", "-m", "broken")
    with pytest.raises(ScriptFailed, match=r"without a call of deepspeed\.initialize"):
        seen(place, "bash", "-c", "python3 train.py --evaluate")
    with pytest.raises(ScriptFailed, match=r"in the background \(&\)"):
        seen(place, "bash", "-c", "nohup python3 train.py &> train.log &")
    (place / "late.py").write_text("import deepspeed, missing\n")
    with pytest.raises(ScriptFailed, match="No module named 'missing'"):
        seen(place, "bash", "-c", "python3 late.py &> late.log")


@pytest.mark.slow
def test_a_sitecustomize_of_the_users_own_is_run_as_well(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = place.parent / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nopen('customized', 'w').close()\n")
    paths = [str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.chdir(own)  # the supervisor's folder is also the one where dsat was started
    assert seen(place, sys.executable, "train.py").script == "train.py"
    assert (place / "customized").exists()


ENGINE = """
import deepspeed, torch
model = torch.nn.Linear(4, 4)
config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""


@pytest.mark.nightly
def test_trackers_that_are_off_in_trials_are_not_the_commands_own_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's launcher is such a case: it imports transformers, then starts another
    process."""
    place = tmp_path / "work"
    place.mkdir()
    (place / "train.py").write_text(ENGINE)
    launcher = "import os, sys, transformers; os.execlp('python', 'python', *sys.argv[1:])"
    (place / "launcher.py").write_text(launcher)
    monkeypatch.setenv("PATH", os.pathsep.join([str(BIN), os.environ["PATH"]]))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    command = ["env", "WANDB_ENTITY=us", "python", "launcher.py", "train.py"]
    program = seen(place, *command, trains=True)
    assert (program.script, program.env) == ("train.py", {"WANDB_ENTITY": "us"})


@pytest.mark.slow
def test_several_nodes_are_refused_before_they_are_waited_for(place: Path) -> None:
    with pytest.raises(UserInputError, match="on 2 nodes"):
        seen(place, "env", "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "train.py")


STARTS_ITS_RANKS = f"""
import os, subprocess, sys
from lightning.fabric.plugins.environments import LightningEnvironment

if not LightningEnvironment().creates_processes_externally:
    rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    other = dict(rank, RANK="1", LOCAL_RANK="1")
    subprocess.Popen([sys.executable, *sys.argv], env=os.environ | other)
    os.environ.update(rank)
{TRAINS}
"""


NEVER_STEPS = f"""
from plain import *
make_engine(config={CONFIG})
list(torch.utils.data.DataLoader(torch.zeros(8, 16), batch_size=2))
"""


@pytest.mark.nightly
def test_a_command_that_reads_its_data_and_makes_no_step_is_told_so(tmp_path: Path) -> None:
    for name, text in (("train.py", NEVER_STEPS), ("plain.py", PLAIN)):
        (tmp_path / name).write_text(text)
    words = "random --run-dir run --max-trials 2 --finals 0 --memory-model formula"
    told = typed(tmp_path, *words.split(), "--", "python3", "train.py")
    assert told.status == 2 and "after 0 optimizer steps" in told.err, told
    outcomes = run_of(tmp_path / "run").outcomes
    assert [outcome.kind for outcome in outcomes.values()] == [OutcomeKind.INVALID] * 2, outcomes


LOSES_ITS_PORT = f"""
from plain import *
began = list(Path().glob("began-*"))
engine = make_engine(config={CONFIG})
Path(f"began-{{os.getpid()}}").touch()  # what an earlier trial wrote, a trial leaves as it is
if not began:
    raise OSError(98, "Address already in use")
train(engine)
"""


@pytest.mark.nightly
def test_a_first_trial_that_lost_its_port_to_another_program_runs_again(tmp_path: Path) -> None:
    """Any trial may lose a port that was free when it was chosen."""
    for name, text in (("train.py", LOSES_ITS_PORT), ("plain.py", PLAIN)):
        (tmp_path / name).write_text(text)
    words = "random -m throughput --run-dir run --max-trials 2 --finals 0 --memory-model formula"
    told = typed(tmp_path, *words.split(), "--", "python3", "train.py")
    assert told.status == 0, told
    assert len(list(tmp_path.glob("began-*"))) >= 2
    assert run_of(tmp_path / "run").outcomes[0].ok


@pytest.mark.nightly  # Lightning, twice
def test_lightning_starts_its_ranks_where_no_launcher_does(place: Path) -> None:
    pytest.importorskip("lightning")
    (place / "alone.py").write_text(STARTS_ITS_RANKS)
    with begun(("python3", "alone.py"), place, ranks=1) as started:
        assert started.ranks() == [(0, 2), (1, 2)]
