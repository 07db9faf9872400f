"""What a recording tries next: micro batches up to out of memory, then all that ran once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import tables
from benchmarks.tables import Row
from dsat.values.outcome import Outcome


def next_size(known: Mapping[int, bool], largest: int) -> int | None:
    """The next micro batch to try with some settings, or None if their edge is known.

    Args:
        known: whether a micro batch ran, for those that were tried.
        largest: none above this is tried.
    """
    size = 1
    while known.get(size) and 2 * size <= largest:
        size *= 2
    if size not in known:
        return size
    ran = max((tried for tried, ok in known.items() if ok), default=0)
    failed = min((tried for tried, ok in known.items() if not ok), default=None)
    if failed is None or failed - ran <= max(1, ran // 6):
        return None
    return (ran + failed) // 2


@dataclass(frozen=True)
class Cell:
    """A trial to run: the position of its settings, its micro batch, and which pass it is of."""

    settings: int
    micro_batch: int
    number: int


class Grid:
    """What is recorded of a table, and what is to be recorded next.

    Args:
        settings: that are tried.
        largest: no micro batch above this is.
        passes: how often each trial that runs is measured.
        events: the rows that were recorded before, all of them with one of the settings.
        interval: only trials whose 95 % intervals are all wider, as a fraction, are measured again.
    """

    def __init__(
        self,
        settings: Sequence[Mapping[str, Any]],
        largest: int,
        passes: int,
        events: Iterable[Mapping[str, Any]] = (),
        *,
        interval: float = 0.0,
    ) -> None:
        self._interval = interval
        self._precise: set[tuple[int, int]] = set()
        self._largest = largest
        self._passes = passes
        self._known: list[dict[int, bool]] = [{} for _ in settings]
        self._ended: set[Cell] = set()
        self._running: set[Cell] = set()
        for event in events:
            row = Row.from_json(event)
            position = list(settings).index(row.settings)
            self.end(Cell(position, row.micro_batch, tables.pass_of(event)), row.outcome)

    def begin(self) -> Cell | None:
        """The next trial, or None if none is to be run before others end."""
        edges = self._edges()
        cell = next((c for c in edges if c is not None), None) if edges else self._repetition()
        if cell is not None:
            self._running.add(cell)
        return cell

    def end(self, cell: Cell, outcome: Outcome) -> None:
        """Enters what came of a trial."""
        if outcome.metrics is not None and outcome.metrics.ci95 <= self._interval:
            self._precise.add((cell.settings, cell.micro_batch))
        self._running.discard(cell)
        self._ended.add(cell)
        if cell.number == 1:
            self._known[cell.settings][cell.micro_batch] = outcome.ok

    def _edges(self) -> list[Cell | None]:
        """Of all settings whose edge is unknown, the next trial; None where one is running."""
        busy = {cell.settings for cell in self._running}
        found: list[Cell | None] = []
        for position, known in enumerate(self._known):
            size = next_size(known, self._largest)
            if size is not None:
                found.append(None if position in busy else Cell(position, size, 1))
        return found

    def _repetition(self) -> Cell | None:
        cells = (
            Cell(position, size, number)
            for number in range(2, self._passes + 1)
            for position, known in enumerate(self._known)
            for size, ok in known.items()
            if ok and (position, size) not in self._precise
        )
        return next((c for c in cells if c not in self._ended | self._running), None)
