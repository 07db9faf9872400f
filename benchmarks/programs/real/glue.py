"""Classify pairs of sentences with the Hugging Face Trainer, like its examples.

    python3 glue.py --output_dir out --deepspeed auto.json --per_device_train_batch_size 8

3,000 samples of random tokens, padded to 128; a BERT of two layers.
"""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

SAMPLES, LENGTH, VOCABULARY = 3000, 128, 2000


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(20, LENGTH, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        tokens = self.tokens[index] * mask
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.sum() % 2}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=256, **sizes)
    model = BertForSequenceClassification(config)
    trainer = Trainer(model=model, args=args, train_dataset=Pairs())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
