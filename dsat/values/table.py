"""Tables of text cells, with their Markdown; `dsat.show` lays them out on terminals and pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Attributes:
        numbers: headings of right-aligned columns.
        names: headings of columns whose cells are never wrapped.
        optional: headings of columns that a narrow terminal omits, in the order of omission.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    names: Collection[str] = ()
    optional: Sequence[str] = ()

    def without(self, heading: str) -> Table:
        i = self.headings.index(heading)
        rows = [[*row[:i], *row[i + 1 :]] for row in self.rows]
        return replace(self, headings=[*self.headings[:i], *self.headings[i + 1 :]], rows=rows)

    def markdown(self) -> list[str]:
        """Return the lines of a Markdown table, like the "pipe" format of tabulate."""
        table = [[cell.replace("|", "\\|") for cell in row] for row in (self.headings, *self.rows)]
        widths = [max(len(column[0]) + 2, *map(len, column)) for column in zip(*table, strict=True)]
        right = [heading in self.numbers for heading in self.headings]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(cells, widths, right, strict=True)
            ]
            return f"| {' | '.join(padded)} |"

        rules = [
            "-" * (width + 1) + ":" if is_right else ":" + "-" * (width + 1)
            for width, is_right in zip(widths, right, strict=True)
        ]
        return [line(table[0]), "|" + "|".join(rules) + "|", *map(line, table[1:])]
