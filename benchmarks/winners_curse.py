"""Is the gain that a run reports the gain that there is? Simulated, with the real tuner.

    python -m benchmarks.winners_curse [--seeds 300] [--output FILE]

Fifty configurations are close to each other and every measurement is noisy, so that the best of a
search is mostly the luckiest. A row is one kind of noise and one search, first what would be said
without finals and then with them. The true speed of every configuration is known here, hence:

- gain: of the recommended configuration over the user's own; 1 if their own is recommended.
- bias: of what is reported, in percentage points; "of claims": where a gain is reported.
- worse: how often something slower than the user's own is recommended.
- covered: how often the true ratio lies in the 95 % interval, whether or not it is significant.
- cost: of the finals, in trials and as a part of the search's time, in the median.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsat.report.verdict import gain
from dsat.space.plan import Plan
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.loop import drive
from dsat.tuning.tuner import Tuner
from dsat.values.files import write_atomically
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.student import half_width
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.simulated import SimulatedEngine

CONFIGURATIONS = 50
MOST_TRIALS = 65  # the profile, all configurations, finals
BATCH = 8
BUCKETS = [10**6 * number for number in range(1, CONFIGURATIONS + 1)]
PROFILE = ModelProfile(10**10, 10**10, 2, 10**6, 1e9, 80 * 2**30)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "asha": {},
    "binary": {},
    "random": {"trials_per_config": 1},
    "model": {},
}
MODEL_SHARE = 10  # its searches cost so much more that it gets this part of the seeds
# Of a trial, in virtual seconds: its start, and each of its steps.
START_S, STEP_S = 3.0, 0.1
WARM_UP, LEAST_STEPS, MOST_STEPS, TARGET = 2, 5, 20, 0.02

MOST_BIAS, MOST_WORSE, LEAST_COVERED, MOST_COST = 0.01, 0.05, 0.93, 0.30


# What the columns are, for the report.
EXPLANATION = (__doc__ or "").split("\n\n", 2)[2].strip().splitlines()


@dataclass(frozen=True)
class World:
    """Configurations and noise; all noise is relative, its size a standard deviation.

    Attributes:
        spread: speeds are uniform between 1 and 1 + this.
        step, run: of each step, and of each run as a whole.
        lift: by what all but the user's own are faster.
        drift: by what the machine slows down during the run.
        wander: of the machine's speed from trial to trial, which a trial inherits by 0.8.
        outliers: part of the runs that another job slows down.
        by: by what these are slower.
    """

    name: str
    spread: float = 0.05
    step: float = 0.05
    run: float = 0.0
    lift: float = 1.0
    drift: float = 0.0
    wander: float = 0.0
    outliers: float = 0.0
    by: float = 1 / 3


WORLDS = (
    World("steps 5 %"),
    World("steps 10 %", step=0.10),
    World("steps 5 %, runs 2 %", run=0.02),
    World("steps 5 %, runs 5 %", run=0.05),
    World("steps 5 %, runs 10 %", run=0.10),
    World("steps 1 %, runs 0.5 %", step=0.01, run=0.005),
    World("nothing to gain, runs 5 %", spread=0.0, run=0.05),
    World("nothing to gain, runs 1 %", spread=0.0, step=0.01, run=0.01),
    World("40 % to gain, runs 5 %", lift=1.4, run=0.05),
    World("40 % to gain, runs 1 %", lift=1.4, step=0.01, run=0.01),
    World("slows down by 20 %, runs 2 %", run=0.02, drift=0.20),
    World("wanders by 5 %, runs 2 %", run=0.02, wander=0.05),
    World("3 % of runs disturbed, runs 1 %", run=0.01, outliers=0.03),
    World("spread 2 %, runs 5 %", spread=0.02, run=0.05),
    World("spread 10 %, runs 5 %", spread=0.10, run=0.05),
    World("3 % to gain, runs 1 %", spread=0.0, lift=1.03, step=0.01, run=0.01),
    World("3 % to gain, runs 2 %", spread=0.0, lift=1.03, step=0.01, run=0.02),
    World("nothing to gain, runs 2 %", spread=0.0, step=0.01, run=0.02),
    World("30 % of runs 12 % slower, runs 1 %", run=0.01, outliers=0.30, by=0.12),
)


@dataclass(frozen=True)
class Result:
    """What one run said and what was true.

    Attributes:
        reported: the gain of what is recommended.
        true: that gain.
        claimed: whether it recommends another configuration than the user's own.
        reported_by_search, true_of_search: what it would have said without finals, and that gain.
        covered: whether the true ratio is in the interval; None without one.
        trials: of the finals.
        cost: their time, as a part of the search's.
    """

    reported: float
    true: float
    claimed: bool
    reported_by_search: float
    true_of_search: float
    covered: bool | None
    trials: int
    cost: float


class Machine:
    """Measures configurations of a world; what comes of a trial is in `outcome`."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = np.random.default_rng(seed)
        speeds = world.lift * (1 + world.spread * self._rng.random(CONFIGURATIONS))
        speeds[0] = 1 + world.spread * self._rng.random()  # the user's own
        self._speeds: dict[int, float] = dict(zip(BUCKETS, speeds.tolist(), strict=True))
        self._trials = 0
        self._wander = 0.0

    def speed(self, trial: Trial) -> float:
        """What is true."""
        zero = trial.overrides.get("zero_optimization", {})
        return self._speeds[int(zero.get("reduce_bucket_size", BUCKETS[0]))]

    def outcome(self, trial: Trial) -> Outcome:
        world, normal = self._world, self._rng.normal
        self._trials += 1
        self._wander = 0.8 * self._wander + 0.6 * world.wander * normal()
        slow = 1 + world.drift * self._trials / MOST_TRIALS
        if self._rng.random() < world.outliers:
            slow *= 1 + world.by
        mean_s = slow * math.exp(world.run * normal() + self._wander) / self.speed(trial)
        to_beat = trial.to_beat.get("throughput")
        steps = mean_s * np.maximum(0.05, 1 + world.step * normal(size=MOST_STEPS))
        latency_s, ci95, count = _measure(steps, None if to_beat is None else BATCH / to_beat)
        metrics = Metrics(BATCH / latency_s, 1e3 * latency_s, 1.0, 1.0, 1.0, None, count, ci95)
        duration_s = START_S + STEP_S * mean_s * (WARM_UP + count)
        profile = PROFILE if trial.profiles else None
        return Outcome(OutcomeKind.OK, metrics=metrics, profile=profile, duration_s=duration_s)


