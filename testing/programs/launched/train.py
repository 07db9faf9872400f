"""A script that tests start in many ways, and that calls `deepspeed.initialize` once."""

import argparse
import importlib.util
import os

assert importlib.util.find_spec("deepspeed") is not None  # libraries check it before an import
import deepspeed  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--evaluate", action="store_true")
arguments = parser.parse_args()
if not arguments.evaluate:
    os.environ["SET_BY_SCRIPT"] = "1"
    config = {"train_micro_batch_size_per_gpu": arguments.steps, "steps_per_print": float("inf")}
    deepspeed.initialize(model=object(), model_parameters=[], config=config)
