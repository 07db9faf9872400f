"""What an exception inside a trial means, wherever the trial runs."""

from __future__ import annotations

import dis
import errno
import os
import re
import runpy
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType

from dsat.errors import Diverged, InvalidTrial
from dsat.values.memory_size import readable
from dsat.values.outcome import Outcome, OutcomeKind

# Messages of allocators that raise a plain RuntimeError: torch's CPU allocator
# (c10/core/impl/alloc_cpu.cpp), the CUDA and HIP runtimes, NCCL (its allocation functions), Triton
# and the CUDA libraries.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cuda runtime error (2)",
    "Cuda failure 2 'out of memory'",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]: out of memory",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)

# Where the message says it all, and a traceback would only lead into dsat.
_SAY_ENOUGH = (OutcomeKind.INVALID, OutcomeKind.DIVERGED)


# cuBLAS makes its handle, and cuDNN finds a kernel, only with memory left; but they may also fail
# for another reason.
_FOR_WANT_OF_MEMORY = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
)
_NEARLY_FULL = 0.03  # of the device that is left
# Pinned memory is the host's: NCCL's and torch's host allocations, cudaHostRegister.
_HOST_OUT_OF_MEMORY = (
    "Failed to CUDA host alloc",
    "Failed to CUDA host malloc",
    "cudaHostRegister",
    "cudaHostAlloc",
    "pin_memory",
    "Cannot allocate memory",
    "out of memory (2)",
)


def classify(error: BaseException) -> OutcomeKind:
    """How a trial ended, by the exception's type and those it was raised from."""
    chain = list(_chain(error))
    if any(isinstance(link, Diverged) for link in chain):
        return OutcomeKind.DIVERGED
    # determined.InvalidHP by name: a script's own refusal.
    if any(isinstance(link, InvalidTrial) or type(link).__name__ == "InvalidHP" for link in chain):
        return OutcomeKind.INVALID
    for link in chain:
        if _is_host_out_of_memory(link):
            return OutcomeKind.HOST_OOM
        if _is_out_of_memory(link):
            return OutcomeKind.OOM
    return OutcomeKind.ERROR


def outcome(error: BaseException) -> Outcome:
    """What a trial that ended with an exception came to."""
    kind = classify(error)
    invalid = next((link for link in _chain(error) if isinstance(link, InvalidTrial)), None)
    return Outcome(
        kind,
        message=message(error),
        detail="" if kind in _SAY_ENOUGH else user_traceback(error),
        smaller_may_run=invalid is not None and invalid.smaller_may_run,
        most_samples=None if invalid is None else invalid.most_samples,
    )


def message(error: BaseException) -> str:
    """One line on an exception, for people."""
    if isinstance(error, (Diverged, InvalidTrial)):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    if classify(error) is OutcomeKind.OOM:
        for link in _chain(error):
            size = re.search(r"tried to allocate (\d+) bytes", str(link))
            if size is not None:
                return f"out of memory: tried to allocate {readable(int(size[1]))}"
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def of_text(text: str) -> OutcomeKind:
    """The same of what a process left in its log, for want of the exception: OOM or ERROR."""
    marks = ("OutOfMemoryError", *_OUT_OF_MEMORY)
    return OutcomeKind.OOM if any(mark in text for mark in marks) else OutcomeKind.ERROR


def user_traceback(error: BaseException) -> str:
    """The traceback as if the user's program had been started directly."""
    ours = f"{Path(__file__).resolve().parents[1]}{os.sep}"
    skipped = (ours, "<frozen runpy>", runpy.__file__)
    kept: list[str] = []
    skipping = False
    for line in "".join(traceback.format_exception(error)).splitlines(keepends=True):
        if line.startswith('  File "'):
            skipping = any(f'"{path}' in line for path in skipped)
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept)


def _is_out_of_memory(error: BaseException) -> bool:
    # torch.OutOfMemoryError and torch.cuda.OutOfMemoryError by name: torch may not be imported.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(part in text for part in _FOR_WANT_OF_MEMORY) and _is_nearly_full():
        return True
    return any(part in text for part in _OUT_OF_MEMORY)


def _is_nearly_full() -> bool:
    """Whether the device has no memory left, neither free nor kept by torch for reuse."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    except RuntimeError:  # the device has failed
        return False
    return bool(free + kept < _NEARLY_FULL * total)


def _is_host_out_of_memory(error: BaseException) -> bool:
    """A data loader's worker was killed, or the host's own allocation failed."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error)
    worker = "DataLoader worker" in text and ("signal: Killed" in text or "Bus error" in text)
    return isinstance(error, RuntimeError) and (worker or _is_of_host(text, _whence(error)))


def _is_of_host(text: str, whence: Collection[str]) -> bool:
    """Whether a message is of an allocation on the host; `whence` are names of where it came from.

    A failed `cudaHostAlloc` says no more than "CUDA error: out of memory"; where it came from does.
    """
    if "DefaultCPUAllocator" in text:  # on a CPU it is the slot's own
        return False
    if any(part in text for part in _HOST_OUT_OF_MEMORY) and (
        "out of memory" in text or "Cannot allocate" in text or "Failed to CUDA host" in text
    ):
        return True
    return "CUDA error: out of memory" in text and "pin_memory" in whence


def _whence(error: BaseException) -> set[str]:
    """The functions that an error came through, and all that the line names that it came from.

    What is written in C, as `Tensor.pin_memory`, has no frame, and a program's source may be gone
    or changed by now: so the compiled line is looked at.
    """
    names: set[str] = set()
    last, link = None, error.__traceback__
    while link is not None:
        names.add(link.tb_frame.f_code.co_name)
        last, link = link, link.tb_next
    return names if last is None else names | _named_by(last)


def _named_by(link: TracebackType) -> set[str]:
    """Attributes, names of arguments and others in the line of code that a traceback points to."""
    code, line = link.tb_frame.f_code, link.tb_lineno
    spans = [range(begin, end) for begin, end, of in code.co_lines() if of == line]
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if any(instruction.offset in span for span in spans):
            named = instruction.argval
            if instruction.opname == "KW_NAMES":  # which `dis` of Python 3.11 does not look up
                named = code.co_consts[instruction.arg or 0]
            parts = named if isinstance(named, tuple) else (named,)  # names of arguments
            names.update(part for part in parts if isinstance(part, str))
    return names


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
