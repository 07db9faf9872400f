"""A Trainer script without any argument, whose data set is slow."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, each sample of which is waited for."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 128, (4096, 32), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)  # most of a step on a loaded machine, too
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes down how the model was trained."""

    def on_step_end(self, args: Any, *_: object, **more: object) -> None:
        model = more["model"]
        assert isinstance(model, GPT2LMHeadModel)
        seen = {
            "checkpointing": model.transformer.gradient_checkpointing,
            "attention": model.config._attn_implementation,
            "workers": args.dataloader_num_workers,
        }
        path = Path(os.environ.get("DSAT_TRIAL_DIR", tempfile.gettempdir())) / "seen.json"
        path.write_text(json.dumps(seen))


def main() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=config,
        per_device_train_batch_size=8,
        max_steps=200,
        save_strategy="no",
        report_to="none",
    )
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Record()]).train()


if __name__ == "__main__":
    main()
