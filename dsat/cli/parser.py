"""What the command line takes, and what `--help` says of it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from dsat.inputs.settings import ESTIMATE, RUN, TUNE
from dsat.space.plan import MEMORY_MODELS
from dsat.space.space import DEFAULT_STAGES, KNOB_NAMES, STAGES
from dsat.values.objective import METRIC_NAMES

_MEMORY_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MEMORY_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TIME_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_GIB = 2**30
_USUAL_MEMORIES = tuple(size * _GIB for size in (16, 24, 40, 80, 141))
_USUAL_SLOTS = (1, 8, 64, 512)

# Options of the deepspeed launcher (deepspeed/launcher/runner.py, 0.19.8), without a value and
# with one.
LAUNCHER_SWITCHES = """
    --no_ssh --no_ssh_check --module --no_python --no_local_rank --force_multi --elastic_training
    --bind_cores_to_rank
""".split()
LAUNCHER_OPTIONS = """
    --hostfile --include --exclude --num_nodes --min_elastic_nodes --max_elastic_nodes --num_gpus
    --num_accelerators --node_rank --master_port --master_addr --launcher --launcher_args
    --bind_core_list --save_pid --enable_each_rank_log --ssh_port --venv_script
""".split()
_LAUNCHER_SHORT = {"--hostfile": "-H", "--include": "-i", "--exclude": "-e"}


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


def _mapping(text: str) -> tuple[str, str]:
    """`KEY=FLAG`; the flag with or without its dashes."""
    key, _, flag = (part.strip() for part in text.partition("="))
    if not key or not flag:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form KEY=FLAG, for example "
            "train_micro_batch_size_per_gpu=--batch-size"
        )
    return key, flag if flag.startswith("-") else f"--{flag}"


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


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability below 1")
    return value


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS) or action.nargs == "+":
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="dsat",
        description="Finds the DeepSpeed configuration with which a training script runs fastest, "
        "by running short trials of it.",
        epilog="Examples: python3 -m dsat asha deepspeed.yaml . | "
        "python3 -m dsat model --slots 2 -- train.py --deepspeed_config ds.json | "
        "python3 -m dsat tune --num_gpus 2 train.py --deepspeed_config ds.json",
    )
    methods = parser.add_subparsers(
        dest="method",
        required=True,
        metavar="{model,asha,binary,random,gridsearch,tune,run,estimate}",
    )
    model = _method(
        methods,
        "model",
        "tries next what models of memory and speed, corrected by every trial, expect most of",
    )
    model.add_argument(
        "--stop-when",
        type=_probability,
        default=0.05,
        metavar="P",
        help="end the search when no other configuration has a chance over P to be 1 %% better "
        "than the best so far; 0 for never",
    )
    _add_early_stopping(model)
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
    _add_early_stopping(random)
    grid = _method(
        methods, "gridsearch", "everything there is, in order: every setting, every micro batch"
    )
    grid.add_argument(
        "--num-micro-batches",
        type=_at_least(1),
        metavar="N",
        help="leave a setting after N micro batches that ran: the smallest first where only some "
        "are allowed, as divisors of --train-batch-size are, else from the largest power of two "
        "that should fit (default: all)",
    )
    grid.add_argument(
        "--early-stopping",
        type=_at_least(1),
        metavar="N",
        help="leave a ZeRO stage after N trials without a better one in it",
    )
    for name, what in ((TUNE, "tunes"), (RUN, "tunes, then trains with the best configuration")):
        _native(methods, name, what)
    _estimate(methods)
    return parser


def _estimate(methods: Any) -> None:
    """Memory without any trial."""
    description = (
        "tells without running a trial what memory each ZeRO stage and offloading needs, and the "
        "largest micro batch on slots of several sizes"
    )
    parser = _command(methods, ESTIMATE, description)
    parser.add_argument(
        "--slot-memory",
        dest="slot_memories",
        type=memory_size,
        nargs="+",
        default=_USUAL_MEMORIES,
        metavar="SIZE",
        help="memory of a slot (default: 16GiB 24GiB 40GiB 80GiB 141GiB)",
    )
    parser.add_argument(
        "--slots",
        dest="slot_counts",
        type=_at_least(1),
        nargs="+",
        default=_USUAL_SLOTS,
        metavar="N",
        help="data-parallel slots (default: 1 8 64 512)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="simulate every line of the table, not the model alone: seconds for each",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _native(methods: Any, name: str, what: str) -> None:
    """A command with the arguments of `deepspeed --autotuning tune|run`."""
    description = (
        f"in place of `deepspeed --autotuning {name} SCRIPT ARGS`: {what}, as the autotuning "
        "section of the script's DeepSpeed configuration says"
    )
    parser: argparse.ArgumentParser = methods.add_parser(
        name, help=description, description=description, formatter_class=_Help
    )
    for flag in LAUNCHER_SWITCHES:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in LAUNCHER_OPTIONS:
        help_text = argparse.SUPPRESS
        if flag == "--num_gpus":
            help_text = "slots of each trial (default: all of this machine)"
        short = [_LAUNCHER_SHORT[flag]] if flag in _LAUNCHER_SHORT else []
        parser.add_argument(*short, flag, metavar="N", help=help_text)
    _add_machine_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments"
    )


def _add_early_stopping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--early-stopping",
        type=_at_least(1),
        metavar="N",
        help="end the search after N trials without a new best",
    )


def _add_range_factor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search-range-factor",
        type=_positive_float,
        default=1.0,
        metavar="X",
        help="multiplies the largest micro batch that is predicted to fit, up to which is searched",
    )


def _command(methods: Any, name: str, description: str) -> argparse.ArgumentParser:
    """A command that takes an experiment, or a command after `--`."""
    parser: argparse.ArgumentParser = methods.add_parser(
        name, help=description, description=description, formatter_class=_Help
    )
    parser.usage = (
        f"dsat {name} [OPTIONS] CONFIG MODEL_DIR\n"
        f"       dsat {name} [OPTIONS] [--ds-config FILE] -- COMMAND"
    )
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="experiment configuration"
    )
    parser.add_argument(
        "model_dir",
        type=Path,
        nargs="?",
        metavar="MODEL_DIR",
        help="folder with the training script",
    )
    add = parser.add_argument
    add(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed configuration of the command after --; by default the one that its "
        "arguments name, or else what the script passes to deepspeed.initialize",
    )
    add(
        "-i",
        "--include",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="further files and folders that the script needs beside it",
    )
    return parser


def _method(methods: Any, name: str, description: str) -> argparse.ArgumentParser:
    parser = _command(methods, name, description)
    add = parser.add_argument
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
        metavar="STAGE",
        help="the ZeRO stages to search, out of 0 1 2 3 (default: "
        + " ".join(map(str, DEFAULT_STAGES))
        + ", or those that your configuration lists)",
    )
    add(
        "--tune",
        nargs="+",
        choices=(*KNOB_NAMES, "all"),
        default=[],
        metavar="KNOB",
        help="search these settings although your configuration sets them, or although they are "
        "not searched by default: " + ", ".join(KNOB_NAMES),
    )
    add(
        "--fix",
        nargs="+",
        choices=(*KNOB_NAMES, "all"),
        default=[],
        metavar="KNOB",
        help="leave these settings as they are; `all` searches stage and micro batch only",
    )
    add(
        "--nvme-path",
        metavar="DIR",
        help="where offloading to NVMe may write, if nothing else fits",
    )
    add(
        "--arg-mapping",
        dest="arg_mappings",
        type=_mapping,
        nargs="+",
        default=[],
        metavar="KEY=FLAG",
        help="an argument of the script that must follow a DeepSpeed setting, such as "
        "train_micro_batch_size_per_gpu=--batch-size",
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
        help="measure up to this step, then on while the mean step time is uncertain by over 2 %% "
        "and may still be the best",
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
        "--max-train-batch-size",
        type=_at_least(1),
        metavar="N",
        help="fill the global batch up to N with gradient accumulation",
    )
    add(
        "--min-micro-batch",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="the smallest micro batch",
    )
    add("--max-micro-batch", type=_at_least(1), metavar="N", help="the largest micro batch")
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
        "--engine",
        choices=("auto", "local", "determined"),
        default="auto",
        help="where trials run: on this machine, or on a Determined cluster (auto: there if "
        "DET_MASTER is set or `det user login` was used)",
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
    _add_machine_options(parser)
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
    cluster.add_argument(
        "--detach",
        action="store_true",
        help="return as soon as the search is submitted",
    )
    return parser


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    """How trials are run, whatever is searched."""
    add = parser.add_argument
    add(
        "--train-batch-size",
        type=_at_least(1),
        metavar="N",
        help="only configurations whose micro batch x gradient accumulation steps x slots is "
        "exactly N",
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
        "--memory-model",
        choices=MEMORY_MODELS,
        default=MEMORY_MODELS[0],
        help="how memory is predicted, so that nothing is tried that cannot fit: by DeepSpeed on "
        "fake tensors, which takes seconds for each strategy (on a cluster by the formula in its "
        "place), at once by a formula, or not at all",
    )
    add(
        "--no-memory-model",
        dest="memory_model",
        action="store_const",
        const=MEMORY_MODELS[-1],
        default=argparse.SUPPRESS,
        help="the same as --memory-model none",
    )
    add(
        "--cold",
        action="store_true",
        help="start every rank as a fresh Python process, for scripts that cannot be forked",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the plan and how the first trial would be started; run nothing",
    )
    add("--json", action="store_true", help="print the result as JSON, everything else to stderr")
