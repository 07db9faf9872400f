"""Lightning's DeepSpeedStrategy on CPU cores, declared as GPUs because it rejects other devices."""

import argparse
import os
from typing import Any

import lightning
import torch
from common import model
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy

p = argparse.ArgumentParser()
p.add_argument("--local_rank", type=int, default=-1)
p.add_argument("--batch-size", type=int, default=2)
a = p.parse_args()


class Cores(CUDAAccelerator):
    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: Any) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", number) for number in range(devices)]

    @staticmethod
    def is_available() -> bool:
        return True


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


config = {"train_micro_batch_size_per_gpu": a.batch_size, "zero_optimization": {"stage": 1}}
trainer = lightning.Trainer(
    accelerator=Cores(),
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    strategy=DeepSpeedStrategy(config=config),
    max_steps=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
rows: Any = torch.randint(0, 250, (2000, 32))
trainer.fit(Module(), torch.utils.data.DataLoader(rows, a.batch_size, shuffle=True))
