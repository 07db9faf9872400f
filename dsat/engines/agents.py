"""Processes on a run's hosts that start ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dsat.engines.agent.leftovers import CompilerLocks
from dsat.engines.machines.hosts import Host
from dsat.engines.own_command import OwnCommand
from dsat.engines.start import StartMethod
from dsat.engines.starts import StartBuilder
from dsat.engines.supervisors import Supervisors
from dsat.values import slow

_log = logging.getLogger(__name__)


class Agents:
    """Supervisors of all hosts, started once the user's own command has ended.

    Their imports would disturb its measurement. `own` is that command until it has ended;
    `supervisors` are its own, or those of all hosts.
    """

    def __init__(
        self, builder: StartBuilder, hosts: Sequence[Host], own: OwnCommand | None
    ) -> None:
        self._builder = builder
        self._hosts = hosts
        self._env = {**builder.experiment.env, **builder.program.env}
        self._modules = tuple(builder.options.imported)  # of the script
        self._locks = CompilerLocks({**os.environ, **self._env})
        self.has_begun = False
        self.own = own
        self.supervisors: Supervisors
        if own is not None:
            self.supervisors = own.supervisors

    def begin(self, method: StartMethod) -> str:
        """Start the supervisors of all hosts, unless they run.

        Returns why ranks cannot be forked; empty if they can be, or start otherwise.
        """
        self.end_command()
        if self.has_begun:
            return ""
        builder, program = self._builder, self._builder.program
        self.supervisors = Supervisors(self._hosts, builder.run, env=self._env)
        self.has_begun = True
        try:
            if any(host.reach for host in self._hosts):
                named = filter(None, (program.script, program.config_path))
                files = [builder.cwd / name for name in named]
                self.supervisors.check_files(builder.cwd, files)
            return self._warm_up() if method is StartMethod.FORKED else ""
        except BaseException:
            self.supervisors.kill()
            raise

    def import_modules(self, modules: Sequence[str]) -> str:
        """Import modules of the user's script in advance; return as `begin` does."""
        self._modules = (*self._modules, *modules)
        return self._warm_up() if self.has_begun else ""

    def end_command(self) -> None:
        own, self.own = self.own, None
        if own is not None:
            own.close()

    def send(self, requests: Mapping[int, Mapping[str, Any]]) -> None:
        for host, request in requests.items():
            self.supervisors.send(host, request)

    def remove_locks(self, *, any_running: bool) -> None:
        """Remove compiler locks that ended processes left.

        With trials running on other hosts (`any_running`), whose compilers cannot be seen, do
        nothing.
        """
        if len(self._hosts) == 1 or not any_running:
            self._locks.remove()

    def close(self) -> None:
        self.end_command()
        self.supervisors.close()

    def _warm_up(self) -> str:
        has_own = len(self._modules) > len(self._builder.options.imported)
        which = "your script's libraries" if has_own else "torch and DeepSpeed"
        with slow.logged(_log, f"importing {which} once"):
            return self.supervisors.warm_up(self._modules)
