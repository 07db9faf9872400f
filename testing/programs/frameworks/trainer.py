"""Hugging Face's Trainer."""

from common import model, rows, tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
words = tokenizer()
data = rows().map(lambda row: words(row["text"]), remove_columns=["text"])
Trainer(
    model=model(),
    args=args,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(words, mlm=False),
).train()
