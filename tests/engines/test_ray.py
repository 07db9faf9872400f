"""Ray: which resources dsat reserves, and a real cluster of three nodes on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsat.engines import supervisors
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.processes import RemoteProcess, spawn
from dsat.engines.places import detect, given_options
from dsat.engines.places.base import Environment
from dsat.engines.places.ray import reserved as reserved_nodes
from dsat.engines.places.ray_choice import NodeResources, Parts, choose, parse_slots
from dsat.engines.places.ray_node import NodeActor
from dsat.errors import UserInputError
from dsat.prepare.hosts import acquire_hosts
from dsat.values.outcome import OutcomeKind
from testing import ray_cluster
from testing.command import (
    FAST,
    Background,
    command_of,
    events_of,
    experiment_of,
    inline,
    run_of,
)
from testing.local import (
    PATIENCE_S,
    SMALL_BUCKETS,
    assert_nothing_is_left,
    bench_of,
    is_alive,
    read_json,
    wait_until,
)
from testing.ray_cluster import RayCluster

ENDS_WITHIN_S = 240.0
# -- what is taken


def node(
    cpus: float, gpus: float = 0, *, kind: str = "", of: tuple[float, float] | None = None
) -> NodeResources:
    """Make a node with these free resources; `of` is its total."""
    total_cpus, total_gpus = of or (cpus, gpus)
    total = {"CPU": total_cpus, "node:10.0.0.1": 1.0, "memory": 2.0**34}
    if total_gpus:
        total |= {"GPU": total_gpus}
    kinds = {f"accelerator_type:{kind}": 1.0} if kind else {}
    return NodeResources(total | kinds, {"CPU": cpus, "GPU": gpus} | kinds)


BUSY = node(0, 0, of=(16, 8))


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        ([node(64, 8), node(64, 8)], (None, None), Parts(2, "GPU", 8, 64)),
        ([node(4), node(4), node(4)], (None, None), Parts(3, "", 4, 4)),
        # Others use the cluster: as many cores as belong to the devices, and are free.
        ([node(10, 4, of=(64, 8))], (None, None), Parts(1, "GPU", 4, 10)),
        # Equal parts.
        ([node(64, 8), node(64, 4, of=(64, 8))], (None, None), Parts(1, "GPU", 8, 64)),
        ([node(64, 8), node(64, 6, of=(64, 8))], (None, 6), Parts(2, "GPU", 6, 48)),
        ([node(64, 8), BUSY, node(64, 8)], (None, None), Parts(2, "GPU", 8, 64)),
        ([node(3.5, of=(4, 0)), node(3)], (None, None), Parts(2, "", 3, 3)),
        # One kind of accelerator.
        (
            [node(8, 8, kind="T4"), node(8, 8, kind="A100")],
            (None, None, "A100"),
            Parts(1, "GPU", 8, 8, "A100"),
        ),
        (
            [node(8, 8, kind="T4"), node(8, 4, kind="A100")],
            (None, None),
            Parts(1, "GPU", 8, 8, "T4"),
        ),
        # What the user requests.
        ([node(64, 8)] * 3, (2, 4), Parts(2, "GPU", 4, 4)),
        ([node(64, 8)] * 3, (2, None), Parts(2, "GPU", 8, 64)),
        # What an autoscaler may add, or another job's end may free.
        ([node(2)], (2, 8, "A100"), Parts(2, "GPU", 8, 8, "A100")),
        ([node(64, 8)], (2, None), None),
        ([BUSY], (None, None), None),
        ([], (None, None), None),
    ],
)
def test_equal_parts_are_taken_of_what_nobody_uses(
    nodes: Sequence[NodeResources], wanted: tuple[Any, ...], expected: Parts | None
) -> None:
    assert choose(nodes, *wanted) == expected


def test_what_is_asked_for() -> None:
    assert parse_slots("A100:8") == ("A100", 8)
    assert parse_slots("4") == ("", 4)
    for wrong in ("many", "A100:", "0", "-1"):
        with pytest.raises(UserInputError, match=f"--gpus-per-node {wrong}: is not a number"):
            parse_slots(wrong)


def test_ray_is_taken_only_where_that_is_wanted() -> None:
    assert detect(Environment({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})) == "ray"
    assert detect(Environment({"RAY_ADDRESS": "10.0.0.1:6379"})) == "local"
    values = {"ray_address": "auto", "nodes": None}
    assert given_options(values, "ray") == {"ray_address": "auto"}
    for engine in ("auto", "slurm", "determined"):
        with pytest.raises(UserInputError, match="--ray-address goes with --engine ray"):
            given_options(values, engine)


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"needs Ray, .*pip install 'ray>="):
        acquire_hosts("ray").__enter__()


def test_dsat_runs_inside_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(
        UserInputError, match=r"ray://head:10001 is an address for Ray Client.*ray job submit"
    ):
        acquire_hosts("ray").__enter__()


# -- a command on a node

SHOWS = """
import os, sys
devices = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")]
print([os.getcwd(), os.environ["OWN"], *devices, *sys.argv[1:]])
sys.stderr.write(str(len(sys.stdin.read())))
sys.exit(3)
"""


class Command(RemoteProcess):
    """A command that an actor in this process has started."""

    def __init__(self, actor: NodeActor, *command: str, **env: str) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__(functools.partial(_call, actor), command, env, self.errors)

    def finished(self) -> tuple[int, bytes, bytes]:
        """Wait for its end; return its exit status and what it wrote to its two outputs."""
        with contextlib.closing(self.stdin), self.stdout, self.errors:
            output = self.stdout.read()
            status = self.wait(PATIENCE_S)
            self.errors.seek(0)
            return status, output, self.errors.read()


def _call(actor: NodeActor, method: str, *args: Any) -> Any:
    return getattr(actor, method)(*args)


def test_a_command_has_our_pipes_our_folder_and_our_variables_but_the_nodes_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.chdir(tmp_path)
    env = {"OWN": "a 'b'\n$c", "CUDA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "1"}
    for actor, devices in ((NodeActor(None), "2,3"), (NodeActor(64), None)):
        command = Command(actor, sys.executable, "-c", SHOWS, "x y", "`z`\n", **env)
        for _ in range(10):
            command.stdin.write(b"input\n" * 10_000)
        command.stdin.close()
        status, out, err = command.finished()
        expected = [str(tmp_path), "a 'b'\n$c", devices, None, "x y", "`z`\n"]
        assert (status, out.decode(), err) == (3, f"{expected}\n", b"600000")


def test_a_command_that_cannot_be_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = Command(NodeActor(64), "/no/python").finished()
    assert status == 127
    assert err.decode().endswith("No such file or directory\n")


def test_a_command_ends_with_its_input_or_by_a_signal() -> None:
    actor = NodeActor(64)
    reads = Command(actor, "/bin/cat")
    reads.stdin.close()
    assert reads.finished()[0] == 0
    sleeps = Command(actor, "/bin/sh", "-c", "echo there; exec sleep 600")
    assert sleeps.stdout.readline() == b"there\n"
    with pytest.raises(subprocess.TimeoutExpired):
        sleeps.wait(0.1)
    sleeps.terminate()
    assert sleeps.finished()[0] != 0
    sleeps.terminate()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("the actor died\nunexpectedly"), b"ConnectionError: the actor died\n"),
        (ConnectionError(), b"ConnectionError\n"),
        (SystemExit(0), b"SystemExit: 0\n"),  # raised by Ray after it has shut down
    ],
)
def test_a_lost_node_ends_its_commands_for_us(
    error: BaseException, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = NodeActor(64)
    sleeps = Command(actor, "/bin/sh", "-c", "echo there; exec sleep 600")
    assert sleeps.stdout.readline() == b"there\n"

    def lost(number: int) -> None:
        raise error

    for method in ("read", "wait"):
        monkeypatch.setattr(actor, method, lost)
    os.write(actor._commands[0][0].stdin.fileno(), b"")  # type: ignore[union-attr]
    sleeps.terminate()  # the read that waits returns
    status, _, err = sleeps.finished()
    assert (status, err) == (255, said)
    process, errors = actor._commands[0]
    with process, errors:
        pass


def test_a_command_sees_its_input_end_when_ray_kills_what_it_knows(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    code = "import sys; print('there', flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"
    program = (
        "import os, sys, time\n"
        "from dsat.engines.places.ray_node import NodeActor\n"
        "actor = NodeActor(64)\n"
        "number = actor.spawn(sys.argv[1:], '/', {})\n"
        "assert actor.read(number) == b'there\\n'\n"
        "actor._commands[number][0].kill()\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, sys.executable, "-c", code, str(ended)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    wait_until(ended.exists, "the command's end")


# -- a real cluster


@pytest.fixture(scope="module")
def three() -> Iterator[RayCluster]:
    """Start a cluster of three nodes with one CPU core each."""
    if not ray_cluster.is_installed():
        pytest.skip("Ray is not installed: make test-cluster does that")
    with ray_cluster.running(3) as found:
        yield found


@contextlib.contextmanager
def kept(cluster: RayCluster, nodes: int) -> Iterator[list[Host]]:
    """Reserve `nodes` nodes of the cluster, for any purpose."""
    with reserved_nodes(cluster.address, nodes) as found:
        yield found


@contextlib.contextmanager
def reserved(cluster: RayCluster, nodes: int) -> Iterator[Sequence[Host]]:
    """Reserve `nodes` nodes of the cluster, as dsat does."""
    with acquire_hosts("ray", given={"nodes": nodes, "ray_address": cluster.address}) as hosts:
        yield hosts


def search_of(run_dir: Path, cluster: RayCluster, *options: object, slots: int = 2) -> list[str]:
    """Return the command of a search with trials over `slots` nodes."""
    own = inline(train_micro_batch_size_per_gpu=2, zero_optimization={**SMALL_BUCKETS, "stage": 2})
    config = experiment_of(run_dir.parent, "tiny", hyperparameters=own)
    on_ray = ("--engine", "ray", "--ray-address", cluster.address, "--slots", slots)
    return command_of("random", "tiny", run_dir, *on_ray, *FAST, *options, config=config)


def wait_for_end_of(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), "the end of a trial's first ranks", 20)


def of_node(process: psutil.Process, cluster: RayCluster) -> tuple[psutil.Process, psutil.Process]:
    """Return the daemon of the node on which a process runs, and the actor there."""
    above = process.parents()
    [daemon] = [each for each in above if each in cluster.nodes]
    return daemon, above[above.index(daemon) - 1]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_search_on_a_cluster(three: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = search_of(run_dir, three, "--max-trials", 2)
    told = subprocess.run(words, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "tuning on free parts of a Ray cluster, 1 CPU of 3 nodes" in told.stderr
    assert "3 hosts (" in told.stdout and "each with 1 CPU core" in told.stdout
    run = run_of(run_dir)
    assert run.best is not None
    folder = run_dir / "trials" / run.best.name
    second = (folder / "cmd.txt").read_text().partition("\n# on ")[2].split()
    assert {"RANK=1", "LOCAL_RANK=0", "CROSS_RANK=1", "LOCAL_WORLD_SIZE=1"} <= set(second)
    assert (folder / "stdout-1.log").exists()
    assert_nothing_is_left(run_dir)


@pytest.mark.slow
@pytest.mark.cluster
def test_two_trials_over_two_nodes_each_and_nodes_that_end(
    three: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "PING_EVERY_S", 1.0)
    monkeypatch.setattr(supervisors, "SILENT_AFTER_S", 8.0)
    core = min(os.sched_getaffinity(0))
    three.add(core)
    with (
        reserved(three, 4) as hosts,
        bench_of(
            "behaviours",
            tmp_path,
            slots_per_trial=2,
            hosts=hosts,
        ) as bench,
    ):
        both = [bench.trial(stage=stage) for stage in (1, 2)]
        for trial in both:
            bench.engine.launch(trial)
        ended = dict(bench.engine.poll(PATIENCE_S))
        while len(ended) < len(both):
            ended |= dict(bench.engine.poll(PATIENCE_S))
        assert [ended[trial.id].ok for trial in both] == [True, True], ended
        # Of the four nodes, one's actor stops and another's daemon is killed. Each time, the trial
        # runs on two remaining nodes.
        for reason in ("it has not answered for 8 s", "the process that runs trials ended"):
            trial = bench.trial("hangs at first")
            bench.engine.launch(trial)
            mark = tmp_path / "trials" / f"{trial.name}.began1"
            wait_until(mark.exists, "the ranks", PATIENCE_S)
            pids = [read_json(bench.path(trial) / f"facts{rank}.json")["pid"] for rank in (0, 1)]
            daemon, actor = of_node(psutil.Process(pids[1]), three)
            if "answered" in reason:
                actor.suspend()
            else:
                daemon.kill()
            try:
                [(_, outcome)] = bench.engine.poll(PATIENCE_S)
            finally:
                if "answered" in reason:
                    actor.resume()
            assert outcome.ok, (outcome, bench.log(trial))
            assert reason in " ".join(outcome.warnings)
            wait_for_end_of(pids)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.cluster
def test_nothing_is_left_when_the_actors_or_dsat_are_killed(
    three: RayCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    begin = (run_dir, three, "--max-trials", 200)
    with kept(three, 2):  # for others
        first = Background(search_of(*begin, slots=1))
        wait_until(lambda: run_of(run_dir).profile is not None, "the profile", ENDS_WITHIN_S)
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "NodeActor" in " ".join(each.cmdline()):
                    each.kill()
        told = first.end()
    assert told.status == 1
    assert "Continue with --resume" in told.err and "Traceback" not in told.err
    assert_nothing_is_left(run_dir)
    known = len(run_of(run_dir).outcomes)
    second = Background(search_of(*begin, "--nodes", 2, "--resume", slots=1))
    wait_until(lambda: len(run_of(run_dir).outcomes) > known, "one more trial", ENDS_WITHIN_S)
    second.kill()
    assert_nothing_is_left(run_dir)
    kinds = {outcome.kind for outcome in run_of(run_dir).outcomes.values()}
    assert kinds <= {OutcomeKind.OK, OutcomeKind.OOM}, events_of(run_dir)
    with kept(three, 2) as nodes:
        assert len(nodes) == 2, "what was reserved is free again"


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_of_the_cluster_takes_it_by_itself(three: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = search_of(run_dir, three, "--max-trials", 2)
    place = words.index("--engine")
    del words[place : place + 4]  # no option mentions Ray
    if not three.dashboard:
        pytest.skip("Ray's jobs need ray[default]")
    submit = [str(Path(sys.executable).parent / "ray"), "job", "submit"]
    submit += ["--address", f"http://{three.dashboard}", "--", *words]
    others = sum(is_alive(node.pid) for node in three.nodes) - 2
    with kept(three, others):  # the imports of two are enough
        told = subprocess.run(submit, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "using --engine ray, which was detected" in told.stdout
    run = run_of(run_dir)
    assert run.best is not None
    assert "\n# on " in (run_dir / "trials" / run.best.name / "cmd.txt").read_text()
    assert_nothing_is_left(run_dir)


@pytest.mark.slow
@pytest.mark.cluster
def test_nodes_that_are_asked_for_are_waited_for_and_tell_their_devices(
    three: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This must be the last test: from now on, nodes with GPUs are preferred."""
    core = min(os.sched_getaffinity(0))

    class Waiting(logging.Handler):
        """Adds nodes with devices once dsat waits for them."""

        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for Ray to give 1 GPU of 2 nodes" in record.getMessage():
                for _ in range(2):
                    three.add(core, gpus=2)

    log, handler = logging.getLogger("dsat.engines.places.ray"), Waiting()
    monkeypatch.setattr(log, "level", logging.INFO)
    monkeypatch.setattr(log, "handlers", [handler])
    with reserved_nodes(three.address, 2, 1) as nodes:
        assert len(nodes) == 2
        show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        for each in nodes:
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": "mine"}
            process = spawn(each.reach, show, env, sys.stderr.buffer)
            assert process.stdout is not None
            assert process.stdout.read() in (b"0\n", b"1\n")
            assert process.wait(PATIENCE_S) == 0
