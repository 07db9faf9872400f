"""Replay every tuner on recorded tables and made-up clusters: how soon does each find the best?

    python -m benchmarks.replay [--data DIR] [--seeds 20] [--trials 50] [--picture FILE]

The tables show the best configuration found, as a fraction of the best that exists: medians over
the seeds, the worst in brackets. Trials run one at a time, on recorded tables (see tables.py) and
on made-up clusters (see made_up_cluster.py). Measurements have noise: that of a table's own
intervals, or of a cluster's constants. What counts is the true speed of the configuration that
measured best; in the column `recommended`, of the one that dsat recommends after its finals.

All trials except those of the finals count: the model profile with which most tuners begin, the
user's own configuration, repetitions, and trials out of memory. A tuner that ends earlier keeps its
best. `own trials` is the time of all trials including finals, in trials of the user's own
configuration. Optuna's sampler and `no search` (only the largest micro batch that is predicted to
fit, in each stage) get dsat's memory predictions and first trials.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common, picture, tables
from benchmarks.common import Bar
from benchmarks.ledger import OBJECTIVE, Ledger, Workload
from benchmarks.made_up_cluster import all_clusters, held_out
from benchmarks.peers import PEERS, player
from benchmarks.tables import Table
from dsat.values.outcome import OutcomeKind

AFTER = (5, 10, 20, 50)
GOALS = (0.95, 0.99)
SEEDS, TRIALS = 20, max(AFTER)
LEAST_WITHIN_10, MOST_OOM = 18 / 20, 1


@dataclass(frozen=True)
class Episode:
    """One tuner on one table with one seed.

    Attributes:
        values: for each trial, the fraction of the best that exists; None if nothing was measured.
        told: these fractions as measured, with noise.
        recommended: this fraction of the final recommendation.
        out_of_memory: number of trials that ran out of memory.
        finals: number of trials after the search, which decide.
        slot_s: slots times seconds of all trials, including finals.
        times_own: these seconds, in trials of the user's own configuration.
    """

    table: str
    tuner: str
    seed: int
    values: tuple[float | None, ...]
    told: tuple[float | None, ...]
    recommended: float
    out_of_memory: int
    finals: int
    slot_s: float
    times_own: float

    def best_after(self, count: int) -> float:
        """Return the fraction of what measured best in the first `count` trials; 0 if none ran."""
        return _best(self.told[:count], self.values[:count])

    def trials_to(self, goal: float) -> float:
        """Return the number of trials until a fraction is reached; infinite if it never is."""
        for number, value in enumerate(self.values, start=1):
            if value is not None and value >= goal:
                return number
        return math.inf


def _best(told: Sequence[float | None], values: Sequence[float | None]) -> float:
    """Return the true value of the trial that measured best; 0 if nothing ran."""
    ran = [
        (measured, value)
        for measured, value in zip(told, values, strict=True)
        if measured is not None and value is not None
    ]
    return max(ran)[1] if ran else 0.0


def play(table: Workload, tuner: str, seed: int, max_trials: int, *, noisy: bool = True) -> Episode:
    """Run one tuner on one workload.

    Args:
        seed: seed of the tuner, and of the measurement noise if `noisy`.
    """
    run = player(tuner)
    ledger = Ledger(table, max_trials, noise=seed if noisy else None)
    run(ledger, seed, max_trials)
    best = table.best(OBJECTIVE)
    values, told = (
        tuple(
            None if (value := outcome.value(OBJECTIVE)) is None else value / best
            for outcome in outcomes
        )
        for outcomes in (ledger.outcomes, ledger.told)
    )
    recommended = _best(told, values)
    if ledger.recommended is not None:
        recommended = (table.answer(ledger.recommended).value(OBJECTIVE) or 0.0) / best
    took_s = sum(outcome.duration_s for outcome in (*ledger.outcomes, *ledger.finals))
    own_s = table.answer(table.header.ds_config).duration_s
    return Episode(
        table=table.header.name,
        tuner=tuner,
        seed=seed,
        values=values,
        told=told,
        recommended=recommended,
        finals=len(ledger.finals),
        out_of_memory=sum(outcome.kind is OutcomeKind.OOM for outcome in ledger.outcomes),
        slot_s=table.header.slots * took_s,
        times_own=took_s / own_s,
    )


@dataclass(frozen=True)
class Summary:
    """All seeds of a tuner on a table."""

    table: str
    tuner: str
    episodes: Sequence[Episode]

    def trials_to(self, goal: float) -> list[float]:
        return [episode.trials_to(goal) for episode in self.episodes]

    @property
    def median_to_95(self) -> float:
        return statistics.median(self.trials_to(0.95))

    @property
    def within_10(self) -> int:
        """Number of seeds that reach 99 % within 10 trials."""
        return sum(count <= 10 for count in self.trials_to(0.99))

    @property
    def worst_oom(self) -> int:
        return max(episode.out_of_memory for episode in self.episodes)

    def cells(self) -> list[str]:
        """Return a table row for people; see `HEADINGS`."""
        episodes = self.episodes
        found = [[e.best_after(count) for e in episodes] for count in AFTER]
        found.append([e.recommended for e in episodes])
        needed = [self.trials_to(goal) for goal in GOALS]
        lost = [e.out_of_memory for e in episodes]
        return [
            self.tuner,
            *(f"{statistics.median(each):.1%} ({min(each):.1%})" for each in found),
            *(f"{number(statistics.median(each))} ({number(max(each))})" for each in needed),
            f"{self.within_10}/{len(episodes)}",
            f"{statistics.median(lost):g} ({max(lost)})",
            f"{statistics.median(len(e.values) for e in episodes):g}",
            f"{statistics.median(e.finals for e in episodes):g}",
            f"{statistics.median(e.slot_s for e in episodes):.0f}",
            f"{statistics.median(e.times_own for e in episodes):.0f}",
        ]


HEADINGS = (
    "tuner",
    *(f"after {n}" for n in AFTER),
    "recommended",
    *(f"trials to {g:.0%}" for g in GOALS),
    *("99 % within 10", "out of memory", "trials", "finals", "slot s", "own trials"),
)


def number(count: float) -> str:
    """Return a number of trials as text; a dash if it is infinite."""
    return "-" if math.isinf(count) else f"{count:g}"


def summaries(episodes: Iterable[Episode]) -> list[Summary]:
    """Return one summary for each table and tuner, in order of first appearance."""
    groups: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault((episode.table, episode.tuner), []).append(episode)
    return [Summary(*names, group) for names, group in groups.items()]


@dataclass(frozen=True)
class Demand:
    """A requirement on some tuners, on every table."""

    text: str
    tuners: tuple[str, ...]
    say: Callable[[Summary], str]
    meets: Callable[..., bool]


DEMANDS = (
    Demand(
        "`model` reaches 99 % of the best within 10 trials",
        ("dsat model",),
        say=lambda s: f"{s.within_10}/{len(s.episodes)}",
        meets=lambda s: s.within_10 / len(s.episodes) >= LEAST_WITHIN_10,
    ),
    *(
        Demand(
            f"`{method}` needs fewer trials to 95 % than Determined's (medians)",
            (f"dsat {method}", f"Determined {method}"),
            say=lambda s: number(s.median_to_95),
            meets=lambda mine, other: mine.median_to_95 < other.median_to_95,
        )
        for method in ("asha", "binary", "random")
    ),
    *(
        Demand(
            f"`{method}` loses at most {MOST_OOM} trial of a search to out of memory (worst seed)",
            (f"dsat {method}",),
            say=lambda s: str(s.worst_oom),
            meets=lambda s: s.worst_oom <= MOST_OOM,
        )
        for method in ("model", "asha", "binary", "random")
    ),
)


def bars(found: Sequence[Summary]) -> list[Bar]:
    """Return the targets of the tuners that ran; each is met only if it is met on every table."""
    by_name = {(s.table, s.tuner): s for s in found}
    names = list(dict.fromkeys(s.table for s in found))
    bars = []
    for demand in DEMANDS:
        if {s.tuner for s in found}.issuperset(demand.tuners):
            each = [[by_name[table, tuner] for tuner in demand.tuners] for table in names]
            said = [" to ".join(map(demand.say, mine)) for mine in each]
            measured = "; ".join(f"{t} {text}" for t, text in zip(names, said, strict=True))
            bars.append(Bar(demand.text, measured, all(demand.meets(*mine) for mine in each)))
    return bars


def workloads(data: Path) -> list[Workload]:
    """Return the recorded tables of a folder, and the made-up clusters."""
    return [*tables.read_all(data), *all_clusters(), *held_out()]


def _all_of(tuner: str, data: Path, seeds: int, max_trials: int) -> list[Episode]:
    """Return all episodes of one tuner; runs in a separate process."""
    return [
        play(workload, tuner, seed, max_trials)
        for workload in workloads(data)
        for seed in range(seeds)
    ]


def replay(data: Path, *, seeds: int, max_trials: int, tuners: Sequence[str]) -> list[Episode]:
    """Run all tuners on all tables of a folder.

    Other tuners' packages have global state, so each tuner runs in a separate process.
    """
    spawn = multiprocessing.get_context("spawn")
    tasks = [(tuner, data, seeds, max_trials) for tuner in tuners]
    with spawn.Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        found = [e for part in pool.starmap(_all_of, tasks, chunksize=1) for e in part]
    order = {table.header.name: number for number, table in enumerate(workloads(data))}
    return sorted(found, key=lambda e: order[e.table])


def describe(workload: Workload) -> str:
    """Return a description of a workload for people."""
    header = workload.header
    facts = ", ".join(f"{key} {value}" for key, value in header.about.items())
    slots = "1 slot" if header.slots == 1 else f"{header.slots} slots"
    recorded = ""
    if isinstance(workload, Table):
        lost = sum(not row.outcome.ok for row in workload.rows)
        close = workload.close_to_best(OBJECTIVE, 0.05)
        recorded = (
            f"{len(workload.rows)} recorded trials, {lost} of them out of memory, {close} within "
            "5 % of the best. "
        )
    return (
        f"`{header.command}`, {header.profile.num_params / 1e6:.1f} M parameters "
        f"({header.profile.trainable_params / 1e6:.1f} M trainable), {slots} of "
        f"{header.slot_memory_bytes / 2**30:.3g} GiB. {recorded}{facts}."
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, default=tables.DATA, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N")
    parser.add_argument("--tuners", nargs="+", choices=PEERS, default=PEERS, metavar="NAME")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the medians, as SVG")
    args = parser.parse_args()
    began = time.perf_counter()
    episodes = replay(args.data, seeds=args.seeds, max_trials=args.trials, tuners=args.tuners)
    common.print_explanation(__doc__)
    if args.picture is not None:
        picture.draw(episodes, args.picture)
        print(f"![Best found after each number of trials]({args.picture.name})\n")
    found = summaries(episodes)
    for workload in workloads(args.data):
        print(f"### {workload.header.name}\n\n{describe(workload)}\n")
        common.print_head(*HEADINGS)
        for summary in found:
            if summary.table == workload.header.name:
                common.print_row(*summary.cells())
        print()
    print(f"{len(episodes)} searches replayed in {time.perf_counter() - began:.0f} s")
    common.print_bars(bars(found))


if __name__ == "__main__":
    main()
