"""Is the gain that a run reports the true gain? Simulated, with the real tuner.

    python -m benchmarks.winners_curse [--seeds 300] [--methods NAME ...] [--max-trials N]

Fifty configurations are close to each other and every measurement is noisy, so the best of a search
is mostly the luckiest. A row is one kind of noise and one search: first the report without finals,
then with them. The true speed of every configuration is known here, hence:

- gain: of the recommended configuration over the user's own; 1 if the user's own is recommended.
- bias: of the reported gain, in percentage points; "of claims": only where a gain is reported.
- worse: how often something slower than the user's own is recommended.
- covered: how often the 95 % interval contains the true ratio, significant or not.
- cost: of the finals, in trials (mean) and as a part of the search's time (median).
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import common, searching
from benchmarks.common import Bar
from dsat.run.trial_factory import count_finals
from dsat.show.verdict import gain
from dsat.space.plan import Plan
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.student import half_width
from dsat.values.trial import BatchTriple, Trial

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
# Virtual seconds of a trial: its start, and each step.
START_S, STEP_S = 3.0, 0.1
WARM_UP, LEAST_STEPS, MOST_STEPS, TARGET = 2, 5, 20, 0.02
MOST_BIAS, MOST_WORSE, LEAST_COVERED, MOST_COST = 0.01, 0.05, 0.93, 0.30


@dataclass(frozen=True)
class World:
    """Configurations and noise; all noise is relative, and its size a standard deviation.

    Attributes:
        spread: speeds are uniform between 1 and 1 + this.
        step, run: noise of each step, and of each run as a whole.
        lift: factor by which all configurations but the user's own are faster.
        drift: by how much the machine slows down during the run.
        wander: noise of the machine's speed between trials; a trial inherits 0.8 of the last.
        outliers: part of the runs that another job slows down.
        by: by how much these runs are slower.
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
    """The report of one run, and the truth.

    Attributes:
        reported: the reported gain of the recommendation.
        true: its true gain.
        claimed: whether another configuration than the user's own is recommended.
        reported_by_search, true_of_search: the same gains without finals.
        covered: whether the interval contains the true ratio; None without an interval.
        trials: number of trials of the finals.
        cost: time of the finals, as a part of the search's time.
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
    """Measures configurations of a world."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = np.random.default_rng(seed)
        speeds = world.lift * (1 + world.spread * self._rng.random(CONFIGURATIONS))
        speeds[0] = 1 + world.spread * self._rng.random()  # the user's own
        self._speeds: dict[int, float] = dict(zip(BUCKETS, speeds.tolist(), strict=True))
        self._trials = 0
        self._wander = 0.0

    def speed(self, trial: Trial) -> float:
        """Return the true speed of a trial's configuration."""
        zero = trial.overrides.get("zero_optimization", {})
        return self._speeds[int(zero.get("reduce_bucket_size", BUCKETS[0]))]

    def outcome(self, trial: Trial) -> Outcome:
        """Return the outcome of a trial, with noise."""
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
    """Return mean, relative 95 % half-width and number of steps, measured as a meter would."""
    count = LEAST_STEPS
    while True:
        taken = steps[:count]
        mean = float(taken.mean())
        half = half_width(0.95, count - 1) * float(taken.std(ddof=1)) / math.sqrt(count) / mean
        beaten = to_beat_s is not None and mean * (1 - half) > to_beat_s
        if half <= TARGET or beaten or count == MOST_STEPS:
            return mean, half, count
        count = min(MOST_STEPS, 2 * count, math.ceil(count * (half / TARGET) ** 2))