def _measure(steps: Any, to_beat_s: float | None) -> tuple[float, float, int]:
    """Mean, relative 95 % interval and number of the steps that a meter would have taken."""
    count = LEAST_STEPS
    while True:
        taken = steps[:count]
        mean = float(taken.mean())
        half = half_width(0.95, count - 1) * float(taken.std(ddof=1)) / math.sqrt(count) / mean
        beaten = to_beat_s is not None and mean * (1 - half) > to_beat_s
        if half <= TARGET or beaten or count == MOST_STEPS:
            return mean, half, count
        count = min(MOST_STEPS, 2 * count, math.ceil(count * (half / TARGET) ** 2))


def search(method: str, world: World, seed: int) -> Result:
    """One run of the real tuner."""
    machine = Machine(world, seed)
    zero = {"stage": 1, "reduce_bucket_size": BUCKETS[0], "contiguous_gradients": True}
    plan = Plan(
        method=method,
        metric="throughput",
        max_trials=MOST_TRIALS,
        zero_stages=(1,),
        seed=seed,
        slots_per_trial=1,
        base_config={"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero},
        own_batch=BatchTriple(BATCH, BATCH, 1),
        micro_batches=(BATCH,),
        choices={"reduce_bucket_size": BUCKETS},
        memory_model="none",
        search_options=METHODS[method],
        finals=None,
    )
    tuner = Tuner(plan, MemoryJournal())
    engine = SimulatedEngine(machine.outcome, num_slots=1)
    drive(tuner, engine, max_concurrent_trials=1)
    run = tuner.run
    assert run.best is not None and run.baseline is not None and run.leader is not None
    own, own_value, value = (
        machine.speed(run.baseline),
        run.value(run.baseline),
        run.value(run.leader),
    )
    assert own_value is not None and value is not None
    true, claimed = machine.speed(run.best) / own, run.best is not run.baseline
    found, covered, reported = gain(run), None, 1.0
    if found is not None and run.finals is not None and run.finals.pick is not None:
        ratio = machine.speed(run.trials[run.finals.pick.trial_id]) / own
        covered = found.low <= ratio <= found.high
        reported = found.ratio if claimed else 1.0
    times: dict[bool, float] = {True: 0.0, False: 0.0}
    for trial in run.trials.values():
        times[trial.kind is TrialKind.FINAL] += run.outcomes[trial.id].duration_s
    cost = times[True] / times[False]
    return Result(
        reported,
        true,
        claimed,
        value / own_value,
        machine.speed(run.leader) / own,
        covered,
        run.num_finals,
        cost,
    )


@dataclass(frozen=True)
class Row:
    """Many runs of one method in one world."""

    world: str
    method: str
    results: Sequence[Result]

    def mean(self, of: Callable[[Result], float]) -> float:
        return statistics.fmean(map(of, self.results))

    @property
    def bias(self) -> float:
        return self.mean(lambda r: r.reported - r.true)

    @property
    def bias_of_claims(self) -> float | None:
        claims = [r.reported - r.true for r in self.results if r.claimed]
        return statistics.fmean(claims) if claims else None

    @property
    def worse(self) -> float:
        return self.mean(lambda r: r.true < 1)

    @property
    def covered(self) -> float | None:
        known = [r.covered for r in self.results if r.covered is not None]
        return statistics.fmean(known) if known else None

    @property
    def cost(self) -> float:
        return statistics.median(r.cost for r in self.results)

    # Whether the row keeps to the bars, as far as its runs can tell (two standard errors).

    @property
    def is_unbiased(self) -> bool:
        spread = statistics.pstdev(r.reported - r.true for r in self.results)
        return abs(self.bias) <= MOST_BIAS + 2 * spread / math.sqrt(len(self.results))

    @property
    def is_seldom_worse(self) -> bool:
        return self.worse <= MOST_WORSE + _two_errors(MOST_WORSE, len(self.results))

    @property
    def is_covered(self) -> bool:
        covered, count = self.covered, len(self.results)
        return covered is None or covered >= LEAST_COVERED - _two_errors(LEAST_COVERED, count)

    @property
    def meets(self) -> bool:
        kept = self.is_unbiased and self.is_seldom_worse and self.is_covered
        return kept and self.cost <= MOST_COST

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        results = [Result(**each) for each in data["results"]]
        return cls(data["world"], data["method"], results)


def _two_errors(share: float, count: int) -> float:
    return 2 * math.sqrt(share * (1 - share) / count)


def run_rows(seeds: int, worlds: Sequence[World], methods: Sequence[str]) -> list[Row]:
    """All rows, on all cores."""
    rows = []
    with multiprocessing.get_context("fork").Pool() as pool:
        for world in worlds:
            for method in methods:
                count = max(20, seeds // MODEL_SHARE) if method == "model" else seeds
                first = 1000 * WORLDS.index(world)
                tasks = [(method, world, first + number) for number in range(count)]
                rows.append(Row(world.name, method, pool.starmap(search, tasks, chunksize=5)))
                print(_line(rows[-1]), flush=True)
    return rows


HEADINGS = (
    "| noise | search | bias before | worse | gain reported | true | bias | of claims | claims "
    "| worse | covered | trials | cost | |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def _line(row: Row) -> str:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def points(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:+.2f}"

    cells = (
        row.world,
        row.method,
        points(row.mean(lambda r: r.reported_by_search - r.true_of_search)),
        share(row.mean(lambda r: r.true_of_search < 1)),
        f"{row.mean(lambda r: r.reported):.3f}",
        f"{row.mean(lambda r: r.true):.3f}",
        points(row.bias),
        points(row.bias_of_claims),
        share(row.mean(lambda r: r.claimed)),
        share(row.worse),
        share(row.covered),
        f"{row.mean(lambda r: r.trials):.1f}",
        share(row.cost),
        "met" if row.meets else "missed",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=300, metavar="N")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--worlds", nargs="*", type=int, default=list(range(len(WORLDS))))
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    args = parser.parse_args()
    print("\n".join(HEADINGS))
    rows = run_rows(args.seeds, [WORLDS[number] for number in args.worlds], args.methods)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
