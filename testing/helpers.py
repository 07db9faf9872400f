"""Outcomes, searches and plans of several test modules, and loops that drive them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsat.inputs.recorded_start import RankStart
from dsat.search import SEARCHES, Search
from dsat.space.plan import Plan
from dsat.space.space import Freedom, Space
from dsat.tuning.tuner import Tuner
from dsat.values.objective import SMALLER_IS_BETTER, Objective
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Proposal, Trial, TrialKind
from dsat.values.zero_strategy import plain

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


def space_of(
    lineages: int = 8, *, micro_batches: Sequence[int] = range(1, 65), stage: int = 1
) -> Space:
    """One stage with up to 8 ZeRO sections, which differ in their bucket size."""
    buckets = (10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9)
    return Space(
        strategies=plain(stage),
        micro_batches=micro_batches,
        slots=1,
        freedom=Freedom(fix=("contiguous_gradients",)),
        num_params=buckets[lineages - 1],
    )


def search_of(
    method: str | type[Search],
    space: Space,
    *,
    ceiling: int = 15,
    metric: str = "throughput",
    seed: int = 0,
    **options: Any,
) -> Search:
    kind = SEARCHES[method] if isinstance(method, str) else method
    return kind(weightless(ceiling), Objective(metric), space, seed=seed, **options)


def play(search: Search, script: str, *, metric: str = "throughput") -> None:
    """Drives a search through a schedule written by hand and compares it line by line.

    Lines of a script, where `L` is a lineage and `M` a micro batch:

        ask L@M              the search proposes this; then, where there are any, the stage (of
                             several) and the note, as in `ask 0@8 stage 1 rung 0`
        ask nothing          the search has nothing to propose now
        tell L@M OOM         what became of a proposal that was asked before
        tell L@M OK 12.5     the same, with the objective's value
    """
    running: dict[str, Proposal] = {}
    for number, line in enumerate(script.strip().splitlines(), start=1):
        verb, what, *rest = line.split("#")[0].split()
        if verb == "ask":
            proposal = search.ask()
            if proposal is None:
                said = ["nothing"]
            else:
                key = f"{proposal.lineage}@{proposal.micro_batch}"
                assert key not in running, f"line {number}: {key} runs already"
                running[key] = proposal
                several = len(search.space.branches) > 1
                told = {"stage": proposal.settings["stage"]} if several else {}
                words = [f"{name} {number}" for name, number in {**told, **proposal.note}.items()]
                said = [key, *" ".join(words).split()]
            assert said == [what, *rest], f"line {number}: {line.strip()!r}, but asked {said}"
        else:
            assert verb == "tell"
            kind, *value = rest
            outcome = ran(float(value[0]), metric) if value else failed(kind)
            assert outcome.kind.value == kind
            search.tell(running.pop(what), outcome)


def walk(search: Search, trials: str) -> None:
    """Play one trial after the other: `8 OK, 12 OOM, end`, `end` if that was the last.

    The larger a micro batch, the slower it is. A lineage may be given, too: `1@7 OK`.
    """
    for trial in trials.split(", "):
        proposal = search.ask()
        if trial == "end":
            assert proposal is None
            return
        what, kind = trial.split()
        *lineage, size = map(int, what.split("@"))
        assert proposal is not None and proposal.micro_batch == size, trial
        assert lineage in ([], [proposal.lineage]), trial
        search.tell(proposal, ran(1 / size) if kind == "OK" else failed(kind))


def proposals_of(
    search: Search,
    outcome: Callable[[Proposal], Outcome],
    *,
    concurrency: int = 1,
    order: int = 0,
    limit: int = 300,
) -> list[Proposal]:
    """All proposals of a search; `order` seeds which of the running ones ends next."""
    rng = np.random.default_rng(order)
    asked: list[Proposal] = []
    running: list[Proposal] = []
    while True:
        while len(running) < concurrency and len(asked) < limit and search.stop_reason is None:
            proposal = search.ask()
            if proposal is None:
                break
            asked.append(proposal)
            running.append(proposal)
        if not running:
            return asked
        ended = running.pop(int(rng.integers(len(running))))
        search.tell(ended, outcome(ended))


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
