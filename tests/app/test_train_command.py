"""The command that trains has the conditions of the trials."""

from __future__ import annotations

import shutil
from dataclasses import replace

from dsat.app.train_command import conditions
from testing.local import cpu_machine

FOUR = replace(cpu_machine(4), devices=("0", "2", "3", "5"))


def test_a_trial_on_some_of_the_cores_is_repeated_on_these() -> None:
    words = conditions(FOUR, 2, memory_is_limited=False)
    assert words[0] == "OMP_NUM_THREADS=1"
    if shutil.which("taskset"):
        assert words[1:] == ["taskset", "--cpu-list", "0,2"]


def test_a_trial_on_all_cores_needs_no_choice_of_them() -> None:
    assert conditions(FOUR, 4, memory_is_limited=False) == ["OMP_NUM_THREADS=1"]


def test_a_limit_on_memory_brings_its_settings_of_malloc() -> None:
    assert conditions(FOUR, 4, memory_is_limited=True) == [
        "OMP_NUM_THREADS=1",
        "MALLOC_MMAP_THRESHOLD_=262144",
        "MALLOC_MMAP_MAX_=1073741824",
        "MALLOC_ARENA_MAX=1",
    ]


def test_an_accelerators_ranks_have_what_the_launcher_gives_them() -> None:
    assert conditions(replace(FOUR, accelerator="cuda"), 2, memory_is_limited=False) == []
