"""A script with TRL's direct preference optimization."""

from common import model, text, tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, TrlParser

(args,) = TrlParser((DPOConfig,)).parse_args_and_config()
data = Dataset.from_list(
    [
        {"prompt": text(i, 5), "chosen": text(i + 1, 8), "rejected": text(i + 2, 8)}
        for i in range(2000)
    ]
)
DPOTrainer(
    model=model(), ref_model=model(), args=args, train_dataset=data, processing_class=tokenizer()
).train()
