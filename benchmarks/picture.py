"""The picture of the replay: best found after each number of trials, a panel for each table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay import TRIALS, Episode

_WIDTH, _HEIGHT, _COLUMNS = 5.4, 3.6, 2
_COLOURS = {
    "asha": "tab:blue",
    "binary": "tab:orange",
    "random": "tab:green",
    "gridsearch": "tab:purple",
    "model": "tab:red",
    "fast": "black",
    "TPE": "tab:brown",
    "GP": "tab:pink",
    "search": "gray",
}


def draw(episodes: Sequence[Episode], path: Path) -> None:
    """Draws medians over the seeds; the same episodes give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dsat", "font.size": 8})
    names = list(dict.fromkeys(e.table for e in episodes))
    rows = -(-len(names) // _COLUMNS)
    figure, panels = pyplot.subplots(
        rows,
        _COLUMNS,
        figsize=(_COLUMNS * _WIDTH, rows * _HEIGHT),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for panel, name in zip(panels.flat, names, strict=False):
        mine = [e for e in episodes if e.table == name]
        for tuner in dict.fromkeys(e.tuner for e in mine):
            family, _, method = tuner.partition(" ")
            panel.step(
                range(1, TRIALS + 1),
                medians([e for e in mine if e.tuner == tuner]),
                where="post",
                label=tuner,
                color=_COLOURS[method],
                linestyle={"dsat": "-", "Determined": "--"}.get(family, ":"),
                linewidth=2 if method == "model" else 1.2,
            )
        panel.set_title(name)
        panel.grid(alpha=0.3)
        panel.set_ylim(0, 1.02)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    for panel in panels[-1]:
        panel.set_xlabel("trials")
    for panel in panels[:, 0]:
        panel.set_ylabel("best found / best recorded")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def medians(episodes: Sequence[Episode]) -> list[float]:
    """The median over the seeds of the best found after 1, 2, ... trials."""
    return [
        statistics.median(e.best_after(count) for e in episodes) for count in range(1, TRIALS + 1)
    ]
