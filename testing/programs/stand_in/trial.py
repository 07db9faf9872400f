"""A trial without a model: it behaves as its hyperparameter `behaviour` says."""

import logging
import os
import time

import determined as det
from determined import core


def main(context: core.Context, info: det.ClusterInfo) -> None:
    behaviour = info.trial.hparams["behaviour"]
    print(f"run {info.trial._trial_run_id} of a trial that {behaviour}", flush=True)
    where = [context.distributed.rank, info.container_rank, info.agent_id, os.environ["HOSTNAME"]]
    everywhere = context.distributed.allgather(where)
    print(f"meets {everywhere}", flush=True)
    for op in context.searcher.operations():
        while behaviour == "waits":
            time.sleep(0.05)
            if context.preempt.should_preempt():
                return
        if behaviour == "hangs":
            time.sleep(2000)
        if context.distributed.rank > 0:
            continue
        op.report_progress(op.length / 2)
        metrics = {"loss": 1.0 / op.length, "pid": os.getpid()}
        context.train.report_validation_metrics(op.length, metrics)
        op.report_completed({"loss": 1.0 / op.length, "of": behaviour})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    cluster_info = det.get_cluster_info()
    assert cluster_info is not None
    ranks = core.DistributedContext.from_deepspeed() if "RANK" in os.environ else None
    with core.init(distributed=ranks, tensorboard_mode=core.TensorboardMode.MANUAL) as core_context:
        main(core_context, cluster_info)
