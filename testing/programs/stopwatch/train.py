"""A plain DeepSpeed script that times its own training loop, with a clock that dsat does not touch.

Each rank appends one line per optimizer step to `stopwatch<rank>.jsonl`, with seconds by phase.
Loading data takes time, and rank 1 is slower.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

WIDTH = 512
RANK = int(os.environ["RANK"])
LOADING_S = 0.012
EXTRA_ON_RANK_1_S = 0.02
STEPS = 40


# The last measured step ends the script from inside engine.step(), so the loop cannot see when the
# step itself was complete.
class End:
    at_s = 0.0


original = deepspeed.DeepSpeedEngine.step


def step(self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    End.at_s = time.perf_counter()


deepspeed.DeepSpeedEngine.step = step


def now(complete: bool) -> float:
    return time.perf_counter() if complete else End.at_s


class Slower(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            time.sleep(EXTRA_ON_RANK_1_S)
        return inputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Slower(), nn.Linear(WIDTH, WIDTH))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    with open(Path(os.environ["DSAT_TRIAL_DIR"]) / f"stopwatch{RANK}.jsonl", "w") as file:
        last = time.perf_counter()
        for _ in range(STEPS):
            times = {"forward": 0.0, "backward": 0.0, "step": 0.0}
            complete = False
            try:
                for _ in range(gas):
                    micro_step(engine, size, times)
                complete = True
            finally:
                end = now(complete)
                file.write(json.dumps({"latency": end - last, **times}) + "\n")
                file.flush()
                last = end


def micro_step(engine: Any, size: int, times: dict[str, float]) -> None:
    time.sleep(LOADING_S)
    inputs = torch.randn(size, WIDTH)
    begin = time.perf_counter()
    outputs = engine(inputs)
    times["forward"] += time.perf_counter() - begin
    loss = outputs.square().mean()
    begin = time.perf_counter()
    engine.backward(loss)
    end = time.perf_counter()
    times["backward"] += end - begin
    complete = False
    try:
        engine.step()
        complete = True
    finally:
        times["step"] += now(complete) - end


if __name__ == "__main__":
    main()
