"""Runs the benchmarks and writes what they found into benchmarks/RESULTS.md, with a picture.

    python -m benchmarks.results [--parts scale replay winners_curse ...]

Parts that are not run now are taken from when they were run last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    by_hand,
    coverage,
    finals_cost,
    native,
    picture,
    projection,
    replay,
    tables,
    winners_curse,
)
from benchmarks.bars import Bar, of_by_hand, of_curse, of_native, of_replay
from benchmarks.by_hand import Compared
from benchmarks.gpu import predicted_memory
from benchmarks.ledger import OBJECTIVE, Workload
from benchmarks.native import Tuned
from benchmarks.record import about_machine
from benchmarks.replay import Episode
from benchmarks.tables import Table
from benchmarks.winners_curse import Row
from dsat.engines.local.machine import find_machine
from dsat.report.format import duration
from dsat.values.files import write_atomically

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
KEPT = ROOT / "build" / "benchmarks"
REPORT = FOLDER / "RESULTS.md"
PICTURE = FOLDER / "RESULTS.svg"
# Part -> module and arguments. Some write JSON besides what they print.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "scale": ("benchmarks.search_scale", "--trials", "10000"),
    "trial_start": ("benchmarks.trial_start",),
    "replay": ("benchmarks.replay", "--output", str(KEPT / "episodes.json")),
    "winners_curse": (
        *("benchmarks.winners_curse", "--seeds", "240"),
        *("--output", str(KEPT / "curse.json")),
    ),
    "finals": ("benchmarks.finals_cost",),
    "by_hand": ("benchmarks.by_hand", "--output", str(KEPT / "hands.json")),
    "coverage": ("benchmarks.coverage",),
    "memory": ("benchmarks.memory_accuracy",),
    "published": ("benchmarks.published",),
    "large_models": ("benchmarks.large_models",),
    "projection": ("benchmarks.projection",),
    "projection_on_cpu": ("benchmarks.projection_on_cpu",),
    "device_memory": ("benchmarks.gpu.predicted_memory", "--null"),
    "native": ("benchmarks.native", "--output", str(KEPT / "tuned.json")),
    "native_16": ("benchmarks.native", "--side", "16", "--output", str(KEPT / "tuned_16.json")),
}
# Part -> what it compares, the largest part of the other's time, and where it keeps that.
NATIVE = {
    "native": ("sequences of 128 tokens", 0.35, KEPT / "tuned.json"),
    "native_16": ("sequences of 16 tokens", 0.25, KEPT / "tuned_16.json"),
}


@dataclass(frozen=True)
class Part:
    """What a benchmark printed, on which machine and when, and how long it took."""

    text: str
    about: Mapping[str, Any]
    took_s: float

    def describe(self) -> str:
        facts = [str(value) for key, value in self.about.items() if key in ("machine", "host")]
        versions = [
            f"{k} {v}" for k, v in self.about.items() if k not in ("machine", "host", "date")
        ]
        return (
            f"{self.about['date']}, {'; '.join(facts)}; {', '.join(versions)}; took "
            f"{duration(self.took_s)}."
        )


def run(name: str) -> None:
    """Runs one part in a process of its own and keeps what it says."""
    KEPT.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *COMMANDS[name]]
    print(f"-- {name}", flush=True)
    began = time.perf_counter()
    text = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{name} ended with status {process.returncode}")
    data = {
        "text": text,
        "about": about_machine(find_machine()),
        "took_s": time.perf_counter() - began,
    }
    write_atomically(KEPT / f"{name}.json", json.dumps(data))


def kept(name: str) -> Part | None:
    """What a part said when it was run last."""
    path = KEPT / f"{name}.json"
    return Part(**json.loads(path.read_text())) if path.exists() else None


def report(
    parts: Mapping[str, Part],
    workloads: Sequence[Workload],
    episodes: Sequence[Episode],
    tuned: Mapping[str, tuple[Tuned, Tuned]],
    curse: Sequence[Row] = (),
    hands: Sequence[Compared] = (),
) -> str:
    """The whole of RESULTS.md.

    Args:
        parts: what was run, by its name in `COMMANDS`.
        workloads: what was replayed.
        episodes: of the replay.
        tuned: what dsat and DeepSpeed's autotuner did, by the part's name in `NATIVE`.
        curse: rows of simulated runs.
        hands: what the printed command did by hand.
    """
    bars = of_replay(replay.summaries(episodes))
    for name, both in tuned.items():
        bars += of_native(*NATIVE[name][:2], *both)
    bars += of_curse(curse) + of_by_hand(hands)
    sections: list[tuple[str, str, Callable[[Part], list[str]]]] = [
        ("replay", "Replay", lambda _: _replay(workloads, episodes)),
        *(
            (
                name,
                f"For real, {workload}: dsat against `deepspeed --autotuning tune`",
                lambda _, name=name: native.lines(*tuned[name]),
            )
            for name, (workload, _, _) in NATIVE.items()
        ),
        (
            "winners_curse",
            "The gain that is reported against the gain that there is",
            _with(winners_curse.EXPLANATION),
        ),
        ("finals", "What finals cost", _with(finals_cost.EXPLANATION)),
        ("by_hand", "The printed command by hand", _with(by_hand.EXPLANATION)),
        ("coverage", "Whether the intervals of step times hold", _with(coverage.EXPLANATION)),
        ("memory", "Simulated memory against real memory", _table),
        ("published", "Predicted memory against published memory", _table),
        ("large_models", "What an estimate of a large model costs", _table),
        (
            "projection",
            "Projected throughput against published throughput",
            _with(projection.EXPLANATION),
        ),
        ("projection_on_cpu", "Steps of CPU ranks, projected from one rank's", _table),
        (
            "device_memory",
            "Predicted memory on a CUDA without a device",
            _with(predicted_memory.EXPLANATION),
        ),
        ("scale", "Cost of a decision", _block),
        ("trial_start", "Start of a trial", _block),
    ]
    lines = ["# Benchmarks", "", "Written by `make bench`; see the modules of this folder.", ""]
    lines += ["## Bars", "", *_bars(bars), ""]
    for name, title, body in sections:
        if name in parts:
            lines += [f"## {title}", "", parts[name].describe(), "", *body(parts[name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _bars(bars: Sequence[Bar]) -> list[str]:
    rows = ["| bar | measured | |", "|---|---|---|"]
    return rows + [
        f"| {b.text} | {b.measured} | {'met' if b.met else '**missed**'} |" for b in bars
    ]


def _replay(workloads: Sequence[Workload], episodes: Sequence[Episode]) -> list[str]:
    lines = [
        "Best found, as a fraction of the best that there is; medians over the seeds, the worst "
        "in brackets; one trial at a time, on recorded tables (see tables.py) and on made-up "
        "clusters (see made_up_cluster.py). Measurements are off by what a table's own intervals, "
        "or a cluster's constants, say; what counts is the true speed of the configuration that "
        "measured best, or, where it says so, of what dsat recommends after its finals. All trials "
        "but those of the finals count: the model profile that most begin with, the user's own "
        "configuration, repetitions, and what ran out of memory. A tuner that ends earlier keeps "
        "what it has. `own trials` is how many trials of the user's own configuration take as long "
        "as all of them and the finals. Optuna's samplers and `no search` (the largest micro batch "
        "that is predicted to fit in each stage, and no more) have dsat's prediction of memory and "
        "its start.",
        "",
        f"![Best found after each number of trials]({PICTURE.name})",
        "",
    ]
    for workload in workloads:
        header = workload.header
        mine = [s for s in replay.summaries(episodes) if s.table == header.name]
        facts = ", ".join(f"{key} {value}" for key, value in header.about.items())
        slots = "1 slot" if header.slots == 1 else f"{header.slots} slots"
        lines += [
            f"### {header.name}",
            "",
            f"`{header.command}`, {header.profile.num_params / 1e6:.1f} M parameters "
            f"({header.profile.trainable_params / 1e6:.1f} M trainable), "
            f"{slots} of {header.slot_memory_bytes / 2**30:.3g} GiB. {_recorded(workload)}{facts}.",
            "",
            *replay.lines(mine),
            "",
        ]
    return lines


def _recorded(workload: Workload) -> str:
    if not isinstance(workload, Table):
        return ""
    lost = sum(not row.outcome.ok for row in workload.rows)
    close = workload.close_to_best(OBJECTIVE, 0.05)
    return (
        f"{len(workload.rows)} recorded trials, {lost} of them out of memory, {close} within 5 % "
        "of the best. "
    )


def _with(explanation: Sequence[str]) -> Callable[[Part], list[str]]:
    """A table below what its columns are."""
    return lambda part: [*explanation, "", *_table(part)]


def _table(part: Part) -> list[str]:
    return part.text.strip().splitlines()


def _block(part: Part) -> list[str]:
    return ["```", *part.text.strip().splitlines(), "```"]


def write() -> None:
    """Writes the report and the picture from what was kept."""
    parts = {name: part for name in COMMANDS if (part := kept(name)) is not None}
    episodes = []
    tuned: dict[str, tuple[Tuned, Tuned]] = {}
    if "replay" in parts:
        data = json.loads((KEPT / "episodes.json").read_text())
        episodes = [Episode.from_json(entry) for entry in data]
    for name, (_, _, path) in NATIVE.items():
        if name in parts:
            ours, theirs = map(Tuned.from_json, json.loads(path.read_text()))
            tuned[name] = ours, theirs
    curse = [Row.from_json(row) for row in _kept_json("winners_curse", "curse.json")]
    hands = [Compared.from_json(each) for each in _kept_json("by_hand", "hands.json")]
    text = report(parts, replay.workloads(tables.DATA), episodes, tuned, curse, hands)
    write_atomically(REPORT, text)
    if episodes:
        picture.draw(episodes, PICTURE)


def _kept_json(part: str, name: str) -> list[dict[str, Any]]:
    """What a part wrote besides what it printed; nothing if it was not run."""
    if kept(part) is None:
        return []
    found: list[dict[str, Any]] = json.loads((KEPT / name).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    for name in parser.parse_args().parts:
        run(name)
    write()
    print(f"-- {REPORT}")


if __name__ == "__main__":
    main()
