"""Trains a causal language model with the Hugging Face Trainer on blocks of tokens.

    deepspeed clm.py --output_dir out --deepspeed auto.json --per_device_train_batch_size 2

1,000 blocks of 128 random tokens; a GPT-2 of two layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

VOCABULARY = 2000


@dataclass
class DataArguments:
    block_size: int = field(default=128)
    blocks: int = field(default=1000)


class Blocks(torch.utils.data.Dataset[dict[str, list[int]]]):
    def __init__(self, count: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCABULARY, (count, size), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    data, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=data.block_size, **sizes))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Blocks(data.blocks, data.block_size),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
