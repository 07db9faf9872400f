"""dsat's own searches, with its real tuner and loop, on the simulated engine."""

from __future__ import annotations

from benchmarks.ledger import OBJECTIVE, STAGES, Ledger
from benchmarks.search_scale import MemoryJournal, Silent
from dsat import ds_config
from dsat.engines.simulated import SimulatedEngine
from dsat.loop import drive
from dsat.plan import Plan
from dsat.trial import Outcome, Trial, TrialKind
from dsat.tuner import Tuner


def play(method: str, ledger: Ledger, seed: int, max_trials: int) -> None:
    """Runs one of `dsat.search.SEARCHES`, one trial at a time."""
    header = ledger.table.header
    plan = Plan(
        method=method,
        metric=OBJECTIVE.metric,
        max_trials=max_trials,
        zero_stages=STAGES,
        seed=seed,
        slots_per_trial=header.slots,
        base_config=header.ds_config,
        own_batch=ds_config.resolve_batch(header.ds_config, header.slots, where=header.name),
        slot_memory_bytes=header.slot_memory_bytes,
    )

    def outcome_of(trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return ledger.profile()
        return ledger.run(ds_config.merge(header.ds_config, trial.overrides))

    engine = SimulatedEngine(outcome_of, num_slots=header.slots, slots_per_trial=header.slots)
    drive(Tuner(plan, MemoryJournal()), engine, Silent(), max_concurrent_trials=1)
