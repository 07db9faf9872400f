"""Trials with real processes: limits, concurrent trials, full-length runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dsat.errors import EngineError
from dsat.values import slow
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial, TrialKind
from testing.local import (
    PATIENCE_S,
    SMALL_BUCKETS,
    Bench,
    bench_of,
    buffers_of,
    ended,
    is_alive,
    launched,
    processes_of,
    read_json,
    wait_until,
)
from testing.ranks_contract import AT_ONCE_S, assert_nothing_is_left, facts_of
from testing.scripts import scripts_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench for trials of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    with bench_of("behaviours", folder, slots_per_trial=2, imported=True) as bench:
        yield bench


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench with two slots for trials of one rank."""
    folder = tmp_path_factory.mktemp("singles")
    with bench_of("behaviours", folder, slots=2, imported=True) as bench:
        yield bench


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench with room for two trials of two ranks with little memory."""
    folder, little = tmp_path_factory.mktemp("tight"), 400 * 2**20
    with bench_of(
        "behaviours", folder, slots=4, slots_per_trial=2, slot_memory_bytes=little, imported=True
    ) as bench:
        yield bench


def canceled(bench: Bench, *trials: Trial) -> None:
    for trial in trials:
        bench.engine.cancel(trial.id)
    for outcome in ended(bench, *trials):
        assert outcome.kind is OutcomeKind.CANCELED


# -- limits


def test_a_hang_is_a_timeout(tight: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = tight.engine._builder
    hasty = replace(builder.options, trial=replace(builder.options.trial, timeout_s=3.0))
    monkeypatch.setattr(tight.engine, "_builder", replace(builder, options=hasty))
    for outcome in ended(tight, *launched(tight, "hangs", "hangs on 1")):
        assert outcome.kind is OutcomeKind.TIMEOUT
        assert "3 s" in outcome.message and "--trial-timeout" in outcome.message
        assert 3 <= outcome.duration_s < 3 + AT_ONCE_S
    assert_nothing_is_left(tight)


def test_the_slots_memory_and_the_time_in_which_dsat_runs_are_the_limits(tight: Bench) -> None:
    trial = tight.trial(zero=SMALL_BUCKETS)
    tight.engine.launch(trial)
    assert tight.engine.poll(0.1) == []
    tight.engine._running[trial.id].read_s -= 24 * 3600.0  # as if dsat had been suspended
    [outcome] = ended(tight, trial)
    assert outcome.ok, outcome
    outcome = tight.run(tight.trial("exhausts the slot on 1", zero=SMALL_BUCKETS))
    assert outcome.kind is OutcomeKind.OOM, outcome
    assert outcome.message == "rank 1: out of memory: tried to allocate 16.0 MiB"
    assert outcome.duration_s < AT_ONCE_S
    assert_nothing_is_left(tight)


# -- neighbours


def test_a_trial_ends_with_its_own_although_another_goes_on(singles: Bench) -> None:
    [goes_on] = launched(singles, "leaves and hangs: daemon")
    path = singles.path(goes_on)
    wait_until((path / "left0.json").exists, "the daemon")
    [other] = read_json(path / "left0.json")
    trial = singles.trial("leaves: child, daemon by exec")
    outcome = singles.run(trial)
    assert outcome.ok, singles.log(trial)
    left = read_json(singles.path(trial) / "left0.json")
    wait_until(lambda: not any(map(is_alive, left)), "their end")
    assert is_alive(other), "the helper of a trial that goes on"
    assert is_alive(facts_of(singles, goes_on)["pid"])
    canceled(singles, goes_on)
    assert_nothing_is_left(singles)


def test_trials_side_by_side_have_cores_and_ports_of_their_own(singles: Bench) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    trials = launched(singles, "hangs", "hangs")
    paths = [singles.path(trial) / "facts0.json" for trial in trials]
    wait_until(lambda: all(path.exists() for path in paths), "both trials")
    facts = [facts_of(singles, trial) for trial in trials]
    assert [len(fact["cores"]) for fact in facts] == [1, 1]
    assert facts[0]["cores"] != facts[1]["cores"]
    ports = [fact["environment"]["MASTER_PORT"] for fact in facts]
    assert ports[0] != ports[1]
    canceled(singles, *trials)


def test_named_shared_memory_is_unlinked_by_its_tracker(singles: Bench) -> None:
    [trial] = launched(singles, "leaves and hangs: shared memory")
    wait_until((singles.path(trial) / "left0.json").exists, "the blocks")
    canceled(singles, trial)
    blocks = singles.read(trial, "blocks.txt").split()
    assert len(blocks) > 1 and not any((Path("/dev/shm") / name).exists() for name in blocks)
    assert_nothing_is_left(singles)


def test_what_takes_long_is_told(
    singles: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "LONG_S", 0.1)
    caplog.set_level("INFO", logger="dsat")
    [trial] = launched(singles, "compiles")
    while not (told := singles.engine.poll(0.2)):
        pass
    assert told[0][1].ok, singles.log(trial)
    assert f"{trial.name}: compiling DeepSpeed's operator slow, once for all runs" in (
        caplog.messages
    )
    other = f"{trial.name}: your script runs, up to its first optimizer step"
    assert caplog.messages.count(other) <= 1
    assert not (singles.path(trial) / "doing.txt").exists(), "it has made a step since"


# -- the whole engine


def test_close_ends_everything(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path, slots=2, imported=True) as bench:
        trials = launched(bench, *(f"leaves and hangs: {left}" for left in ("session", "daemon")))
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
        bench.engine.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    assert processes_of(tmp_path) == []
    assert buffers_of(tmp_path) == []


def test_an_engine_whose_supervisor_died_says_so(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path, slots=2) as bench:
        launched(bench, *(f"leaves and hangs: {left}" for left in ("session", "worker")))
        wait_until(lambda: len(list(tmp_path.glob("trials/*/left0.json"))) == 2, "both trials")
        supervisor = bench.supervisor()
        below = supervisor.children(recursive=True)
        assert len(buffers_of(tmp_path)) == 2
        supervisor.kill()
        with pytest.raises(EngineError, match=r"ended \(exit status .*--resume"):
            bench.engine.poll(PATIENCE_S)
    wait_until(lambda: not any(is_alive(child.pid) for child in below), "the trials' end")
    assert processes_of(tmp_path / "trials") == []
    assert buffers_of(tmp_path) == []


# -- the profile, and what comes after the measurement


def test_the_profile_trial_counts_a_partitioned_model_whole(pair: Bench) -> None:
    trial = pair.trial(kind=TrialKind.PROFILE, stage=3, zero=SMALL_BUCKETS)
    outcome = pair.run(trial)
    assert outcome.ok and outcome.profile is not None, pair.log(trial)
    profile = outcome.profile
    assert profile.num_params == profile.trainable_params == 16 * 16 + 16 + 16 + 1
    # Forward pass and weight gradients in both layers, input gradient only in the second.
    assert profile.flops_per_sample == 2 * (2 * (16 * 16 + 16) + 16)
    # The inputs of each layer. The script computes the loss outside of the model.
    assert profile.activation_bytes_per_sample == 4 * (16 + 16)


def test_a_script_that_ends_between_the_steps_counts_as_measured(pair: Bench) -> None:
    """Steps 3 to 5 are measured and their variation requires more, but the script makes only
    six."""
    outcome = pair.run(pair.trial("ends between"))
    assert outcome.ok and outcome.metrics is not None
    assert 3 <= outcome.metrics.num_steps <= 4


TRAINS_IN = """
import multiprocessing, queue, threading
def run(ends):
    train(make_engine())
    ends.put("done")
