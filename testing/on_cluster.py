"""The real command against the stand-in for a master, and what it leaves there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dsat.determined_cluster import result
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind
from testing.command import Told
from testing.local import PATIENCE_S, PROGRAMS
from testing.master import StandIn

RUNNER, SEARCH = 1, 2  # the experiments of the first search on a fresh master

# As the images of a cluster of CPUs would have it.
IMAGE = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass
class OnCluster:
    """A master, and commands of a user who has configured it.

    Attributes:
        home: the folder of the user's commands and cached tokens.
    """

    master: StandIn
    home: Path
    begun: list[subprocess.Popen[str]] = field(default_factory=list)

    def begin(self, *words: object, **variables: str) -> subprocess.Popen[str]:
        env = {**os.environ, **self.master.client_environment(self.home), **variables}
        self.home.mkdir(exist_ok=True)
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

    def dsat(self, *words: object, **variables: str) -> Told:
        """Runs the command to its end."""
        return ended(self.begin(*words, **variables))

    def search(self, program: str | Path, *options: object, method: str = "random") -> Told:
        return self.dsat(*words_of(program, method), *options)

    def begin_search(
        self, program: str | Path, *options: object, method: str = "random"
    ) -> subprocess.Popen[str]:
        return self.begin(*words_of(program, method), *options)

    # -- what is left

    @property
    def runner(self) -> int:
        """The search runner's trial."""
        return self.master.trials(RUNNER)[0].id

    def files(self) -> Path:
        """The runner's latest checkpoint."""
        return self.master.checkpoint_paths(self.runner)[-1]

    def run(self) -> Run:
        return Run(read_events(self.files() / FILE_NAME))

    def outcomes(self) -> dict[int, Outcome]:
        return self.run().outcomes

    def kinds(self) -> list[OutcomeKind]:
        return [outcome.kind for outcome in self.outcomes().values()]

    def has_begun(self, experiment_id: int) -> bool:
        return experiment_id in [each.id for each in self.master.experiments]

    def until_started(self, experiment_id: int) -> None:
        """Waits until a trial of an experiment (of the program `pretend`) runs."""

        def running() -> bool:
            trials = self.master.trials(experiment_id) if self.has_begun(experiment_id) else []
            return any("a trial that runs" in self.master.log(trial.id) for trial in trials)

        self.master.wait_until(running, "a running trial", PATIENCE_S)

    def until_reported(self, count: int) -> None:
        """Waits until so many trials of the search have reported."""

        def enough() -> bool:
            if not self.has_begun(SEARCH):
                return False
            return sum(bool(self.master.metrics(t.id)) for t in self.master.trials(SEARCH)) >= count

        self.master.wait_until(enough, f"{count} reports", PATIENCE_S)

    def until_said(self, text: str) -> None:
        """Waits until the runner's log has a text."""
        self.master.wait_until(lambda: self.has_begun(SEARCH), "the search's experiment")
        self.master.wait_until(lambda: text in self.master.log(self.runner), text, PATIENCE_S)

    def kill_runner(self) -> None:
        """Kills the runner with SIGKILL, as soon as it works on the search."""
        self.master.wait_until(lambda: self.has_begun(SEARCH), "the search's experiment")
        self.master.wait_until(lambda: self.master.processes(self.runner), "the runner")
        self.master.signal(self.runner)

    def created(self) -> list[str]:
        """Request ids of the trials that were made."""
        operations = [
            operation
            for post in self.master.posted(SEARCH)
            for operation in post["searcherOperations"]
        ]
        return [each["createTrial"]["requestId"] for each in operations if each.get("createTrial")]

    def result(self) -> dict[str, Any]:
        """Return the result in the runner's log."""
        return result.of_lines(self.master.log(self.runner).splitlines())


@contextlib.contextmanager
def cluster(folder: Path, *, nodes: Sequence[int] = (2,), **more: Any) -> Iterator[OnCluster]:
    compiled = {"TORCH_EXTENSIONS_DIR": os.environ["TORCH_EXTENSIONS_DIR"]}
    with StandIn(
        folder / "master", nodes=nodes, environment={**IMAGE, **compiled}, **more
    ) as master:
        found = OnCluster(master, folder / "home")
        try:
            yield found
        finally:
            for process in found.begun:
                if process.poll() is None:
                    process.kill()
                process.communicate()


def ended(process: subprocess.Popen[str]) -> Told:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Told(process.returncode, out, err)


def words_of(program: str | Path, method: str) -> list[object]:
    folder = PROGRAMS / program
    return [method, folder / "deepspeed.yaml", folder, "--metric", "throughput"]


def changed(program: str | Path, folder: Path, **changes: Any) -> Path:
    """A copy of a program with other values in its experiment configuration."""
    source, target = PROGRAMS / program, folder / "changed"
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_text(path.read_text())
    data: Mapping[str, Any] = yaml.safe_load((target / "deepspeed.yaml").read_text())
    hparams = {**data["hyperparameters"], **changes.pop("hyperparameters", {})}
    text = yaml.safe_dump({**data, **changes, "hyperparameters": hparams})
    (target / "deepspeed.yaml").write_text(text)
    return target
