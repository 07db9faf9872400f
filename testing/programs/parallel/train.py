"""A small Llama with the tensor or sequence parallelism that its DeepSpeed configuration sets.

With AutoTP, the ranks of a group get the same samples. With Ulysses, each rank of a group gets a
part of the positions, and the loss is that of the group.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY = 256


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of random tokens, the same on every rank."""
    tokens = torch.randint(0, VOCABULARY, (128, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length)
    return [{"input_ids": row, "labels": row, "position_ids": positions} for row in tokens]


def model(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def batches(engine: Any, config: dict[str, Any], length: int, mpu: Any) -> Iterator[Any]:
    tensor = (config.get("tensor_parallel") or {}).get("autotp_size") or 1
    replicas, rank = distributed.get_world_size() // tensor, distributed.get_rank() // tensor
    data = samples(length)
    sampler: Any = DistributedSampler(data, replicas, rank, shuffle=False)  # type: ignore[arg-type]
    size = engine.train_micro_batch_size_per_gpu()
    while True:
        loader: Any = DataLoader(data, size, sampler=sampler, drop_last=True)  # type: ignore[arg-type]
        if mpu is not None:
            loader = UlyssesSPDataLoaderAdapter(
                loader,
                mpu.get_sequence_parallel_rank(),
                mpu.get_sequence_parallel_group(),
                mpu.get_sequence_parallel_world_size(),
                engine.device,
            )
        yield from loader


def loss_of(engine: Any, batch: dict[str, torch.Tensor], mpu: Any) -> torch.Tensor:
    # On a CPU, the adapter's parts are views of whole sequences, so they need a copy.
    batch = {name: tensor.to(engine.device).contiguous() for name, tensor in batch.items()}
    if mpu is None:
        return engine(**batch).loss  # type: ignore[no-any-return]
    shifted = batch.pop("shift_labels")
    logits = engine(**batch).logits
    loss: Any = engine.module.loss_function(logits, None, VOCABULARY, shift_labels=shifted)
    group, kept = mpu.get_sequence_parallel_group(), (shifted != -100).sum()
    # Not torch's differentiable all_gather: without NCCL, it takes group ranks for global ranks.
    total, value = kept.clone(), (loss * kept).detach()
    for tensor in (total, value):
        distributed.all_reduce(tensor, group=group)
    own = mpu.get_sequence_parallel_world_size() * loss * kept / total
    return own + (value / total - own).detach()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--unchecked", action="store_true", help="a device keeps no values")
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    config = json.loads(Path(args.deepspeed_config).read_text())
    deepspeed.init_distributed()
    net = model(args.layers, args.width)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        net,
        core_attn_implementation="sdpa",
        sequence_parallel_size=config.get("sequence_parallel_size", 1),
        micro_batch_size=config["train_micro_batch_size_per_gpu"],
    )
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config, mpu=mpu
    )
    if args.unchecked and getattr(engine, "first_dataloader_check", None) is not None:
        engine.first_dataloader_check.remove()
        engine.first_dataloader_check = None
    for batch in batches(engine, config, args.length, mpu):
        engine.backward(loss_of(engine, batch, mpu))
        engine.step()


if __name__ == "__main__":
    main()
