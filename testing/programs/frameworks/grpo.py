"""A script with TRL's GRPO and a custom reward."""

from common import model, text, tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()
data = Dataset.from_list([{"prompt": text(i, 5)} for i in range(2000)])


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(c.split()))) for c in completions]


GRPOTrainer(
    model=model(), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer()
).train()
