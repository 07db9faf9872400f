"""A Hugging Face Trainer script for Determined, with its callback and dsat's helpers."""

import sys
from typing import Any

import determined as det
import torch
from determined.transformers import DetCallback
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import dsat


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 128, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(args: TrainingArguments, core_context: Any) -> None:
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    det_callback = DetCallback(core_context, args, filter_metrics=["loss"])
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sentences(512),
        eval_dataset=sentences(64),
        callbacks=[det_callback],
    )
    with dsat.dsat_reporting_context(core_context, op=det_callback.current_op):
        trainer.train()


if __name__ == "__main__":
    info = det.get_cluster_info()
    assert info is not None
    words = dsat.get_hf_args_with_overwrites(sys.argv[1:], info.trial.hparams)
    [arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    distributed = det.core.DistributedContext.from_deepspeed()
    with det.core.init(distributed=distributed) as context:
        main(arguments, context)
