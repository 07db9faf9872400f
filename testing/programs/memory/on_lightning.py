"""A script with Lightning's DeepSpeedStrategy."""

import json
import warnings
from typing import Any

import lightning  # type: ignore[import-not-found,unused-ignore]
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy  # type: ignore[import-not-found,unused-ignore]
from parts import LENGTH, VOCABULARY, Language, arguments, loss_of  # type: ignore[import-not-found]

warnings.filterwarnings("ignore")
args = arguments()


class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = loss_of(self.model(tokens), tokens)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


with open(args.deepspeed_config) as file:
    config = json.load(file)
for key in ("optimizer", "gradient_accumulation_steps"):  # Lightning sets them
    config.pop(key, None)
strategy = DeepSpeedStrategy(config=config)
trainer = lightning.Trainer(
    accelerator="gpu",  # the strategy requires it
    devices=1,
    strategy=strategy,
    precision="bf16-true",
    max_steps=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
rows: Any = torch.randint(0, VOCABULARY, (512, LENGTH))
size = config["train_micro_batch_size_per_gpu"]
trainer.fit(Module(), torch.utils.data.DataLoader(rows, size, shuffle=True))
