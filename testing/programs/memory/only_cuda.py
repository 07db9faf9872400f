"""A script that names CUDA as its device everywhere."""

import deepspeed
import torch
from parts import Language, arguments, batches, loss_of  # type: ignore[import-not-found]

args = arguments()
torch.cuda.set_device(args.local_rank or 0)
device = torch.device("cuda", torch.cuda.current_device())
model = Language().cuda()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
for tokens in batches(engine.train_micro_batch_size_per_gpu()):
    tokens = tokens.to(device, non_blocking=True)
    weights = torch.ones(len(tokens), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_of(engine(tokens), tokens) * weights.mean()
    engine.backward(loss)
    engine.step()
    torch.cuda.synchronize()
