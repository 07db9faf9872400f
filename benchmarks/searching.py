"""dsat's searches on recorded or made-up outcomes: the only place where benchmarks use its tuner.

Tuner, loop and finals are real; the engine is simulated, so no time passes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ledger import OBJECTIVE, STAGES, BudgetSpent, Ledger, Workload
from dsat.command import ds_config
from dsat.memory.predictor import Basis
from dsat.run.finals import MOST_TRIALS, reserved
from dsat.run.journal import FILE_NAME, MemoryJournal, read_events
from dsat.run.loop import drive
from dsat.run.run import Run
from dsat.run.strategies import make_space
from dsat.run.tuner import Tuner
from dsat.search import SEARCHES, Context, Observation, Problem, Proposal, usual_options
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.space.overrides import overrides_for
from dsat.space.plan import BY_FORMULA, BY_SIMULATION, LONGEST_S, Plan
from dsat.space.space import Freedom, Space
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Trial, TrialKind
from dsat.values.zero_strategy import plain
from testing.simulated import SimulatedEngine


def search(
    plan: Plan,
    outcome_of: Callable[[Trial], Outcome],
    *,
    concurrent: int = 1,
    basis: Basis | None = None,
) -> Run:
    """Run a whole search, including finals, whose trials a function answers.

    Args:
        concurrent: number of trials at once.
        basis: basis of memory predictions, if the plan asks for simulations.
    """
    tuner, slots = Tuner(plan, MemoryJournal()), plan.slots_per_trial
    engine = SimulatedEngine(outcome_of, num_slots=concurrent * slots, slots_per_trial=slots)
    survey = None if basis is None else lambda: basis
    drive(tuner, engine, survey=survey)
    return tuner.run


def plan_of(table: Workload, method: str, *, seed: int = 0, max_trials: int = 50) -> Plan:
    """Return the plan of a search over what a workload contains, beginning as for users, without
    finals."""
    header = table.header
    return Plan(
        method=method,
        metric=OBJECTIVE.metric,
        max_trials=max_trials,
        search_options=usual_options(method),
        zero_stages=STAGES,
        seed=seed,
        slots_per_trial=header.slots,
        base_config=header.ds_config,
        own_batch=ds_config.resolve_batch(header.ds_config, header.slots, where=header.name),
        slot_memory_bytes=header.slot_memory_bytes,
        max_micro_batch=table.cap,
        choices=table.choices,
        train_batch_size=header.train_batch_size,
        fix=tuple(name for name in SETTING_NAMES if name not in table.choices),
        ramp=True,
        longest_s=LONGEST_S,
        measured={"steps": header.steps},
        memory_model=BY_FORMULA if header.memory is None else BY_SIMULATION,
    )


def search_ledger(ledger: Ledger, plan: Plan) -> Run:
    """Run a whole search whose trials a ledger records; also record its recommendation."""
    header = ledger.table.header

    def outcome_of(trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return ledger.profile()
        again = trial.kind is TrialKind.FINAL
        outcome = (ledger.run_again if again else ledger.run)(plan.config(trial.overrides))
        return replace(outcome, profile=header.profile if trial.profiles else None)

    basis = None if header.memory is None else Basis.from_json(dict(header.memory))
    run = search(plan, outcome_of, basis=basis)
    if run.best is not None:
        ledger.recommended = plan.config(run.best.overrides)
    return run


def play(method: str, ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run one of `dsat.search.SEARCHES`, one trial at a time, then its finals.

    Any gain justifies a larger batch here, as tuners are judged by speed alone.
    """
    # The total budget that leaves `max_trials` for the search after the finals' reserve.
    sums = range(max_trials + MOST_TRIALS, 0, -1)
    total = next(each for each in sums if each - reserved(each) <= max_trials)
    plan = plan_of(ledger.table, method, seed=seed, max_trials=total)
    with contextlib.suppress(BudgetSpent):  # a search without finals also uses their reserve
        search_ledger(ledger, replace(plan, finals=None, indifference=0.0))


def decide(
    method: str,
    profile: ModelProfile,
    outcome_of: Callable[[Mapping[str, Any], int], Outcome],
    *,
    trials: int,
    concurrent: int,
    slots: int,
) -> None:
    """Run a search without a tuner, on the real space with a further setting, so that it never
    ends."""
    space = Space(
        strategies=plain(*STAGES),
        micro_batches=range(1, LARGEST_MICRO_BATCH + 1),
        slots=slots,
        freedom=Freedom(choices={"gradient_accumulation_steps": range(1, 101)}),
    )
    asked = SEARCHES[method](Problem(profile, OBJECTIVE, space, seed=42))
    observations: list[Observation] = []
    running: deque[int] = deque()
    while len(observations) < trials + concurrent - 1 or running:
        while len(running) < concurrent and len(observations) < trials + concurrent - 1:
            proposal = asked.propose(observations, Context())
            assert isinstance(proposal, Proposal)
            point = proposal.point
            settings = space.branches[point.branch].settings(point.index)
            running.append(len(observations))
            batch = space.batch(point.micro_batch, settings)
            observations.append(
                Observation(
                    point,
                    batch,
                    None,
                    neighbours=len(running) - 1,
                    arm=proposal.arm,
                    note=proposal.note,
                )
            )
        ended = running.popleft()
        known = observations[ended]
        assert known.point is not None
        settings = space.branches[known.point.branch].settings(known.point.index)
        outcome = outcome_of(settings, known.point.micro_batch)
        observations[ended] = replace(known, outcome=outcome)


def reference_configs(plan: Plan, profile: ModelProfile) -> list[dict[str, Any]]:
    """Return the configuration of each strategy that is simulated before a search begins."""
    space, found = make_space(plan, profile), []
    for branch in space.branches:
        settings = branch.settings(0)
        batch = space.batch(space.micro_batches[0], settings)
        found.append(plan.config(overrides_for(settings, batch)))
    return found


def seconds(run: Run) -> tuple[float, float]:
    """Return the total seconds of a search's trials, and of its finals."""
    took_s = {True: 0.0, False: 0.0}
    for trial in run.trials.values():
        took_s[trial.kind is TrialKind.FINAL] += run.outcomes[trial.id].duration_s
    return took_s[False], took_s[True]


def run_in(folder: Path) -> Run:
    """Read the run whose journal is in a folder."""
    return Run(read_events(folder / FILE_NAME))
