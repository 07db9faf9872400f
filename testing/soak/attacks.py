"""All attacks by name."""

from __future__ import annotations

from collections.abc import Callable

from testing.soak import Tally, inputs, journals, real, runs

# What is tried how often in full, and how many tries make a piece with a seed of its own.
ATTACKS: dict[str, tuple[Callable[[int, int], Tally], int, int]] = {
    "inputs": (inputs.attack, 20_000, 250),
    "journals": (journals.attack, 20_000, 500),
    "kills": (runs.kills, 300, 15),
    "failing_calls": (runs.failing_calls, 300, 15),
    "full_disks": (runs.full_disks, 64, 8),
    "surroundings": (runs.surroundings, 60, 10),
    "several_at_once": (runs.several_at_once, 40, 5),
    "real_kills": (real.kills, 60, 6),
    "real_scripts": (real.hostile_scripts, 5, 5),
}


def piece(task: tuple[str, int, int]) -> tuple[str, Tally]:
    """One piece of an attack: its name, a seed, how many tries."""
    name, seed, count = task
    return name, ATTACKS[name][0](seed, count)
