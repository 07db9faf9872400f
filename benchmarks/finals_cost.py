"""What the finals of a search cost, on recorded tables: `python3 -m benchmarks.finals_cost`.

Every search runs as a user runs it, its finals included, and its trials take the time that they
took when they were recorded. A run of a trial differs from another by some noise, since otherwise
finals would be over at once. Told is the time of the finals as a part of the search's, in the
median of the seeds, and how many trials they took.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

import numpy as np

from benchmarks import tables
from benchmarks.peers.ours import plan_of
from benchmarks.tables import Table
from dsat.memory.predictor import Basis
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.loop import drive
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind
from testing.simulated import SimulatedEngine

METHODS = ("model", "asha", "binary", "random")
NOISE = 0.05  # of one run, about what the passes of the tables are apart by
MOST_COST = 0.30
EXPLANATION = (__doc__ or "").split("\n\n", 1)[1].strip().splitlines()


def finals_of(table: Table, method: str, seed: int) -> tuple[float, int]:
    """The finals' time as a part of the search's, and their number of trials."""
    header, rng = table.header, np.random.default_rng(seed)
    plan = replace(plan_of(table, method, seed=seed), finals=None)

    def outcome_of(trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return table.profile_outcome
        outcome = table.answer(plan.config(trial.overrides))
        outcome = replace(outcome, profile=header.profile if trial.profiles else None)
        metrics, factor = outcome.metrics, math.exp(NOISE * rng.normal())
        if metrics is None:
            return outcome
        noisy = replace(
            metrics, throughput=metrics.throughput * factor, latency=metrics.latency / factor
        )
        return replace(outcome, metrics=noisy)

    engine = SimulatedEngine(outcome_of, num_slots=header.slots, slots_per_trial=header.slots)
    tuner = Tuner(plan, MemoryJournal())
    basis = Basis.from_json(header.memory or {})
    drive(tuner, engine, max_concurrent_trials=1, survey=lambda _: basis)
    run, took_s = tuner.run, {True: 0.0, False: 0.0}
    for trial in run.trials.values():
        took_s[trial.kind is TrialKind.FINAL] += run.outcomes[trial.id].duration_s
    return took_s[True] / took_s[False], run.num_finals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    costs = []
    print("| table | search | trials of the finals | part of the search's time |")
    print("|---|---|---|---|")
    for table in tables.read_all():
        for method in args.methods:
            found = [finals_of(table, method, seed) for seed in range(args.seeds)]
            cost, trials = (statistics.median(each) for each in zip(*found, strict=True))
            costs.append(cost)
            print(f"| {table.header.name} | {method} | {trials:g} | {cost:.1%} |", flush=True)
    median = statistics.median(costs)
    verdict = "met" if median <= MOST_COST else "missed"
    print(f"| median | all | | {median:.1%}: at most {MOST_COST:.0%} is {verdict} |")


if __name__ == "__main__":
    main()
