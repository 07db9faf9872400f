"""A Trainer with PEFT's LoRA."""

from common import model, rows, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
words = tokenizer()
data = rows().map(lambda row: words(row["text"]), remove_columns=["text"])
net = get_peft_model(model(), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
Trainer(
    model=net,
    args=args,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(words, mlm=False),
).train()
