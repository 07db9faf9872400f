"""The memory limit of a rank on the CPU; each test forks a new process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from testing import warm_host
from testing.local import PATIENCE_S

pytestmark = pytest.mark.slow

LIMITED = """
import resource
import subprocess
import sys

from deepspeed.ops.op_builder.builder import OpBuilder

from dsat.in_trial import memory_limit
from dsat.in_trial.adapters.install import adapt
from dsat.in_trial.adapters.trial import TRIAL, Phase


def compiled(self, verbose=True):
    subprocess.run([sys.executable, "-c", f"bytearray({limit})"], check=True)
    return "the operator"


OpBuilder.jit_load = compiled
adapt(sys.modules[OpBuilder.__module__])
TRIAL.phase = Phase.TRAINING  # which has no files to protect
plain = {"absolute_name": None, "sources": None}
builder = type("Operator", (OpBuilder,), plain)("operator")
memory_limit.limit_memory(BUDGET)
limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
"""


def after_the_limit(code: str, *, budget_mib: int | None = 50) -> str:
    """Run code in a rank whose memory is limited; return the last line of its output.

    Args:
        budget_mib: the rank's limit; None limits it to its host's memory.
    """
    limited = LIMITED.replace("BUDGET", str((budget_mib or 0) * 2**20))
    if budget_mib is None:
        limited = "from dsat.in_trial import memory_limit\nmemory_limit.limit_to_host()\n"
    command = [*warm_host.prefix(), sys.executable, "-c", limited + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return (done.stderr or done.stdout).strip().splitlines()[-1]


def test_a_rank_gets_what_its_slot_has_but_the_compiler_of_an_operator_has_more() -> None:
    load = "print(builder.jit_load(verbose=False), len(bytearray(40 * 2**20)))\n"
    assert after_the_limit(load) == f"the operator {40 * 2**20}"
    assert "MemoryError" in after_the_limit(load.replace("print", "") + "bytearray(100 * 2**20)")
    assert "CalledProcessError" in after_the_limit("compiled(None)"), "a process of the script"


MEASURE = """
from deepspeed.accelerator import get_accelerator
from dsat.in_trial.clocks import MemoryWatch, ProcessMemory
import torch

torch.set_num_threads(1)  # each has a stack
watch = MemoryWatch(get_accelerator(), ProcessMemory.now())
for elements in (50 * 2**20, 2**20):
    torch.zeros(elements)
used = watch.over_ranks(lambda values: values)
print(used.data_bytes / 2**20, used.is_exact, used.peak == used.data_bytes)
"""


def test_the_most_that_counted_against_the_limit_is_known() -> None:
    words = after_the_limit(MEASURE, budget_mib=500).split()
    assert 200 <= float(words[0]) < 204 and words[1:] == ["True", "True"]


# Reserves memory that it does not write, as DeepSpeed does for buckets.
RESERVE = """
import mmap
from dsat.values.host_limits import available_bytes

most, kept = available_bytes() // 2**30, []
try:
    while len(kept) < 2 * most + 20:
        kept.append(mmap.mmap(-1, 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
except OSError:
    pass
print(len(kept) - most)
"""


def test_a_host_bounds_allocations_and_no_measured_memory() -> None:
    assert after_the_limit(MEASURE, budget_mib=None) == "0.0 False True"
    reserved = after_the_limit(RESERVE, budget_mib=None)
    assert 6 <= int(reserved) <= 10, "GiB beyond the memory that was available"
