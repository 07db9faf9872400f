"""Train a causal language model of a transformers configuration on random tokens.

    python3 language_model.py --model llama-3.2-1b.json --length 2048 --deepspeed_config ds.json

With --report it ends after so many steps, with a line of JSON: the memory that torch's allocator
held at its peak, what it reserved, and what the driver counts, in bytes.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--liger", action="store_true")
parser.add_argument("--small", action="store_true", help="one layer and 1,000 tokens alone")
parser.add_argument("--report", type=int, metavar="STEPS")
parser.add_argument("--deepspeed_config", type=Path, required=True)
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()

ds_config = json.loads(args.deepspeed_config.read_text())
stage = ds_config.get("zero_optimization", {}).get("stage", 0)
facts = json.loads(args.model.read_text())
config = AutoConfig.for_model(facts.pop("model_type"), use_cache=False, **facts)
if args.small:
    config.num_hidden_layers, config.vocab_size = 1, 1000
if args.liger:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=stage == 3):
    model = AutoModelForCausalLM.from_config(config)
if args.checkpointing:
    model.gradient_checkpointing_enable({"use_reentrant": False})
model.train()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config
)
while args.report is None or engine.global_steps < args.report:
    shape = engine.train_micro_batch_size_per_gpu(), args.length
    tokens = torch.randint(config.vocab_size, shape, device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
if args.report is not None and torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    memory = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "driver": total - free,
    }
    print(json.dumps(memory), flush=True)
