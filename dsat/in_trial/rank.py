"""One rank of a trial: prepares the process, runs the user's program, reports the outcome.

Runs in a process forked from the warm supervisor, or as `python3 -m dsat.in_trial.rank DIR`. It
leaves by `os._exit`, because an orderly end of the interpreter costs a second.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dsat.errors import InvalidTrial
from dsat.in_trial import config_injection, failures, preparation
from dsat.in_trial.adapters.begin import begin
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.memory_limit import limit_memory
from dsat.in_trial.meter import Meter, TrialComplete
from dsat.in_trial.rank_files import MODULES_FILE, Progress, RankSpec, write_outcome
from dsat.inputs.entrypoint import Entrypoint
from dsat.simulation import server
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome

FAILED = 1


def run(folder: Path) -> NoReturn:
    """Run the rank that the environment says this process is; never returns."""
    _Rank(folder).run()


class _Rank:
    """One rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec = RankSpec.of_folder(folder)
        self._rank = int(os.environ["RANK"])
        self._progress = Progress(folder if self._rank == 0 else None)
        self._meter: Meter | None = None
        self._has_engine = False
        socket = self._spec.simulation_socket
        self._server = None if socket is None else server.SimulationServer(Path(socket))

    def run(self) -> NoReturn:
        try:
            begin(self._folder)
            if "deepspeed" not in sys.modules:
                self._progress.set_activity("importing torch and DeepSpeed in a fresh process")
            self._prepare()
            program = Entrypoint.from_json(self._spec.program)
            # For --hf-config dsat has a script of its own.
            runs = "the model" if program.module.startswith("dsat.") else "your script"
            self._progress.set_activity(f"{runs} runs, up to its first optimizer step")
            _run_program(program)
        except (TrialComplete, server.ScriptSimulated):
            _leave(0)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                self._fail(stop, f"the script ended with sys.exit({stop.code!r})")
        except BaseException as error:
            self._fail(error)
        self._end_of_script()

    def _prepare(self) -> None:
        import deepspeed  # noqa: F401  (after a cold start; the memory limit must come after it)
        import numpy

        # A forked process has its parent's state, a fresh one would have a random one.
        random.seed()
        numpy.random.seed()
        spec, given = self._spec, os.environ.get("OMP_NUM_THREADS", "")
        if not spec.threads and given.isdigit():  # torch read it in the parent of this process
            spec = replace(spec, threads=int(given))
        if self._server is not None:
            self._server.install()
        config_injection.on_initialize(self._begin_engine)

        def complete(outcome: Outcome) -> None:
            write_outcome(self._folder, self._rank, outcome)
            if self._rank == 0:
                names = preparation.libraries(known, before)
                write_atomically(self._folder / MODULES_FILE, json.dumps(names))

        self._meter = preparation.prepare(
            spec,
            self._folder,
            self._progress,
            on_complete=complete,
            on_step=self._progress.count,
        )
        preparation.prevent_side_effects(spec)
        if spec.cpu_memory_bytes is not None:
            limit_memory(spec.cpu_memory_bytes)
        known, before = set(sys.modules), dict(os.environ)

    def _begin_engine(self, _: Any) -> None:
        self._has_engine = True

    def _end_of_script(self) -> NoReturn:
        """Report the outcome of a script that came to its own end."""
        if self._server is not None:
            self._server.failed(None)
            problem = "the script ended without calling deepspeed.initialize with an optimizer"
            self._report(failures.outcome(InvalidTrial(problem)))
        if self._meter is None:
            # A training run ends as a Python program does: threads joined, atexit functions called.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            _leave(0)
        self._report(outcome_of_ended(self._meter))

    def _fail(self, error: BaseException, message: str = "") -> NoReturn:
        if self._server is not None:
            message = self._server.failed(error) or message
        found = failures.outcome(error)
        self._report(
            replace(found, message=message or found.message, before_engine=not self._has_engine)
        )

    def _report(self, outcome: Outcome) -> NoReturn:
        if not outcome.ok:
            sys.stderr.write((outcome.detail or outcome.message) + "\n")
        write_outcome(self._folder, self._rank, outcome)
        _leave(0 if outcome.ok else FAILED)


def outcome_of_ended(meter: Meter) -> Outcome:
    """Return the outcome of a script that came to its own end before enough was measured."""
    try:
        meter.finish()
    except InvalidTrial as error:
        return failures.outcome(error)
    except RuntimeError as error:  # the script has already ended its process group
        print(f"dsat: nothing more can be measured: {error}", file=sys.stderr)
    return meter.outcome or failures.outcome(meter.shortfall)


def _run_program(program: Entrypoint) -> None:
    args = list(program.args)
    if program.launch.passes_local_rank:
        args.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        TRIAL.local_rank = os.environ["LOCAL_RANK"]
    if program.trial_class:
        from determined.exec import harness

        sys.path.insert(0, os.getcwd())
        sys.argv = ["harness.py", program.trial_class]
        harness.main(program.trial_class)
    elif program.module:
        sys.path.insert(0, os.getcwd())
        sys.argv = [program.module, *args]
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    else:
        # `__file__` is absolute, as Python has it: a script may change its folder, or spawn itself.
        script = os.path.abspath(program.script)
        # Python looks beside the file itself; links to it may have their own neighbours, too.
        beside = dict.fromkeys(map(os.path.dirname, (os.path.realpath(script), script)))
        sys.path[:0] = list(beside)
        sys.argv = [program.script, *args]
        runpy.run_path(script, run_name="__main__")


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or FAILED
    os._exit(status)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
