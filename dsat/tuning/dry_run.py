"""Output of a dry run: the search and its first trial."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dsat.prepare.hosts import describe
from dsat.run.journal import MemoryJournal
from dsat.run.strategies import fallbacks, make_space
from dsat.run.tuner import Tuner
from dsat.space.plan import Plan
from dsat.tuning.preparation import Prepared
from dsat.values.format import count
from dsat.values.text import redacted_command
from dsat.values.trial import Trial


def describe_plan(ready: Prepared) -> Iterator[str]:
    """Yield lines that describe a search, its hosts and its first trial."""
    plan, first = ready.plan, _first_trial(ready)
    yield from describe_search(ready.experiment.name, plan, f"on {describe(ready.hosts)}")
    fixed = [key for key in plan.fixed if key not in plan.fix]
    if fixed:
        yield f"set by your configuration, so not searched: {', '.join(fixed)}"
    others = "; ".join(strategy.label for strategy in fallbacks(plan))
    if others:
        yield f"if your configuration runs out of memory, dsat tries: {others}"
    own, groups = plan.own_batch, plan.parallelism().groups(plan.slots_per_trial)
    yield (
        f"your global batch: {own.train_batch_size} = micro batch {own.micro_batch} x gradient "
        f"accumulation {own.gas} x {groups}"
    )
    yield from ready.notes
    command = redacted_command(ready.program.command())
    yield f"trial 0 ({first.name}) starts {count(plan.slots_per_trial, 'rank')} of: {command}"
    changes = json.dumps(first.overrides)
    yield f"trial 0 overrides values of {ready.experiment.ds_config_name}: {changes}"


def describe_search(name: str, plan: Plan, where: str) -> Iterator[str]:
    """Yield lines that describe a search: its method, metric, hosts and search space."""
    yield f"{name}: {plan.method} search, optimising {plan.metric}"
    yield f"{where}, {count(plan.slots_per_trial, 'device')} per trial"
    yield f"at most {plan.max_trials} trials: your own configuration, then:"
    yield from (f"  {line}" for line in make_space(plan).describe())


def plan_to_json(ready: Prepared) -> dict[str, Any]:
    """Return a search and its first trial as JSON values."""
    plan = ready.plan
    space = make_space(plan).describe()
    return {
        "plan": {**plan.to_json(), "machine": describe(ready.hosts), "space": space},
        "first_trial": _first_trial(ready).to_json(),
        "command": ready.program.command(),
    }


def _first_trial(ready: Prepared) -> Trial:
    [trial] = Tuner(ready.plan, MemoryJournal()).next_trials(ready.plan.slots_per_trial)
    return trial
