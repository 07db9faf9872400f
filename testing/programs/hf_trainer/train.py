"""A Hugging Face Trainer script as users write it: without Determined and without dsat."""

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)


@dataclass
class DataArguments:
    """The script's own arguments, in addition to the Trainer's."""

    samples: int = field(default=1024)
    record: str = field(default="", metadata={"help": "file for what the model saw"})


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process; loading a row takes `load_s` seconds."""

    def __init__(self, samples: int, load_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 128, (samples, 16), generator=generator)
        self.load_s = load_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.load_s)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes down how the model was trained by the end of the first optimizer step."""

    def __init__(self, model: GPT2LMHeadModel, path: str) -> None:
        self.path = os.path.join(os.environ.get("DSAT_TRIAL_DIR", "."), path) if path else ""
        self.shapes: list[list[int]] = []
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, model: GPT2LMHeadModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shapes.append(list(kwargs["input_ids"].shape))
        self.checkpointing = model.transformer.gradient_checkpointing

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self.path and state.global_step == 1 and state.is_world_process_zero:
            seen = {
                "shapes": self.shapes,
                "checkpointing": self.checkpointing,
                "attention": more["model"].config._attn_implementation,
                "workers": args.dataloader_num_workers,
            }
            with open(self.path, "w") as file:
                json.dump(seen, file)


def make_model(layers: int = 2) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, args = parser.parse_args_into_dataclasses()
    model = make_model()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sentences(data.samples),
        callbacks=[Record(model, data.record)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
