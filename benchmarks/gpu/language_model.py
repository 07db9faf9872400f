"""Train a causal language model with a transformers configuration on random tokens.

    python3 language_model.py --model llama-3.2-1b.json --length 2048 --deepspeed_config ds.json

With --report STEPS, it ends after that many steps, and prints a line of JSON after each: bytes that
torch's allocator held and reserved at most, and that the driver counts. The key `fails` of the
DeepSpeed configuration makes its third step run out of memory in one of its passes, or kills the
process in this step with nearly all GPU memory allocated.
"""

import argparse
import base64
import json
import os
import signal
from pathlib import Path

import deepspeed
import torch
import torch._dynamo  # not first in zero.Init: its Tensor.__new__ fails that import in torch 2.15
from deepspeed.accelerator import get_accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM

LEFT_BYTES = 768 * 2**20  # memory that a killed rank leaves free

parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--length", type=int, required=True, help="tokens in a sequence")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--small", action="store_true", help="one layer and 1,000 tokens alone")
parser.add_argument("--report", type=int, metavar="STEPS")
parser.add_argument("--deepspeed_config", required=True, help="a file, or as base64")
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()


def ask_for_all(*_: object) -> None:
    kept = []
    while True:
        kept.append(torch.empty(2**28, dtype=torch.uint8, device=engine.device))


if os.path.exists(args.deepspeed_config):
    text = Path(args.deepspeed_config).read_text()
else:  # from DeepSpeed's autotuner
    text = base64.urlsafe_b64decode(args.deepspeed_config).decode()
ds_config = json.loads(text)
fails, stage = ds_config.pop("fails", ""), ds_config["zero_optimization"]["stage"]
facts = json.loads(args.model.read_text())
config = AutoConfig.for_model(facts.pop("model_type"), use_cache=False, **facts)
if args.small:
    config.num_hidden_layers, config.vocab_size = 1, 1000
with (
    torch.device(get_accelerator().current_device_name()),
    deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=stage == 3),
):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
if args.checkpointing:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=ds_config)
while args.report is None or engine.global_steps < args.report:
    failing = fails if engine.global_steps == 2 else ""
    if failing == "killed":
        left = torch.cuda.mem_get_info()[0] - LEFT_BYTES
        kept = torch.empty(left, dtype=torch.uint8, device=engine.device)
        os.kill(os.getpid(), signal.SIGKILL)
    elif failing == "forward":
        engine.module.register_forward_pre_hook(ask_for_all)
    elif failing == "step":
        register_optimizer_step_pre_hook(ask_for_all)
    shape = engine.train_micro_batch_size_per_gpu(), args.length
    tokens = torch.randint(config.vocab_size, shape, device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    if failing == "backward":
        loss.register_hook(ask_for_all)
    engine.backward(loss)
    engine.step()
    if args.report is not None:
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        memory = {"allocated": held[0], "reserved": held[1], "driver": total - free}
        print(json.dumps(memory), flush=True)
