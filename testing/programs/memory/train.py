"""Trains one of the models of `models.py` until it is stopped."""

import argparse

import deepspeed
import models  # type: ignore[import-not-found]

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
task = models.TASKS[args.model]
model = task.model()
if args.model == "offloading":
    deepspeed.init_distributed()
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=trained, config=args.deepspeed_config
)
dtype = next(engine.module.parameters()).dtype
while True:
    inputs, targets = task.batch(engine.train_micro_batch_size_per_gpu(), dtype)
    # As many scripts do, takes `backward` before the forward pass.
    engine.backward(loss := task.loss(engine(inputs.to(engine.device)), targets.to(engine.device)))
    engine.step()
    loss.item()
