"""The command line of a search, and the command that resumes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.engines.places import ENGINE_NAMES
from dsat.options import Option
from dsat.search import BUILT_IN
from dsat.tuning.settings import TUNE, Settings


@dataclass(frozen=True)
class CommandLine:
    """The words of a dsat command.

    `target` is the user's command, or the configuration and folder of an experiment.
    """

    name: str
    options: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    is_experiment: bool = False

    def resumed(self, folder: Path, *more: str) -> list[str]:
        """Return the words that resume the run; options in `more` override the user's."""
        names = {word.partition("=")[0] for word in self.options}
        options = [*self.options, *([] if "--resume" in names else ["--resume"])]
        if "--run-dir" not in names:
            options += ["--run-dir", str(folder)]
        options += [word for word in more if word not in names]
        if self.is_experiment:
            return [self.name, *self.target, *options]
        return [self.name, *options, *self.target]


def write_line(
    settings: Settings, options: Iterable[Option], keywords: Mapping[str, Any]
) -> CommandLine | None:
    """Return the command line that is equivalent to a call of `dsat.tune`; None if there is none.

    `options` are the options of `dsat.tune`, and `keywords` the call's values by keyword.
    """
    if settings.method not in BUILT_IN or settings.engine not in ENGINE_NAMES:
        return None
    options_by_keyword = {keyword: option for option in options for keyword in option.keywords}
    words = ["--method", settings.method]
    for keyword, value in keywords.items():
        option_words = options_by_keyword[keyword].to_words(value)
        if option_words is None:
            return None
        words += option_words
    if settings.config is None:
        return CommandLine(TUNE, tuple(words), settings.command)
    target = (str(settings.config), str(settings.model_dir))
    return CommandLine(TUNE, tuple(words), target, is_experiment=True)
