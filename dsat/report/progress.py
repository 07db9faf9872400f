"""Progress of a run: steps, the best so far, and the time left."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsat.in_trial.rank import STEPS_FILE
from dsat.report import format as fmt
from dsat.report.page_rows import best_so_far
from dsat.report.verdict import search_gain
from dsat.search.base import Outlook
from dsat.tuning import finals
from dsat.tuning.run import Run
from dsat.values.codec import Recorded
from dsat.values.files import write_atomically
from dsat.values.trial import TrialKind

STATUS_FILE = "status.json"
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_TRIALS = 3  # before anything is said of the time
_RECENT = 20


@dataclass(frozen=True)
class TimeLeft:
    """Estimated time left, in seconds, if all remaining trials are run.

    Attributes:
        trials: that it may still have, those that run included.
        low_s, high_s: if they take as long as the lower and the upper quartile of recent ones.
    """

    trials: int
    low_s: float
    high_s: float

    def __str__(self) -> str:
        few = f"at most {self.trials} more trial{'' if self.trials == 1 else 's'}"
        low, high = fmt.duration(self.low_s), fmt.duration(self.high_s)
        return f"{few}: {low if low == high else f'{low} to {high}'} if all are run"


@dataclass(frozen=True)
class Status(Recorded):
    """State of the process that works on a run, which the journal does not hold.

    Attributes:
        num_slots: slots that trials may use at once.
        at_once: trials of the search that may run at a time.
        outlook: what the search thinks of what it would try next.
    """

    num_slots: int
    at_once: int
    outlook: Outlook | None = None

    def write(self, folder: Path) -> None:
        """Into a run's folder."""
        write_atomically(folder / STATUS_FILE, json.dumps(self.to_json()))

    @classmethod
    def of_run(cls, folder: Path) -> Status | None:
        """Return the status in a run's folder; None if there is none."""
        try:
            return cls.from_json(json.loads((folder / STATUS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


def slots_line(run: Run, num_slots: int, trials: Path) -> str:
    """Return the numbers of busy and of all slots.

    Args:
        run: that goes on.
        num_slots: that trials may use at once.
        trials: where trials get their folders.
    """
    assert run.plan is not None
    begun = sum(not _is_queued(trials / trial.name) for trial in run.running)
    return f"{begun * run.plan.slots_per_trial} of {num_slots} slots busy"


def doing(trial_folder: Path) -> str:
    """Return the state of a running trial."""
    if _is_queued(trial_folder):
        return "waits for slots"
    step = step_of(trial_folder)
    return "starts" if step is None else f"step {step}"


def _is_queued(trial_folder: Path) -> bool:
    """A trial gets its folder together with its slots."""
    return not trial_folder.exists()


def outlook_line(run: Run, outlook: Outlook) -> str:
    """Return the search's expectation of its next trial."""
    assert run.plan is not None
    strategy = outlook.strategy.removeprefix("z").replace("_", " ")
    value = fmt.metric(run.plan.metric, outlook.value)
    return (
        f"the search expects {value} of stage {strategy} at micro batch {outlook.micro_batch}, "
        f"with a chance of {fmt.percent(outlook.chance)} to be 1 % better than the best so far"
    )


def time_left(run: Run, at_once: int) -> TimeLeft | None:
    """An estimate from the trials so far; None before there are enough of them.

    Args:
        run: that goes on.
        at_once: how many trials of the search run at a time; those of the finals run alone.
    """
    assert run.plan is not None
    took = [
        outcome.duration_s
        for trial_id, outcome in run.outcomes.items()
        if run.trials[trial_id].kind is not TrialKind.PROFILE
    ][-_RECENT:]
    if len(took) < _LEAST_TRIALS:
        return None
    most = run.plan.max_trials
    left = max(0, most - len(run.outcomes))
    alone = left
    if run.finals is None:
        alone = min(left, finals.reserved(most - run.num_finals, run.plan.finals))
    rounds = alone + -(-(left - alone) // max(1, at_once))
    low, _, high = statistics.quantiles(took, n=4, method="inclusive")
    return TimeLeft(left, rounds * low, rounds * high)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of blocks, the newest `width` of them."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BLOCKS[0] * len(shown)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in shown)


def best_line(run: Run) -> str:
    """The best so far, its gain over the user's own configuration, and how it came to it."""
    assert run.plan is not None
    if run.best is None or run.best_value is None:
        return "best: none yet"
    line = f"best: {run.best.name}, {fmt.metric(run.plan.metric, run.best_value)}"
    ratio = search_gain(run)
    if ratio is not None and run.best is not run.baseline:
        line += f", {ratio:.2f}x your own as measured once"
    values = [row["best"] for row in best_so_far(run)]
    return f"{line}\n{sparkline(values, 60)}" if len(values) > 1 else line


def step_of(trial_folder: Path) -> int | None:
    """The optimizer steps that a running trial has made; None if it has not come so far."""
    try:
        return int((trial_folder / STEPS_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
