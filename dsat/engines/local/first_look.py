"""Starts the user's script while dsat is still getting ready, to see at once whether it can start.

The process ends by itself before it changes anything outside of it (see
`dsat.in_trial.start_recorder`), so it may run beside anything and be ended at any time. Only errors
count that no trial would be without: what the script imports is not there, a file that it reads is
missing, its arguments are wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from dsat.engines.local import trial_result
from dsat.engines.local.launch import log_files
from dsat.engines.local.ports import free_ports
from dsat.errors import ScriptFailed
from dsat.in_trial import start_recorder
from dsat.in_trial.loopback import ADDRESS
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment

# argparse's, and that of others who find a command line wrong.
_USAGE_STATUS = 2
_SAMPLES = 5
_BETWEEN_SAMPLES_S = 0.01
_HARMLESS_OPTIONS = frozenset(("-u", "-B", "-O", "-OO"))


class FirstLook:
    """A process of the user's script, up to where it would change anything.

    It is ended when this is forgotten, and with the thread that began it.

    Args:
        command: of the script, without a launcher.
        cwd: where.
        env: all of its variables but those that are this one's own.
    """

    def __init__(self, command: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dsat-"))
        hook = self._folder / "hook"
        hook.mkdir()
        shutil.copyfile(start_recorder.__file__, hook / "sitecustomize.py")
        path = [str(hook), env.get("PYTHONPATH"), str(Path(__file__).resolve().parents[3])]
        out, err = (self._folder / name for name in log_files(0))
        with open(out, "wb") as printed, open(err, "wb") as said:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                cwd=cwd,
                env={
                    **env,
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    start_recorder.FOLDER_VARIABLE: str(self._folder),
                    start_recorder.CAREFUL_VARIABLE: str(os.getpid()),
                    "DSAT_TRIAL_DIR": str(self._folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                start_new_session=True,
            )
        self._forget = weakref.finalize(self, _end, self._process, self._folder)

    @classmethod
    def at(cls, experiment: Experiment, program: Entrypoint) -> FirstLook | None:
        """A look at an experiment's program.

        None where there is nothing to look at alone, or nothing to be had by it: a program that
        needs Determined or other files around it, or a machine without a core to spare.
        """
        given = experiment.entrypoint
        words = given if isinstance(given, str) else " ".join(map(str, given))
        apart = program.trial_class or program.interpreter or program.hosts or experiment.includes
        known = (program.script or program.module) and "determined" not in words
        # Without the hook on PYTHONPATH, which other options may hide, the training would begin.
        hooked = _HARMLESS_OPTIONS.issuperset(program.python_options)
        if apart or not known or not hooked or not _has_a_core_to_spare():
            return None
        what = ["-m", program.module] if program.module else [program.script]
        if program.passes_local_rank:
            what.append("--local_rank=0")
        own = {**os.environ, **experiment.env, **program.env}
        ranks = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "1")
        ranks |= dict.fromkeys(("RANK", "LOCAL_RANK", "CROSS_RANK", "GROUP_RANK"), "0")
        port = str(free_ports(1)[0])
        return cls(
            [sys.executable, *program.python_options, *what, *program.args],
            experiment.model_dir,
            {**own, **ranks, "MASTER_ADDR": ADDRESS, "MASTER_PORT": port},
        )

    def check(self) -> None:
        """Raises ScriptFailed if the script has met an error that is surely its own."""
        if not self._forget.alive:
            return
        status = self._process.poll()
        if status is None:
            return
        path = self._folder / start_recorder.ERROR_FILE
        if path.exists():
            error = json.loads(path.read_text(encoding="utf-8"))
            message, detail = str(error["message"]), str(error["detail"])
        elif status == _USAGE_STATUS:
            message = f"it ended with exit status {status}"
            detail = trial_result.log_tail(self._folder)
        else:
            self.end()
            return
        log = self._folder / log_files(0)[1]
        self._forget.detach()  # the log stays
        raise ScriptFailed(
            f"your script failed before it called deepspeed.initialize: {message}. Its log is "
            f"{log}",
            detail,
        )

    def end(self) -> None:
        """Ends the process, if it goes on, and leaves nothing."""
        self._forget()


def _has_a_core_to_spare() -> bool:
    """Whether one is idle besides that which dsat's own imports take."""
    return max(_running() for _ in range(_SAMPLES)) <= len(os.sched_getaffinity(0)) - 1 > 0


def _running() -> int:
    """Threads on this machine that run or want to, this one among them; proc(5)."""
    time.sleep(_BETWEEN_SAMPLES_S)
    *_, counts, _ = Path("/proc/loadavg").read_text().split()
    return int(counts.partition("/")[0])


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
