"""`make soak`: all attacks in full, their figures into docs/reliability.md.

    python -m testing.soak [--scale PART] [--seed N] [--jobs N] [--only NAME ...]

A finding is printed with the seed that shows it again, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import datetime
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
    with context.Pool(args.jobs, maxtasksperchild=1) as pool:
        for name, tally in pool.imap_unordered(piece, pieces):
            found = tallies.setdefault(name, Tally(tally.name))
            for ending, count in tally.by.items():
                found.by[ending] = found.by.get(ending, 0) + count
            found.tried += tally.tried
            found.findings += tally.findings
            for finding in tally.findings:
                print(f"{name}: {finding}".encode("ascii", "backslashreplace").decode(), flush=True)
            print(f"{name}: {found.tried} tried, {len(found.findings)} findings", flush=True)
    ordered = [tallies[name] for name in ATTACKS if name in tallies]
    _write(ordered, args.seed, time.monotonic() - began)
    return 1 if any(tally.findings for tally in ordered) else 0


def _pieces(name: str, scale: float) -> list[int]:
    _, whole, most = ATTACKS[name]
    count = max(1, round(whole * scale))
    return [min(most, count - begun) for begun in range(0, count, most)]


def _write(tallies: list[Tally], seed: int, took_s: float) -> None:
    """Puts the figures into their place in the page."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    lines = [
        _BEGIN,
        "",
        f"dsat {__version__}, Python {platform.python_version()}, seed {seed}, {today}, "
        f"{took_s / 60:.0f} minutes.",
        "",
        "| attack | tried | how it ended | findings |",
        "|---|---:|---|---:|",
    ]
    for tally in tallies:
        by = ", ".join(f"{ending} {count}" for ending, count in sorted(tally.by.items()))
        lines.append(f"| {tally.name} | {tally.tried} | {by} | {len(tally.findings)} |")
    text = REPORT.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    figures = "\n".join([*lines, "", _END])
    REPORT.write_text(f"{before}{figures}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
