"""What of a plan's settings DeepSpeed refuses beside the user's others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsat.space.knobs import KNOBS
from dsat.space.overrides import SCRIPT_SWITCHES, overrides_for
from dsat.space.plan import WHOLE_STRATEGY, Plan
from dsat.space.space import Branch
from dsat.tuning import strategies
from dsat.values.trial import BatchTriple

# Of whole DeepSpeed configurations: DeepSpeed's objection to each, None if it has none.
Objections = Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
# Sizes differ by too little for DeepSpeed to refuse one of them.
_SIZES = frozenset(knob.key for knob in KNOBS if knob.elements)


@dataclass
class Refused:
    """What is refused.

    Attributes:
        settings: as `Plan.refused` has it.
        lines: for people, one for each of them.
    """

    settings: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, branch: Branch, key: str, value: Any, objection: str) -> None:
        of_strategy = self.settings.setdefault(branch.strategy.name, {})
        of_strategy[key] = (*of_strategy.get(key, ()), value)
        what = branch.strategy.label
        if key != WHOLE_STRATEGY:
            what += f" with {key} {value if isinstance(value, Mapping) else str(value).lower()}"
        self.lines.append(f"{what} is not tried: {objection}")


def first_questions(plan: Plan) -> list[dict[str, Any]]:
    """The configurations that `of_plan` asks about first, and mostly all of them."""
    asked: list[dict[str, Any]] = []

    def note(configs: Sequence[Mapping[str, Any]]) -> list[None]:
        asked.extend(dict(config) for config in configs)
        return [None] * len(configs)

    of_plan(plan, note)
    return asked


def of_plan(plan: Plan, objections: Objections) -> Refused:
    """Which strategies DeepSpeed refuses, and which values of their settings.

    Each value is asked about by itself, beside the first values of all others; if these are
    refused, beside the first change of a single one of them that is not.

    Args:
        plan: with everything that may be tried.
        objections: asks DeepSpeed.
    """
    branches = _branches(plan)
    found = Refused()
    answers = _answers(plan, branches, [{}] * len(branches), objections)
    moved = {}
    for number, (own, changes) in enumerate(answers):
        taken = next((change for change, objection in changes if objection is None), None)
        if own is not None and taken is None:
            found.add(branches[number], WHOLE_STRATEGY, branches[number].strategy.stage, own)
        elif own is not None and taken is not None:
            moved[number] = taken
    again = _answers(plan, [branches[n] for n in moved], list(moved.values()), objections)
    for number, answer in zip(moved, again, strict=True):
        answers[number] = answer
    for branch, (own, changes) in zip(branches, answers, strict=True):
        if own is None:
            for change, objection in changes:
                if objection is not None:
                    [(key, value)] = change.items()
                    found.add(branch, key, value, objection)
    return found


def _branches(plan: Plan) -> list[Branch]:
    """Of all strategies that may be searched, those of the ladder among them."""
    whole = replace(plan, refused={})
    found = list(strategies.make_space(whole).branches)
    known = {branch.strategy for branch in found}
    further = [strategy for strategy in strategies.rungs(whole) if strategy not in known]
    if further:
        found += strategies.make_space(whole, only=further).branches
    return found


_Answer = tuple[str | None, list[tuple[dict[str, Any], str | None]]]


def _answers(
    plan: Plan,
    branches: Sequence[Branch],
    starts: Sequence[Mapping[str, Any]],
    objections: Objections,
) -> list[_Answer]:
    """Of each branch, the objection to its first settings with some changed, and, for each other
    value of a single one of these, the change and the objection to it."""
    asked: list[dict[str, Any]] = []
    changes = []
    for branch, start in zip(branches, starts, strict=True):
        first = {**branch.settings(0), **start}
        of_branch = [
            {key: value}
            for key, values in branch.knobs
            if key not in _SIZES and key not in SCRIPT_SWITCHES
            for value in values
            if value != first[key]
        ]
        changes.append(of_branch)
        asked += [{**first, **change} for change in ({}, *of_branch)]
    said = iter(objections([_config(plan, settings) for settings in asked]))
    return [(next(said), [(change, next(said)) for change in of_branch]) for of_branch in changes]


def _config(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    gas = plan.own_batch.gas
    return plan.config(overrides_for(settings, BatchTriple(gas * plan.slots_per_trial, 1, gas)))
