"""Trials that run the user's whole command again, where its ranks cannot be started otherwise."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from dsat.engines.local.launch import ALLOCATOR_SETTINGS, Launch, allocator_is_set, log_files
from dsat.in_trial import command_hook
from dsat.in_trial.command_hook import CHANGES_FILE
from dsat.in_trial.command_rank import DONE_FILE, PORTS_FILE
from dsat.in_trial.loopback import ADDRESS, INTERFACES
from dsat.in_trial.side_effects import trackers_off
from dsat.inputs.entrypoint import Entrypoint
from dsat.values.files import write_atomically
from dsat.values.text import words_without_secrets


def with_hook(
    env: Mapping[str, str],
    folder: Path,
    *,
    packages: Sequence[Path] = (),
    source: ModuleType = command_hook,
) -> dict[str, str]:
    """Environment in which every Python process of a command runs dsat's hook first.

    Args:
        env: of the command without it.
        folder: where the hook's own folder is made.
        packages: folders that processes may import from besides their own.
        source: of the hook.
    """
    hook = folder.resolve() / "hook"
    hook.mkdir()
    shutil.copyfile(str(source.__file__), hook / "sitecustomize.py")
    path = [str(hook), *filter(None, [env.get("PYTHONPATH")]), *map(str, packages)]
    return {**env, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class CommandLaunch(Launch):
    """One start of the user's command as a trial, on one host.

    The command decides how many ranks there are, and where they meet and run; dsat says on which
    cores, where these are the slots.

    Attributes:
        seen: the program as it was seen when the command was run first.
    """

    seen: Entrypoint

    @classmethod
    def of(cls, launch: Launch, seen: Entrypoint) -> CommandLaunch:
        """The same trial, started by the user's command."""
        return cls(**{f.name: getattr(launch, f.name) for f in fields(launch)}, seen=seen)

    def requests(self, cwd: Path) -> dict[int, dict[str, Any]]:
        """Return the request to the supervisor; the command starts in its own folder."""
        [share] = self.shares
        command = list(self.program.started_by)
        cores = self._cores(share, 0) if self._machine.is_cpu else []
        write_atomically(self.folder / CHANGES_FILE, json.dumps(self._changes()))
        env = with_hook(self._environment(), self.folder, packages=[self._linked_packages()])
        return {
            share.index: {
                "op": "launch",
                "trial": self.trial.id,
                "folder": str(self.folder.resolve()),
                "cwd": self.program.started_in or str(cwd.resolve()),
                "port": self.ports[0],
                "command": [shutil.which(command[0]) or command[0], *command[1:]],
                "ranks": [{"env": env, "cores": cores}],
                "logs": log_files(0),
                "linger_s": self.linger_s,
                "done": None if self.meter is None else DONE_FILE,
                "ports": PORTS_FILE,
            }
        }

    def command_text(self, cwd: Path) -> str:
        """The command as a person can paste it into a shell, in the trial's environment."""
        folder, hook = self.folder.resolve(), self.folder.resolve() / "hook"
        env = {k: v for k, v in self._environment().items() if os.environ.get(k) != v}
        users_own = self.experiment.env
        words = [
            f'{key}="${key}"' if key in users_own else f"{key}={shlex.quote(value)}"
            for key, value in sorted(env.items())
        ]
        path = f'PYTHONPATH={shlex.quote(str(hook))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        path += f":{shlex.quote(str(folder / 'packages'))}"
        command = shlex.join(words_without_secrets(self.program.started_by))
        lines = [
            "# The whole command: its ranks cannot be started by themselves, because",
            f"# {self.program.needs_command}.",
            f"cd {shlex.quote(self.program.started_in or str(cwd.resolve()))}",
            " ".join(["env", *words, path, command]),
        ]
        return "\n".join(lines) + "\n"

    def _environment(self) -> dict[str, str]:
        """All variables of the command but for the hook's."""
        env = {**INTERFACES, **os.environ, **self.experiment.env}
        env.update(
            # For a command that does not choose them itself.
            MASTER_ADDR=ADDRESS,
            MASTER_PORT=str(self.ports[0]),
            DS_ACCELERATOR=self._machine.accelerator,
            DSAT_TRIAL_DIR=str(self.folder.resolve()),  # by which the hook knows what to do
        )
        if self.meter is not None:
            env.update(trackers_off(self.folder))
        if self._machine.is_cpu:
            env["OMP_NUM_THREADS"] = "1"
        elif self._machine.expandable_segments and not allocator_is_set(env):
            env.update(ALLOCATOR_SETTINGS)
        return env

    def _changes(self) -> dict[str, Any]:
        """Return the arguments and variables that replace those of the first run."""
        seen, wanted = self.seen, self.program
        names = [n for n, value in seen.env.items() if wanted.env.get(n) != value]
        changed = {n: value for n, value in wanted.env.items() if seen.env.get(n) != value}
        unnamed = ["-m"] if seen.module else ["-c", "-", ""]
        return {
            "programs": [seen.script] if seen.script else unnamed,
            "args": [list(seen.args), list(wanted.args)],
            "env": [{name: seen.env[name] for name in names}, changed],
        }
