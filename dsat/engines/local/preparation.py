"""Preparation of a trial: its folder, and the requests that start its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsat.engines.local import leftovers
from dsat.engines.local.command_trial import CommandLaunch
from dsat.engines.local.hosts import Share
from dsat.engines.local.launch import COMMAND_FILE, Launch, LocalOptions
from dsat.engines.local.ports import free_ports
from dsat.engines.local.running import Running, Start, Way
from dsat.in_trial.rank_files import CONFIG_FILE, SPEC_FILE
from dsat.inputs import ds_config
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.values.files import PRIVATE_FOLDER, remove, write_atomically


@dataclass(frozen=True)
class Preparation:
    """Facts that all trials of a run share.

    Attributes:
        experiment: what is run.
        program: its entrypoint, taken apart.
        run: folder of the run.
        trials: folder of the trials' folders.
        cwd: folder that trials run in.
        options: how trials are run and measured.
    """

    experiment: Experiment
    program: Entrypoint
    run: Path
    trials: Path
    cwd: Path
    options: LocalOptions

    def config_of(self, start: Start) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a trial."""
        return ds_config.for_use(self.experiment.base_config, start.trial.overrides)

    def prepare(
        self, start: Start, shares: tuple[Share, ...], way: Way, *, why: str
    ) -> tuple[Running, Mapping[int, Mapping[str, Any]]]:
        """Write a trial's folder.

        Args:
            start: the trial.
            shares: its slots.
            way: in which its ranks are started.
            why: reason for which each trial runs the user's command again, if it does.

        Returns:
            The trial, and the requests to supervisors, by host.
        """
        trial, folder = start.trial, start.folder
        remove(folder)  # left when dsat was killed
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
        config, swap = leftovers.with_own_swap_folder(
            self.config_of(start), f"{self.run.name}-{trial.name}"
        )
        config_path = folder / CONFIG_FILE
        write_atomically(config_path, json.dumps(config, indent=2) + "\n")
        launch = Launch(
            experiment=self.experiment,
            program=self.program.for_config(
                str(config_path.resolve()), config, trial.script_args, self.experiment.arg_mappings
            ),
            start=start,
            shares=shares,
            config=config,
            ports=tuple(free_ports(3)),
            options=self.options,
            is_forked=way is Way.FORKED,
        )
        if way is Way.COMMAND:
            same = {f.name: getattr(launch, f.name) for f in fields(launch)}
            launch = CommandLaunch(**same, recorded=self.program, why=why)
        write_atomically(folder / SPEC_FILE, json.dumps(launch.spec().to_json(), indent=1) + "\n")
        write_atomically(folder / COMMAND_FILE, launch.command_text(self.cwd))
        return Running(start, shares, way, swap=swap), launch.requests(self.cwd)
