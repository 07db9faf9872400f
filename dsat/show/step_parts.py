"""Parts of an optimizer step, and advice about a part that is large."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any

from dsat.command.switches import BIND_CORES
from dsat.run.comparison import Gain
from dsat.run.finals import Contestant
from dsat.run.run import Run, own_switches
from dsat.values import format as fmt
from dsat.values.outcome import Metrics
from dsat.values.trial import Trial
from dsat.values.zero_strategy import NONE, of_config

PARTS = ("forward", "backward", "optimizer step", "waiting for data", "the rest")
_DATA, _OPTIMIZER = 0.1, 0.3  # of a step, from which on a part is worth a sentence
_WORKERS = "worker"  # in the names of switches that set how many processes load data


def milliseconds(metrics: Metrics) -> tuple[float, ...]:
    """Return the ms of an optimizer step in each of `PARTS`."""
    known = (metrics.forward, metrics.backward, metrics.step, metrics.data)
    return (*known, max(0.0, metrics.latency - sum(known)))


def advice(run: Run) -> list[str]:
    """Return a sentence for each large part of a step, with its remedy and the measured gain."""
    own, best = _metrics(run, run.baseline), _metrics(run, run.best)
    if best is None:
        return []
    return [*_advise_on_data(run, own or best, best), *_advise_on_optimizer(run, best)]


def _advise_on_data(run: Run, own: Metrics, best: Metrics) -> Iterator[str]:
    """Name the wait for data: of the user's own step, and if it is still there of the best's."""
    names = dict.fromkeys(name for trial in run.trials.values() for name in trial.script_args)
    tried = [name for name in names if _WORKERS in name]
    gains = [
        (gain, f"{name}={value}")
        for name in tried
        for value, gain in gains_of_switch(run, name).items()
    ]
    gain, setting = max(gains, default=(0.0, ""))
    share, its = own.data / own.latency, best.data / best.latency
    if share >= _DATA and setting:
        yield f"Time: {fmt.percent(share)} of your step waits for data: {setting} gave {gain:.2f}x."
    elif share >= _DATA > its:
        both = f"{fmt.percent(share)} of your step waits for data, {fmt.percent(its)} of the best"
        yield f"Time: {both}."
    if its < _DATA:
        return
    yield f"Time: {fmt.percent(its)} of the best step waits for data: {_more_workers(tried)}."


def _more_workers(tried: Sequence[str]) -> str:
    if tried:
        return f"more worker processes may help: list higher values of {tried[0]} with --vary"
    return (
        "give the data loader more worker processes (num_workers), or do less work per sample. To "
        "search a flag of your script for it: --vary --num_workers=0,4,8"
    )


def _advise_on_optimizer(run: Run, best: Metrics) -> Iterator[str]:
    """Name a large optimizer step on the host."""
    assert run.best is not None
    share, strategy = best.step / best.latency, of_config(run.plan.config(run.best.overrides))
    if share < _OPTIMIZER or strategy.offload_optimizer == NONE:
        return
    gains = gains_of_switch(run, BIND_CORES)
    bound = f"{BIND_CORES} gave {gains[True]:.2f}x; " if True in gains else ""
    yield (
        f"Time: {fmt.percent(share)} of the best step is the optimizer step on the host: {bound}"
        "more devices share it, and more gradient accumulation makes it rarer."
    )


def gains_of_switch(run: Run, name: str) -> dict[Any, float]:
    """Return the gain of each value of a script's switch over the user's own, if it is sure.

    Of trials that differ in nothing else; the geometric mean where there are several pairs.
    """
    own_value = own_switches(run).get(name)
    ran = [trial for trial in run.trials.values() if run.value(trial)]
    without: dict[str, Contestant] = {}
    others: list[tuple[str, Any, Contestant]] = []
    for trial in ran:
        rest, value = _rest(run, trial, name), trial.script_args.get(name, own_value)
        if value == own_value:
            without.setdefault(rest, run.contestant(trial))
        else:
            others.append((rest, value, run.contestant(trial)))
    pairs: dict[Any, list[tuple[Contestant, Contestant]]] = {}
    for rest, value, contestant in others:
        if rest in without:
            pairs.setdefault(value, []).append((without[rest], contestant))
    gains = {value: _gain(found) for value, found in pairs.items()}
    return {value: gain.ratio for value, gain in gains.items() if gain.low > 1}


def _gain(pairs: Sequence[tuple[Contestant, Contestant]]) -> Gain:
    """Return the mean gain of pairs, each measured once, and its 95 % interval."""
    mean = statistics.fmean(then.log_value - own.log_value for own, then in pairs)
    errors = math.hypot(*(each.standard_error for pair in pairs for each in pair))
    return Gain.of_log(mean, NormalDist().inv_cdf(0.975) * errors / len(pairs))


def _rest(run: Run, trial: Trial, name: str) -> str:
    """Return the configuration of a trial and its switches but one, as text."""
    config = run.plan.config(trial.overrides)
    config["zero_optimization"] = {"stage": 0, **(config.get("zero_optimization") or {})}
    others = {k: v for k, v in trial.script_args.items() if k != name}
    return json.dumps([config, others], sort_keys=True, default=str)


def _metrics(run: Run, trial: Trial | None) -> Metrics | None:
    outcome = None if trial is None else run.outcomes.get(trial.id)
    return None if outcome is None else outcome.metrics
