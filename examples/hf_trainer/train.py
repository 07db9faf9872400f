"""Trains a small GPT-2 with the Hugging Face Trainer: a script with nothing of dsat in it.

    torchrun train.py --deepspeed ds_config.json --output_dir output \
        --per_device_train_batch_size 4 --gradient_checkpointing False

The model is initialised at random and the data are random tokens, so that nothing is downloaded.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

VOCABULARY = 8192
LENGTH = 64


class RandomTokens(torch.utils.data.Dataset):
    """Random sequences from a small pool, as many as are asked for."""

    def __init__(self, num_samples: int, pool_size: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (pool_size, LENGTH), generator=generator)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=RandomTokens(100_000))
    trainer.train()


if __name__ == "__main__":
    main()
