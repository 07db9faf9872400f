"""Completion by the shell, with argcomplete if it is installed."""

from __future__ import annotations

import argparse
import os
from typing import Any

from dsat.inputs.option import PATH, Option
from dsat.space.knobs import KNOB_NAMES


def completes_runs(action: argparse.Action) -> None:
    """Complete names of runs, and paths."""
    _set(action, _runs_and_paths)


def completes(action: argparse.Action, option: Option) -> None:
    """Complete the values of an option: paths, choices or knobs, and no other text."""
    if option.kind is not PATH and option.choices is None:
        words = KNOB_NAMES if option.metavar == "KNOB" else ()
        _set(action, lambda **_: list(words))


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer a shell's request for completions and exit, if there is one."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _set(action: argparse.Action, completer: Any) -> None:
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it


def _runs_and_paths(prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    from dsat.app import past_runs

    names = [folder.name for folder in past_runs.folders() if folder.name.startswith(prefix)]
    return [*names, *FilesCompleter()(prefix=prefix)]
