"""A user at dsat's command line, whose trials run in a made-up world.

The command line, the loop, the journal, the finals and all files are real. Only the outcome of a
trial is made up, by a `World`, so a search takes about a second. A scenario is a command typed in a
folder, a world and a harm. Tests judge it by what a user sees: the exit status, `--json`, messages,
and the files of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil

from dsat.cli.main import main as dsat_main
from dsat.engines.machines.machine import Machine
from dsat.engines.places import local as this_machine
from dsat.prepare import installed_deepspeed
from dsat.tuning import local
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing import warm_command
from testing.simulated import SimulatedEngine
from testing.started import Started, Told, resize
from testing.world import World

_ROOT = Path(__file__).parents[1]
_SCRIPT = """\
import argparse

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.initialize(args=args)
"""


@dataclass(frozen=True)
class Terminal:
    """A terminal in which the command runs; it changes to `resized_to` after the first output."""

    columns: int = 80
    lines: int = 24
    resized_to: tuple[int, int] | None = None


@dataclass(frozen=True)
class Harm:
    """Harm to a process of the command line.

    Attributes:
        signals: by trial number, the signals sent to the process when that trial is launched.
        before: called in the process before the command.
        variables: further variables of the process.
        python: options of the interpreter, such as `-O`; without them the process is a fork.
        terminal: used instead of pipes.
        out_is_closed: nobody reads the standard output.
    """

    signals: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    python: tuple[str, ...] | None = None
    terminal: Terminal | None = None
    out_is_closed: bool = False


class MadeUpEngine(SimulatedEngine):
    """Takes outcomes from a world, in virtual time, and writes the files of a trial's folder.

    Args:
        world: decides the outcomes of trials.
        ready: the prepared run.
        folder: the folder of the run.
        signals: as in `Harm`.
        pause_s: real seconds that each launch takes.
    """

    def __init__(
        self,
        world: World,
        ready: Any,
        folder: Path,
        *,
        signals: Mapping[int, Sequence[int]] | None = None,
        pause_s: float = 0.0,
    ) -> None:
        slots = ready.plan.slots_per_trial
        super().__init__(self._outcome, num_slots=slots * world.at_once, slots_per_trial=slots)
        limit = ready.plan.slot_memory_bytes or world.gpu.memory_bytes
        gpu = dataclasses.replace(world.gpu, memory_bytes=min(limit, world.gpu.memory_bytes))
        self._world = dataclasses.replace(world, slots=slots, gpu=gpu)
        self._config_of = ready.plan.config
        self._trials = folder / "trials"
        self._signals = signals or {}
        self._pause_s = pause_s

    def launch(self, trial: Trial) -> None:
        if self._pause_s:
            time.sleep(self._pause_s)
        below = self._trials / trial.name
        below.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self._config_of(trial.overrides), indent=2)
        (below / "ds_config.json").write_text(config, encoding="utf-8")
        (below / "stdout.log").write_text(f"output of {trial.name}\n", encoding="utf-8")
        (below / "stderr.log").write_text("", encoding="utf-8")
        super().launch(trial)
        for number in self._signals.get(trial.id, ()):
            os.kill(os.getpid(), number)

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        return super().poll(1e9 if self._ends else 0.0)

    def _outcome(self, trial: Trial) -> Outcome:
        return self._world.outcome(trial, self._config_of(trial.overrides))


@dataclass
class User:
    """A user in a folder with a training script, its configuration and an experiment.

    Attributes:
        folder: working folder of all commands.
        world: decides the outcomes of trials.
        pause_s: real seconds of each trial, so that harm from outside can hit it.
    """

    folder: Path
    world: World = field(default_factory=World)
    pause_s: float = 0.0

    def has(self, config: Mapping[str, Any] | None = None, **experiment: Any) -> None:
        """Write the training script, `ds.json` and `deepspeed.yaml`.

        Args:
            config: the DeepSpeed configuration, in addition to optimizer and bf16.
            experiment: further values of the experiment's configuration.
        """
        own = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": True}}
        config = {**own, **(config or {"train_micro_batch_size_per_gpu": 1})}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
        (self.folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        data = {
            "name": "made-up",
            "entrypoint": "python3 -m determined.launch.deepspeed python3 train.py",
            "hyperparameters": {"deepspeed_config": "ds.json"},
            "resources": {"slots_per_trial": self.world.slots},
            "searcher": {"name": "single", "metric": "loss", "max_length": 20},
            **experiment,
        }
        # Every JSON text is YAML.
        (self.folder / "deepspeed.yaml").write_text(json.dumps(data), encoding="utf-8")

    def types(self, *words: object, harm: Harm | None = None) -> Told:
        """Type `dsat WORDS` and wait for its end."""
        argv = [str(word) for word in words]
        if harm is None:
            return self._run_here(argv)
        return self.starts(*words, harm=harm).wait()

    def starts(self, *words: object, harm: Harm | None = None) -> Started:
        """Start `dsat WORDS` in another process."""
        argv, harm = [str(word) for word in words], harm or Harm()
        if harm.python is not None:
            return self._start_interpreter(argv, harm)
        return self._fork(argv, harm)

    def tunes(
        self,
        *options: object,
        method: str = "model",
        experiment: bool = False,
        harm: Harm | None = None,
        metric: str = "throughput",
    ) -> Told:
        """Tune the script by its command, or as an experiment; the output is JSON."""
        return self.types(
            *self.words(*options, method=method, experiment=experiment, metric=metric), harm=harm
        )

    def words(
        self,
        *options: object,
        method: str = "model",
        experiment: bool = False,
        metric: str = "throughput",
        run_dir: str = "run",
        shown: bool = False,
    ) -> list[object]:
        """Return the arguments of a search.

        Args:
            run_dir: folder of the run; if empty, dsat chooses a numbered one.
            shown: print text for people instead of JSON.
        """
        where = ["--run-dir", run_dir] if run_dir else []
        form = [] if shown else ["--json"]
        common = ["--engine", "local", "--metric", metric, *where, *form, *options]
        if experiment:
            return [method, "deepspeed.yaml", ".", *common]
        script = ["--slots", self.world.slots, "--ds-config", "ds.json"]
        return [method, *script, *common, "--", "train.py"]

    def reads(self, name: str) -> str:
        """Return the text of a file in the run's folder."""
        return (self.folder / "run" / name).read_text(encoding="utf-8")

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the run's journal."""
        return [json.loads(line) for line in self.reads("journal.jsonl").splitlines()]

    def cut(self, events: int, run_dir: str = "run") -> None:
        """Keep the first `events` events of a run's journal, as if the run was killed then."""
        path = self.folder / run_dir / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:events]))

    def best_config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration that the run recommends."""
        config = json.loads(self.reads("best_ds_config.json"))
        assert isinstance(config, dict)
        return config

    def true_speed(self, config: Mapping[str, Any]) -> float:
        """Return the world's true throughput of a configuration, in samples/s; 0 if it does not
        run."""
        metrics = self.world.answer(config).metrics
        return 0.0 if metrics is None else metrics.throughput

    # -- three ways to run a command

    def _run_here(self, argv: list[str]) -> Told:
        out, err = io.StringIO(), io.StringIO()
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        here = Path.cwd()
        os.chdir(self.folder)
        # Tests need no protection from a power failure; without fsync they take half the time.
        sync = mock.patch.object(os, "fsync")
        no_others = mock.patch.object(psutil, "process_iter", return_value=())
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                sync,
                no_others,
            ):
                status = self._command(argv, Harm())
        finally:
            os.chdir(here)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Told(status, out.getvalue(), err.getvalue())

    def _fork(self, argv: list[str], harm: Harm) -> Started:
        if harm.terminal is not None:
            pid, terminal = pty.fork()
            if pid == 0:
                self._in_child(argv, harm)
            resize(terminal, harm.terminal.columns, harm.terminal.lines)
            return Started(pid, terminal, None, harm.terminal.resized_to)
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            os.close(err)
            os.dup2(its_out, 1)
            os.dup2(its_err, 2)
            self._in_child(argv, harm)
        os.close(its_out)
        os.close(its_err)
        if harm.out_is_closed:
            os.close(out)
            return Started(pid, err, None)
        return Started(pid, out, err)

    def _in_child(self, argv: list[str], harm: Harm) -> NoReturn:
        """Run a command in this forked process, then exit."""
        status = 70
        try:
            os.environ.update(harm.variables)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does
            sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            os.chdir(self.folder)
            if harm.before is not None:
                harm.before()
            status = self._command(argv, harm)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(status)

    def _start_interpreter(self, argv: list[str], harm: Harm) -> Started:
        scenario = {"world": self.world.to_json(), "argv": argv, "pause_s": self.pause_s}
        process = subprocess.Popen(
            [sys.executable, *(harm.python or ()), "-m", "testing.scenarios", json.dumps(scenario)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **harm.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        out, err = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        process.stdout.close()
        process.stderr.close()
        process.returncode = 0  # marks it as ended, because `Started` waits for it instead
        return Started(process.pid, out, err)

    def _command(self, argv: list[str], harm: Harm) -> int:
        """Run the command line in this process, with the world in place of this machine."""

        def make(ready: Any, folder: Path) -> MadeUpEngine:
            return MadeUpEngine(
                self.world, ready, folder, signals=harm.signals, pause_s=self.pause_s
            )

        machine = machine_of(self.world)
        with (
            mock.patch.object(this_machine, "find_machine", return_value=machine),
            mock.patch.dict(local.ENGINES, {"local": make, "auto": make}),
            mock.patch.object(installed_deepspeed, "_ask", warm_command.check_configurations),
        ):
            try:
                return dsat_main(argv)
            except SystemExit as stop:
                return stop.code if isinstance(stop.code, int) else 1


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGPIPE)


def machine_of(world: World) -> Machine:
    """Return the machine of a world, with GPUs for `at_once` trials."""
    count = world.slots * world.at_once
    return Machine(
        accelerator="cuda",
        device_name=world.device_name,
        devices=tuple(str(number) for number in range(count)),
        visible_devices=("CUDA_VISIBLE_DEVICES",),
        memory_bytes=world.gpu.memory_bytes,
        device_memory_bytes=(world.gpu.memory_bytes,) * count,
        device_names=(world.device_name,) * count,
    )


def main(scenario: str) -> NoReturn:
    """Run a command in this interpreter, for `User.starts`."""
    given = json.loads(scenario)
    user = User(Path.cwd(), World.from_json(given["world"]), given["pause_s"])
    user._in_child(given["argv"], Harm())


if __name__ == "__main__":
    main(sys.argv[1])
