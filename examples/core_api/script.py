"""Trains a torchvision model with DeepSpeed and Determined's Core API.

The data are random images of ImageNet's form, made on the spot: what counts here is speed.
"""

import logging
import pathlib

import deepspeed
import determined as det
import torch
import torchvision
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dsat

NUM_CLASSES = 1000
NUM_IMAGES = 100_000
REPORT_EVERY = 10  # optimizer steps
CHECKPOINT_EVERY = 100


class RandomImages(Dataset):
    """As many random images as ImageNet has classes a hundred times over, from a small pool."""

    def __init__(self, image_size: int, pool_size: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(pool_size, 3, image_size, image_size, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (pool_size,), generator=generator)

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        position = index % len(self.images)
        return self.images[position], self.labels[position]


def main(core_context: det.core.Context, info: det.ClusterInfo) -> None:
    hparams = info.trial.hparams
    ds_config = dsat.get_ds_config_from_hparams(hparams)

    model = getattr(torchvision.models, hparams["model_name"])(num_classes=NUM_CLASSES)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    dtype = next(engine.module.parameters()).dtype
    dataset = RandomImages(hparams["image_size"])
    loader = DataLoader(
        dataset,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=DistributedSampler(dataset),
        num_workers=hparams["data_workers"],
        drop_last=True,
    )
    batches = iter(deepspeed.utils.RepeatingLoader(loader))

    steps_completed = 0
    if info.latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
            _, state = engine.load_checkpoint(str(path))
            steps_completed = state["steps_completed"]

    is_chief = core_context.distributed.rank == 0
    loss = torch.zeros(())
    for op in core_context.searcher.operations():
        with dsat.dsat_reporting_context(core_context, op):
            while steps_completed < op.length:
                for _ in range(engine.gradient_accumulation_steps()):
                    images, labels = next(batches)
                    outputs = engine(images.to(engine.device, dtype))
                    loss = torch.nn.functional.cross_entropy(
                        outputs.float(), labels.to(engine.device)
                    )
                    engine.backward(loss)
                    engine.step()
                steps_completed += 1

                if steps_completed % REPORT_EVERY == 0 and is_chief:
                    core_context.train.report_training_metrics(
                        steps_completed=steps_completed, metrics={"loss": loss.item()}
                    )
                    op.report_progress(steps_completed)
                done = steps_completed == op.length
                if steps_completed % CHECKPOINT_EVERY == 0 or done:
                    save(core_context, engine, steps_completed)
                    if core_context.preempt.should_preempt():
                        return

        if is_chief:
            core_context.train.report_validation_metrics(
                steps_completed=steps_completed, metrics={"loss": loss.item()}
            )
            op.report_completed(loss.item())


def save(core_context: det.core.Context, engine, steps_completed: int) -> None:
    metadata = {"steps_completed": steps_completed}
    with core_context.checkpoint.store_path(metadata, shard=True) as (path, _):
        engine.save_checkpoint(
            str(pathlib.Path(path)), client_state={"steps_completed": steps_completed}
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    cluster_info = det.get_cluster_info()
    if cluster_info is None:
        raise SystemExit("Run this with `python3 -m dsat` or on a Determined cluster.")
    deepspeed.init_distributed()
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as context:
        main(context, cluster_info)
