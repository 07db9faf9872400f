"""Hugging Face's Trainer, which saves its model; `--lora` trains PEFT's LoRA."""

from dataclasses import dataclass

from common import Rows, model
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Choices:
    lora: bool = False
    width: int = 32


choices, args = HfArgumentParser((Choices, TrainingArguments)).parse_args_into_dataclasses()
net = model(choices.width)
if choices.lora:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(net, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
trainer = Trainer(model=net, args=args, train_dataset=Rows())
trainer.train()
trainer.save_model()
