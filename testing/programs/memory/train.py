"""Train a model of `models.py` until the process is stopped, in the way that `--variant`
selects."""

import argparse
import contextlib
import json
from pathlib import Path

import deepspeed
import models  # type: ignore[import-not-found]
import torch
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt")
parser.add_argument("--variant", default="")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
task = models.TASKS[args.model]
in_stage_3 = False
if args.variant == "zero.Init in stage 3":
    in_stage_3 = (
        json.loads(Path(args.deepspeed_config).read_text())["zero_optimization"]["stage"] == 3
    )
partitions = in_stage_3 or args.variant == "zero.Init"
built = deepspeed.zero.Init() if partitions else contextlib.nullcontext()
with built:
    model = task.model()
if args.model == "offloading":
    deepspeed.init_distributed()
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=trained, config=args.deepspeed_config
)
if args.variant == "compile":
    engine.compile()
called = model if args.variant == "the model itself" else engine
autocasts = torch.autocast(engine.device.type, torch.bfloat16, enabled=args.variant == "autocast")
dtype = next(engine.module.parameters()).dtype
size = engine.train_micro_batch_size_per_gpu()


def contrastive(outputs: torch.Tensor) -> torch.Tensor:
    """Compute a loss over two views of each sample with the micro batch as a number."""
    samples = functional.normalize(outputs.float().mean(1))
    views = torch.cat([samples, samples.flip(0)])
    same = torch.eye(2 * size, dtype=torch.bool, device=engine.device)
    near = (views @ views.t()).masked_fill(same, -1.0)
    places = torch.arange(size, device=engine.device)
    return functional.cross_entropy(near[:size], places)


while True:
    inputs, targets = task.batch(size, dtype)
    # Like many scripts, it binds `backward` before the forward pass.
    backward = engine.backward
    with autocasts:
        outputs = called(inputs.to(engine.device))
        if args.variant == "pairs":
            outputs = outputs + called(inputs.flip(0).to(engine.device))
        if args.variant == "contrastive":
            loss = contrastive(outputs)
        else:
            loss = task.loss(outputs, targets.to(engine.device))
    if args.variant == "loss.backward":
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        backward(loss)
    engine.step()
    loss.item()
