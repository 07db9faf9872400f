"""Memory of kernels while they run on a GPU; attention uses the kernel that torch chooses there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.null_cuda.conftest import MachineOf

COMPARE = """
import itertools, json, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from dsat.simulation import fake_device
from dsat.simulation.attention import Kernel, attention, kernel_for
from dsat.simulation.storage_tracker import StorageTracker
from dsat.memory.closed_form import MATMUL_WORKSPACE_BYTES

NAMES = {0: Kernel.MATH, 1: Kernel.FLASH, 2: Kernel.EFFICIENT}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
found = {"choices": {}, "wrong": [], "real": [], "simulated": [], "matmuls": []}


def inputs(device, dtype, heads, lengths, size, mask, grad=False):
    of = lambda count, length: torch.empty(
        4, count, length, size, dtype=dtype, device=device, requires_grad=grad
    )
    q, k, v = of(heads[0], lengths[0]), of(heads[1], lengths[1]), of(heads[1], lengths[1])
    kinds = {"none": None, "float": dtype, "bool": torch.bool}
    masked = None
    if kinds[mask] is not None:
        masked = torch.zeros(1, 1, *lengths, dtype=kinds[mask], device=device)
    return q, k, v, masked


cases = itertools.product(
    DTYPES,
    [(8, 8, False), (8, 2, True), (8, 2, False), (8, 3, True), (8, 1, False)],
    [(128, 128), (128, 64), (100, 100)],
    [64, 60, 4, 33, 128, 288],
    ["none", "float", "bool"],
    [False, True],
    [True, False],
)
for dtype, (heads, shared, gqa), lengths, size, mask, causal, flash in cases:
    if causal and mask != "none":
        continue
    torch.backends.cuda.enable_flash_sdp(flash)
    q, k, v, masked = inputs("cuda", dtype, (heads, shared), lengths, size, mask)
    real = torch._fused_sdp_choice(q, k, v, masked, 0.0, causal, enable_gqa=gqa)
    ours = kernel_for(q, k, v, masked, is_causal=causal, enable_gqa=gqa)
    found["choices"][ours.name] = found["choices"].get(ours.name, 0) + 1
    if NAMES[real] is not ours:
        found["wrong"].append(
            [str(dtype), heads, shared, gqa, lengths, size, mask, causal, flash, real, ours.name]
        )
torch.backends.cuda.enable_flash_sdp(True)

cases = [
    (torch.bfloat16, (8, 8), (512, 512), 64, "none", False),
    (torch.bfloat16, (8, 8), (500, 500), 80, "none", False),
    (torch.bfloat16, (8, 8), (512, 512), 60, "none", False),
    (torch.bfloat16, (8, 2), (512, 512), 64, "none", True),
    (torch.bfloat16, (8, 8), (512, 512), 64, "float", False),
    (torch.float16, (8, 8), (512, 512), 128, "bool", False),
    (torch.float32, (8, 8), (512, 512), 64, "none", False),
    (torch.float32, (8, 8), (512, 500), 32, "float", False),
    (torch.bfloat16, (8, 8), (256, 256), 288, "none", False),
]
for dtype, heads, lengths, size, mask, gqa in cases:
    q, k, v, masked = inputs("cuda", dtype, heads, lengths, size, mask, grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, masked, enable_gqa=gqa)
    out.backward(torch.empty_like(out))
    found["real"].append(torch.cuda.max_memory_allocated() - before)
    del out, q, k, v, masked

torch._C._set_multithreading_enabled(False)
fake_device.register()
for dtype, heads, lengths, size, mask, gqa in cases:
    tracker = StorageTracker("dsat")
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        q, k, v, masked = inputs("dsat", dtype, heads, lengths, size, mask, grad=True)
        tracker.begin("attention")
        before = tracker.current()
        out = attention(q, k, v, masked, enable_gqa=gqa)
        out.backward(torch.empty_like(out))
        found["simulated"].append(tracker.peak("attention") - before)
        del out, q, k, v, masked

def products(device, dtype):
    of = lambda *shape: torch.empty(shape, dtype=dtype, device=device)
    matrix, vector, batch = of(512, 512), of(512), of(8, 512, 512)
    for product in (
        lambda: matrix @ matrix,
        lambda: batch @ batch,
        lambda: torch.nn.functional.linear(batch, matrix),
        lambda: torch.nn.functional.linear(batch, matrix, vector),
        lambda: torch.baddbmm(batch, batch, batch),
    ):
        yield product


tracker = StorageTracker("dsat")
tracker.workspace_bytes = MATMUL_WORKSPACE_BYTES
for dtype in DTYPES:
    for product in products("cuda", dtype):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = product()
        found["matmuls"].append([torch.cuda.max_memory_allocated() - before])
        del kept
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        for number, product in enumerate(products("dsat", dtype), len(found["matmuls"]) - 5):
            tracker.begin(f"product {number}")
            before = tracker.current()
            kept = product()
            found["matmuls"][number].append(tracker.peak(f"product {number}") - before)
            del kept
print(json.dumps(found))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("keeps_workspace", ["0", "1"])
def test_the_kernels_are_those_that_torch_chooses_and_need_as_much(
    keeps_workspace: str, null_cuda: MachineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    null_cuda()
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", keeps_workspace)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found["choices"].get(name, 0) for name in ("FLASH", "EFFICIENT", "MATH")) > 20
    assert found["wrong"] == []
    # The allocator does not split a block if the rest would be less than 1 MiB.
    assert found["simulated"] == pytest.approx(found["real"], rel=0.01, abs=2**20)
    assert [real for real, _ in found["matmuls"]] == [ours for _, ours in found["matmuls"]]
