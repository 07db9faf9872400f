"""Replays every tuner on recorded tables and made-up clusters: how soon each finds the best.

    python -m benchmarks.replay [--data DIR] [--seeds 20] [--trials 50] [--output FILE]

All trials count, one after the other: the model profile that most begin with, the user's own
configuration that dsat measures next, repetitions, and what ran out of memory. dsat's finals come
after them: `recommended` is what they decide; of others, what measured best.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.ledger import OBJECTIVE, Ledger, Workload
from benchmarks.made_up_cluster import all_clusters, held_out
from benchmarks.peers import PEERS, player
from dsat.values.files import write_atomically
from dsat.values.outcome import OutcomeKind

AFTER = (5, 10, 20, 50)
GOALS = (0.95, 0.99)
SEEDS = 20
TRIALS = max(AFTER)


@dataclass(frozen=True)
class Episode:
    """One tuner on one table with one seed.

    Attributes:
        values: of each trial the fraction of the best that there is; None if it measured nothing.
        told: the same as they were measured, with noise.
        recommended: the same of what is recommended in the end.
        out_of_memory: how many trials did.
        finals: how many trials ran after the search to decide.
        slot_s: slots times the seconds that the trials took, finals included.
        times_own: these seconds in trials of the user's own configuration.
        decide_s: seconds of this process, the tuner's own imports left out.
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
    decide_s: float

    def best_after(self, count: int) -> float:
        """The fraction of the one that measured best within so many trials; 0 if none ran."""
        return _best(self.told[:count], self.values[:count])

    def trials_to(self, goal: float) -> float:
        """How many trials until a fraction is reached; infinite if it never is."""
        for number, value in enumerate(self.values, start=1):
            if value is not None and value >= goal:
                return number
        return math.inf

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Episode:
        return cls(**{**data, "values": tuple(data["values"]), "told": tuple(data["told"])})


@dataclass(frozen=True)
class Summary:
    """What all seeds of a tuner on a table came to. Trials that are never reached are infinite."""

    table: str
    tuner: str
    seeds: int
    median_after: tuple[float, ...]
    worst_after: tuple[float, ...]
    median_recommended: float
    worst_recommended: float
    median_trials_to: tuple[float, ...]
    worst_trials_to: tuple[float, ...]
    within_10_of_99: int
    median_oom: float
    worst_oom: int
    median_slot_s: float
    median_times_own: float
    median_trials: float
    median_finals: float


def _best(told: Sequence[float | None], values: Sequence[float | None]) -> float:
    """The true value of what measured best; 0 if nothing ran."""
    ran = [
        (measured, value)
        for measured, value in zip(told, values, strict=True)
        if measured is not None and value is not None
    ]
    return max(ran)[1] if ran else 0.0


def play(table: Workload, tuner: str, seed: int, max_trials: int, *, noisy: bool = True) -> Episode:
    """Runs one tuner on one workload.

    Args:
        seed: of the tuner, and of what measurements are off by if they are `noisy`.
    """
    run = player(tuner)
    ledger = Ledger(table, max_trials, noise=seed if noisy else None)
    began = time.perf_counter()
    run(ledger, seed, max_trials)
    decide_s = time.perf_counter() - began
    best = table.best(OBJECTIVE)
    values, told = (
        tuple(
            None if (value := outcome.value(OBJECTIVE)) is None else value / best
            for outcome in outcomes
        )
        for outcomes in (ledger.outcomes, ledger.told)
    )
    chosen = ledger.recommended
    recommended = (
        _best(told, values)
        if chosen is None
        else (table.answer(chosen).value(OBJECTIVE) or 0.0) / best
    )
    took_s = sum(outcome.duration_s for outcome in (*ledger.outcomes, *ledger.finals))
    own_s = table.answer({**table.header.ds_config, **table.header.switches}).duration_s
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
        decide_s=decide_s,
    )


