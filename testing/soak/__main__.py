"""`make soak`: all attacks in full, their figures into docs/reliability.md.

    python -m testing.soak [--scale PART] [--seed N] [--jobs N] [--only NAME ...]

A finding is printed with the seed that shows it again, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path

from dsat import __version__
from testing.soak import Tally
from testing.soak.attacks import ATTACKS, piece

REPORT = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN, _END = "<!-- figures: written by `make soak` -->", "<!-- end of the figures -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.soak")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the whole")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    args = parser.parse_args()
    began = time.monotonic()
    pieces = [
        (name, args.seed + 1000 * number, count)
        for name in args.only
        for number, count in enumerate(_pieces(name, args.scale))
    ]
    # Each in a process of its own: what one leaves is not the next one's.
    context = multiprocessing.get_context("spawn")
    tallies: dict[str, Tally] = {}
    left = collections.Counter(name for name, _, _ in pieces)
    with context.Pool(args.jobs, maxtasksperchild=1) as pool:
        for name, tally in pool.imap_unordered(piece, pieces):
            found = tallies.setdefault(name, Tally())
            for ending, count in tally.by.items():
                found.by[ending] = found.by.get(ending, 0) + count
            found.tried += tally.tried
            found.findings += tally.findings
            for finding in tally.findings:
                print(f"{name}: {finding}".encode("ascii", "backslashreplace").decode(), flush=True)
            print(f"{name}: {found.tried} tried, {len(found.findings)} findings", flush=True)
            left[name] -= 1
            if not left[name]:
                _write(name, found, args.seed, time.monotonic() - began)
    return 1 if any(tally.findings for tally in tallies.values()) else 0


def _pieces(name: str, scale: float) -> list[int]:
    attack = ATTACKS[name]
    count = max(1, round(attack.whole * scale))
    return [min(attack.piece, count - begun) for begun in range(0, count, attack.piece)]


def _write(name: str, tally: Tally, seed: int, took_s: float) -> None:
    """Puts an attack's figures into their place in the page; all others keep theirs."""
    text = REPORT.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    figures, _, after = rest.partition(_END)
    rows = {line.split(" | ")[0].strip("| "): line for line in figures.splitlines()}
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    by = ", ".join(f"{ending} {count}" for ending, count in sorted(tally.by.items()))
    title, found, minutes = ATTACKS[name].title, len(tally.findings), math.ceil(took_s / 60)
    rows[title] = (
        f"| {title} | {tally.tried:,} | {by} | {found} | {today}, {seed} | {minutes} min |"
    )
    titles = [attack.title for attack in ATTACKS.values()]
    lines = [
        _BEGIN,
        "",
        f"dsat {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| attack | tried | how it ended | findings | when, with which seed | done after |",
        "|---|---:|---|---:|---|---:|",
        *(rows[title] for title in titles if title in rows),
        "",
        _END,
    ]
    REPORT.write_text(before + "\n".join(lines) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
