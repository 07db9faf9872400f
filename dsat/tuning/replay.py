"""Resumes a run: decides again what was decided then, and checks that it is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsat.errors import JournalMismatch
from dsat.inputs.switches import BIND_CORES, SWITCHES
from dsat.space.overrides import SEQUENTIAL
from dsat.space.plan import Plan
from dsat.space.space import Suggestion
from dsat.tuning.decisions import Decisions
from dsat.tuning.events import (
    EVENT_PROPOSED,
    EVENT_START,
    EVENT_WAITING,
    event_of,
    raise_as_corrupt_journal,
)
from dsat.values.codec import encode
from dsat.values.trial import Trial


def replay(decisions: Decisions, events: Iterable[Mapping[str, Any]]) -> None:
    """Brings new decisions to where an earlier run was.

    Args:
        decisions: of a plan, nothing applied to them.
        events: of the earlier run, as its journal holds them. It may have had more trials than are
            planned now, or fewer.

    Raises:
        JournalMismatch: the events were decided by another program, plan or seed.
        JournalError: they do not fit together.
    """
    number = 0
    for number, line in enumerate(events, start=1):
        with raise_as_corrupt_journal(number):
            event = event_of(line)
            if event["event"] == EVENT_START:
                _check_plan(decisions.plan, event["plan"])
            elif event["event"] in (EVENT_PROPOSED, EVENT_WAITING):
                _check_decision(decisions, event)
            decisions.apply(event)
    if number:
        with raise_as_corrupt_journal(number):
            _ = decisions.stop_reason  # what follows from the last event too


def as_begun(plan: Plan, events: Sequence[Mapping[str, Any]]) -> Plan:
    """Return a plan with the space and the suggestions of the run that it continues.

    A run has the knobs of its recorded defaults; the first ones recorded none, and have no knobs
    that came later.
    """
    first = events[0] if events else {}
    earlier = first.get("plan")
    if first.get("event") != EVENT_START or not isinstance(earlier, Mapping):
        return plan
    plan = replace(
        plan,
        own_first=bool(earlier.get("own_first")),
        suggested=tuple(map(Suggestion.from_json, earlier.get("suggested", ()))),
    )
    if "listed_switches" not in earlier:
        plan = _without_later_names(plan, earlier)
    defaults = earlier.get("defaults")
    if not isinstance(defaults, Mapping) or not defaults:
        return replace(plan, defaults={}, slots_per_host=0)
    today = plan.defaults
    return replace(plan, defaults={path: today.get(path, own) for path, own in defaults.items()})


def _without_later_names(plan: Plan, earlier: Mapping[str, Any]) -> Plan:
    """Return a plan without the switches and knobs that came after the plan of an earlier run."""
    later = {BIND_CORES, SEQUENTIAL, *SWITCHES}
    return replace(
        plan,
        listed_switches={n: v for n, v in plan.listed_switches.items() if n != BIND_CORES},
        tune=tuple(n for n in plan.tune if n not in later or n in earlier.get("tune", ())),
        fix=tuple(n for n in plan.fix if n not in later or n in earlier.get("fix", ())),
    )


def _check_plan(plan: Plan, earlier: Plan) -> None:
    difference = plan.difference(earlier)
    if difference is not None:
        raise JournalMismatch(
            f"Cannot resume: {difference}. Resume with the options and files that the run was "
            "started with, or start a new run."
        )


def _check_decision(decisions: Decisions, event: Mapping[str, Any]) -> None:
    decided: Trial | None = (decisions.next_event(ignore_budget=True) or {}).get("trial")
    earlier: Trial | None = event.get("trial")
    if encode(decided) == encode(earlier):
        return
    said = "nothing" if decided is None else decided.name
    if earlier is None:
        assert decided is not None
        began = f"the run waited before trial {decided.id}"
    else:
        began = f"trial {earlier.id} was {earlier.name}"
    raise JournalMismatch(
        f"{began}, but this dsat decides {said}. The run was made by another version: start a new "
        "one."
    )
