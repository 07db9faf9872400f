"""dsat's own searches, with its real tuner and loop, on the simulated engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.ledger import OBJECTIVE, STAGES, Ledger, Workload
from dsat.inputs import ds_config
from dsat.inputs.settings import BY_FORMULA, BY_SIMULATION
from dsat.memory.predictor import Basis
from dsat.search import usual_options
from dsat.space.knobs import KNOB_NAMES
from dsat.space.plan import LONGEST_S, Plan
from dsat.tuning.finals import MOST_TRIALS, reserved
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.loop import drive
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind
from testing.simulated import SimulatedEngine


def plan_of(table: Workload, method: str, *, seed: int = 0, max_trials: int = 50) -> Plan:
    """The plan that searches what a table has recorded, as users begin; buckets first that need
    little memory."""
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
        choices={k: v for k, v in table.choices.items() if k not in header.switches},
        switches=header.switches,
        train_batch_size=header.train_batch_size,
        fix=tuple(name for name in KNOB_NAMES if name not in table.choices),
        ramp=True,
        longest_s=LONGEST_S,
        measured={"steps": header.steps},
        memory_model=BY_FORMULA if header.memory is None else BY_SIMULATION,
    )


def play(method: str, ledger: Ledger, seed: int, max_trials: int) -> None:
    """Runs one of `dsat.search.SEARCHES`, one trial at a time, then its finals.

    A larger batch is worth any gain here: a tuner is judged by speed alone.
    """
    header = ledger.table.header
    # So many that those which are not reserved for the finals are the search's own.
    sums = range(max_trials + MOST_TRIALS, 0, -1)
    total = next(each for each in sums if each - reserved(each) <= max_trials)
    plan = plan_of(ledger.table, method, seed=seed, max_trials=total)
    plan = replace(plan, finals=None, indifference=0.0)

    def config_of(trial: Trial) -> dict[str, Any]:
        return {**plan.config(trial.overrides), **header.switches, **trial.script_args}

    def outcome_of(trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return ledger.profile()
        again = trial.kind is TrialKind.FINAL
        outcome = (ledger.run_again if again else ledger.run)(config_of(trial))
        return replace(outcome, profile=header.profile if trial.profiles else None)

    tuner = Tuner(plan, MemoryJournal())
    engine = SimulatedEngine(outcome_of, num_slots=header.slots, slots_per_trial=header.slots)
    drive(
        tuner,
        engine,
        max_concurrent_trials=1,
        survey=lambda _: Basis.from_json(header.memory or {}),
    )
    if tuner.run.best is not None:
        ledger.recommended = config_of(tuner.run.best)
