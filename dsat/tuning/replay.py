"""Resumes a run: decides again what was decided then, and checks that it is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsat.errors import DecisionMismatch, JournalMismatch
from dsat.search import usual_options
from dsat.space.plan import Plan, first_difference
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
    """Return a plan with what the run that it continues had: suggestions, knobs, a trial's length.

    A run has the knobs of its recorded defaults, and no option of its search that nobody has set
    since and that it did not have.
    """
    if not events:
        return plan
    with raise_as_corrupt_journal(1):
        earlier: Plan = event_of(events[0])["plan"]
    defaults = {path: plan.defaults.get(path, own) for path, own in earlier.defaults.items()}
    usual = usual_options(plan.method)
    options = {
        name: value
        for name, value in plan.search_options.items()
        if name in earlier.search_options or name not in usual or value != usual[name]
    }
    return replace(
        plan,
        search_options=options,
        suggested=earlier.suggested,
        defaults=defaults,
        longest_s=earlier.longest_s,
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
    if decided is not None and earlier is not None:  # a prediction is shown, and decides nothing
        decided = replace(decided, predicted_bytes=earlier.predicted_bytes)
    if encode(decided) == encode(earlier):
        return
    if decided is not None and earlier is not None and decided.name == earlier.name:
        path, was, now = first_difference(encode(earlier), encode(decided))
        raise DecisionMismatch(
            f"{'.'.join(path)} of trial {earlier.id} ({earlier.name}) was {was}, now {now}"
        )
    was = "the run waited" if earlier is None else f"trial {earlier.id} was {earlier.name}"
    now = "nothing" if decided is None else decided.name
    raise DecisionMismatch(f"{was}, but {now} is decided here")
