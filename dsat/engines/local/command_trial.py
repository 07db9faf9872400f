"""Trials that run the user's whole command again, where its ranks cannot be started otherwise."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.engines.local.launch import Launch, assignments
from dsat.engines.local.rank_settings import ALLOCATOR_SETTINGS, allocator_is_set, cores_of
from dsat.in_trial import command_hook
from dsat.in_trial.adapters.trackers import variables_off
from dsat.in_trial.loopback import ADDRESS, INTERFACES
from dsat.in_trial.rank_files import CHANGES_FILE, DONE_FILE
from dsat.inputs import accelerate_env
from dsat.inputs.entrypoint import Entrypoint
from dsat.values.files import write_atomically
from dsat.values.text import words_without_secrets


def with_hook(
    env: Mapping[str, str],
    folder: Path,
    *,
    packages: Sequence[Path] = (),
) -> dict[str, str]:
    """Return an environment in which every Python process of a command runs dsat's hook first.

    Args:
        env: of the command without it.
        folder: where the hook's own folder is made.
        packages: folders that processes may import from besides their own.
    """
    hook = folder.resolve() / "hook"
    hook.mkdir()
    shutil.copyfile(command_hook.__file__, hook / "sitecustomize.py")
    path = [str(hook), *filter(None, [env.get("PYTHONPATH")]), *map(str, packages)]
    return {**env, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class CommandLaunch(Launch):
    """One start of the user's command as a trial, on one host.

    The command decides how many ranks there are, and where they meet and run; dsat decides on which
    cores, where these are the slots.

    Attributes:
        recorded: the program as the first run recorded it.
        why: the reason for which ranks cannot be started by themselves.
    """

    recorded: Entrypoint
    why: str

    def requests(self, cwd: Path) -> dict[int, dict[str, Any]]:
        """Return the request to the supervisor; the command starts in its own folder."""
        [share] = self.shares
        is_cpu = self._machine.is_cpu
        cores = cores_of(share, 0, self.program, self.config) if is_cpu else []
        write_atomically(self._folder / CHANGES_FILE, json.dumps(self._changes()))
        env = with_hook(self._environment(), self._folder, packages=[self.linked_packages()])
        command = list(self.program.started_by)
        return {
            share.index: {
                **self._request(self._cwd(cwd), [{"env": env, "cores": cores}]),
                "command": [shutil.which(command[0]) or command[0], *command[1:]],
                "done": None if self.start.meter is None else DONE_FILE,
            }
        }

    def command_text(self, cwd: Path) -> str:
        """Return the command as a person can paste it into a shell, in the trial's environment."""
        words = assignments(self._environment())
        hook, packages = self._folder / "hook", self._folder / "packages"
        path = f'PYTHONPATH={shlex.quote(str(hook))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        path += f":{shlex.quote(str(packages))}"
        command = shlex.join(words_without_secrets(self.program.started_by))
        lines = [
            "# The whole command: its ranks cannot be started by themselves, because",
            f"# {self.why}.",
            f"cd {shlex.quote(str(self._cwd(cwd)))}",
            " ".join(["env", *words, path, command]),
        ]
        return "\n".join(lines) + "\n"

    def _cwd(self, cwd: Path) -> Path:
        return Path(self.program.started_in or cwd)

    def _environment(self) -> dict[str, str]:
        """Return all variables of the command but for the hook's."""
        env = {**INTERFACES, **os.environ, **self.experiment.env}
        env.update(
            # For a command that does not choose them itself.
            MASTER_ADDR=ADDRESS,
            MASTER_PORT=str(self.ports[0]),
            DS_ACCELERATOR=self._machine.accelerator,
            DSAT_TRIAL_DIR=str(self._folder),  # by which the hook finds the trial
        )
        if self.start.meter is not None:
            env.update(variables_off(self._folder))
        if self._machine.is_cpu:
            env["OMP_NUM_THREADS"] = "1"
        elif self._machine.expandable_segments and not allocator_is_set(env):
            env.update(ALLOCATOR_SETTINGS)
        return env | accelerate_env.for_parallelism(env, self.config, self._ranks)

    def _changes(self) -> dict[str, Any]:
        """Return the arguments and variables that replace those of the first run."""
        before, wanted = self.recorded, self.program
        names = [n for n, value in before.env.items() if wanted.env.get(n) != value]
        changed = {n: value for n, value in wanted.env.items() if before.env.get(n) != value}
        unnamed = ["-m"] if before.module else ["-c", "-", ""]
        return {
            "programs": [before.script] if before.script else unnamed,
            "args": [list(before.args), list(wanted.args)],
            "env": [{name: before.env[name] for name in names}, changed],
        }
