"""The command line by which a search was started, to show how to go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line of dsat.

    Attributes:
        name: of the command.
        options: words of its options.
        target: the user's command, or the experiment's configuration and folder.
        is_experiment: which of the two it is.
    """

    name: str
    options: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    is_experiment: bool = False

    def words(self, *more: str) -> list[str]:
        """Return its words with further options."""
        if self.is_experiment:
            return [self.name, *self.target, *self.options, *more]
        return [self.name, *self.options, *more, *self.target]
