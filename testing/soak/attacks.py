"""All attacks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testing.soak import Tally, disks, inputs, journals, real, runs


@dataclass(frozen=True)
class Attack:
    """An attack: in words, with a seed and a number of tries, and how much of it is the whole."""

    title: str
    run: Callable[[int, int], Tally]
    whole: int
    piece: int  # tries with a seed and a process of their own


ATTACKS = {
    "inputs": Attack("mutated yaml, json and command lines", inputs.attack, 20_000, 250),
    "journals": Attack("damaged journals", journals.attack, 20_000, 500),
    "kills": Attack("signals to the tuner at seeded moments, then --resume", runs.kills, 300, 15),
    "failing_calls": Attack(
        "a failing call to the file system, then --resume", runs.failing_calls, 300, 15
    ),
    "full_disks": Attack(
        "a file system of 256 KiB that fills up, then --resume", disks.full_disks, 64, 8
    ),
    "read_only_folders": Attack(
        "a folder that turns read-only, then --resume", disks.read_only_folders, 100, 10
    ),
    "surroundings": Attack(
        "clocks that jump by an hour, ulimits, no HOME", runs.surroundings, 60, 10
    ),
    "several_at_once": Attack(
        "two and five dsat in one folder at once", runs.several_at_once, 40, 5
    ),
    "real_kills": Attack(
        "signals to tuner, supervisor and ranks of real searches", real.kills, 60, 6
    ),
    "real_scripts": Attack("hostile scripts", real.hostile_scripts, 7, 7),
    "real_at_once": Attack("two real searches at once", real.several_at_once, 6, 2),
}


def piece(task: tuple[str, int, int]) -> tuple[str, Tally]:
    """One piece of an attack: its name, a seed, how many tries."""
    name, seed, count = task
    return name, ATTACKS[name].run(seed, count)
