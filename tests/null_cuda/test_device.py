"""What the null CUDA itself does, as torch sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.local import PATIENCE_S
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

_MIB = 2**20

MEMORY = """
import ctypes, json, os, torch
from torch.nn import functional as F
x = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
found = {"free": torch.cuda.mem_get_info()[0], "values": torch.tensor([2.0, 3.5]).cuda().tolist()}
try:
    torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["oom"] = str(error)
del x
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    net(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
torch.optim.AdamW(net.parameters()).step()
torch.cuda.synchronize()
pid = os.fork()
if pid == 0:
    os._exit(ctypes.CDLL(None).cudaFree(None))
found["child"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(found))
"""

COLLECTIVES = """
import json, os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
values = torch.tensor([1.0 + rank, 5.0 - rank], device="cuda")
dist.all_reduce(values, op=dist.ReduceOp.MAX)
found = values.tolist()
large = torch.empty(2**22, device="cuda")
dist.all_reduce(large)
part = torch.tensor([rank], device="cuda")
dist.broadcast(part, 1)
dist.barrier()
print(json.dumps([found, part.tolist(), torch.cuda.mem_get_info()[0]]))
os._exit(0)
"""


def _python(code: str, *args: object) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_real_torch_runs_on_it_and_memory_is_kept_account_of(
    null_cuda: MachineOf, monkeypatch: pytest.MonkeyPatch, expandable: bool
) -> None:
    null_cuda(Device(total_bytes=1024 * _MIB), context_bytes=100 * _MIB)
    if expandable:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = _python(MEMORY)
    # Expandable segments grow by 20 MiB at a time.
    taken = 260 if expandable else 256
    assert found["free"] == (1024 - 100 - taken) * _MIB
    assert found["values"] == [2.0, 3.5]
    assert "1024.00 MiB" in found["oom"] or "1.00 GiB" in found["oom"]
    assert (
        found["child"] == 3
    )  # initialization error: no CUDA after a fork of a process that used it


@pytest.mark.slow
def test_ranks_of_two_processes_meet_in_collectives(null_cuda: MachineOf, tmp_path: Path) -> None:
    machine = null_cuda(Device(), Device(), context_bytes=_MIB)
    command = [sys.executable, "-W", "ignore", "-c", COLLECTIVES]
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([*command, str(rank), store], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=PATIENCE_S)
        values, part, free = json.loads(out.splitlines()[-1])
        assert (values, part) == ([2.0, 5.0], [1])
        assert free < 8 * 2**30 - 16 * _MIB  # its own context and tensors only
    assert not machine.held()
