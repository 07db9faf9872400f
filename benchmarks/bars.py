"""The bars that dsat is held against, and whether what was measured meets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import by_hand, winners_curse
from benchmarks.by_hand import Compared
from benchmarks.native import Tuned
from benchmarks.replay import Summary, number
from benchmarks.winners_curse import Row

SEEDS_OF_20 = 18
SEARCHES_WITH_MEMORY_MODEL = ("model", "asha", "binary", "random")
MOST_OOM = 1
# Of two medians of the same stopwatch: what it cannot tell apart.
STOPWATCH_NOISE = 0.02


@dataclass(frozen=True)
class Bar:
    """A demand, what was measured, and whether that is enough."""

    text: str
    measured: str
    met: bool


def of_replay(found: Sequence[Summary]) -> list[Bar]:
    """The bars on recorded tables; each holds only if it does on every table."""
    if not found:
        return []
    by_name = {(s.table, s.tuner): s for s in found}
    names = list(dict.fromkeys(s.table for s in found))
    bars = [_within_ten(names, by_name)]
    bars += [_fewer_trials(method, names, by_name) for method in ("asha", "binary", "random")]
    return [
        *bars,
        *(_few_lost(method, names, by_name) for method in SEARCHES_WITH_MEMORY_MODEL),
    ]


def of_native(workload: str, most: float, ours: Tuned, theirs: Tuned) -> list[Bar]:
    """The bars of a real comparison with DeepSpeed's autotuner.

    Args:
        workload: what was tuned, for people.
        most: largest fraction of the other's wall time.
    """
    share, gain = ours.wall_s / theirs.wall_s, ours.throughput / theirs.throughput
    return [
        Bar(
            f"for real, {workload}: at most {most:g} of the native autotuner's wall time",
            f"{ours.wall_s:.0f} s of {theirs.wall_s:.0f} s: {share:.2f}",
            share <= most,
        ),
        Bar(
            f"for real, {workload}: an answer at least as fast (the stopwatch tells "
            f"{STOPWATCH_NOISE:.0%})",
            f"{ours.throughput:.2f} to {theirs.throughput:.2f} samples/s: {gain:.3f}",
            gain >= 1 - STOPWATCH_NOISE,
        ),
    ]


def of_curse(rows: Sequence[Row]) -> list[Bar]:
    """The bars on simulated runs; each holds only if it does in every row, as far as the number of
    its runs can tell (two standard errors)."""
    if not rows:
        return []
    covered = [row for row in rows if row.covered is not None]
    within = "(within two standard errors of each row's runs)"
    return [
        _in_every_row(
            f"gains: biased by at most {winners_curse.MOST_BIAS:.0%} in every row {within}",
            rows,
            lambda row: abs(row.bias),
            lambda row: f"{100 * row.bias:+.2f} points",
            lambda row: row.is_unbiased,
        ),
        _in_every_row(
            f"gains: worse than the user's own in at most {winners_curse.MOST_WORSE:.0%} of runs",
            rows,
            lambda row: row.worse,
            lambda row: f"{row.worse:.1%}",
            lambda row: row.is_seldom_worse,
        ),
        _in_every_row(
            f"gains: in the interval in at least {winners_curse.LEAST_COVERED:.0%} {within}",
            covered,
            lambda row: -(row.covered or 0.0),
            lambda row: f"{row.covered:.1%}",
            lambda row: row.is_covered,
        ),
    ]


def of_by_hand(found: Sequence[Compared]) -> list[Bar]:
    """The bar on the printed command."""
    said = "; ".join(f"{each.name} {each.ratio:.3f}" for each in found)
    apart = f"the printed command by hand: within {by_hand.MOST_APART:.0%} of what is reported"
    return [Bar(apart, said, all(each.met for each in found))] if found else []


def _in_every_row(
    text: str,
    rows: Sequence[Row],
    badness: Callable[[Row], float],
    say: Callable[[Row], str],
    meets: Callable[[Row], bool],
) -> Bar:
    """A bar on rows: told are the worst, and those that miss it."""
    told = [max(rows, key=badness), *(row for row in rows if not meets(row))]
    said = [f"{row.world}, {row.method}: {say(row)} of {len(row.results)} runs" for row in told]
    return Bar(text, "; ".join(dict.fromkeys(said)), all(map(meets, rows)))


_ByName = dict[tuple[str, str], Summary]


def _within_ten(names: Sequence[str], by_name: _ByName) -> Bar:
    return _on_each(
        f"`model` reaches 99 % of the best within 10 trials in {SEEDS_OF_20} of 20 seeds",
        names,
        by_name,
        ("dsat model",),
        say=lambda s: f"{s.within_10_of_99}/{s.seeds}",
        meets=lambda s: s.within_10_of_99 / s.seeds >= SEEDS_OF_20 / 20,
    )


def _fewer_trials(method: str, names: Sequence[str], by_name: _ByName) -> Bar:
    return _on_each(
        f"`{method}` needs fewer trials to 95 % than Determined's (medians)",
        names,
        by_name,
        (f"dsat {method}", f"Determined {method}"),
        say=lambda s: number(s.median_trials_to[0]),
        meets=lambda mine, other: mine.median_trials_to[0] < other.median_trials_to[0],
    )


def _few_lost(method: str, names: Sequence[str], by_name: _ByName) -> Bar:
    return _on_each(
        f"`{method}` loses at most {MOST_OOM} trial of a search to out of memory (worst seed)",
        names,
        by_name,
        (f"dsat {method}",),
        say=lambda s: str(s.worst_oom),
        meets=lambda s: s.worst_oom <= MOST_OOM,
    )


def _on_each(
    text: str,
    names: Sequence[str],
    by_name: _ByName,
    tuners: Sequence[str],
    *,
    say: Callable[[Summary], str],
    meets: Callable[..., bool],
) -> Bar:
    """A bar on some tuners: their summaries are told in turn, with a dash for one left out.

    Args:
        text: what is demanded.
        names: of the tables.
        tuners: whose summaries `meets` is given; the bar is missed without one of them.
    """
    said, met = [], True
    for table in names:
        found = [by_name.get((table, tuner)) for tuner in tuners]
        said.append(f"{table} {' to '.join('-' if s is None else say(s) for s in found)}")
        met = met and None not in found and meets(*found)
    return Bar(text, "; ".join(said), met)
