"""What the user asked for, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The commands of DeepSpeed's autotuner: what they do is in the `autotuning` section.
TUNE, RUN = "tune", "run"
ESTIMATE = "estimate"

# Each method's own options: flag -> the search's parameter.
SEARCH_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "asha": {
        "max_rungs": "max_rungs",
        "min_binary_search_trials": "min_trials",
        "asha_early_stopping": "early_stopping",
        "divisor": "divisor",
        "search_range_factor": "search_range_factor",
    },
    "binary": {"search_range_factor": "search_range_factor"},
    "random": {
        "trials_per_random_config": "trials_per_config",
        "early_stopping": "early_stopping",
    },
    "gridsearch": {
        "num_micro_batches": "num_micro_batches",
        "early_stopping": "early_stopping",
    },
    "model": {
        "stop_when": "stop_when",
        "early_stopping": "early_stopping",
    },
}


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see `--help` for each."""

    method: str
    config: Path | None
    model_dir: Path | None
    command: tuple[str, ...]
    ds_config: Path | None
    include: tuple[Path, ...]
    max_trials: int
    max_slots: int | None
    max_concurrent_trials: int
    metric: str
    run_full_experiment: bool
    zero_stages: tuple[int, ...] | None
    tune: tuple[str, ...]
    fix: tuple[str, ...]
    memory_model: str
    nvme_path: str | None
    arg_mappings: Mapping[str, str]
    start_profile_step: int
    end_profile_step: int
    max_profile_steps: int
    random_seed: int
    search_runner_config: Path | None
    max_search_runner_restarts: int
    detach: bool
    train_batch_size: int | None
    max_train_batch_size: int | None
    min_micro_batch: int
    max_micro_batch: int | None
    divisible_by: int
    slots: int | None
    trial_timeout_s: float
    slot_memory_bytes: int | None
    engine: str
    cold: bool
    run_dir: Path | None
    resume: bool
    dry_run: bool
    json: bool
    search_options: Mapping[str, Any]


@dataclass(frozen=True)
class EstimateSettings:
    """What the user asked of `dsat estimate`.

    Attributes:
        slot_memories: memory of a slot, in bytes; one column of the table for each.
        slot_counts: numbers of data-parallel slots; a table for each.
        exact: every line of the tables is simulated.
    """

    config: Path | None
    model_dir: Path | None
    command: tuple[str, ...]
    ds_config: Path | None
    include: tuple[Path, ...]
    slot_memories: tuple[int, ...]
    slot_counts: tuple[int, ...]
    exact: bool
    json: bool