ends = {queue}()
{start}(target=run, args=(ends,), daemon=True).start()
ends.get()
"""
BESIDE_A_THREAD = """
import threading
stops = threading.Event()
threading.Thread(target=stops.wait).start()
train(make_engine())
stops.set()
"""
IN_A_PROCESS = "multiprocessing.get_context('fork').Process"


@pytest.mark.parametrize(
    ("script", "is_cold"),
    [
        (TRAINS_IN.format(queue="queue.Queue", start="threading.Thread"), False),
        pytest.param(
            *(TRAINS_IN.format(queue="multiprocessing.Queue", start=IN_A_PROCESS), False),
            marks=pytest.mark.nightly,
        ),
        # Python's own end waits for the thread.
        pytest.param(BESIDE_A_THREAD, True, marks=pytest.mark.nightly),
    ],
    ids=["thread", "process", "beside a thread"],
)
def test_a_measured_trial_ends_although_its_script_waits(
    script: str, is_cold: bool, tmp_path: Path
) -> None:
    with scripts_in(tmp_path, cold=is_cold) as scripts:
        ended = scripts.run(script).well()
    assert ended.outcome.duration_s < AT_ONCE_S


def test_full_length_runs_are_not_measured_and_never_removed(pair: Bench) -> None:
    for name in ("full", "full-2"):
        folder = pair.engine.train(pair.trial("ends early"))
        assert folder.name == name
        [(_, outcome)] = pair.engine.poll(PATIENCE_S)
        assert outcome.ok, (folder / "stderr.log").read_text()
        assert not (folder / "metrics.json").exists()
    assert (pair.folder / "full" / "stdout.log").exists()
    assert_nothing_is_left(pair)


def test_a_full_length_run_is_never_repeated(tmp_path: Path) -> None:
    """A second run would delete the checkpoints of the first."""
    ends = "open(FOLDER.parent / 'starts', 'a').write('x')\nos.kill(os.getpid(), 15)"
    with scripts_in(tmp_path) as scripts:
        ended = scripts.run_in_full(ends)
    assert not ended.outcome.ok
    assert (scripts.run_folder / "starts").read_text() == "x"


@pytest.mark.nightly  # two ranks import everything
def test_cmd_txt_can_be_pasted_into_a_shell(pair: Bench) -> None:
    trial = pair.trial()
    assert pair.run(trial).ok
    text = pair.read(trial, "cmd.txt")
    comment, change, *ranks = text.splitlines()
    assert comment.endswith(f"train.py --deepspeed_config {pair.path(trial)}/ds_config.json")
    assert change == f"cd {facts_of(pair, trial)['folder']}"
    assert len(ranks) == 2
    path = pair.path(trial) / "metrics.json"
    path.unlink()
    subprocess.run(
        ["bash", "-c", text + "wait\n"], check=True, timeout=PATIENCE_S, capture_output=True
    )
    assert read_json(path)["metrics"]["num_steps"] >= 3
    for name in buffers_of(pair.folder):
        (Path("/dev/shm") / name).unlink()
