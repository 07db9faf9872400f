"""The target of a dsat command: an experiment or the user's command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsat.options import PATH, Group, option

_EXPERIMENT_SUFFIXES = (".yaml", ".yml")


def names_experiment(word: str) -> bool:
    """Return whether a target is the configuration of an experiment, not a command."""
    return word.endswith(_EXPERIMENT_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Target:
    """An experiment (`config` and `model_dir`), or a command."""

    config: Path | None = None
    model_dir: Path | None = None
    command: tuple[str, ...] = ()
    ds_config: Path | None = option(
        "--ds-config",
        kind=PATH,
        metavar="FILE",
        group=Group.TARGET,
        help="DeepSpeed configuration of the command; by default the one that its "
        "arguments name, or else what the script passes to deepspeed.initialize",
    )
    include: tuple[Path, ...] = option(
        "--add-files",
        old=("-i", "--include"),
        kind=PATH,
        many=True,
        default=(),
        group=Group.TARGET,
        help="further files and folders that the script needs beside it",
    )
