"""The meaning of an exception, and of a trial's remains if several ranks failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial import failures
from dsat.simulation.borrowed_model import BorrowedModel
from dsat.values.outcome import OutcomeKind
from testing.scripts import Scripts


def raised(error: BaseException, handling: BaseException) -> BaseException:
    """Return an error that was raised while another one was handled."""
    error.__context__ = handling
    return error


CPU_ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 2097152 bytes. Error code 12 (Cannot allocate memory)"
)


OVERFLOW = Exception(
    "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OVERFLOW, "DIVERGED"),
        (MemoryError(), "OOM"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "OOM"),
        (CPU_ALLOCATOR, "OOM"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "OOM"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "OOM"),
        (
            RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
            "ERROR",
        ),
        (RuntimeError("GET was unable to find an engine to execute this computation"), "ERROR"),
        (RuntimeError("Failed to CUDA calloc async 608 bytes"), "OOM"),
        (RuntimeError("Failed to CUDA malloc 4194304 bytes"), "OOM"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "OOM"),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), "OOM"),
        (RuntimeError("Failed to CUDA host alloc 1048576 bytes"), "HOST_OOM"),
        (RuntimeError("cudaHostRegister failed: out of memory (2)"), "HOST_OOM"),
        (RuntimeError("std::bad_alloc"), "OOM"),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), "OOM"),
        (raised(ValueError("the step failed"), MemoryError()), "OOM"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "HOST_OOM"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "HOST_OOM"),
        (InvalidTrial("no engine"), "INVALID"),
        (type("InvalidHP", (Exception,), {})("not these"), "INVALID"),
        (raised(RuntimeError("wrapped"), InvalidTrial("no engine")), "INVALID"),
        # The text alone does not make it one.
        (ValueError("out of memory"), "ERROR"),
        (FileNotFoundError(errno.ENOENT, "no data"), "ERROR"),
        (RuntimeError("CUDA error: device-side assert triggered"), "ERROR"),
        (SystemExit(3), "ERROR"),
    ],
    ids=repr,
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert failures.outcome(error).kind is OutcomeKind(kind)


def test_an_error_may_be_raised_from_itself() -> None:
    error = ValueError("a")
    error.__cause__ = error
    assert failures.outcome(error).kind is OutcomeKind.ERROR


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("\n\n  three\n"), "ValueError: three"),
        (MemoryError(), "MemoryError"),
        (CPU_ALLOCATOR, "out of memory: tried to allocate 2.0 MiB"),
        (
            raised(ValueError("the step failed"), CPU_ALLOCATOR),
            "out of memory: tried to allocate 2",
        ),
        (InvalidTrial("it ended too early"), "it ended too early"),
        (OVERFLOW, f"Exception: {OVERFLOW} Train in bf16"),
    ],
    ids=repr,
)
def test_messages_are_one_line(error: BaseException, message: str) -> None:
    text = failures.outcome(error).message
    assert text.startswith(message)
    assert "\n" not in text


def test_pinned_memory_is_the_hosts(tmp_path: Path) -> None:
    """`Tensor.pin_memory` is written in C and leaves no frame, so the source line decides."""
    path = tmp_path / "script.py"
    path.write_text("x.pin_memory()\n")

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as caught:
        exec(compile(path.read_text(), path, "exec"), {"x": SimpleNamespace(pin_memory=fail)})
    assert failures.outcome(caught.value).kind is OutcomeKind.HOST_OOM


def test_host_memory_beside_a_device_is_not_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_uses_cuda", lambda: True)
    for error in (MemoryError(), CPU_ALLOCATOR):
        assert failures.outcome(error).kind is OutcomeKind.HOST_OOM
    # The message of cuBLAS without enough memory.
    monkeypatch.setattr(failures, "_is_nearly_full", lambda: True)
    error = RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")
    assert failures.outcome(error).kind is OutcomeKind.OOM


# -- who is blamed

LOADS = """
from torch.utils.data import DataLoader
list(DataLoader([1, 2], collate_fn={collate}))
"""
MODEL = """
class Model(torch.nn.Linear):
    def forward(self, inputs):
        raise ValueError("wrong inputs")


