"""Run the real command against a stand-in for a Determined master, and inspect the results."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.determined_cluster import result
from dsat.in_trial.cluster_rank import OUTCOME_KEY, numbers
from dsat.run.journal import FILE_NAME, read_events
from dsat.run.run import Run
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from testing.forked import Forked, run_module
from testing.local import PATIENCE_S, PROGRAMS
from testing.master import StandIn
from testing.master.made_up import Ending, MadeUpTrials
from testing.started import Told

RUNNER, SEARCH = 1, 2  # the experiments of the first search on a fresh master
Command = subprocess.Popen[str] | Forked

# Variables that a container image for CPUs would set.
IMAGE = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass
class OnCluster:
    """A master, and commands of a user who has configured it.

    Attributes:
        home: the working folder of the user's commands, also for cached tokens.
        begun: all commands started so far.
    """

    master: StandIn
    home: Path
    begun: list[Command] = field(default_factory=list)

    def begin(self, *words: object) -> Command:
        """Start a command; it is forked if trials are made up."""
        env = {**os.environ, **self.master.client_environment(self.home)}
        self.home.mkdir(exist_ok=True)
        process: Command
        if self.master.made_up is not None:
            command = ["dsat", *map(str, words)]
            process = Forked(run_module, command, environment=env, folder=self.home)
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsat", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                cwd=self.home,
                start_new_session=True,
            )
        self.begun.append(process)
        return process

    def dsat(self, *words: object) -> Told:
        """Run a command to its end."""
        return ended(self.begin(*words))

    def search(self, program: str | Path, *options: object, method: str = "random") -> Told:
        return self.dsat(*words_of(program, method), *options)

    def begin_search(self, program: str | Path, *options: object) -> Command:
        return self.begin(*words_of(program, "random"), *options)

    # -- act during the search

    @property
    def user(self) -> Any:
        """Determined's real client, for actions of the user outside of dsat."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from determined.experimental import Determined

        [(name, password), *_] = self.master.users.items()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DET_DEBUG_CONFIG_PATH", str(self.home))
            return Determined(self.master.url, name, password)

    def let_end(self, count: int | None = None) -> None:
        """Let `count` made-up trials end in total, and wait until the search knows; None: all."""
        made_up = self.master.made_up
        assert made_up is not None
        self.master.do(lambda: setattr(made_up, "limit", count))
        if count is not None:
            self.master.wait_until(lambda: made_up.ended >= count, f"{count} ends", PATIENCE_S)
            queue = self.master.experiment(SEARCH).queue
            self.master.wait_until(lambda: not queue.events, "answers to all events", PATIENCE_S)

    def has_begun(self, experiment_id: int) -> bool:
        return experiment_id in [each.id for each in self.master.experiments]

    def until_reported(self, count: int) -> None:
        """Wait until at least `count` trials of the search have reported."""

        def enough() -> bool:
            if not self.has_begun(SEARCH):
                return False
            return sum(bool(self.master.metrics(t.id)) for t in self.master.trials(SEARCH)) >= count

        self.master.wait_until(enough, f"{count} reports", PATIENCE_S)

    def until_said(self, text: str) -> None:
        """Wait until the runner's log contains a text."""
        self.master.wait_until(lambda: self.has_begun(SEARCH), "the search's experiment")
        self.master.wait_until(lambda: text in self.said, text, PATIENCE_S)

    def kill_runner(self) -> None:
        """Kill the search runner with SIGKILL once the search's experiment exists."""
        self.master.wait_until(lambda: self.has_begun(SEARCH), "the search's experiment")
        self.master.wait_until(lambda: self.master.processes(self.runner), "the runner")
        [process, *_] = processes = self.master.processes(self.runner)
        for each in processes:
            each.kill()
        process.wait(PATIENCE_S)

    # -- inspect the results

    @property
    def runner(self) -> int:
        """Id of the search runner's trial."""
        return self.master.trials(RUNNER)[0].id

    @property
    def said(self) -> str:
        """The runner's log."""
        return self.master.log(self.runner)

    def state(self, experiment_id: int) -> str:
        """Wait for the end of an experiment; return its terminal state, such as `COMPLETED`."""
        return self.master.wait_ended(experiment_id).removeprefix("STATE_")

    def files(self) -> Path:
        """Return the folder of the runner's latest checkpoint."""
        return self.master.checkpoint_paths(self.runner)[-1]

    def run(self) -> Run:
        return Run(read_events(self.files() / FILE_NAME))

    def outcomes(self) -> dict[int, Outcome]:
        return self.run().outcomes

    def kinds(self) -> list[OutcomeKind]:
        return [outcome.kind for outcome in self.outcomes().values()]

    def created(self) -> list[dict[str, Any]]:
        """Return the operations that created trials: request ids and hyperparameters."""
        operations = [
            operation
            for post in self.master.posted(SEARCH)
            for operation in post["searcherOperations"]
        ]
        return [each["createTrial"] for each in operations if each.get("createTrial")]

    def result(self) -> dict[str, Any]:
        """Return the result that the runner's log contains."""
        return result.from_lines(self.said.splitlines())


