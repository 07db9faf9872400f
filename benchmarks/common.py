"""What several benchmarks do with the product's own parts."""

from __future__ import annotations

from dsat.engines.local.engine import LocalEngine
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


def run_trial(engine: LocalEngine, trial: Trial) -> Outcome:
    """Launches a trial on an engine without any other, and waits until it ends."""
    engine.launch(trial)
    ended: list[tuple[int, Outcome]] = []
    while not ended:
        ended = engine.poll(60.0)
    [(_, outcome)] = ended
    return outcome