engine = make_engine(Model(16, 1))
"""
TAKES_THE_PORT = """
import socket
with socket.socket() as other:
    other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    other.listen()
    make_engine()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("make_engine().forward()", "missing 1 required positional argument"),
        (f"{MODEL}engine.eval()\nengine(1)", "ValueError: wrong inputs"),
        (f"{MODEL}engine.train()\nengine(1)", "ValueError: wrong inputs"),
        (LOADS.format(collate="int"), "TypeError"),
        (LOADS.format(collate="iter"), ""),
        ("import json\njson.loads('{')", "JSONDecodeError"),
        (TAKES_THE_PORT, "in use"),
    ],
    ids=["argument", "evaluates", "trains", "loader", "fine", "library", "port"],
)
def test_a_script_is_blamed_whatever_of_dsat_is_around_it(
    scripts: Scripts, script: str, said: str
) -> None:
    outcome = scripts.run(script).outcome
    assert said in outcome.message and "error in dsat" not in outcome.message
    assert os.path.join("dsat", "in_trial") not in outcome.detail


def test_a_line_of_dsats_own_is_told_so() -> None:
    text: Any = None
    with pytest.raises(AttributeError) as caught:
        failures.classify_text(text)
    found = failures.outcome(caught.value)
    assert "error in dsat" in found.message
    assert str(Path(failures.__file__).parent) in found.detail


@pytest.mark.slow
def test_torch_below_the_modes_of_a_simulation_is_the_scripts() -> None:
    def initialize(**_: object) -> None:
        torch.tensor(1.0, dtype=torch.bfloat16).view(torch.uint8)

    model = BorrowedModel(initialize, {"model": torch.nn.Linear(2, 2)}, {})
    with pytest.raises(Exception) as caught:  # noqa: PT011
        model.engine_for_the_script()
    assert "error in dsat" not in failures.outcome(caught.value).message


EXITS = """
import sys
problem = None
try:
    train(make_engine(), rows=3)
except Exception as error:
    {handles}
sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("handles", ["sys.exit(1)", "problem = error", "raise ValueError('job')"])
def test_the_reason_is_kept_where_a_framework_ends_the_script(
    scripts: Scripts, handles: str
) -> None:
    """Hydra and click end scripts like this."""
    outcome = scripts.run(EXITS.format(handles=handles), micro_batch=4).outcome
    assert outcome.kind is OutcomeKind.INVALID and outcome.most_samples == 3
    assert "the first batch has 3 samples" in outcome.message


@pytest.mark.parametrize(
    "text",
    [
        "The model's config file has neither `hidden_size` nor `hidden_sizes` entry, therefore ...",
        "1 validation error for DeepSpeedZeroConfig\nreduce_bucket_size\n  Input should be a valid "
        "integer, unable to parse string as an integer [type=int_parsing, input_value='auto', ...",
    ],
    ids=["Trainer", "DeepSpeed"],
)
def test_what_to_write_for_auto_without_a_hidden_size_is_said(text: str) -> None:
    said = failures.message(ValueError(text))
    assert "hidden_size squared for reduce_bucket_size" in said and "Remove these" in said


@pytest.mark.parametrize(
    ("text", "is_of_configuration"),
    [
        ("could not convert string to float: 'auto'", True),
        (
            "multi_tensor_adam(): incompatible function arguments.\n 1.\nInvoked with: 'auto', 1",
            True,
        ),
        ("invalid choice: 'x' (choose from 'auto', 'cuda')", False),
    ],
)
def test_a_value_of_auto_that_nothing_replaced_is_said(
    text: str, is_of_configuration: bool
) -> None:
    assert ('replace "auto"' in failures.message(TypeError(text))) is is_of_configuration
