"""Classification and description of the exceptions that end a trial."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dsat.errors import Diverged, DsatError, InvalidTrial
from dsat.values import format as fmt
from dsat.values.outcome import Outcome, OutcomeKind

# Parts of the message of a RuntimeError or of a log, in lower case.
# Sources: torch (c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDAException.cpp), the CUDA and
# HIP runtimes, NCCL's allocations, Triton, TransformerEngine, bitsandbytes and the CUDA libraries.
_HOST_OUT_OF_MEMORY = (  # pinned memory is the host's
    "failed to cuda host alloc",
    "failed to cuda host malloc",
    "cudahostregister failed",
    "cudahostalloc failed",
    "out of memory (2)",
)
_OUT_OF_MEMORY = (
    "cuda out of memory",
    "hip out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cuda runtime error (2)",
    "cuda failure 2 'out of memory'",
    "cuda failure 'out of memory'",
    "hip error: out of memory",
    "hiperroroutofmemory",
    "cudaerrormemoryallocation",
    "cuda_error_out_of_memory",
    "failed to cuda calloc",
    "failed to cuda malloc",
    "triton error [cuda]: out of memory",
    "triton error [hip]: out of memory",
    "error out of memory at line",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
# The slot's memory if slots are CPU cores, otherwise the host's.
_CPU_OUT_OF_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
)
# cuBLAS needs memory to make its handle, and cuDNN to find a kernel; but both may also fail for
# another reason.
_SIGNS_OF_FULL_MEMORY = (
    "cublas_status_not_initialized",
    "unable to find an engine to execute this computation",
    "unable to find a valid cudnn algorithm to run convolution",
)
_FREE_FRACTION = 0.03  # a device with a smaller fraction of free memory counts as full
# Gradients overflow in fp16 at any scale (deepspeed/runtime/fp16/loss_scaler.py, 0.15.4 to 0.19.8).
_OVERFLOWS = "loss scale already at minimum"

INSIDE_DSAT = "an error in dsat, not in your script"
# Errors of earlier work on a device or of another rank, which surface at any later wait; or a port
# that another program uses.
_FROM_ELSEWHERE = ("cuda error", "hip error", "nccl", "gloo", "address already in use")
# Kinds with a sufficient message; a traceback would only lead into dsat.
_SELF_EXPLANATORY = (OutcomeKind.INVALID, OutcomeKind.DIVERGED)
# Advice on errors, by patterns of their messages (`_ADVICE`).
_SAME_FOLDER = "All trials run in the same folder, so let the script accept files of earlier trials"
# As a Trainer computes them (transformers/integrations/deepspeed.py, `trainer_config_finalize`).
_AUTO = (
    'Only a Trainer replaces "auto", and only for a model with hidden_size. Remove these settings '
    "for DeepSpeed's defaults, or write numbers: hidden_size squared for reduce_bucket_size, 0.9 "
    "of that for stage3_prefetch_bucket_size, and 10 x hidden_size for "
    "stage3_param_persistence_threshold"
)
_ADVICE = {
    "has neither `hidden_size` nor": _AUTO,
    "input_value='auto'": _AUTO,
    "exists and is not empty": _SAME_FOLDER,
    "(?i)address already in use|EADDRINUSE": (
        "Another process uses this port. If it is the launcher's, choose another one "
        "(--master_port 29501)"
    ),
    _OVERFLOWS: "Train in bf16, or check the data and the learning rate",
    # From int(), float(), and the optimizers' operators.
    r": 'auto'|(?s:incompatible function arguments.*'auto')": (
        'Only the Trainer and accelerate replace "auto" in a configuration: write the value'
    ),
}
unwritten: set[Path] = set()  # files that the script believes it has written
resumed: list[Path] = []  # checkpoints whose client state the script got
_DSAT = f"{Path(__file__).parents[1]}{os.sep}"
# Modules of dsat that pass on errors of the script or a library: calls of adapted functions, ranks
# (which run the script), functions that scripts call, and simulations.
_TRANSPARENT = tuple(
    f"{_DSAT}{name}"
    for name in (
        "in_trial/adapters/calls.py",
        "engines/agent/rank_process.py",
        "in_trial/rank.py",
        "in_trial/script_api.py",
        "in_trial/adapters/determined_shim.py",
        "simulation/",
    )
)
_LIBRARIES = ("<", f"{Path(os.__file__).parent}{os.sep}")
_PROGRAMS = f"{Path(sys.executable).parent}{os.sep}"  # launchers


def classify(error: BaseException) -> OutcomeKind:
    """Classify an exception by its type, message and causes."""
    chain = list(_chain(error))
    if any(isinstance(link, Diverged) or _OVERFLOWS in str(link) for link in chain):
        return OutcomeKind.DIVERGED
    # determined.InvalidHP, by name: a script refuses its hyperparameters.
    if any(isinstance(link, InvalidTrial) or type(link).__name__ == "InvalidHP" for link in chain):
        return OutcomeKind.INVALID
    kinds = (_memory_kind(link) for link in chain)
    return next((kind for kind in kinds if kind is not None), OutcomeKind.ERROR)


def outcome(error: BaseException) -> Outcome:
    """Return the outcome of a trial that ended with an exception."""
    kind = classify(error)
    invalid = next((link for link in _chain(error) if isinstance(link, InvalidTrial)), None)
    return Outcome(
        kind,
        message=message(error),
        detail="" if kind in _SELF_EXPLANATORY else user_traceback(error),
        **(invalid.facts if invalid is not None else {}),
    )


def message(error: BaseException) -> str:
    """Describe an exception in a line, with advice if there is any; mark errors inside dsat."""
    for link in _chain(error):
        if isinstance(link, (Diverged, InvalidTrial)):
            return str(link)
    lines = str(error).strip().splitlines() or [""]
    if classify(error) is OutcomeKind.OOM:
        for link in _chain(error):
            size = re.search(r"tried to allocate (\d+) bytes", str(link))
            if size is not None:
                return f"out of memory: tried to allocate {fmt.memory(int(size[1]))}"
    first = " ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1]))
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    advice = next((advice for part, advice in _ADVICE.items() if re.search(part, str(error))), "")
    if not advice and isinstance(error, FileExistsError):
        advice = _SAME_FOLDER
    text = f"{text.rstrip('.')}. {advice}" if advice else text
    path = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(path, (str, bytes)) and Path(os.fsdecode(path)).resolve() in unwritten:
        text += ". Trials save no models, so dsat did not write this file"
    return f"{INSIDE_DSAT}: {text}" if _is_of_dsat(error) else text


def place_in_script(frame: FrameType) -> str:
    """Return the innermost file and line of the script in a stack; empty in a launcher."""
    for caller, line in traceback.walk_stack(frame):
        path = caller.f_code.co_filename
        if not (path.startswith((_DSAT, *_LIBRARIES, _PROGRAMS)) or f"-packages{os.sep}" in path):
            with contextlib.suppress(OSError):  # the working folder may be gone
                path = os.path.relpath(path)
            return f"{path}:{line}"
    return ""


def classify_text(text: str) -> OutcomeKind:
    """Classify the end of a process that reported no exception, by its log."""
    text = text.lower()
    if has_part(text, _HOST_OUT_OF_MEMORY):
        return OutcomeKind.HOST_OOM
    marks = ("outofmemoryerror", *_OUT_OF_MEMORY, *_CPU_OUT_OF_MEMORY)
    return OutcomeKind.OOM if has_part(text, marks) else OutcomeKind.ERROR


def user_traceback(error: BaseException) -> str:
    """Return the traceback as if the user's program had been started directly.

    For an error inside dsat, return the whole traceback.
    """
    if _is_of_dsat(error):
        return "".join(traceback.format_exception(error))
    hidden = (_DSAT, "<frozen runpy>", runpy.__file__)
    lines: list[str] = []
    skipping = False
    for line in "".join(traceback.format_exception(error)).splitlines(keepends=True):
        if line.startswith('  File "'):
            skipping = any(f'"{path}' in line for path in hidden)
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            lines.append(line)
    return "".join(lines)


def _is_of_dsat(error: BaseException) -> bool:
    """Return whether an error is a defect of dsat; errors of calls that dsat forwards are not.

    The innermost frame of dsat or the script decides: an error in a library counts as its caller's.
    Only errors of the kind ERROR can be defects of dsat.
    """
    if isinstance(error, (SystemExit, KeyboardInterrupt, DsatError)):
        return False
    if has_part(str(error).lower(), _FROM_ELSEWHERE) or classify(error) is not OutcomeKind.ERROR:
        return False
    paths = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    for path in reversed(paths):
        if path.startswith(_DSAT):
            return not path.startswith(_TRANSPARENT)
        if not path.startswith(_LIBRARIES) and f"-packages{os.sep}" not in path:
            return False
    return False


def _memory_kind(error: BaseException) -> OutcomeKind | None:
    """Return the kind of error if memory of the device or the host ran out; None for others."""
    host_kind = OutcomeKind.HOST_OOM if _uses_cuda() else OutcomeKind.OOM
    if isinstance(error, MemoryError):
        return host_kind
    # torch.OutOfMemoryError and torch.cuda.OutOfMemoryError by name: torch may not be imported.
    if type(error).__name__ == "OutOfMemoryError":
        return OutcomeKind.OOM
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return OutcomeKind.HOST_OOM
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).lower()
    killed = "dataloader worker" in text and ("signal: killed" in text or "bus error" in text)
    if killed or has_part(text, _HOST_OUT_OF_MEMORY):
        return OutcomeKind.HOST_OOM
    if has_part(text, _CPU_OUT_OF_MEMORY):
        return host_kind
    if has_part(text, _OUT_OF_MEMORY):
        # The message of a failed cudaHostAlloc is the same; only its traceback differs.
        pinning = "pin_memory" in "".join(traceback.format_tb(error.__traceback__))
        return OutcomeKind.HOST_OOM if pinning else OutcomeKind.OOM
    if has_part(text, _SIGNS_OF_FULL_MEMORY) and _is_nearly_full():
        return OutcomeKind.OOM
    return None


def has_part(text: str, parts: tuple[str, ...]) -> bool:
    """Return whether a text contains any of several texts."""
    return any(part in text for part in parts)


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _is_nearly_full() -> bool:
    """Return whether the CUDA device has almost no memory left, even in torch's cache."""
    if not _uses_cuda():
        return False
    torch = sys.modules["torch"]
    try:
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    except RuntimeError:  # the device has failed
        return False
    return bool(free + cached < _FREE_FRACTION * total)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
