"""DeepSpeed's own API: `engine.backward(loss)` or, as a variant, `loss.backward()`."""

import contextlib

import deepspeed
import torch
from parts import Language, arguments, batches, loss_of  # type: ignore[import-not-found]

args = arguments()
recompute = {"reentrant": "reentrant", "non-reentrant": "other"}.get(args.variant, "")
built = deepspeed.zero.Init() if args.variant == "zero.Init" else contextlib.nullcontext()
with built:
    model = Language(recompute)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
if args.variant == "compile":
    engine.compile()
called = model if args.variant == "the model itself" else engine
autocasts = args.variant == "autocast"
for batch in batches(engine.train_micro_batch_size_per_gpu()):
    tokens = batch["input_ids"].to(engine.device)
    with torch.autocast(engine.device.type, torch.bfloat16, enabled=autocasts):
        loss = loss_of(called(tokens), tokens)
    if args.variant == "loss.backward":
        loss.backward()
    else:
        engine.backward(loss)
    engine.step()
    loss.item()
