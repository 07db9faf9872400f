"""The words of a command line that mean given settings: the way back from `dsat.cli`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dsat.inputs.option import Option, options_of
from dsat.inputs.settings import Settings
from dsat.search import options_of as options_of_search


def words_of(settings: Settings, *, without: Collection[str] = ()) -> list[str]:
    """What follows `dsat` on a command line.

    Args:
        settings: of one of the methods in `SEARCHES`.
        without: names of settings that are left out; those that mean something in a shell only are
            in any case.
    """
    words = [settings.method]
    if not settings.command:
        words += [str(settings.config), str(settings.model_dir)]
    for own in options_of(Settings):
        if not (own.shell_only or own.name in without):
            words += _of_option(own, getattr(settings, own.name))
    for parameter, own in options_of_search(settings.method).items():
        words += _of_option(own, settings.search_options.get(parameter, own.initial))
    return [*words, "--", *settings.command] if settings.command else words


def _of_option(own: Option, value: Any) -> list[str]:
    """An option with its value; nothing if it has that by itself."""
    flag = own.flags[-1]
    if value == own.initial:
        return []
    if own.kind is None:
        return [flag]
    if own.many:
        pairs = isinstance(value, Mapping)
        listed = [f"{key}={each}" for key, each in value.items()] if pairs else value
        return [flag, *map(own.kind.write, listed)]
    text = own.kind.write(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