@contextlib.contextmanager
def cluster(
    folder: Path,
    *,
    nodes: Sequence[int] = (2,),
    variables: Mapping[str, str] | None = None,
    **more: Any,
) -> Iterator[OnCluster]:
    """Run a cluster whose trials are real processes, or made up with `made_up=`.

    Args:
        variables: variables of all containers.
    """
    compiled = {"TORCH_EXTENSIONS_DIR": os.environ["TORCH_EXTENSIONS_DIR"]}
    image = {**IMAGE, **compiled, **(variables or {})}
    with StandIn(folder / "master", nodes=nodes, environment=image, **more) as master:
        found = OnCluster(master, folder / "home")
        try:
            yield found
        finally:
            for process in found.begun:
                if process.poll() is None:
                    process.kill()
                process.communicate()


def quick_cluster(
    folder: Path,
    behave: Callable[[dict[str, Any]], Ending | None] | None = None,
    *,
    limit: int | None = None,
    **more: Any,
) -> contextlib.AbstractContextManager[OnCluster]:
    """Run a cluster with made-up trials; a whole search takes a second or two.

    A long poll for events lasts up to an hour: a client cannot rely on its time-out.

    Args:
        behave, limit: as in `MadeUpTrials`; by default trials behave as in `measured`.
    """
    made_up = MadeUpTrials(behave or measured, limit)
    return cluster(folder, made_up=made_up, poll_s=3600.0, **more)


def measured(hparams: Mapping[str, Any], **changes: Any) -> Ending:
    """Return how a trial on a made-up machine ends: a larger micro batch is faster, up to 16.

    Args:
        changes: changed fields of the outcome.
    """
    spec = spec_of(hparams)
    size = spec["micro_batch"]
    if size > 16:
        return Ending(log=("RuntimeError: CUDA error: out of memory",), status=1)
    profile = ModelProfile(10**6, 10**6, 4, 10**6, 1e6, 10**9) if spec["profile"] else None
    speed = 100.0 * size / (size + 3) + 4 * spec["stage"]
    metrics = Metrics(speed, 1.0, 1.0, 1.0, 1.0, 1e6 * speed, 3, 0.01)
    outcome = Outcome(OutcomeKind.OK, metrics=metrics, profile=profile, duration_s=1.0)
    return reported(replace(outcome, **changes), measures=spec.get("measures", True))


def reported(outcome: Outcome, *, measures: bool = True) -> Ending:
    """Return the end of a trial that reports an outcome."""
    plotted = numbers(outcome, measures=measures)
    return Ending({**plotted, OUTCOME_KEY: outcome.to_json()}, plotted)


def spec_of(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of what a trial measures."""
    spec: dict[str, Any] = json.loads(hparams["_dsat_trial"]["spec"])
    return spec


def ended(process: Command) -> Told:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode is not None
    return Told(process.returncode, out, err)


def words_of(program: str | Path, method: str) -> list[object]:
    folder = PROGRAMS / program
    return [method, folder / "deepspeed.yaml", folder, "--metric", "throughput"]


def changed(folder: Path, **changes: Any) -> Path:
    """Copy the program `pretend`, and change values in its experiment configuration."""
    source, target = PROGRAMS / "pretend", folder / "changed"
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_text(path.read_text())
    data: Mapping[str, Any] = yaml.safe_load((target / "deepspeed.yaml").read_text())
    hparams = {**data["hyperparameters"], **changes.pop("hyperparameters", {})}
    text = yaml.safe_dump({**data, **changes, "hyperparameters": hparams})
    (target / "deepspeed.yaml").write_text(text)
    return target