def summarise(episodes: Sequence[Episode]) -> Summary:
    """One line of the results, from all seeds of one tuner on one table."""
    after = [[e.best_after(count) for e in episodes] for count in AFTER]
    needed = [[e.trials_to(goal) for e in episodes] for goal in GOALS]
    return Summary(
        table=episodes[0].table,
        tuner=episodes[0].tuner,
        seeds=len(episodes),
        median_after=tuple(map(statistics.median, after)),
        worst_after=tuple(map(min, after)),
        median_recommended=statistics.median(e.recommended for e in episodes),
        worst_recommended=min(e.recommended for e in episodes),
        median_trials_to=tuple(map(statistics.median, needed)),
        worst_trials_to=tuple(map(max, needed)),
        within_10_of_99=sum(e.trials_to(0.99) <= 10 for e in episodes),
        median_oom=statistics.median(e.out_of_memory for e in episodes),
        worst_oom=max(e.out_of_memory for e in episodes),
        median_slot_s=statistics.median(e.slot_s for e in episodes),
        median_times_own=statistics.median(e.times_own for e in episodes),
        median_trials=statistics.median(len(e.values) for e in episodes),
        median_finals=statistics.median(e.finals for e in episodes),
    )


def summaries(episodes: Iterable[Episode]) -> list[Summary]:
    """Of all tables and tuners, in the order in which they first come."""
    groups: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault((episode.table, episode.tuner), []).append(episode)
    return [summarise(group) for group in groups.values()]


def _all_of(tuner: str, data: Path, seeds: int, max_trials: int) -> list[Episode]:
    """All episodes of one tuner, in a process of its own."""
    return [
        play(workload, tuner, seed, max_trials)
        for workload in workloads(data)
        for seed in range(seeds)
    ]


def workloads(data: Path) -> list[Workload]:
    """The recorded tables of a folder, and the made-up clusters."""
    return [*tables.read_all(data), *all_clusters(), *held_out()]


def replay(data: Path, *, seeds: int, max_trials: int, tuners: Sequence[str]) -> list[Episode]:
    """All tuners on all tables of a folder.

    The packages of others have global state, so each tuner gets a process of its own.
    """
    spawn = multiprocessing.get_context("spawn")
    tasks = [(tuner, data, seeds, max_trials) for tuner in tuners]
    with spawn.Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        found = [e for part in pool.starmap(_all_of, tasks, chunksize=1) for e in part]
    order = {table.header.name: number for number, table in enumerate(workloads(data))}
    return sorted(found, key=lambda e: order[e.table])


def lines(found: Sequence[Summary]) -> list[str]:
    """A table for people, in Markdown."""
    heads = [
        "tuner",
        *(f"after {n}" for n in AFTER),
        "recommended",
        *(f"trials to {g:.0%}" for g in GOALS),
    ]
    heads += ["99 % within 10", "out of memory", "trials", "finals", "slot s", "own trials"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for s in found:
        cells = [s.tuner]
        medians = (*s.median_after, s.median_recommended)
        worsts = (*s.worst_after, s.worst_recommended)
        cells += [f"{m:.1%} ({w:.1%})" for m, w in zip(medians, worsts, strict=True)]
        cells += [
            f"{number(median)} ({number(worst)})"
            for median, worst in zip(s.median_trials_to, s.worst_trials_to, strict=True)
        ]
        cells += [f"{s.within_10_of_99}/{s.seeds}", f"{s.median_oom:g} ({s.worst_oom})"]
        cells += [f"{s.median_trials:g}", f"{s.median_finals:g}", f"{s.median_slot_s:.0f}"]
        cells.append(f"{s.median_times_own:.0f}")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def number(count: float) -> str:
    """A number of trials; a dash if it is never reached."""
    return "-" if math.isinf(count) else f"{count:g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=tables.DATA, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N")
    parser.add_argument("--tuners", nargs="+", choices=PEERS, default=PEERS, metavar="NAME")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all episodes, as JSON")
    args = parser.parse_args()
    began = time.perf_counter()
    episodes = replay(args.data, seeds=args.seeds, max_trials=args.trials, tuners=args.tuners)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps([asdict(e) for e in episodes]))
    found = summaries(episodes)
    for table in dict.fromkeys(s.table for s in found):
        print(f"\n{table}: median (worst) of {args.seeds} seeds\n")
        print("\n".join(lines([s for s in found if s.table == table])))
    print(f"\n{len(episodes)} searches replayed in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
