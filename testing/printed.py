"""The training command that a run prints at its end, made without a search."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.places import local as this_machine
from dsat.run.run import Run
from dsat.show import summary
from dsat.show.view import RunView
from dsat.tuning import preparation as prepare
from dsat.tuning import train_command
from dsat.tuning.command_line import CommandLine
from dsat.tuning.preparation import Prepared
from dsat.tuning.settings import Settings
from dsat.values.outcome import Outcome, OutcomeKind, ScriptSwitch
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import ran, weightless
from testing.local import cpu_machine


def prepared(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Prepared:
    """Prepare `dsat random -- COMMAND` in a folder, on this machine's cores."""
    monkeypatch.chdir(folder)
    machine = cpu_machine(len(os.sched_getaffinity(0)))
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: machine)
    words = tuple(shlex.split(command))
    wanted = Settings(method="random", command=words, dry_run=True, **settings)
    with prepare.prepare_run(wanted, CommandLine("random", (), words)) as ready:
        return ready


def own_configuration(ready: Prepared) -> Trial:
    batch = BatchTriple(ready.plan.slots_per_trial, 1, 1)
    return Trial(0, TrialKind.BASELINE, "own", 1, batch, overrides=batch.config())


def printed_line(
    ready: Prepared,
    folder: Path,
    *,
    found: Mapping[str, ScriptSwitch] | None = None,
    warnings: Sequence[str] = (),
    **switches: Any,
) -> str:
    """Return the command printed after a run of only the baseline; write the run's files.

    Args:
        found: switches that the script was observed to have.
        warnings: warnings of the trial.
        switches: values of the script's switches in the trial.
    """
    best, run = replace(own_configuration(ready), script_args=switches), Run()
    run.apply({"event": "start", "plan": ready.plan, "info": ready.info})
    run.apply({"event": "proposed", "trial": best})
    outcome = replace(ran(1.0, ready.plan.metric), warnings=tuple(warnings))
    run.apply({"event": "finished", "trial_id": best.id, "outcome": outcome})
    run.profiled = Outcome(OutcomeKind.OK, profile=replace(weightless(1), switches=found or {}))
    line = train_command.make_line(ready, run, folder)
    summary.write_files(RunView(run), folder, line)
    return line


def printed_in(run_dir: Path) -> str:
    """Return the training command in a run's summary."""
    said = (run_dir / "summary.md").read_text(encoding="utf-8")
    return said.partition("Train with it: `")[2].partition("`")[0]
