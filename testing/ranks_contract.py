"""Contract of every engine that starts processes: what ranks see, how they fail, what they leave.

The training script of these tests (`programs/behaviours`) writes what it sees, or misbehaves.
"""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial
from testing.local import (
    PATIENCE_S,
    PROGRAMS,
    Bench,
    bench_of,
    buffers_of,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)

PROGRAM = (PROGRAMS / "behaviours").resolve()
# A failure must end a trial at once, without gloo's time-out of half an hour or the trial's own.
AT_ONCE_S = PATIENCE_S / 3


class RanksContract(abc.ABC):
    """Inherit this in a class that pytest collects; trials have two ranks on one host.

    Attributes:
        options: arguments of `testing.local.bench_of`, which choose how ranks are started.
        without_engine: outcome kind of a script that never makes an engine.
    """

    options: dict[str, Any]
    without_engine = OutcomeKind.INVALID

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        folder = tmp_path_factory.mktemp("pair")
        with bench_of("behaviours", folder, slots_per_trial=2, **cls.options) as bench:
            yield bench
        assert processes_of(folder) == []

    def fails(self, pair: Bench, behaviour: str) -> tuple[Trial, Outcome]:
        """Run a trial that must fail at once, and leave no process behind."""
        trial = pair.trial(behaviour)
        outcome = pair.run(trial)
        assert outcome.metrics is None, pair.log(trial)
        assert outcome.duration_s < AT_ONCE_S
        assert_nothing_is_left(pair)
        return trial, outcome

    # -- what a rank sees

    def test_ranks_see_what_a_launcher_gives_them(
        self, pair: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        monkeypatch.setenv("OF_THE_USER", "a 'b'\n$c")
        trial = pair.trial()
        assert pair.run(trial).ok, pair.log(trial)
        facts = [facts_of(pair, trial, rank) for rank in (0, 1)]
        envs = [fact["environment"] for fact in facts]
        assert [(env["RANK"], env["LOCAL_RANK"]) for env in envs] == [("0", "0"), ("1", "1")]
        for env in envs:
            names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
            assert [env[name] for name in names] == ["2", "2", "127.0.0.1", "1"]
            assert env["OF_THE_USER"] == "a 'b'\n$c"
            # DeepSpeed compiles with ninja, which is in the folder of this Python.
            assert env["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
            assert env["DSAT_TRIAL_DIR"] == str(pair.path(trial))
        assert envs[0]["MASTER_PORT"] == envs[1]["MASTER_PORT"]
        config = str(pair.path(trial) / "ds_config.json")
        for fact in facts:
            assert fact["cores"] == sorted(os.sched_getaffinity(0))[:2]
            assert Path(fact["folder"], fact["file"]) == PROGRAM / "train.py"
            assert fact["arguments"][-2:] == ["--deepspeed_config", config]
            assert Path(fact["arguments"][0]).name == "train.py"
            assert fact["folder"] == str(PROGRAM)
            # SIGINT may be ignored: a shell sets that for its background processes.
            assert not {"SIGTERM", "SIGHUP", "SIGUSR1"} & {*fact["ignores"]}
            assert fact["blocks"] == []

    def test_trials_meet_at_ports_of_their_own(self, pair: Bench) -> None:
        trials = [pair.trial(), pair.trial()]
        for trial in trials:
            assert pair.run(trial).ok, pair.log(trial)
        ports = [facts_of(pair, trial)["environment"]["MASTER_PORT"] for trial in trials]
        assert ports[0] != ports[1]

    # -- failures, and who is to blame

    @pytest.mark.parametrize(
        ("behaviour", "kind", "said"),
        [
            ("sys.exit on 1", "ERROR", ("exit", "3")),
            ("exit on 1", "ERROR", ("exit status 3",)),
            ("is killed on 1", "HOST_OOM", ("SIGKILL", "memory")),
            ("exhausts memory on 1", "OOM", ("rank 1", "out of memory", "tried to allocate")),
            ("ends early", "INVALID", ("after 3 optimizer steps", "up to step 5")),
            ("exits early", "INVALID", ("after 3 optimizer steps", "up to step 5")),
        ],
    )
    def test_a_failure_on_one_rank_ends_the_trial_at_once(
        self, pair: Bench, behaviour: str, kind: str, said: tuple[str, ...]
    ) -> None:
        trial, outcome = self.fails(pair, behaviour)
        assert outcome.kind is OutcomeKind(kind), outcome
        assert all(word in outcome.message for word in said), outcome.message
        assert "\n" not in outcome.message
        assert outcome.smaller_may_run is behaviour.endswith("early")  # data ran out
        for report in pair.path(trial).glob("rank*.json"):  # such as rank 0's lost connection
            assert "inside dsat" not in report.read_text()

    def test_a_script_that_makes_no_engine_is_told_so(self, pair: Bench) -> None:
        _, outcome = self.fails(pair, "never initializes")
        assert outcome.kind is self.without_engine
        assert "deepspeed.initialize" in outcome.message

    def test_the_detail_is_the_users_traceback_alone(self, pair: Bench) -> None:
        trial, outcome = self.fails(pair, "crashes on 1")
        assert outcome.kind is OutcomeKind.ERROR
        assert outcome.message == "rank 1: ValueError: the data set has no labels", outcome
        lines = outcome.detail.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        files = {line.split('"')[1] for line in lines if line.startswith('  File "')}
        assert {Path(PROGRAM, file) for file in files} == {PROGRAM / "train.py"}
        assert "KeyError: 'label'" in lines
        assert "The above exception was the direct cause of the following exception:" in lines
        assert lines[-2:] == ["ValueError: the data set has no labels", "nor anything else"]
        assert lines[-2] in pair.read(trial, "stderr.log")

    def test_a_traceback_keeps_the_librarys_frames(self, pair: Bench) -> None:
        _, outcome = self.fails(pair, "raises from a library on 1")
        assert "torch.ones(2, 3) @ torch.ones(2, 3)" in outcome.detail
        assert "RuntimeError" in outcome.detail.splitlines()[-1]
        assert "runpy" not in outcome.detail
        assert os.path.join("dsat", "in_trial") not in outcome.detail

    def test_a_trial_that_is_canceled_ends_with_all_it_started(self, pair: Bench) -> None:
        trial = pair.trial("leaves and hangs: session, worker")
        pair.engine.launch(trial)
        marks = [pair.path(trial) / f"left{rank}.json" for rank in (0, 1)]
        wait_until(lambda: all(mark.exists() for mark in marks), "both ranks")
        left = [pid for mark in marks for pid in read_json(mark)]
        pair.engine.cancel(trial.id)
        [(_, outcome)] = pair.engine.poll(PATIENCE_S)
        assert outcome.kind is OutcomeKind.CANCELED
        wait_until(lambda: not any(map(is_alive, left)), "the end of all")
        assert_nothing_is_left(pair)

    # -- what a trial leaves

    def test_what_a_trial_started_ends_with_it(self, pair: Bench) -> None:
        trial = pair.trial("leaves: child, session, daemon, daemon by exec")
        outcome = pair.run(trial)
        assert outcome.ok, pair.log(trial)
        left = [pid for r in (0, 1) for pid in read_json(pair.path(trial) / f"left{r}.json")]
        assert len(left) == 8
        wait_until(lambda: not any(map(is_alive, left)), "the end of all")
        assert_nothing_is_left(pair)

    @pytest.mark.parametrize("behaviour", ["spawns", "has workers"])
    def test_a_script_may_start_processes(self, pair: Bench, behaviour: str) -> None:
        trial = pair.trial(behaviour)
        assert pair.run(trial).ok, pair.log(trial)
        assert_nothing_is_left(pair)

    def test_a_trials_folder(self, pair: Bench) -> None:
        trial = pair.trial(micro_batch=3, gas=2, stage=2)
        pair.path(trial).mkdir(parents=True)  # as if a killed dsat had left it
        for name in ("metrics.json", "rank1.json"):
            (pair.path(trial) / name).write_text("{}")
        outcome = pair.run(trial)
        assert outcome.ok and outcome.metrics is not None, pair.log(trial)
        names = {path.name for path in pair.path(trial).iterdir()}
        assert names >= {"cmd.txt", "ds_config.json", "trial.json", "stdout.log", "stderr.log"}
        assert "metrics.json" in names and "rank1.json" not in names
        assert not any(name.endswith(".tmp") for name in names)
        assert read_json(pair.path(trial) / "ds_config.json") == {
            "train_batch_size": 12,
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
        }
        assert Trial.from_json(read_json(pair.path(trial) / "trial.json")["trial"]) == trial
        written = read_json(pair.path(trial) / "metrics.json")
        assert written["metrics"] == outcome.metrics.to_json()
        assert len(written["step_ms"]) == outcome.metrics.num_steps + outcome.metrics.accidents
        assert int(pair.read(trial, "steps")) >= outcome.metrics.num_steps
        logged = set(pair.read(trial, "stdout.log").splitlines())
        assert logged >= {"rank 0 runs", "rank 1 runs"}


def facts_of(bench: Bench, trial: Trial, rank: int = 0) -> dict[str, Any]:
    """Return the facts that a rank has written."""
    facts: dict[str, Any] = read_json(bench.path(trial) / f"facts{rank}.json")
    return facts


def assert_nothing_is_left(bench: Bench) -> None:
    """Check that the supervisor has no children, and that no process and no buffer of a trial
    remains."""
    supervisor = bench.supervisor()
    wait_until(lambda: not supervisor.children(recursive=True), "no children")
    trials = bench.folder / "trials"
    wait_until(lambda: not processes_of(trials), f"no processes: {processes_of(trials)}")
    assert buffers_of(bench.folder) == []
