"""The local engine with real processes, real failures, and a look at what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dsat.engines.local import leftovers
from dsat.engines.local.hosts import Host
from dsat.engines.local.retries import BESIDE_OTHERS
from dsat.errors import EngineError
from dsat.values import slow
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind
from testing import warm_host
from testing.hosts_contract import HostsContract
from testing.local import (
    PATIENCE_S,
    Bench,
    bench_of,
    buffers_of,
    cpu_machine,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)

pytestmark = pytest.mark.slow

# A failure ends a trial at once: nothing waits for gloo's half hour, nor for the trial's time-out.
AT_ONCE_S = PATIENCE_S / 3
SMALL_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


class TestEngine(HostsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return [Host(cpu_machine(2), prefix=warm_host.prefix())]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Trials of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    with bench_of("behaviours", folder, slots_per_trial=2, imported=True) as bench:
        yield bench


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two slots for trials of one rank."""
    folder = tmp_path_factory.mktemp("singles")
    with bench_of("behaviours", folder, slots=2, imported=True) as bench:
        yield bench


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two trials of two ranks with little memory."""
    folder, little = tmp_path_factory.mktemp("tight"), 400 * 2**20
    with bench_of(
        "behaviours", folder, slots=4, slots_per_trial=2, slot_memory_bytes=little, imported=True
    ) as bench:
        yield bench


def assert_nothing_is_left(bench: Bench) -> None:
    """The supervisor has no child any more, and nobody shows any sign of a trial."""
    supervisor = bench.supervisor()
    wait_until(lambda: not supervisor.children(recursive=True), "no children")
    trials = bench.folder / "trials"
    wait_until(lambda: not processes_of(trials), f"no processes: {processes_of(trials)}")
    assert buffers_of(bench.folder) == []


def wait_until_dead(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


def side_by_side(bench: Bench, *trials: Trial) -> list[Outcome]:
    """Return the outcomes of trials that are launched together."""
    for trial in trials:
        bench.engine.launch(trial)
    return ended(bench, *trials)


def ended(bench: Bench, *trials: Trial) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(trials):
        outcomes.update(bench.engine.poll(PATIENCE_S))
    return [outcomes[trial.id] for trial in trials]


def canceled(bench: Bench, *trials: Trial) -> None:
    for trial in trials:
        bench.engine.cancel(trial.id)
    for outcome in ended(bench, *trials):
        assert outcome.kind is OutcomeKind.CANCELED


# -- failures


def fails(bench: Bench, behaviour: str) -> tuple[Trial, Outcome]:
    trial = bench.trial(behaviour)
    outcome = bench.run(trial)
    assert outcome.metrics is None, bench.log(trial)
    assert outcome.duration_s < AT_ONCE_S
    assert_nothing_is_left(bench)
    return trial, outcome


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("sys.exit on 1", "ERROR", "rank 1: the script ended with sys.exit(3)"),
        ("exit on 1", "ERROR", "rank 1 ended with exit status 3"),
        ("is killed on 1", "HOST_OOM", "rank 1 was killed with SIGKILL, most likely because the"),
        ("exhausts memory on 1", "OOM", "rank 1: out of memory: tried to allocate"),
        ("never initializes", "INVALID", "the script ended without calling deepspeed.initialize"),
        ("ends early", "INVALID", "the script ended after 3 optimizer steps, but steps up to 5"),
    ],
)
def test_a_failure_on_one_rank_ends_the_trial_at_once(
    pair: Bench, behaviour: str, kind: str, message: str
) -> None:
    _, outcome = fails(pair, behaviour)
    assert outcome.kind is OutcomeKind(kind), outcome
    assert message in outcome.message
    assert "\n" not in outcome.message
    assert outcome.smaller_may_run is (behaviour == "ends early")  # it ran out of data


def test_the_detail_is_the_users_traceback_alone(pair: Bench) -> None:
    trial, outcome = fails(pair, "crashes on 1")
    assert outcome.kind is OutcomeKind.ERROR
    assert outcome.message == "rank 1: ValueError: the data set has no labels"
    script = str(Path("testing/programs/behaviours/train.py").resolve())
    lines = outcome.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    files = {line.split('"')[1] for line in lines if line.startswith('  File "')}
    assert files == {script}
    assert "KeyError: 'label'" in lines
    assert "The above exception was the direct cause of the following exception:" in lines
    assert lines[-2:] == ["ValueError: the data set has no labels", "nor anything else"]
    assert outcome.detail in pair.read(trial, "stderr.log")


def test_a_traceback_keeps_the_librarys_frames(pair: Bench) -> None:
    _, outcome = fails(pair, "raises from a library on 1")
    assert "torch.ones(2, 3) @ torch.ones(2, 3)" in outcome.detail
    assert "RuntimeError" in outcome.detail.splitlines()[-1]
    assert "runpy" not in outcome.detail
    assert os.path.join("dsat", "in_trial") not in outcome.detail


def test_a_hang_is_a_timeout(tight: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tight.engine._options
    hasty = replace(options, trial=replace(options.trial, timeout_s=3.0))
    monkeypatch.setattr(tight.engine, "_options", hasty)
    for outcome in side_by_side(tight, tight.trial("hangs"), tight.trial("hangs on 1")):
        assert outcome.kind is OutcomeKind.TIMEOUT
        assert "3 s" in outcome.message and "--trial-timeout" in outcome.message
        assert 3 <= outcome.duration_s < 3 + AT_ONCE_S
    assert_nothing_is_left(tight)


def test_the_slots_memory_and_the_time_in_which_dsat_runs_are_the_limits(tight: Bench) -> None:
    trial = tight.trial(zero=SMALL_BUCKETS)
    tight.engine.launch(trial)
    assert tight.engine.poll(0.1) == []
    tight.engine._running[trial.id].clock._read_s -= 24 * 3600.0  # as if dsat was stopped since
    [outcome] = ended(tight, trial)
    assert outcome.ok, outcome
    outcome = tight.run(tight.trial("exhausts the slot on 1", zero=SMALL_BUCKETS))
    assert outcome.kind is OutcomeKind.OOM, outcome
    assert outcome.message == "rank 1: out of memory: tried to allocate 16.0 MiB"
    assert outcome.duration_s < AT_ONCE_S
    assert_nothing_is_left(tight)


# -- no orphans


def test_what_a_trial_started_ends_with_it(pair: Bench) -> None:
    trial = pair.trial("leaves: child, session, daemon, daemon by exec")
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    for rank in (0, 1):
        for pid in read_json(pair.path(trial) / f"left{rank}.json"):
            wait_until_dead(pid)
    assert_nothing_is_left(pair)


def test_named_shared_memory_is_unlinked_by_its_tracker(singles: Bench) -> None:
    trial = singles.trial("leaves and hangs: shared memory")
    singles.engine.launch(trial)
    wait_until((singles.path(trial) / "left0.json").exists, "the blocks")
    canceled(singles, trial)
    blocks = singles.read(trial, "blocks.txt").split()
    assert len(blocks) > 1 and not any((Path("/dev/shm") / name).exists() for name in blocks)
    assert_nothing_is_left(singles)


def test_it_ends_although_another_trial_goes_on(singles: Bench) -> None:
    goes_on = singles.trial("leaves and hangs: daemon")
    singles.engine.launch(goes_on)
    path = singles.path(goes_on)
    wait_until((path / "left0.json").exists, "the daemon")
    [other] = read_json(path / "left0.json")
    trial = singles.trial("leaves: child, daemon by exec")
    outcome = singles.run(trial)
    assert outcome.ok, singles.log(trial)
    for pid in read_json(singles.path(trial) / "left0.json"):
        wait_until_dead(pid)
    assert is_alive(other), "the helper of a trial that goes on"
    assert is_alive(read_json(path / "facts0.json")["pid"])
    canceled(singles, goes_on)
    assert_nothing_is_left(singles)


def test_a_compilers_lock_of_an_interrupted_trial_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with bench_of("behaviours", tmp_path, imported=True) as bench:
        bench.engine.launch(bench.trial("hangs"))
        lock.touch()
    assert not lock.exists()


def test_close_ends_everything(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path, slots=2, imported=True) as bench:
        trials = [bench.trial(f"leaves and hangs: {left}") for left in ("session", "daemon")]
        for trial in trials:
            bench.engine.launch(trial)
        marks = [bench.path(trial) / "left0.json" for trial in trials]
        wait_until(lambda: all(mark.exists() for mark in marks), "both trials")
        supervisor = bench.supervisor()
        below = supervisor.children(recursive=True)
        pids = [supervisor.pid, *(child.pid for child in below if is_alive(child.pid))]
        assert len(pids) == 5
        assert len(buffers_of(tmp_path)) == 2
        listening = [
            socket.laddr.ip
            for process in (supervisor, *below)
            for socket in process.net_connections()
            if socket.status == psutil.CONN_LISTEN
        ]
        assert listening and set(listening) == {"127.0.0.1"}, "nobody else can reach a rank"
        [client] = bench.engine._supervisors._clients.values()
        bench.engine.close()
        assert client.wait_for_end() == 0, "nobody had to insist"
    assert [pid for pid in pids if is_alive(pid)] == []
    assert processes_of(tmp_path) == []
    assert buffers_of(tmp_path) == []


def test_an_engine_whose_supervisor_died_says_so(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path, slots=2) as bench:
        for left in ("session", "worker"):
            bench.engine.launch(bench.trial(f"leaves and hangs: {left}"))
        wait_until(lambda: len(list(tmp_path.glob("trials/*/left0.json"))) == 2, "both trials")
        supervisor = bench.supervisor()
        below = supervisor.children(recursive=True)
        assert len(buffers_of(tmp_path)) == 2
        supervisor.kill()
        with pytest.raises(EngineError, match=r"ended \(exit status -9; see .*--resume"):
            bench.engine.poll(PATIENCE_S)
    wait_until(lambda: not any(is_alive(child.pid) for child in below), "the trials' end")
    assert processes_of(tmp_path / "trials") == []
    assert buffers_of(tmp_path) == []


def test_what_a_kill_of_everything_leaves_is_ended_by_the_next_run(tmp_path: Path) -> None:
    """Workers and daemons, forked so that no variable of theirs tells of the trial, and segments of
    shared memory."""
    code = (
        "import pathlib, sys, time\n"
        "from testing.local import bench_of\n"
        "with bench_of('behaviours', pathlib.Path(sys.argv[1]), slots=2) as bench:\n"
        "    for left in ('worker', 'daemon'):\n"
        "        bench.engine.launch(bench.trial(f'leaves and hangs: {left}'))\n"
        "    time.sleep(1000)\n"
    )
    owner = psutil.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_until(lambda: len(list(tmp_path.glob("trials/*/left0.json"))) == 2, "both trials")
    left = [pid for path in tmp_path.glob("trials/*/left0.json") for pid in read_json(path)]
    [supervisor] = owner.children()
    for process in (supervisor, owner):
        process.kill()
    owner.wait(PATIENCE_S)
    assert len(left) == 2 and all(map(is_alive, left)), "or there is nothing to show"
    assert len(buffers_of(tmp_path)) == 2
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(2000)"])
    try:
        assert set(left) <= set(leftovers.end_processes(tmp_path))
        wait_until(lambda: not any(map(is_alive, left)), "the end of all")
        assert processes_of(tmp_path) == [] and buffers_of(tmp_path) == []
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


# -- slots, folders, environment


def test_trials_side_by_side_have_cores_of_their_own(singles: Bench) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    trials = [singles.trial("hangs"), singles.trial("hangs")]
    for trial in trials:
        singles.engine.launch(trial)
    paths = [singles.path(trial) / "facts0.json" for trial in trials]
    wait_until(lambda: all(path.exists() for path in paths), "both trials")
    facts = [read_json(path) for path in paths]
    assert [len(fact["cores"]) for fact in facts] == [1, 1]
    assert facts[0]["cores"] != facts[1]["cores"]
    ports = [fact["environment"]["MASTER_PORT"] for fact in facts]
    assert ports[0] != ports[1]
    canceled(singles, *trials)


def test_a_trial_that_fails_beside_others_is_run_again_alone(singles: Bench) -> None:
    outcomes = side_by_side(singles, *(singles.trial("fails beside others") for _ in range(2)))
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert any(BESIDE_OTHERS in outcome.warnings for outcome in outcomes), "it was said"


def test_what_takes_long_is_told(
    singles: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "LONG_S", 0.1)
    caplog.set_level("INFO", logger="dsat")
    trial = singles.trial("compiles")
    singles.engine.launch(trial)
    while not (told := singles.engine.poll(0.2)):
        pass
    assert told[0][1].ok, singles.log(trial)
    assert f"{trial.name}: compiling DeepSpeed's operator slow; the result is kept" in (
        caplog.messages
    )
    other = f"{trial.name}: your script runs, up to its first optimizer step"
    assert caplog.messages.count(other) <= 1
    assert not (singles.path(trial) / "doing.txt").exists(), "it has made a step since"
    # One that fails beside another is run again once that has ended.
    trials = [singles.trial("hangs"), singles.trial("crashes")]
    for each in trials:
        singles.engine.launch(each)
    waits = f"{trials[1].name}: waits for {trials[0].name} to end"
    wait_until(lambda: singles.engine.poll(0.1) or waits in caplog.text, waits)
    canceled(singles, *trials[::-1])


def test_the_environment_is_a_launchers(pair: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    trial = pair.trial()
    assert pair.run(trial).ok, pair.log(trial)
    facts = [read_json(pair.path(trial) / f"facts{rank}.json") for rank in (0, 1)]
    assert facts[0]["cores"] == facts[1]["cores"] == sorted(os.sched_getaffinity(0))[:2]
    assert [fact["environment"]["RANK"] for fact in facts] == ["0", "1"]
    env = facts[1]["environment"]
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert [env[name] for name in names] == ["1", "2", "2", "127.0.0.1", "1"]
    # DeepSpeed compiles with the ninja that lies beside this python.
    assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    program = Path("testing/programs/behaviours").resolve()
    assert facts[1]["folder"] == str(program)
    config = str(pair.path(trial) / "ds_config.json")
    script = str(program / "train.py")
    assert facts[1]["file"] == script
    assert facts[1]["arguments"] == [script, "--local_rank=1", "--deepspeed_config", config]


@pytest.mark.parametrize("behaviour", ["spawns", "has workers"])
def test_a_script_may_start_processes(pair: Bench, behaviour: str) -> None:
    trial = pair.trial(behaviour)
    assert pair.run(trial).ok, pair.log(trial)
    assert_nothing_is_left(pair)


def test_a_trials_folder(pair: Bench) -> None:
    trial = pair.trial(micro_batch=3, gas=2, stage=2)
    pair.path(trial).mkdir(parents=True)  # left by a session that was killed
    for name in ("metrics.json", "rank1.json"):
        (pair.path(trial) / name).write_text("{}")
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    names = {path.name for path in pair.path(trial).iterdir()}
    assert names >= {"cmd.txt", "ds_config.json", "trial.json", "stdout.log", "stderr.log"}
    assert "metrics.json" in names and "rank1.json" not in names
    assert not any(name.endswith(".tmp") for name in names)
    config = read_json(pair.path(trial) / "ds_config.json")
    assert config == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    assert Trial.from_json(read_json(pair.path(trial) / "trial.json")["trial"]) == trial
    metrics = read_json(pair.path(trial) / "metrics.json")
    assert outcome.metrics is not None
    assert metrics["metrics"] == outcome.metrics.to_json()
    assert len(metrics["step_ms"]) == outcome.metrics.num_steps + outcome.metrics.accidents
    assert int(pair.read(trial, "steps")) >= outcome.metrics.num_steps
    assert set(pair.read(trial, "stdout.log").splitlines()) >= {"rank 0 runs", "rank 1 runs"}


@pytest.mark.nightly  # two ranks that import all
def test_cmd_txt_can_be_pasted_into_a_shell(pair: Bench) -> None:
    trial = pair.trial()
    assert pair.run(trial).ok
    text = pair.read(trial, "cmd.txt")
    comment, change, *ranks = text.splitlines()
    assert comment.endswith(f"train.py --deepspeed_config {pair.path(trial)}/ds_config.json")
    assert change == f"cd {Path('testing/programs/behaviours').resolve()}"
    assert len(ranks) == 2
    path = pair.path(trial) / "metrics.json"
    path.unlink()
    subprocess.run(
        ["bash", "-c", text + "wait\n"], check=True, timeout=PATIENCE_S, capture_output=True
    )
    assert read_json(path)["metrics"]["num_steps"] >= 3
    for name in buffers_of(pair.folder):
        (Path("/dev/shm") / name).unlink()


# -- the profile, and what comes after the measurement


@pytest.mark.parametrize("stage", [0, 3])
def test_the_profile_trial_counts_the_model(pair: Bench, stage: int) -> None:
    """The same whatever the partitioning."""
    trial = pair.trial(kind=TrialKind.PROFILE, stage=stage, zero=SMALL_BUCKETS)
    outcome = pair.run(trial)
    assert outcome.ok and outcome.profile is not None, pair.log(trial)
    profile = outcome.profile
    assert profile.num_params == profile.trainable_params == 16 * 16 + 16 + 16 + 1
    # Forward and the gradients of the weights in both layers, of the input in the second alone.
    assert profile.flops_per_sample == 2 * (2 * (16 * 16 + 16) + 16)
    # What goes into each layer. The script computes the loss outside of the model.
    assert profile.activation_bytes_per_sample == 4 * (16 + 16)


def test_a_script_that_ends_between_the_steps_counts_as_measured(pair: Bench) -> None:
    """Steps 3 to 5 are measured; the script makes six, and the spread asks for more."""
    outcome = pair.run(pair.trial("ends between"))
    assert outcome.ok and outcome.metrics is not None
    assert 3 <= outcome.metrics.num_steps <= 4


def test_full_length_runs_are_not_measured_and_never_removed(pair: Bench) -> None:
    for name in ("full", "full-2"):
        folder = pair.engine.train(pair.trial("ends early"))
        assert folder.name == name
        [(_, outcome)] = pair.engine.poll(PATIENCE_S)
        assert outcome.ok, (folder / "stderr.log").read_text()
        assert not (folder / "metrics.json").exists()
    assert (pair.folder / "full" / "stdout.log").exists()
    assert_nothing_is_left(pair)
