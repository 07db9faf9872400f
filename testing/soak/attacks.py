"""Table of all attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testing.soak import Tally, harms, inputs, journals, losses, page, real, runs, secrets
from testing.soak.harms import attack


@dataclass(frozen=True)
class Attack:
    """An attack: its title, its function of a seed and a number of tries, and its full size."""

    title: str
    run: Callable[[int, int], Tally]
    whole: int
    piece: int  # tries with a seed and a process of their own


ATTACKS = {
    "inputs": Attack("mutated yaml, json and command lines", inputs.attack, 20_000, 250),
    "searches": Attack(
        "searches of mutated yaml, json and command lines, with made-up trials",
        inputs.searches,
        1_000,
        25,
    ),
    "journals": Attack("damaged journals", journals.attack, 20_000, 500),
    "losses": Attack("losses of healthy trainings of all kinds", losses.attack, 20_000, 2_500),
    "secrets": Attack("planted secrets", secrets.attack, 600, 25),
    "page": Attack("hostile clients of a running search's page", page.attack, 120, 15),
    "kills": Attack("signals to the tuner at seeded moments, then --resume", runs.kills, 300, 15),
    "failing_calls": Attack(
        "a failing call to the file system, then --resume",
        attack(harms.failing_call),
        300,
        15,
    ),
    "full_disks": Attack(
        "a file system of 256 KiB that fills up, then --resume",
        attack(harms.full_disk),
        64,
        8,
    ),
    "read_only_folders": Attack(
        "a folder that turns read-only, then --resume",
        attack(harms.read_only_folder),
        100,
        10,
    ),
    "surroundings": Attack(
        "clocks that jump by an hour, ulimits, no HOME", attack(harms.surroundings), 60, 10
    ),
    "several_at_once": Attack(
        "two and five dsat in one folder at once", runs.several_at_once, 40, 5
    ),
    "real_kills": Attack(
        "signals to tuner, supervisor and ranks of real searches", real.kills, 60, 6
    ),
    "users_folders": Attack("users' folders before and after a search", real.users_folders, 11, 11),
    "real_scripts": Attack("hostile scripts", real.hostile_scripts, 7, 7),
}


def piece(task: tuple[str, int, int]) -> tuple[str, Tally]:
    """Run one piece of an attack: its name, a seed, how many tries."""
    name, seed, count = task
    return name, ATTACKS[name].run(seed, count)
