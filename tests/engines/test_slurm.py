"""Slurm: what the variables of an allocation say, and real daemons of three nodes here."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dsat.engines.machines.hosts import Host
from dsat.engines.places import local as this_machine
from dsat.engines.places.slurm import Allocation
from dsat.errors import EngineError, UserInputError
from dsat.prepare.hosts import acquire_hosts, check_equal, check_slots, describe
from dsat.values.outcome import OutcomeKind
from testing import slurm as cluster
from testing.command import FAST, command_of, events_of, experiment_of, inline, run_of
from testing.local import SMALL_BUCKETS, assert_nothing_is_left, cpu_machine, wait_until
from testing.slurm import Slurm

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2)",
}
ENDS_WITHIN_S = 240.0
ROOT = Path(__file__).parents[2]
# dsat with short time limits for silent hosts.
IMPATIENT = """
import sys
from dsat.cli.main import main
from dsat.engines import supervisors
supervisors.PING_EVERY_S, supervisors.SILENT_AFTER_S = 1.0, 8.0
sys.exit(main(sys.argv[1:]))
"""


def test_an_allocation_is_known_by_its_variables() -> None:
    assert Allocation.of({}) is None
    assert Allocation.of(JOB) == Allocation("7", "n[1-2]", 2, "16(x2)", node="")
    inside = Allocation.of({**JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_NUM_TASKS": "1"})
    assert inside is not None and inside.node == "n1"
    with pytest.raises(EngineError, match=r"srun has started dsat 2 times\. Start dsat once"):
        Allocation.of({**JOB, "SLURM_STEP_NUM_TASKS": "2"})
    with pytest.raises(EngineError, match=r"job 7 is heterogeneous \(3 components\)"):
        Allocation.of({**JOB, "SLURM_HET_SIZE": "3"})


def test_slurm_is_asked_for_only_where_there_is_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserInputError, match=r"SLURM_JOB_ID .* not set. .*sbatch"):
        acquire_hosts("slurm").__enter__()


def test_an_allocation_of_one_node_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**JOB, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: cpu_machine(2))
    with acquire_hosts("slurm") as hosts:
        assert hosts == (Host(cpu_machine(2)),)


def test_hosts_must_be_equal() -> None:
    machine = replace(
        cpu_machine(2), software=("torch 2.9", "deepspeed 0.19"), device_names=("A100", "A100")
    )
    a = Host(machine, "a")
    check_equal([a, Host(replace(machine, memory_bytes=machine.memory_bytes + 1), "b")])
    for other, told in (
        (replace(machine, devices=("0",)), "host a has 2 CPU cores .* host b has 1 CPU core"),
        (replace(machine, memory_bytes=2**30), "host b has 2 CPU cores .*1 GiB"),
        (
            replace(machine, device_names=("A100", "T4")),
            "host a has A100, A100, but host b has A100, T4",
        ),
        (replace(machine, software=("torch 2.8",)), "host a has torch 2.9.* b has torch 2.8"),
        (replace(machine, cores=(0, 1)), "host a has 0 CPU cores.* b has 2 CPU cores"),
    ):
        with pytest.raises(UserInputError, match=told):
            check_equal([a, Host(other, "b")])


def test_a_trial_has_slots_of_one_host_or_whole_hosts() -> None:
    several = [Host(cpu_machine(4), name) for name in "abc"]
    assert describe(several).startswith("3 hosts (a, b, c), each with 4 CPU cores")
    for slots in (1, 3, 4, 8, 12):
        check_slots(several, slots, where="--slots")
    for slots in (6, 16):
        with pytest.raises(UserInputError, match="a multiple of 4, up to 12"):
            check_slots(several, slots, where="--slots")


def test_a_missing_command_of_slurms_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(EngineError, match=r"scontrol was not found.*--engine local"):
        allocation_of("16(x2)").find_nodes()


SCONTROL = """#!/bin/sh
case "$*" in
    *hostnames*) echo {names};;
    *job*) {answer};;
esac
"""
OVER = "JobId=7 JobName=sh JobState=RUNNING Nodes=n1 CPU_IDs=0 Mem=0 GRES="
Scontrol = Callable[..., None]


def allocation_of(cpus: str) -> Allocation:
    return Allocation("7", "n[1-2]", 2, cpus, "")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """Return a function that puts a stand-in for `scontrol` first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(answer: str = f"echo '{OVER}'", names: str = "n1 n2") -> None:
        (tmp_path / "scontrol").write_text(SCONTROL.format(answer=answer, names=names))
        (tmp_path / "scontrol").chmod(0o700)

    return install


@pytest.mark.parametrize(
    ("cpus", "by_node"), [("32(x2),16", [32, 32, 16]), ("8", [8]), ("4,2(x3)", [4, 2, 2, 2])]
)
def test_a_step_has_all_processors_of_its_node(
    scontrol: Scontrol, cpus: str, by_node: list[int]
) -> None:
    scontrol(names=" ".join(f"n{index}" for index, _ in enumerate(by_node)))
    for node, count in zip(allocation_of(cpus).find_nodes(), by_node, strict=True):
        assert not callable(node.reach)
        assert f"--cpus-per-task={count}" in node.reach


