"""Outcomes and plans of several test modules, and a loop that drives a tuner."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.inputs.recorded_start import RankStart
from dsat.space.plan import Plan
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.objective import SMALLER_IS_BETTER
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind

Event = dict[str, Any]


def ran(value: float = 1.0, metric: str = "throughput") -> Outcome:
    """A success whose `metric` is `value`; every other one is as bad as can be."""
    slow = dict.fromkeys(SMALLER_IS_BETTER, 1e9)
    numbers = {"throughput": -1e9, "FLOPS_per_gpu": -1e9, **slow, metric: value}
    return Outcome(OutcomeKind.OK, metrics=Metrics(**numbers, num_steps=5, ci95=0.01, accidents=0))


def failed(kind: OutcomeKind | str, message: str = "") -> Outcome:
    return Outcome(OutcomeKind(kind), message=message)


def weightless(ceiling: int) -> ModelProfile:
    """A model without parameters: memory is activations alone, so that `ceiling` samples fit."""
    return ModelProfile(
        num_params=0,
        trainable_params=0,
        param_bytes=2,
        activation_bytes_per_sample=10,
        flops_per_sample=1e9,
        slot_memory_bytes=10 * ceiling,
    )


def profiled(profile: ModelProfile) -> Outcome:
    return Outcome(OutcomeKind.OK, profile=profile)


def plan_of(method: str = "binary", **changes: Any) -> Plan:
    plan = Plan(
        method=method,
        metric="throughput",
        max_trials=20,
        zero_stages=(1, 2, 3),
        seed=7,
        slots_per_trial=1,
        base_config={"optimizer": {"type": "Adam"}, "gradient_accumulation_steps": 1},
        own_batch=BatchTriple(4, 4, 1),
    )
    return replace(plan, **changes)


def first_profiled(trial: Trial, outcome: Outcome, profile: ModelProfile) -> Outcome:
    """The outcome, with the model's profile if it is that of the first trial and a success."""
    return replace(outcome, profile=profile) if trial.profiles and outcome.ok else outcome


def tuner_of(plan: Plan, events: list[Event] | None = None) -> tuple[Tuner, MemoryJournal]:
    """A tuner that goes on after some events, and its journal."""
    journal = MemoryJournal(list(events or []))
    return Tuner(plan, journal, events=events, clock=FakeClock()), journal


class FakeClock:
    """One second passes with each look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class World:
    """A made-up machine: decides what becomes of a trial, and which running one ends next.

    Both depend on the trial alone, so a resumed run meets the same world as an uninterrupted one.
    """

    # About 40 samples fit beside the model state; six bucket sizes are worth trying.
    profile = ModelProfile(
        num_params=2 * 10**8,
        trainable_params=2 * 10**8,
        param_bytes=4,
        activation_bytes_per_sample=10**9,
        flops_per_sample=1e12,
        slot_memory_bytes=44 * 10**9,
    )

    def outcome(self, trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return profiled(self.profile)
        return first_profiled(trial, self._measured(trial), self.profile)

    def _measured(self, trial: Trial) -> Outcome:
        chance = _digest(trial.name) % 100
        if chance < 8:
            return failed("ERROR", "the script crashed")
        if chance < 14:
            return failed("TIMEOUT")
        largest = (
            10 + _digest(json.dumps(trial.overrides["zero_optimization"])) % 30
            if ("zero_optimization" in trial.overrides)
            else 30
        )
        if trial.batch.micro_batch > largest:
            return failed("OOM" if chance % 2 else "HOST_OOM")
        return ran(100.0 * trial.batch.micro_batch / (trial.batch.micro_batch + 5) + chance / 7)

    def next_to_end(self, running: Iterable[Trial]) -> Trial:
        return min(running, key=lambda trial: _digest(f"{trial.id} {trial.name}"))


def drive(tuner: Tuner, world: World, *, slots: int = 1) -> None:
    """The loop that an engine would run, to the end."""
    plan = tuner.plan
    while True:
        tuner.next_trials(slots - plan.slots_per_trial * len(tuner.run.running))
        if not tuner.run.running:
            break
        trial = world.next_to_end(tuner.run.running)
        tuner.record(trial.id, world.outcome(trial))
    tuner.stop()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def starts_of(
    folder: Path, variables: Sequence[Mapping[str, str]], config: Mapping[str, Any] | None = None
) -> list[RankStart]:
    """The recorded starts of `train.py` in a folder: a rank for each mapping of variables."""
    return [
        RankStart(
            rank=number,
            size=len(variables),
            forked=False,
            executable=sys.executable,
            prefix=sys.prefix,
            version=tuple(sys.version_info[:2]),
            command=(sys.executable, "train.py"),
            cwd=str(folder),
            env=its,
            has_wrapt=True,
            config=config,
        )
        for number, its in enumerate(variables)
    ]
