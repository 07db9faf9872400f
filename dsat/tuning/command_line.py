"""The command line of a search, and the command that resumes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
        """Return the words that resume the run; `--name=value` in `more` overrides the user's."""
        given = {word.partition("=")[0] for word in self.options}
        options = [*self.options, *([] if "--resume" in given else ["--resume"])]
        if "--run-dir" not in given:
            options += ["--run-dir", str(folder)]
        options += [word for word in more if word not in given]
        if self.is_experiment:
            return [self.name, *self.target, *options]
        return [self.name, *options, *self.target]
