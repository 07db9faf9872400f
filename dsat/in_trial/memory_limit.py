"""Limits on the memory of processes on CPU cores."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator

from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.clocks import MemoryWatch, ProcessMemory
from dsat.values import host_limits

_SLACK_BYTES = 16 * 2**20
_RESERVED_BYTES = 8 * 2**30  # four buckets of DeepSpeed's default size, which may stay unwritten
# Settings of glibc's malloc: environment variable, option of `mallopt` (malloc.h), and value.
_MALLOC = (
    ("MALLOC_MMAP_THRESHOLD_", -3, 2**18),
    ("MALLOC_MMAP_MAX_", -4, 2**30),
    ("MALLOC_ARENA_MAX", -8, 1),
)
MALLOC_VARIABLES = {name: value for name, _, value in _MALLOC}  # for a program started by hand


def limit_memory(budget_bytes: int) -> None:
    """Limit what this process may allocate from now on, except while DeepSpeed compiles operators.

    The limit is on the data segment (private writable mappings), so torch's CPU allocator fails as
    a device's would. malloc is configured to return freed tensors to the system at once, so holes
    in its heap do not count. It gets only one heap, because a second briefly reserves 128 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):
        for _, option, value in _MALLOC:
            ctypes.CDLL(None).mallopt(option, value)
    limit, hard_limit = limit_data(budget_bytes + _SLACK_BYTES)
    MemoryWatch.counts_data = True

    # The compilers that DeepSpeed starts for its operators would inherit the limit.
    @contextlib.contextmanager
    def unlimited() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))

    TRIAL.calls.around_compilation = unlimited


def limit_to_host() -> None:
    """Make allocations 8 GiB beyond the available memory fail, before the kernel kills a rank.

    The 8 GiB allow for buffers that DeepSpeed reserves but hardly writes to.
    """
    limit_data(host_limits.available_bytes() + _RESERVED_BYTES)


def limit_data(more_bytes: int) -> tuple[int, int]:
    """Limit the growth of the data segment; return its soft and hard limits in bytes."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = ProcessMemory.now().data_bytes + more_bytes
    limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    return limit, hard_limit
