"""A tiny Core API script, as a user of Determined would write it."""

import argparse

import deepspeed
import determined as det
import torch
from torch import nn

import dsat


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs).float(), targets.float())


def main(core_context: det.core.Context, width: int, sample_bytes: int) -> None:
    info = det.get_cluster_info()
    assert info is not None
    assert info.latest_checkpoint is None
    config = dsat.get_ds_config_from_hparams(info.trial.hparams)
    model = Model(width)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size = engine.train_micro_batch_size_per_gpu()
    steps = 0
    for op in core_context.searcher.operations():
        with dsat.dsat_reporting_context(core_context, op):
            while steps < op.length:
                inputs = torch.randn(size, width, device=engine.device)
                _weight = inputs.new_empty(size, sample_bytes, dtype=torch.uint8)
                loss = engine(inputs, inputs)
                engine.backward(loss)
                engine.step()
                steps += 1
        if core_context.distributed.rank == 0:
            core_context.train.report_validation_metrics(
                steps_completed=steps, metrics={"loss": loss.item()}
            )
            op.report_completed(loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--sample-bytes", type=int, default=0, help="memory that a sample takes without any work"
    )
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as context:
        main(context, arguments.width, arguments.sample_bytes)
