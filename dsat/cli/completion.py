"""Completion by the shell, with argcomplete if it is installed; loaded only when a shell asks."""

from __future__ import annotations

import argparse
import os
from typing import Any

from dsat.app import past_runs
from dsat.inputs.option import PATH, Option


def completes_runs(action: argparse.Action) -> None:
    """What is completed is the name of a run, or a path."""
    _set(action, _runs_and_paths)


def completes(action: argparse.Action, option: Option) -> None:
    """What an option takes; where that is any text, nothing is offered but paths."""
    if option.kind is not PATH and option.choices is None and not option.names_knobs:
        _set(action, lambda **_: [])


def answer(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and leaves, if it was a shell that asked."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _set(action: argparse.Action, completer: Any) -> None:
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it


def _runs_and_paths(prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    names = [folder.name for folder in past_runs.folders() if folder.name.startswith(prefix)]
    return [*names, *FilesCompleter()(prefix=prefix)]