def test_a_step_takes_nothing_of_the_jobs_options_for_its_own(scontrol: Scontrol) -> None:
    scontrol()
    prefix = allocation_of("16(x2)").find_nodes()[0].reach
    assert not callable(prefix)
    before = prefix[: prefix.index("srun")]
    job = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_NODE", "SLURM_LABELIO")
    env = {"PATH": os.environ["PATH"], **dict.fromkeys(job, "1"), "SLURM_JOB_ID": "7"}
    left = subprocess.run([*before, "env"], env=env, capture_output=True, text=True, check=True)
    assert {line.partition("=")[0] for line in left.stdout.splitlines()} == {"PATH", "SLURM_JOB_ID"}


def test_numbers_of_nodes_that_disagree_are_told(scontrol: Scontrol) -> None:
    scontrol()
    with pytest.raises(EngineError, match=r"lists 2 nodes \(n\[1-2\]\), but processors for 3"):
        allocation_of("16(x3)").find_nodes()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (f"echo '{OVER.replace('RUNNING', 'TIMEOUT')}'", "job 7 (SLURM_JOB_ID) is TIMEOUT: if"),
        ("echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1", "scontrol: slurm_load_jobs"),
        (f"echo '{OVER}'; echo '{OVER.replace('Id=7', 'Id=8').replace('RUNNING', 'FAILED')}'", ""),
    ],
)
def test_an_allocation_that_is_over_is_told(scontrol: Scontrol, answer: str, told: str) -> None:
    scontrol(answer)
    if not told:
        assert [node.name for node in allocation_of("16(x2)").find_nodes()] == ["n1", "n2"]
        return
    with pytest.raises(EngineError, match=rf"{re.escape(told)}.* unset SLURM_JOB_ID or use --eng"):
        allocation_of("16(x2)").find_nodes()


