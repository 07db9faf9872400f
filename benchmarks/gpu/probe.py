"""Print a GPU's memory, and the rates that projections assume, as one line of JSON."""

import json
import sys
import time
from collections.abc import Callable

import torch

SIZE, COUNT = (256, 2**20) if "--short" in sys.argv else (8192, 2**31)


def seconds(work: Callable[[], object]) -> float:
    """Return the mean time of ten calls, after three calls to warm up."""
    for number in range(13):
        if number == 3:
            torch.cuda.synchronize()
            began = time.perf_counter()
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


free, total = (size // 2**20 for size in torch.cuda.mem_get_info())
matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
source = torch.empty(COUNT, dtype=torch.uint8, device="cuda")
target, host = torch.empty_like(source), torch.empty(COUNT, dtype=torch.uint8, pin_memory=True)
found = {
    "gpu": torch.cuda.get_device_name(),
    "free, total by the driver (MiB)": [free, total],
    "bf16 products (TFLOP/s)": 2 * SIZE**3 / 1e12 / seconds(lambda: matrix @ matrix),
    "copies, both ways counted (GB/s)": 2 * COUNT / 1e9 / seconds(lambda: target.copy_(source)),
    "to the host (GB/s)": COUNT / 1e9 / seconds(lambda: host.copy_(source)),
}
print(json.dumps(found))
