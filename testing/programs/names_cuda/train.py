"""A script that names CUDA wherever it can: device, autocast, synchronize, memory."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", type=Path, required=True)
parser.add_argument("--local_rank", type=int)
config = json.loads(parser.parse_args().deepspeed_config.read_text())
torch.cuda.set_device(0)
model = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 256))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
size = engine.train_micro_batch_size_per_gpu()
inputs = torch.randn(size, 256).cuda()
for _ in range(100):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = engine(inputs)
        loss = nn.functional.mse_loss(outputs, inputs.to("cuda"))
    torch.cuda.synchronize()
    engine.backward(loss)
    engine.step()
    torch.cuda.max_memory_allocated()
