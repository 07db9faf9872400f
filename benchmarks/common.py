"""What several benchmarks do with the product's own parts."""

from __future__ import annotations

from dsat.engines.local.engine import LocalEngine
from dsat.memory.forecast import Forecast
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class Silent:
    """An observer of `dsat.tuning.loop.drive` that says nothing."""

    def started(self, run: Run, trial: Trial) -> None: ...

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None: ...

    def began(self, run: Run, forecast: Forecast | None) -> None: ...

    def waited(self, run: Run) -> None: ...


def run_trial(engine: LocalEngine, trial: Trial) -> Outcome:
    """Launches a trial on an engine without any other, and waits until it ends."""
    engine.launch(trial)
    ended: list[tuple[int, Outcome]] = []
    while not ended:
        ended = engine.poll(60.0)
    [(_, outcome)] = ended
    return outcome
