"""The command line as frozen, checked values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.space import DEFAULT_STAGES, STAGES
from dsat.trial import METRIC_NAMES

_MEMORY_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MEMORY_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TIME_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

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
}


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see `--help` for each."""

    method: str
    config: Path
    model_dir: Path
    include: tuple[Path, ...]
    max_trials: int
    max_slots: int | None
    max_concurrent_trials: int
    metric: str
    run_full_experiment: bool
    zero_stages: tuple[int, ...]
    start_profile_step: int
    end_profile_step: int
    max_profile_steps: int
    random_seed: int
    search_runner_config: Path | None
    max_search_runner_restarts: int
    train_batch_size: int | None
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


def parse(argv: Sequence[str] | None = None) -> Settings:
    """The settings of a command line; leaves with status 2 and one line if it is wrong."""
    parser = _parser()
    values = vars(parser.parse_args(argv))
    if values["end_profile_step"] < values["start_profile_step"]:
        parser.error(
            f"--end-profile-step {values['end_profile_step']} is before --start-profile-step "
            f"{values['start_profile_step']}"
        )
    measured = values["end_profile_step"] - values["start_profile_step"] + 1
    if values["max_profile_steps"] < measured:
        parser.error(
            f"--max-profile-steps {values['max_profile_steps']} is less than the {measured} steps "
            "from --start-profile-step to --end-profile-step"
        )
    options = SEARCH_OPTIONS[values["method"]]
    search_options = {parameter: values.pop(flag) for flag, parameter in options.items()}
    values["zero_stages"] = tuple(dict.fromkeys(values["zero_stages"]))
    values["include"] = tuple(values["include"])
    return Settings(**values, search_options=search_options)


def memory_size(text: str) -> int:
    """Bytes of `24GiB`, `512MB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _MEMORY_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory size like 24GiB")
    return int(float(match[1]) * unit)


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `1h`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    unit = _TIME_UNITS.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration like 90s, 10m or 1h")
    return float(match[1]) * unit


def _at_least(least: int) -> Any:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return whole_number


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsat",
        description="Finds the DeepSpeed configuration with which a training script runs fastest, "
        "by running short trials of it.",
        epilog="Example: python3 -m dsat asha deepspeed.yaml .",
    )
    methods = parser.add_subparsers(dest="method", required=True, metavar="{asha,binary,random}")
    asha = _method(
        methods,
        "asha",
        "successive halving: many configurations get a few trials, the best ones more",
    )
    asha.add_argument(
        "--max-rungs", type=_at_least(1), default=5, help="number of rungs", metavar="N"
    )
    asha.add_argument(
        "--min-binary-search-trials",
        type=_at_least(1),
        default=3,
        metavar="N",
        help="trials that every drawn configuration gets",
    )
    asha.add_argument(
        "--asha-early-stopping",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="smallest rate of early stopping (`s` in arXiv:1810.05934)",
    )
    asha.add_argument(
        "--divisor",
        type=_at_least(2),
        default=2,
        metavar="N",
        help="1/divisor of the configurations go on to the next rung, with divisor times as many "
        "trials (`eta` in arXiv:1810.05934)",
    )
    _add_range_factor(asha)
    binary = _method(methods, "binary", "bisects the micro batch of randomly drawn configurations")
    _add_range_factor(binary)
    random = _method(
        methods, "random", "random configurations and micro batches, with early stopping"
    )
    random.add_argument(
        "--trials-per-random-config",
        type=_at_least(1),
        default=5,
        metavar="N",
        help="the most trials of one drawn configuration",
    )
    random.add_argument(
        "--early-stopping",
        type=_at_least(1),
        metavar="N",
        help="end the search after N trials without a new best",
    )
    return parser


def _add_range_factor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search-range-factor",
        type=_positive_float,
        default=1.0,
        metavar="X",
        help="multiplies the predicted largest micro batch where the bisection begins",
    )


def _method(methods: Any, name: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = methods.add_parser(
        name, help=description, description=description, formatter_class=_Help
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="experiment configuration")
    parser.add_argument(
        "model_dir", type=Path, metavar="MODEL_DIR", help="folder with the training script"
    )
    add = parser.add_argument
    add(
        "-i",
        "--include",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="further files and folders that the script needs beside it",
    )
    add(
        "-mt",
        "--max-trials",
        type=_at_least(2),
        default=50,
        metavar="N",
        help="the most trials, the profile trial and your own configuration's included",
    )
    add("-ms", "--max-slots", type=_at_least(1), metavar="N", help="use at most N slots at once")
    add(
        "-mct",
        "--max-concurrent-trials",
        type=_at_least(1),
        default=16,
        metavar="N",
        help="run at most N trials at once",
    )
    add("-m", "--metric", choices=METRIC_NAMES, default="FLOPS_per_gpu", help="what to optimise")
    add(
        "--run-full-experiment",
        action="store_true",
        help="then train in full length with the best configuration",
    )
    add(
        "-z",
        "--zero-stages",
        type=int,
        nargs="+",
        choices=STAGES,
        default=list(DEFAULT_STAGES),
        metavar="STAGE",
        help="the ZeRO stages to search, out of 0 1 2 3",
    )
    add(
        "--start-profile-step",
        type=_at_least(1),
        default=3,
        metavar="N",
        help="the first optimizer step that is measured, counted from 1",
    )
    add(
        "--end-profile-step",
        type=_at_least(1),
        default=5,
        metavar="N",
        help="measure up to this step, then on while the mean step time is uncertain by over 2 %%",
    )
    add(
        "--max-profile-steps",
        type=_at_least(1),
        default=20,
        metavar="N",
        help="the most optimizer steps that are measured",
    )
    add(
        "-r",
        "--random-seed",
        type=_at_least(0),
        default=42,
        metavar="N",
        help="seed of every random choice",
    )
    add(
        "--train-batch-size",
        type=_at_least(1),
        metavar="N",
        help="only configurations whose micro batch x gradient accumulation steps x slots is "
        "exactly N",
    )
    add(
        "--divisible-by",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="only micro batches that are multiples of N",
    )
    add(
        "--slots",
        type=_at_least(1),
        metavar="N",
        help="slots of each trial, instead of resources.slots_per_trial",
    )
    add(
        "--trial-timeout",
        dest="trial_timeout_s",
        type=duration_s,
        default="30m",
        metavar="TIME",
        help="end a trial that takes longer (90s, 10m, 1h)",
    )
    add(
        "--slot-memory",
        dest="slot_memory_bytes",
        type=memory_size,
        metavar="SIZE",
        help="let every slot use only this much (24GiB): tunes for a smaller card, and is the "
        "only limit that a CPU has",
    )
    add(
        "--engine",
        choices=("auto", "local", "determined"),
        default="auto",
        help="where trials run: on this machine, or on a Determined cluster",
    )
    add(
        "--cold",
        action="store_true",
        help="start every rank as a fresh Python process, for scripts that cannot be forked",
    )
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run (default: dsat_runs/NAME-N)",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the run in --run-dir, or the newest one of this experiment",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the plan and how the first trial would be started; run nothing",
    )
    add("--json", action="store_true", help="print the result as JSON, everything else to stderr")
    cluster = parser.add_argument_group("on a Determined cluster only")
    cluster.add_argument(
        "--search-runner-config",
        type=Path,
        metavar="FILE",
        help="experiment configuration of the search runner",
    )
    cluster.add_argument(
        "--max-search-runner-restarts",
        type=_at_least(0),
        default=5,
        metavar="N",
        help="restarts of the search runner",
    )
    return parser
