"""Parts of an optimizer step, and advice on a large part."""

from __future__ import annotations

from collections.abc import Iterator

from dsat.run.run import Run
from dsat.values import format as fmt
from dsat.values.outcome import Metrics
from dsat.values.trial import Trial
from dsat.values.zero_strategy import NONE, read_strategy

PARTS = ("forward", "backward", "optimizer step", "waiting for data", "the rest")
_DATA, _OPTIMIZER = 0.1, 0.3  # smallest shares of a step that are worth a sentence
_WORKERS = "worker"  # in names of switches for the number of processes that load data


def milliseconds(metrics: Metrics) -> tuple[float, ...]:
    """Return the ms of an optimizer step in each of `PARTS`."""
    parts = (metrics.forward, metrics.backward, metrics.step, metrics.data)
    return (*parts, max(0.0, metrics.latency - sum(parts)))


def advice(run: Run) -> list[str]:
    """Return sentences with remedies if waiting for data or an offloaded optimizer is slow."""
    baseline, best = _metrics(run, run.baseline), _metrics(run, run.best)
    if best is None:
        return []
    return [*_advise_on_data(run, baseline or best, best), *_advise_on_optimizer(run, best)]


def _advise_on_data(run: Run, baseline: Metrics, best: Metrics) -> Iterator[str]:
    names = dict.fromkeys(name for trial in run.trials.values() for name in trial.script_args)
    workers = [name for name in names if _WORKERS in name]
    share, best_share = baseline.data / baseline.latency, best.data / best.latency
    if share >= _DATA > best_share:
        yield (
            f"Time: your configuration waits for data {fmt.percent(share)} of a step, and the best "
            f"configuration {fmt.percent(best_share)}."
        )
    if best_share < _DATA:
        return
    remedy = (
        "Give the data loader more worker processes (num_workers), or do less work per sample. If "
        "your script has a flag for workers, --vary --FLAG=0,4,8 searches it"
    )
    if workers:
        remedy = f"More worker processes may help: list higher values of {workers[0]} with --vary"
    waits = f"the best configuration waits for data {fmt.percent(best_share)} of a step"
    yield f"Time: {waits}. {remedy}."


def _advise_on_optimizer(run: Run, best: Metrics) -> Iterator[str]:
    assert run.best is not None
    share, strategy = best.step / best.latency, read_strategy(run.plan.config(run.best.overrides))
    if share < _OPTIMIZER or strategy.offload_optimizer == NONE:
        return
    yield (
        f"Time: the optimizer on the host takes {fmt.percent(share)} of a step of the best "
        "configuration. More devices make it faster, and more gradient accumulation makes it rarer."
    )


def _metrics(run: Run, trial: Trial | None) -> Metrics | None:
    outcome = None if trial is None else run.outcomes.get(trial.id)
    return None if outcome is None else outcome.metrics
