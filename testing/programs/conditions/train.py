"""Write the conditions of each rank into its trial's folder or `HAND_DIR`, and train some steps."""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

RANK = os.environ.get("RANK", "0")


def mapped_blocks() -> int:
    """Return the number of blocks that the C library has mapped outside of its heap."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
            "keepcost".split()
        ]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    return int(mallinfo2().hblks)


def is_mapped(size: int) -> bool:
    """Return whether a tensor of `size` bytes gets its own mapping, which is unmapped with it.

    The first tensors may still fill free blocks of the heap, so several are tried.
    """
    before, tensors = mapped_blocks(), list[torch.Tensor]()
    while mapped_blocks() == before and len(tensors) < 100:
        tensors.append(torch.empty(size, dtype=torch.uint8))
    return mapped_blocks() > before


def conditions() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "options": [sys.flags.optimize, sys.flags.dev_mode],
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": os.nice(0),
        "tensors of their own mapping": [is_mapped(2**power) for power in (17, 19, 22, 26)],
        "garbage collection": [gc.isenabled(), gc.get_threshold()],
        "precision": [str(torch.get_default_dtype()), torch.get_float32_matmul_precision()],
    }


def train(config: str) -> None:
    import deepspeed

    model = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(60):
        size = engine.train_micro_batch_size_per_gpu()
        engine.backward(engine(torch.randn(size, 16, device=engine.device)).square().mean())
        engine.step()


if __name__ == "__main__":
    folder = Path(os.environ.get("DSAT_TRIAL_DIR") or os.environ["HAND_DIR"])
    (folder / f"conditions{RANK}.json").write_text(json.dumps(conditions(), indent=1))
    train(next(word for word in sys.argv if word.endswith(".json")))
