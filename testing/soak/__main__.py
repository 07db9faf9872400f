"""Run all attacks at full size.

    python -m testing.soak [--scale PART] [--seed N] [--jobs N] [--only NAME ...]

Prints each finding with the seed that reproduces it; a finding makes the exit status 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from testing.soak import Tally, folders, inputs, journals, real, runs, secrets


@dataclass(frozen=True)
class Attack:
    """A function of a seed and a number of tries; the tries at full size, and of one process."""

    run: Callable[[int, int], Tally]
    whole: int
    piece: int


ATTACKS = {
    "inputs": Attack(inputs.attack, 20_000, 250),
    "searches": Attack(inputs.searches, 1_000, 25),
    "journals": Attack(journals.attack, 2_000, 50),
    "secrets": Attack(secrets.attack, 600, 25),
    "kills": Attack(runs.kills, 300, 15),
    "failing_calls": Attack(runs.failing_calls, 300, 15),
    "full_disks": Attack(runs.full_disks, 64, 8),
    "budgets": Attack(runs.budgets, 200, 20),
    "several_at_once": Attack(runs.several_at_once, 40, 5),
    "folders": Attack(folders.attack, 40, 4),
    "real_kills": Attack(real.kills, 60, 6),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.soak")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    args = parser.parse_args()
    pieces = []
    for name in args.only:
        attack = ATTACKS[name]
        count = max(1, round(attack.whole * args.scale))
        for number, begun in enumerate(range(0, count, attack.piece)):
            tries = min(attack.piece, count - begun)
            pieces.append((name, args.seed + 1000 * number, tries))
    found = {name: Tally() for name in args.only}
    context = multiprocessing.get_context("spawn")
    # One process per piece, so that no piece inherits what another left behind.
    with context.Pool(args.jobs, maxtasksperchild=1) as pool:
        # A spawned process can only import functions of other modules, not of `__main__`.
        ends = [(name, pool.apply_async(ATTACKS[name].run, tries)) for name, *tries in pieces]
        for name, end in ends:
            tally = end.get()
            found[name].by.update(tally.by)
            found[name].findings += tally.findings
            for finding in tally.findings:
                print(f"{name}: {finding}".encode("ascii", "backslashreplace").decode(), flush=True)
    for name, total in found.items():
        endings = ", ".join(f"{ending} {count}" for ending, count in sorted(total.by.items()))
        print(f"{name}: {total.tried:,} tried, {len(total.findings)} findings: {endings}")
    return 1 if any(total.findings for total in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
