"""Trains a torchvision model with DeepSpeed and Determined's DeepSpeedTrial.

The data are random images of ImageNet's form, made on the spot: what counts here is speed. The only
line for dsat is the one that calls `dsat.get_ds_config_from_hparams`.
"""

from typing import Any

import deepspeed
import torch
import torchvision
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from torch.utils.data import Dataset

import dsat

NUM_CLASSES = 1000
NUM_IMAGES = 100_000
NUM_VALIDATION_IMAGES = 1000


class RandomImages(Dataset):
    """Random images from a small pool, as many as are asked for."""

    def __init__(self, image_size: int, num_images: int, pool_size: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(pool_size, 3, image_size, image_size, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (pool_size,), generator=generator)
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        position = index % len(self.images)
        return self.images[position], self.labels[position]


class TorchvisionTrial(det_ds.DeepSpeedTrial):
    def __init__(self, context: det_ds.DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        model = getattr(torchvision.models, self.hparams["model_name"])(num_classes=NUM_CLASSES)
        ds_config = dsat.get_ds_config_from_hparams(self.hparams)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config
        )
        self.engine = context.wrap_model_engine(engine)
        self.dtype = next(engine.module.parameters()).dtype

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss.item()}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(next(dataloader_iter)).item()}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self._loader(NUM_IMAGES, training=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self._loader(NUM_VALIDATION_IMAGES, training=False)

    def _loader(self, num_images: int, *, training: bool) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            RandomImages(self.hparams["image_size"], num_images),
            batch_size=self.context.train_micro_batch_size_per_gpu,
            shuffle=training,
            drop_last=training,
            num_workers=self.hparams["data_workers"],
        )

    def _loss(self, batch: Any) -> torch.Tensor:
        images, labels = self.context.to_device(batch)
        outputs = self.engine(images.to(self.dtype))
        return torch.nn.functional.cross_entropy(outputs.float(), labels)
