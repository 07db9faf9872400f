"""Cost of the finals of a search, on recorded tables.

    python3 -m benchmarks.finals_cost [--seeds 5]

Every search runs as for a user, including its finals, and a trial takes the time that was recorded.
Repeated runs of a trial differ by some noise, as finals without noise would be over at once. The
table shows the time of the finals as a part of the search's time, and their number of trials, as
medians over the seeds.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks import common, searching, tables
from benchmarks.common import Bar
from benchmarks.ledger import Ledger
from benchmarks.tables import Table
from dsat.run.trial_factory import count_finals

METHODS = ("model", "asha", "binary", "random")
NOISE = 0.05  # of one run, about the difference between passes of the tables
MOST_COST = 0.30


def finals_of(table: Table, method: str, seed: int) -> tuple[float, int]:
    """Return the time of the finals as a part of the search's time, and their number of trials."""
    plan = replace(searching.plan_of(table, method, seed=seed), finals=None)
    run = searching.search_ledger(Ledger(table, plan.max_trials, noise=seed, sd=NOISE), plan)
    search_s, finals_s = searching.seconds(run)
    return finals_s / search_s, count_finals(run)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    common.print_explanation(__doc__)
    common.print_head("table", "search", "trials of the finals", "part of the search's time")
    costs = []
    for table in tables.read_all():
        for method in args.methods:
            found = [finals_of(table, method, seed) for seed in range(args.seeds)]
            cost, trials = (statistics.median(each) for each in zip(*found, strict=True))
            costs.append(cost)
            common.print_row(table.header.name, method, f"{trials:g}", f"{cost:.1%}")
    median = statistics.median(costs)
    text = f"finals take at most {MOST_COST:.0%} of the search's time (median)"
    common.print_bars([Bar(text, f"{median:.1%}", median <= MOST_COST)])


if __name__ == "__main__":
    main()
