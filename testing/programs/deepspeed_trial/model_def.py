"""A DeepSpeedTrial in many variants that users write; the configuration selects one."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from determined.pytorch import dsat as determined_dsat
from torch import nn

import dsat

FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])


class Diary(pytorch.PyTorchCallback):  # type: ignore[misc]
    """Writes down the events of a trial in their order."""

    def __init__(self) -> None:
        self.path = FOLDER / f"diary{os.environ['RANK']}.txt"

    def write(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(what + "\n")

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.write(f"startup {first_batch_idx} {checkpoint_uuid}")

    def on_training_start(self) -> None:
        self.write("training")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.write(f"epoch {epoch_idx}")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.write(f"validated {sorted(metrics)}")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.write("checkpoint")

    def on_trial_shutdown(self) -> None:
        self.write("shutdown")


class Sum(pytorch.MetricReducer):  # type: ignore[misc]
    """A custom metric reducer."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = 0

    def update(self, value: int) -> None:
        self.total += value

    def per_slot_reduce(self) -> int:
        return self.total

    def cross_slot_reduce(self, per_slot_metrics: list[int]) -> int:
        return sum(per_slot_metrics)


class Variants(det_ds.DeepSpeedTrial):  # type: ignore[misc]
    def __init__(self, context: det_ds.DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.behaviour = hparams.get("overwrite_deepspeed_args", {}).get("behaviour", "plain")
        self.width = context.get_hparam("width")
        self.diary = Diary()
        assert context.get_initial_batch() == 0
        self.samples = context.wrap_reducer(Sum(), "samples")
        self.writer = context.get_tensorboard_writer()
        engine = self.make_engine(hparams)
        self.engine = context.wrap_model_engine(engine)
        if self.behaviour == "two engines":
            self.critic = context.wrap_model_engine(self.make_engine(hparams))
        if self.behaviour == "accumulates itself":
            context.disable_auto_grad_accumulation()
        if self.behaviour == "own loader":
            context.disable_dataset_reproducibility_checks()

    def make_engine(self, hparams: dict[str, Any]) -> Any:
        model = nn.Sequential(nn.Linear(self.width, self.width), nn.Linear(self.width, 1))
        parts = {"model": model, "model_parameters": model.parameters()}
        if self.behaviour == "args":
            args = SimpleNamespace(**hparams)
            return deepspeed.initialize(args=args, **parts)[0]
        if self.behaviour == "overwrite":
            config = det_ds.overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            )
        elif self.behaviour == "determined's own":
            config = determined_dsat.get_ds_config_from_hparams(hparams)
        else:
            config = dsat.get_ds_config_from_hparams(hparams)
        return deepspeed.initialize(**parts, config=config)[0]

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"diary": self.diary}

    def train_batch(self, iterator: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        calls = 1
        if self.behaviour == "accumulates itself":
            calls = self.context.num_micro_batches_per_slot
        for _ in range(calls):
            inputs, targets = self.context.to_device(next(iterator))
            loss = nn.functional.mse_loss(self.engine(inputs), targets)
            self.engine.backward(loss)
            self.engine.step()
            if self.behaviour == "two engines":
                self.critic.backward(self.critic(inputs).square().mean())
                self.critic.step()
        self.samples.update(len(inputs))
        self.writer.add_scalar("mine", loss.item(), batch_idx)
        self.diary.write(f"batch {batch_idx} {len(inputs)}")
        return {"loss": loss}

    def evaluate_batch(self, iterator: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = self.context.to_device(next(iterator))
        self.samples.update(len(inputs))
        if self.behaviour == "gets worse":
            return {"error": float(self.engine.global_steps)}
        return {"error": nn.functional.mse_loss(self.engine(inputs), targets)}

    def build_training_data_loader(self) -> Any:
        return self.loader(2000)

    def build_validation_data_loader(self) -> Any:
        return self.loader(40)

    def loader(self, length: int) -> Any:
        data = torch.utils.data.TensorDataset(
            torch.randn(length, self.width), torch.randn(length, 1)
        )
        size = self.context.train_micro_batch_size_per_gpu
        if self.behaviour == "own loader":
            return torch.utils.data.DataLoader(data, size)
        return pytorch.DataLoader(data, batch_size=size, shuffle=True, drop_last=True)
