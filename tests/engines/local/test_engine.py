"""The local engine with real processes, real failures, and a look at what they leave behind."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsat.engines import Engine
from dsat.engines.local import leftovers
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.retries import BESIDE_OTHERS
from dsat.errors import EngineError
from dsat.inputs import entrypoint, experiment
from dsat.values import slow
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind, TrialOptions
from testing import warm_host
from testing.engine_contract import Behaviour, EngineContract, TrialContract
from testing.local import (
    PATIENCE_S,
    Bench,
    bench_of,
    buffers_of,
    cpu_machine,
    engine_of,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)

pytestmark = pytest.mark.slow

# A failure ends a trial at once: nothing waits for gloo's half hour, nor for the trial's time-out.
# One that aborts is run again in fresh processes, whose imports take a loaded machine a minute.
AT_ONCE_S = PATIENCE_S / 3


class _LocalContract(TrialContract):
    cold: bool

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path
        yield
        assert processes_of(tmp_path) == []
        assert buffers_of(tmp_path) == []

    def make(self, num_slots: int) -> Engine:
        options: dict[str, Any] = {"cold": True} if self.cold else {"imported": True}
        return engine_of("behaviours", self.folder, slots=num_slots, **options)

    def trial(self, trial_id: int, behaviour: Behaviour = Behaviour.RUNS) -> Trial:
        plain = super().trial(trial_id, behaviour)
        zero = {"zero_optimization": {"stage": plain.stage}}
        return replace(plain, overrides={**plain.batch.config(), **zero, **plain.overrides})


@pytest.fixture(scope="module")
def warm() -> Iterator[list[LocalEngine]]:
    """Engines that several tests use, closed after the last of them."""
    engines: list[LocalEngine] = []
    yield engines
    for engine in engines:
        engine.close()


class TestWarmEngine(_LocalContract, EngineContract):
    """One engine for all: what each test leaves running is ended after it."""

    cold = False
    _tests = itertools.count(1)

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("warm")
        self.first_id = 100 * next(self._tests)

    @pytest.fixture
    def engine(self, warm: list[LocalEngine]) -> Iterator[Engine]:
        if not warm or warm[-1]._closed:
            warm.append(engine_of("behaviours", self.folder, slots=2, imported=True))
        engine = warm[-1]
        yield engine
        if engine._closed:
            return
        for trial_id in list(engine._running):
            engine.cancel(trial_id)
        while engine._running:
            engine.poll(self.patience_s)


@pytest.mark.nightly  # of cold ranks, test_cold_fallback.py and the killed engine
class TestColdEngine(_LocalContract):
    """An engine keeps its books alike however ranks are started: with warm ones it is seen to."""

    cold = True


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Trials of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    with bench_of(
        "behaviours", folder, slots_per_trial=2, own_micro_batch=7, imported=True
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two slots for trials of one rank."""
    with bench_of(
        "behaviours", tmp_path_factory.mktemp("singles"), slots=2, imported=True
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two trials of two ranks with little memory."""
    with bench_of(
        "behaviours",
        tmp_path_factory.mktemp("tight"),
        slots=4,
        slots_per_trial=2,
        slot_memory_bytes=400 * 2**20,
        imported=True,
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


def fails(bench: Bench, behaviour: str) -> tuple[Trial, Outcome]:
    trial = bench.trial(behaviour)
    outcome = bench.run(trial)
    assert outcome.metrics is None, bench.log(trial)
    assert outcome.duration_s < AT_ONCE_S
    assert_nothing_is_left(bench)
    return trial, outcome


# -- failures


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("crashes on 1", "ERROR", "rank 1: ValueError: the data set has no labels"),
        ("sys.exit on 1", "ERROR", "rank 1: the script ended with sys.exit(3)"),
        ("exit on 1", "ERROR", "rank 1 ended with exit status 3"),
        ("abort on 1", "ERROR", "rank 1 was killed by SIGABRT"),
        ("segfault on 1", "ERROR", "rank 1 was killed by SIGSEGV"),
        ("is killed on 1", "HOST_OOM", "rank 1 was killed with SIGKILL, most likely because the"),
        ("exhausts memory on 1", "OOM", "rank 1: out of memory: tried to allocate"),
        ("exhausts Python's memory on 1", "OOM", "rank 1: MemoryError"),
        ("never initializes", "INVALID", "the script ended without calling deepspeed.initialize"),
        ("ends early", "INVALID", "the script ended after 3 optimizer steps, but steps up to 5"),
        (
            "feeds its own batch",
            "INVALID",
            "the script feeds 7 samples, its own micro batch, although the trial's "
            "train_micro_batch_size_per_gpu is 2: take the batch size from "
            "engine.train_micro_batch_size_per_gpu(), or name the script's flag: --arg-mapping ",
        ),
        ("is a pipeline", "INVALID", "deepspeed.initialize was given a PipelineModule"),
    ],
)
def test_a_failure_on_one_rank_ends_the_trial_at_once(
    pair: Bench, behaviour: str, kind: str, message: str
) -> None:
    _, outcome = fails(pair, behaviour)
    assert outcome.kind is OutcomeKind(kind), outcome
    assert message in outcome.message
    assert "\n" not in outcome.message


def test_the_detail_is_the_users_traceback_alone(pair: Bench) -> None:
    trial, outcome = fails(pair, "crashes on 1")
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


def test_a_rank_that_leaves_without_a_word_is_missed(tight: Bench) -> None:
    trial = tight.trial("exit without a word")
    outcome = tight.run(trial)
    assert outcome.kind is OutcomeKind.ERROR
    assert outcome.message == "the ranks ended without a result"
    assert_nothing_is_left(tight)


def test_a_hang_is_a_timeout(tight: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tight.engine._options
    hasty = replace(options, trial=replace(options.trial, timeout_s=3.0))
    monkeypatch.setattr(tight.engine, "_options", hasty)
    trials = [tight.trial(behaviour) for behaviour in ("hangs", "hangs on 1")]
    for trial in trials:
        tight.engine.launch(trial)
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(trials):
        outcomes.update(tight.engine.poll(PATIENCE_S))
    for trial in trials:
        outcome = outcomes[trial.id]
        assert outcome.kind is OutcomeKind.TIMEOUT, tight.log(trial)
        assert "3 s" in outcome.message and "--trial-timeout" in outcome.message
        assert 3 <= outcome.duration_s < 3 + AT_ONCE_S
    assert_nothing_is_left(tight)


def test_a_compilers_lock_of_an_interrupted_trial_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    lock = tmp_path / "operators" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with bench_of("behaviours", tmp_path, imported=True) as bench:
        bench.engine.launch(bench.trial("hangs"))
        lock.touch()
    assert not lock.exists()


def test_time_in_which_dsat_is_stopped_is_not_the_trials(tight: Bench) -> None:
    trial = tight.trial(zero=SMALL_BUCKETS)
    tight.engine.launch(trial)
    assert tight.engine.poll(0.1) == []
    running = tight.engine._running[trial.id]
    running.clock._read_s -= 24 * 3600.0  # as if dsat had been stopped since
    [(_, outcome)] = tight.engine.poll(PATIENCE_S)
    assert outcome.ok, outcome


SMALL_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def test_the_slots_memory_is_the_limit(tight: Bench) -> None:
    outcome = tight.run(tight.trial(zero=SMALL_BUCKETS))
    assert outcome.ok, outcome
    begin = time.monotonic()
    outcome = tight.run(tight.trial("exhausts the slot on 1", zero=SMALL_BUCKETS))
    assert outcome.kind is OutcomeKind.OOM, outcome
    assert outcome.message == "rank 1: out of memory: tried to allocate 16.0 MiB"
    assert time.monotonic() - begin < AT_ONCE_S
    assert_nothing_is_left(tight)


# -- no orphans


@pytest.mark.parametrize("left", ["child", "session", "daemon", "daemon by exec"])
def test_what_a_trial_started_ends_with_it(pair: Bench, left: str) -> None:
    trial = pair.trial(f"leaves: {left}")
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
    singles.engine.cancel(trial.id)
    singles.engine.poll(PATIENCE_S)
    blocks = singles.read(trial, "blocks.txt").split()
    assert len(blocks) > 1 and not any((Path("/dev/shm") / name).exists() for name in blocks)
    assert_nothing_is_left(singles)


@pytest.mark.parametrize("left", ["child", "daemon by exec"])
def test_it_ends_although_another_trial_goes_on(singles: Bench, left: str) -> None:
    goes_on = singles.trial("leaves and hangs: daemon")
    singles.engine.launch(goes_on)
    path = singles.path(goes_on)
    wait_until((path / "left0.json").exists, "the daemon")
    [other] = read_json(path / "left0.json")
    trial = singles.trial(f"leaves: {left}")
    outcome = singles.run(trial)
    assert outcome.ok, singles.log(trial)
    [pid] = read_json(singles.path(trial) / "left0.json")
    wait_until_dead(pid)
    assert is_alive(other), "the helper of a trial that goes on"
    assert is_alive(read_json(path / "facts0.json")["pid"])
    singles.engine.cancel(goes_on.id)
    [(trial_id, canceled)] = singles.engine.poll(PATIENCE_S)
    assert (trial_id, canceled.kind) == (goes_on.id, OutcomeKind.CANCELED)
    assert_nothing_is_left(singles)


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


@pytest.mark.nightly  # a command that is killed: tests/end_to_end/test_command.py
@pytest.mark.parametrize(("number", "cold"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_the_engines_process_may_be_killed(
    tmp_path: Path, number: signal.Signals, cold: bool
) -> None:
    """Everything ends with whoever made the engine, whatever became of that."""
    code = (
        "import pathlib, sys, time\n"
        "from testing.local import bench_of\n"
        f"with bench_of('behaviours', pathlib.Path(sys.argv[1]), slots=2, cold={cold}) as bench:\n"
        "    for left in ('session', 'daemon by exec'):\n"
        "        bench.engine.launch(bench.trial(f'leaves and hangs: {left}'))\n"
        "    time.sleep(1000)\n"
    )
    owner = psutil.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_until(lambda: len(list(tmp_path.glob("trials/*/left0.json"))) == 2, "both trials")
    below = owner.children(recursive=True)
    assert len(below) >= 3
    owner.send_signal(number)
    owner.wait(PATIENCE_S)
    wait_until(lambda: not any(is_alive(process.pid) for process in below), "the end of all")
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
        assert leftovers.end_processes(tmp_path) == []
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
    for trial in trials:
        singles.engine.cancel(trial.id)
    told: list[int] = []
    while len(told) < 2:
        told += [trial_id for trial_id, _ in singles.engine.poll(PATIENCE_S)]
    assert sorted(told) == [trial.id for trial in trials]


def test_a_trial_that_fails_beside_others_is_run_again_alone(singles: Bench) -> None:
    trials = [singles.trial("fails beside others") for _ in range(2)]
    for trial in trials:
        singles.engine.launch(trial)
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < 2:
        outcomes.update(singles.engine.poll(PATIENCE_S))
    for trial in trials:
        assert outcomes[trial.id].ok, singles.log(trial)
    warned = [BESIDE_OTHERS in outcome.warnings for outcome in outcomes.values()]
    assert any(warned), "it was said"


def test_what_takes_long_is_told(
    singles: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "LONG_S", 0.1)
    caplog.set_level("INFO", logger="dsat")
    trial = singles.trial("compiles")
    singles.engine.launch(trial)
    while not (ended := singles.engine.poll(0.2)):
        pass
    assert ended[0][1].ok, singles.log(trial)
    said = [record.getMessage() for record in caplog.records]
    assert f"{trial.name}: compiling DeepSpeed's operator slow; the result is kept" in said
    other = f"{trial.name}: your script runs, up to its first optimizer step"
    assert said.count(other) <= 1
    assert not (singles.path(trial) / "doing.txt").exists(), "it has made a step since"
    # One that fails beside another is run again once that has ended.
    trials = [singles.trial("hangs"), singles.trial("crashes")]
    for each in trials:
        singles.engine.launch(each)
    waits = f"{trials[1].name}: waits for {trials[0].name} to end"
    wait_until(lambda: singles.engine.poll(0.1) or waits in caplog.text, waits)
    for each in trials[::-1]:
        singles.engine.cancel(each.id)
    told: list[int] = []
    while len(told) < 2:
        told += [trial_id for trial_id, _ in singles.engine.poll(PATIENCE_S)]


def test_ranks_of_a_trial_share_its_cores(pair: Bench) -> None:
    trial = pair.trial()
    assert pair.run(trial).ok
    facts = [read_json(pair.path(trial) / f"facts{rank}.json") for rank in (0, 1)]
    assert facts[0]["cores"] == facts[1]["cores"] == sorted(os.sched_getaffinity(0))[:2]
    assert [fact["environment"]["RANK"] for fact in facts] == ["0", "1"]


def test_the_environment_is_a_launchers(pair: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    trial = pair.trial()
    assert pair.run(trial).ok, pair.log(trial)
    fact = read_json(pair.path(trial) / "facts1.json")
    env = fact["environment"]
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert [env[name] for name in names] == ["1", "2", "2", "127.0.0.1", "1"]
    # DeepSpeed compiles with the ninja that lies beside this python.
    assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    program = Path("testing/programs/behaviours").resolve()
    assert fact["folder"] == str(program)
    assert fact["file"] == str(program / "train.py")
    config = str(pair.path(trial) / "ds_config.json")
    arguments = [fact["file"], "--local_rank=1", "--deepspeed_config", config]
    assert fact["arguments"] == arguments


def test_a_script_may_spawn_itself(pair: Bench) -> None:
    trial = pair.trial("spawns")
    assert pair.run(trial).ok, pair.log(trial)


def test_a_data_loader_may_have_workers(pair: Bench) -> None:
    trial = pair.trial("has workers")
    assert pair.run(trial).ok, pair.log(trial)
    assert_nothing_is_left(pair)


def test_a_module_with_an_include(tmp_path: Path) -> None:
    """`python3 -m package.main`, which needs a file from elsewhere beside it."""
    model_dir, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    shutil.copytree("testing/programs/behaviours", model_dir)
    (model_dir / "package").mkdir()
    (model_dir / "package" / "__init__.py").write_text("")
    (model_dir / "train.py").rename(model_dir / "package" / "training.py")
    main = "import shared\nfrom package import training\nprint(shared.WORD)\ntraining.main()\n"
    (model_dir / "package" / "main.py").write_text(main)
    elsewhere.mkdir()
    (elsewhere / "shared.py").write_text("WORD = 'from elsewhere'\n")
    user = experiment.read(model_dir / "deepspeed.yaml", model_dir, [elsewhere / "shared.py"])
    program = entrypoint.parse(
        "python3 -m package.main --deepspeed_config ds_config.json", user.model_dir
    )
    options = LocalOptions(TrialOptions(timeout_s=PATIENCE_S))
    hosts = [Host(cpu_machine(1), prefix=warm_host.prefix())]
    engine = LocalEngine(user, program, hosts, tmp_path, options, slots_per_trial=1)
    try:
        bench = Bench(engine, tmp_path)
        trial = bench.trial()
        assert bench.run(trial).ok, bench.log(trial)
        assert "from elsewhere" in bench.read(trial, "stdout.log")
    finally:
        engine.close()


def test_a_trials_folder(pair: Bench) -> None:
    trial = pair.trial(micro_batch=3, gas=2, stage=2)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    names = {path.name for path in pair.path(trial).iterdir()}
    assert names >= {"cmd.txt", "ds_config.json", "trial.json", "stdout.log", "stderr.log"}
    assert "metrics.json" in names
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


@pytest.mark.nightly  # two ranks that import all: tests/end_to_end/test_conditions.py has one
def test_cmd_txt_can_be_pasted_into_a_shell(pair: Bench) -> None:
    trial = pair.trial()
    first = pair.run(trial)
    assert first.ok
    text = pair.read(trial, "cmd.txt")
    comment, change, *ranks = text.splitlines()
    assert comment.endswith(
        shlex.join(["train.py", "--deepspeed_config", f"{pair.path(trial)}/ds_config.json"])
    )
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


def test_a_folder_left_by_a_killed_session_is_cleared(pair: Bench) -> None:
    trial = pair.trial()
    pair.path(trial).mkdir(parents=True)
    (pair.path(trial) / "metrics.json").write_text("{}")
    (pair.path(trial) / "rank1.json").write_text("{}")
    outcome = pair.run(trial)
    assert outcome.ok
    assert not (pair.path(trial) / "rank1.json").exists()


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


def test_a_batch_too_large_for_the_data_may_be_tried_smaller(pair: Bench) -> None:
    assert pair.run(pair.trial("ends early")).smaller_may_run
    assert not pair.run(pair.trial("never initializes")).smaller_may_run
