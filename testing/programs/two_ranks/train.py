"""A Core API script that runs out of memory in its second step.

Rank 1 does so with the user's own configuration, and rank 0 with all others. The profile trial
runs.
"""

from typing import Any

import deepspeed
import determined as det
import torch

import dsat


def main(core_context: det.core.Context, info: Any) -> None:
    config = dsat.get_ds_config_from_hparams(info.trial.hparams)
    model = torch.nn.Linear(64, 64)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size, rank = engine.train_micro_batch_size_per_gpu(), core_context.distributed.rank
    stage = engine.zero_optimization_stage()
    failing = {(1, 0): None, (2, 0): 1}.get((size, stage), 0)
    for op in core_context.searcher.operations():
        with dsat.dsat_reporting_context(core_context, op):
            for step in range(op.length):
                if step == 1 and rank == failing:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
                loss = engine(torch.randn(size, 64)).square().mean()
                engine.backward(loss)
                engine.step()


if __name__ == "__main__":
    deepspeed.init_distributed()
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(distributed=distributed) as context:
        main(context, det.get_cluster_info())