# -- real daemons


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster of three nodes with one CPU core each."""
    if lacks := cluster.missing():
        pytest.skip(f"{', '.join(lacks)} not found: make test-cluster installs Slurm")
    with cluster.running(tmp_path_factory.mktemp("slurm"), 3) as found:
        yield found


def words_of(run_dir: Path, *options: object) -> list[str]:
    own = inline(train_micro_batch_size_per_gpu=2, zero_optimization={**SMALL_BUCKETS, "stage": 2})
    config = experiment_of(run_dir.parent, "tiny", hyperparameters=own)
    return command_of("random", "tiny", run_dir, "--slots", 2, *FAST, *options, config=config)


def job_of(run_dir: Path, *options: object) -> str:
    return shlex.join(words_of(run_dir, *options))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "asked",
    [
        "--gpus=4",
        "--gpus=4 --gpus-per-task=2 --ntasks-per-node=1",
        "--gpus-per-node=2 --ntasks=2 --gpu-bind=single:1",
        "--gres=gpu:2 --ntasks-per-node=1",
    ],
)
def test_a_step_has_all_gpus_that_the_job_has_on_its_node(
    three: Slurm, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """This holds for every option with which the job requested them, as steps do not repeat it."""
    with three.allocation(2, *asked.split()) as variables:
        variables = {**variables, "SLURM_LABELIO": "1"}  # as some users set it
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        allocation = Allocation.of(variables)
        assert allocation is not None
        for node in allocation.find_nodes():
            assert not callable(node.reach)
            told = three.ask(*node.reach, "printenv", "CUDA_VISIBLE_DEVICES", env=variables)
            assert told.strip() == "0,1", node
    with pytest.raises(EngineError, match=r"\(SLURM_JOB_ID\) is COMPLET.*unset SLURM_JOB_ID"):
        allocation.find_nodes()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_search_in_a_job_of_two_nodes(three: Slurm, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job = three.submit(job_of(run_dir, "--max-trials", 2), log, "--nodes=2")
    state = three.wait_for(job, ENDS_WITHIN_S)
    said = log.read_text()
    assert state == "COMPLETED", said
    assert f"tuning on 2 nodes of Slurm job {job}, n[1-2]" in said
    assert "using --engine slurm, which was detected" in said
    assert "2 hosts (n1, n2), each with 1 CPU core" in said
    run = run_of(run_dir)
    assert run.best is not None and run.stop_reason is not None
    folder = run_dir / "trials" / run.best.name
    started = (folder / "cmd.txt").read_text()
    second = started.partition("# on n2\n")[2].split()
    assert {"RANK=1", "LOCAL_RANK=0", "CROSS_RANK=1", "LOCAL_WORLD_SIZE=1"} <= set(second)
    assert (folder / "stdout-1.log").exists()
    assert_nothing_is_left(run_dir)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_that_is_ended_leaves_a_run_that_goes_on(three: Slurm, tmp_path: Path) -> None:
    run_dir, logs = tmp_path / "run", [tmp_path / "job1.log", tmp_path / "job2.log"]
    job = three.submit(job_of(run_dir, "--max-trials", 200), logs[0], "--nodes=2", "--time=10")
    wait_until(lambda: len(run_of(run_dir).outcomes) >= 2, "two trials", ENDS_WITHIN_S)
    three.ask("scancel", "--signal=USR1", job)  # as `#SBATCH --signal=USR1@120`, to all steps
    wait_until(lambda: len(run_of(run_dir).outcomes) >= 4, "two more trials", ENDS_WITHIN_S)
    assert "no longer used" not in logs[0].read_text()
    three.ask("scancel", job)
    assert three.wait_for(job, ENDS_WITHIN_S) == "CANCELLED"
    assert_nothing_is_left(run_dir)
    known = run_of(run_dir).outcomes
    assert {outcome.kind for outcome in known.values()} <= {OutcomeKind.OK, OutcomeKind.OOM}
    words = job_of(run_dir, "--max-trials", len(known) + 2, "--resume")
    job = three.submit(words, logs[1], "--nodes=2", "--time=10")
    assert three.wait_for(job, ENDS_WITHIN_S) == "COMPLETED", logs[1].read_text()
    assert len(run_of(run_dir).outcomes) > len(known)
    assert not any("Traceback" in log.read_text() for log in logs)


@pytest.mark.slow
@pytest.mark.cluster
def test_nodes_that_end_or_fall_silent_leave_the_run(three: Slurm, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    words = words_of(run_dir, "--max-trials", 200)
    words = [words[0], "-c", IMPATIENT, *words[3:]]
    job = three.submit(shlex.join(words), log, "--nodes=3")
    wait_until(lambda: run_of(run_dir).profile is not None, "the profile", ENDS_WITHIN_S)
    steps = three.ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %N")
    [step] = [line.split()[0] for line in steps.splitlines() if line.split()[-1] == "n2"]
    three.ask("scancel", step)
    wait_until(lambda: "host n2 is no longer used" in log.read_text(), "the loss of n2", 60)
    known = len(run_of(run_dir).outcomes)
    wait_until(lambda: len(run_of(run_dir).outcomes) > known + 1, "more trials", ENDS_WITHIN_S)
    srun_of("n3").suspend()
    assert three.wait_for(job, 60) == "FAILED"
    assert re.search(
        "2 devices, but only 1 of 3 .*n3: it has not answered for 8 s", log.read_text()
    )
    assert all(outcome.ok for outcome in run_of(run_dir).outcomes.values()), events_of(run_dir)
    assert_nothing_is_left(run_dir)


def srun_of(node: str) -> psutil.Process:
    """Return the srun process that runs the supervisor of a node."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            is_first = process.name() == "srun" and parent is not None and parent.name() != "srun"
            if is_first and f"--nodelist={node}" in process.cmdline():
                return process
    raise AssertionError(f"no srun of {node}")


@pytest.mark.slow
@pytest.mark.cluster
def test_the_documented_job_goes_on_with_its_run_when_it_is_preempted(
    three: Slurm, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "several-machines.md").read_text()
    [script] = re.findall(r"```\n(#!/bin/bash\n#SBATCH.*?)```", page, re.S)
    run_dir, job_file, log = tmp_path / "run", tmp_path / "job.sh", tmp_path / "job.log"
    script = script.replace("dsat_runs/tuned", str(run_dir))
    # The nodes here have no GPU, and the environment is that of the test.
    script = re.sub(r"(#SBATCH --(gpus|cpus)-per|source ).*\n", "", script)
    own = shlex.join(words_of(run_dir, "--max-trials", 6)[3:])
    before, _, _ = script.partition("tune ")
    job_file.write_text(f"{before}{own} $RESUME\n")
    options = ["--parsable", f"--output={log}", f"--chdir={ROOT}"]
    job = three.ask("sbatch", *options, str(job_file)).strip()
    wait_until(lambda: len(run_of(run_dir).outcomes) >= 2, "two trials", ENDS_WITHIN_S)
    urgent = three.submit(
        "sleep 1", tmp_path / "urgent.log", f"--partition={cluster.URGENT}", "--nodes=3"
    )
    wait_until(lambda: three.state(urgent) == "COMPLETED", "the urgent job", ENDS_WITHIN_S)
    assert three.wait_for(job, ENDS_WITHIN_S) == "COMPLETED", log.read_text()
    assert "Traceback" not in log.read_text()
    starts = [event for event in events_of(run_dir) if event["event"] == "start"]
    assert len(starts) == 1, "the second start of the job went on with the run of the first"
    assert run_of(run_dir).stop_reason is not None
    assert_nothing_is_left(run_dir)
