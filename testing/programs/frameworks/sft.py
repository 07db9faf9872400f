"""TRL's supervised fine-tuning."""

from common import model, rows, tokenizer
from trl import SFTConfig, SFTTrainer, TrlParser

(args,) = TrlParser((SFTConfig,)).parse_args_and_config()
SFTTrainer(model=model(), args=args, train_dataset=rows(), processing_class=tokenizer()).train()
