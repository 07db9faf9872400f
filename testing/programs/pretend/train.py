"""A trial that measures nothing: after a while, it reports results of a made-up machine.

The hyperparameter `behaviours` lists how trials end instead, by the trial's number.
"""

import json
import logging
import os
import signal
import sys
import time
from typing import Any

import determined as det

from dsat.in_trial import runner_watch
from dsat.in_trial.cluster_rank import OUTCOME_KEY, numbers
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind


def outcome_of(spec: dict[str, Any]) -> Outcome:
    micro_batch = spec["micro_batch"]
    if micro_batch > 16:
        return Outcome(OutcomeKind.OOM, message="rank 0: out of memory")
    profile = ModelProfile(10**6, 10**6, 4, 10**6, 1e6, 10**9) if spec["profile"] else None
    speed = 100.0 * micro_batch / (micro_batch + 3) + spec["stage"]
    metrics = Metrics(speed, 1.0, 1.0, 1.0, 1.0, 1e6 * speed, 3, 0.01)
    return Outcome(OutcomeKind.OK, metrics=metrics, profile=profile, duration_s=1.0)


def misbehave(behaviour: str, op: Any) -> None:
    if behaviour == "crashes":
        raise KeyError("no such thing")
    if behaviour == "runs out of memory":
        raise RuntimeError("CUDA error: out of memory")
    if behaviour == "rejects":
        raise det.InvalidHP("not with me")
    if behaviour == "leaves":
        sys.exit(0)
    if behaviour == "leaves with a status":
        sys.exit(3)
    if behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "reports its own":
        op.report_completed(0.0)


def main(context: Any, info: Any) -> None:
    hparams = info.trial.hparams
    spec = json.loads(hparams["_dsat_trial"]["spec"])
    watch = runner_watch.start(hparams["_dsat_trial"]["runner"])
    behaviours = dict(enumerate(hparams.get("behaviours", [])))
    for op in context.searcher.operations():
        print("a trial that runs", flush=True)
        op.report_progress(0.0)  # as `dsat_reporting_context` does
        deadline = time.monotonic() + hparams["lasts_s"]
        while time.monotonic() < deadline:
            if context.preempt.should_preempt():
                return
            time.sleep(0.02)
        behaviour = behaviours.get(hparams["_dsat_trial"]["id"], "runs")
        misbehave(behaviour, op)
        outcome = outcome_of(spec)
        if behaviour != "runs":
            continue
        metrics = numbers(outcome, measures=spec.get("measures", True))
        if metrics:
            context.train.report_validation_metrics(steps_completed=1, metrics=metrics)
        op.report_completed({OUTCOME_KEY: outcome.to_json()})
        if watch is not None:
            watch.stay_until_closed()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core_context:
        main(core_context, det.get_cluster_info())
