"""A training loop with DeepSpeed; options compile it, slow its data set or add loader workers."""

import argparse

import deepspeed
from common import Rows, model
from torch.utils.data import DataLoader

p = argparse.ArgumentParser()
p.add_argument("--local_rank", type=int, default=-1)
p = deepspeed.add_config_arguments(p)
p.add_argument("--compile", action="store_true")
p.add_argument("--num-workers", type=int, default=0)
p.add_argument("--load-s", type=float, default=0.0, help="seconds that a row takes to load")
a = p.parse_args()
net = model()
engine, *_ = deepspeed.initialize(args=a, model=net, model_parameters=net.parameters())
if a.compile:
    engine.compile()
size = engine.train_micro_batch_size_per_gpu()
loader = DataLoader(Rows(a.load_s), size, num_workers=a.num_workers, drop_last=True)
for _ in range(3):
    for batch in loader:
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        engine.backward(engine(**batch).loss)
        engine.step()
