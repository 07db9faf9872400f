"""The model of `train.py` in the Trainer, which enables Ulysses through accelerate."""

import tempfile

import transformers
from train import model, samples  # type: ignore[import-not-found]
from transformers import HfArgumentParser, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
(args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
args.output_dir = tempfile.mkdtemp()
Trainer(model=model(2, 64), args=args, train_dataset=samples(32)).train()