def search(method: str, world: World, seed: int, **changes: Any) -> Result:
    """Run the real tuner once.

    Args:
        changes: changed fields of the plan.
    """
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
    run = searching.search(replace(plan, **changes), machine.outcome)
    assert run.best is not None and run.baseline is not None and run.leader is not None
    own, own_value = machine.speed(run.baseline), run.value(run.baseline)
    value = run.value(run.leader)
    assert own_value is not None and value is not None
    claimed = run.best is not run.baseline
    found, covered, reported = gain(run), None, 1.0
    if found is not None and run.finals is not None and run.finals.pick is not None:
        ratio = machine.speed(run.trials[run.finals.pick.trial_id]) / own
        covered = found.low <= ratio <= found.high
        reported = found.ratio if claimed else 1.0
    search_s, finals_s = searching.seconds(run)
    return Result(
        reported=reported,
        true=machine.speed(run.best) / own,
        claimed=claimed,
        reported_by_search=value / own_value,
        true_of_search=machine.speed(run.leader) / own,
        covered=covered,
        trials=count_finals(run),
        cost=finals_s / search_s,
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
    def bias_error(self) -> float:
        """Standard error of the bias."""
        spread = statistics.pstdev(r.reported - r.true for r in self.results)
        return spread / math.sqrt(len(self.results))

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

    @property
    def meets(self) -> bool:
        return self.cost <= MOST_COST and all(demand.meets(self) for demand in DEMANDS)

    def cells(self) -> list[str]:
        """Return a table row for people; see `HEADINGS`."""
        return [
            self.world,
            self.method,
            _points(self.mean(lambda r: r.reported_by_search - r.true_of_search)),
            _share(self.mean(lambda r: r.true_of_search < 1)),
            f"{self.mean(lambda r: r.reported):.3f}",
            f"{self.mean(lambda r: r.true):.3f}",
            _points(self.bias),
            _points(self.bias_of_claims),
            _share(self.mean(lambda r: r.claimed)),
            _share(self.worse),
            _share(self.covered),
            f"{self.mean(lambda r: r.trials):.1f}",
            _share(self.cost),
            "met" if self.meets else "missed",
        ]


HEADINGS = (
    *("noise", "search", "bias before", "worse", "gain reported", "true", "bias", "of claims"),
    *("claims", "worse", "covered", "trials", "cost", ""),
)


def two_errors(share: float, count: int) -> float:
    """Return two standard errors of a share of `count` runs."""
    return 2 * math.sqrt(share * (1 - share) / count)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f}"


def run_rows(
    seeds: int, worlds: Sequence[World], methods: Sequence[str], max_trials: int = MOST_TRIALS
) -> Iterator[Row]:
    """Yield all rows; all cores compute each row."""
    task = functools.partial(search, max_trials=max_trials)
    with multiprocessing.get_context("fork").Pool() as pool:
        for world, method in itertools.product(worlds, methods):
            first = 1000 * WORLDS.index(world)
            tasks = [(method, world, first + number) for number in range(seeds)]
            yield Row(world.name, method, pool.starmap(task, tasks, chunksize=5))


@dataclass(frozen=True)
class Demand:
    """A requirement on every row, tested within two standard errors of its runs."""

    text: str
    badness: Callable[[Row], float]
    say: Callable[[Row], str]
    meets: Callable[[Row], bool]

    def bar(self, rows: Sequence[Row]) -> Bar:
        """Return the target as a bar, which names the worst row and all rows that miss it."""
        missed = [row for row in rows if not self.meets(row)]
        told = dict.fromkeys(
            f"{row.world}, {row.method}: {self.say(row)} of {len(row.results)} runs"
            for row in (max(rows, key=self.badness), *missed)
        )
        return Bar(self.text, "; ".join(told), not missed)


_WITHIN = "(within two standard errors of each row's runs)"
DEMANDS = (
    Demand(
        f"gains: biased by at most {MOST_BIAS:.0%} in every row {_WITHIN}",
        badness=lambda row: abs(row.bias),
        say=lambda row: f"{_points(row.bias)} points",
        meets=lambda row: abs(row.bias) <= MOST_BIAS + 2 * row.bias_error,
    ),
    Demand(
        f"gains: worse than the user's own in at most {MOST_WORSE:.0%} of runs",
        badness=lambda row: row.worse,
        say=lambda row: _share(row.worse),
        meets=lambda row: row.worse <= MOST_WORSE + two_errors(MOST_WORSE, len(row.results)),
    ),
    Demand(
        f"gains: in the interval in at least {LEAST_COVERED:.0%} {_WITHIN}",
        badness=lambda row: -1.0 if row.covered is None else -row.covered,
        say=lambda row: _share(row.covered),
        meets=lambda row: (
            row.covered is None
            or row.covered >= LEAST_COVERED - two_errors(LEAST_COVERED, len(row.results))
        ),
    ),
)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the targets; each is met only if every row meets it."""
    return [demand.bar(rows) for demand in DEMANDS] if rows else []


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=300, metavar="N")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--worlds", nargs="*", type=int, default=list(range(len(WORLDS))))
    parser.add_argument("--max-trials", type=int, default=MOST_TRIALS, metavar="N")
    args = parser.parse_args()
    common.print_explanation(__doc__)
    common.print_head(*HEADINGS)
    rows = []
    worlds = [WORLDS[number] for number in args.worlds]
    for row in run_rows(args.seeds, worlds, args.methods, args.max_trials):
        rows.append(row)
        common.print_row(*row.cells())
    common.print_bars(bars(rows))


if __name__ == "__main__":
    main()
