"""A script with TRL's supervised fine-tuning."""

from common import model, text, tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer, TrlParser

(args,) = TrlParser((SFTConfig,)).parse_args_and_config()
rows = Dataset.from_list([{"text": text(number)} for number in range(2000)])
SFTTrainer(model=model(), args=args, train_dataset=rows, processing_class=tokenizer()).train()
