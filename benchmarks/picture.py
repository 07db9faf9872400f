"""The picture of the replay: one panel per table, with the best found after each number of
trials."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.replay import Episode

_TRIALS = 50
_WIDTH, _HEIGHT, _COLUMNS = 5.4, 3.6, 2
_STYLES = {"dsat": "-", "Determined": "--"}


def draw(episodes: Sequence[Episode], path: Path) -> None:
    """Draw medians over the seeds; the same episodes give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dsat", "font.size": 8})
    tables = list(dict.fromkeys(e.table for e in episodes))
    methods = list(dict.fromkeys(e.tuner.partition(" ")[2] for e in episodes))
    rows = -(-len(tables) // _COLUMNS)
    figure, panels = pyplot.subplots(
        rows,
        _COLUMNS,
        figsize=(_COLUMNS * _WIDTH, rows * _HEIGHT),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for panel, table in zip(panels.flat, tables, strict=False):
        mine = [e for e in episodes if e.table == table]
        for tuner in dict.fromkeys(e.tuner for e in mine):
            family, _, method = tuner.partition(" ")
            panel.step(
                range(1, _TRIALS + 1),
                medians([e for e in mine if e.tuner == tuner]),
                where="post",
                label=tuner,
                color=f"C{methods.index(method)}",
                linestyle=_STYLES.get(family, ":"),
                linewidth=2 if method == "model" else 1.2,
            )
        panel.set(title=table, ylim=(0, 1.02), xlabel="trials", ylabel="best found / best there is")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(tables) :]:
        panel.axis("off")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def medians(episodes: Sequence[Episode]) -> list[float]:
    """Return the median over the seeds of the best found after 1, 2, ... trials."""
    return [
        statistics.median(e.best_after(count) for e in episodes) for count in range(1, _TRIALS + 1)
    ]
