"""The catalogue of mutations: reads `rules/*.yaml` and applies mutations."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
RULES = Path(__file__).parent / "rules"


@dataclass(frozen=True)
class Mutation:
    """A change of a few lines that breaks a documented rule; it has `tests` or `equivalent`.

    Attributes:
        id: a short, unique name.
        file: a path relative to `dsat`.
        rule: the broken rule, in one plain sentence.
        old: lines that occur exactly once in the file, at any common indentation.
        new: the lines that replace them.
        tests: paths or names of tests, one of which must then fail.
        equivalent: why no test can notice the change; empty for all other mutations.
    """

    id: str
    file: str
    rule: str
    old: str
    new: str
    tests: str = ""
    equivalent: str = ""

    @property
    def path(self) -> Path:
        """The file, relative to the repository."""
        return Path("dsat", self.file)

    def line(self, text: str) -> int:
        """Return the index of the first old line in the file's text.

        Raises:
            ValueError: the old lines are missing, or occur more than once.
        """
        lines, old = text.splitlines(), self.old.splitlines()
        found = [i for i in range(len(lines)) if _matches(lines[i : i + len(old)], old)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} places in {self.path} match, not 1")
        return found[0]

    def problem(self) -> str:
        """Return why the mutation does not apply to the repository; empty if it does."""
        try:
            self.applied((ROOT / self.path).read_text(encoding="utf-8"))
            for test in self.tests.split():
                path, _, name = test.partition("::")
                if f"def {name}" not in (ROOT / path).read_text(encoding="utf-8"):
                    raise ValueError(f"there is no {test}")
        except (OSError, ValueError, SyntaxError) as error:
            return f"{self.id}: {error}"
        return "" if self.tests or self.equivalent else f"{self.id}: no test is named"

    def applied(self, text: str) -> str:
        """Return the file's text with the new lines in place of the old ones."""
        first, lines = self.line(text), text.splitlines()
        indent = _indent(lines[first])
        lines[first : first + len(self.old.splitlines())] = [
            indent + line if line else line for line in self.new.splitlines()
        ]
        mutated = "\n".join(lines) + "\n"
        if ast.dump(ast.parse(mutated)) == _meaning(text):
            raise ValueError("the new lines mean the same as the old ones")
        return mutated


@functools.cache
def _meaning(text: str) -> str:
    return ast.dump(ast.parse(text))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _matches(lines: Sequence[str], old: Sequence[str]) -> bool:
    indent = _indent(lines[0]) if lines else ""
    return list(lines) == [indent + line if line else line for line in old]


def load() -> list[Mutation]:
    """Read all mutations."""
    found = []
    for path in sorted(RULES.glob("*.yaml")):
        for name, fields in YAML(typ="safe").load(path.read_text(encoding="utf-8")).items():
            found.append(Mutation(name, **fields))
    names = [mutation.id for mutation in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"mutations with the same id: {', '.join(sorted(repeated))}")
    return found
