"""Train a small GPT on random tokens; with --steps, print the median seconds of a step."""

import argparse
import json
import statistics
import time

import deepspeed
import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(0)
config = transformers.GPT2Config(
    n_embd=320, n_layer=6, n_head=5, n_positions=128, vocab_size=8192, use_cache=False
)
model = transformers.GPT2LMHeadModel(config)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
times: list[float] = []
while not args.steps or len(times) < args.steps + 3:
    start = time.perf_counter()
    tokens = torch.randint(0, 8192, (engine.train_micro_batch_size_per_gpu(), 128))
    tokens = tokens.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    times.append(time.perf_counter() - start)
if engine.global_rank == 0:
    print(json.dumps({"step_s": statistics.median(times[3:])}))
