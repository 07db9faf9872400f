"""Rich runs of a machine that does not exist, for whatever is drawn from runs: no trial is run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.tuning.journal import FILE_NAME, MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import MemoryUse, Metrics, Outcome
from dsat.values.trial import Trial, TrialKind
from testing.helpers import (
    FakeClock,
    World,
    drive,
    failed,
    first_profiled,
    plan_of,
    profiled,
    ran,
)

HOSTILE = "</script><script>document.body.dataset.hacked='yes'</script><img src=x onerror=alert(1)>"


class Measured(World):
    """A made-up machine that measures all that a device would."""

    def outcome(self, trial: Trial) -> Outcome:
        return measured(super().outcome(trial), trial)


def measured(found: Outcome, trial: Trial) -> Outcome:
    """An outcome with all that a device would have measured besides the throughput."""
    if found.metrics is None:
        return found
    latency = 1000 * trial.batch.train_batch_size / found.metrics.throughput
    return replace(
        found,
        metrics=Metrics(
            throughput=found.metrics.throughput,
            latency=latency,
            forward=0.3 * latency,
            backward=0.5 * latency,
            step=0.1 * latency,
            FLOPS_per_gpu=None,
            num_steps=8,
            ci95=0.015,
        ),
        memory=MemoryUse(allocated_bytes={"forward": 20 * 2**30, "backward": 30 * 2**30}),
        duration_s=12.3,
    )


class Steady(Measured):
    """The same, on which the user's own configuration runs, so that there are finals; a
    configuration that is run again differs from itself by up to 1 %."""

    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        if trial.kind not in (TrialKind.BASELINE, TrialKind.FINAL):
            return found
        noise = 1 + (trial.id * 7 % 11 - 5) / 500
        size = trial.batch.micro_batch
        value = noise * 100.0 * size / (size + 5)
        return first_profiled(trial, measured(ran(value), trial), self.profile)


class Lawful(World):
    """Steps take 20 ms and 2 ms a sample, stage 2 5 % more, large buckets 4 % more."""

    def outcome(self, trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return profiled(self.profile)
        if trial.batch.micro_batch > 24:
            return failed("OOM")
        zero = trial.overrides.get("zero_optimization", {})
        slow = 1.04 if zero.get("reduce_bucket_size", 0) > 10**8 else 1.0
        slow *= 1.05 if trial.stage == 2 else 1.0
        size = trial.batch.micro_batch
        value = size / (slow * (0.020 + 0.002 * size))
        return first_profiled(trial, measured(ran(value), trial), self.profile)


def run_of_world(world: World | None = None, **options: Any) -> Run:
    """A run of `events_of_world`."""
    return Run(events_of_world(world, **options))


def events_of_world(
    world: World | None = None,
    *,
    method: str = "random",
    trials: int = 40,
    finals: int | None = 0,
) -> list[dict[str, Any]]:
    """The journal of a search on a made-up machine; `finals` as `Plan` has them."""
    journal = MemoryJournal()
    plan = plan_of(method, max_trials=trials, finals=finals)
    info = {"name": f"model {HOSTILE}", "machine": "8 devices"}
    drive(Tuner(plan, journal, info=info, clock=FakeClock()), world or Measured(), slots=2)
    return journal.events


def write_run(folder: Path, world: World | None = None, **options: Any) -> Run:
    """The folder of such a run, with its journal and the files of its trials.

    Args:
        folder: made if it is missing.
        world: the machine.
        options: of `events_of_world`.
    """
    events = events_of_world(world, **options)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / FILE_NAME).write_text(lines, encoding="utf-8")
    run = Run(events)
    for trial in run.trials.values():
        below = folder / "trials" / trial.name
        below.mkdir(parents=True)
        steps = "".join(f"step {number} of {trial.name}\n" for number in range(40))
        (below / "stdout.log").write_text(steps, encoding="utf-8")
        (below / "stderr.log").write_text("", encoding="utf-8")
        config = json.dumps(run.plan.config(trial.overrides), indent=2)
        (below / "ds_config.json").write_text(config, encoding="utf-8")
    return run
