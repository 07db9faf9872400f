"""What an exception means, and what a trial's remains mean when several ranks failed."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from dsat.engines.local import trial_result
from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.running import Running, Start, Way
from dsat.errors import InvalidTrial
from dsat.in_trial import agreement, failures, loaders, loopback
from dsat.in_trial.meter import Meter
from dsat.in_trial.rank_files import PORTS_FILE, Progress, RankSpec
from dsat.in_trial.simulation.borrowed_model import BorrowedModel
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import ran
from testing.local import cpu_machine

KILLED = -signal.SIGKILL


def raised(error: BaseException, handling: BaseException) -> BaseException:
    """An error that was raised while another one was handled."""
    error.__context__ = handling
    return error


CPU_ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 2097152 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
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
        # Words alone do not make it one.
        (ValueError("out of memory"), "ERROR"),
        (FileNotFoundError(errno.ENOENT, "no data"), "ERROR"),
        (RuntimeError("CUDA error: device-side assert triggered"), "ERROR"),
        (SystemExit(3), "ERROR"),
    ],
    ids=repr,
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert failures.classify(error) is OutcomeKind(kind)


def test_a_file_that_dsat_did_not_write_is_not_the_scripts_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "unwritten", {tmp_path / "best.pt"})
    monkeypatch.chdir(tmp_path)
    for name, is_named in (("best.pt", True), ("other.pt", False)):
        with pytest.raises(FileNotFoundError) as caught:
            Path(name).read_text()
        assert ("dsat did not write it" in failures.message(caught.value)) is is_named
    assert "same folder" in failures.message(FileExistsError(17, "File exists", "out"))


def test_an_error_may_be_raised_from_itself() -> None:
    error = ValueError("a")
    error.__cause__ = error
    assert failures.classify(error) is OutcomeKind.ERROR


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
    ],
    ids=repr,
)
def test_messages_are_one_line(error: BaseException, message: str) -> None:
    text = failures.message(error)
    assert text.startswith(message)
    assert "\n" not in text


# -- several ranks


def judge(
    folder: Path,
    reports: Sequence[tuple[Outcome, float] | None],
    statuses: Sequence[int],
    killed: Sequence[bool] = (),
    way: Way = Way.FORKED,
) -> Outcome:
    for rank, report in enumerate(reports):
        if report is not None:
            outcome, time_s = report
            path = folder / f"rank{rank}.json"
            path.write_text(json.dumps(outcome.to_json()))
            os.utime(path, (time_s, time_s))
    trial = Trial(1, TrialKind.SEARCH, "t", 1, BatchTriple(1, 1, 1), {})
    share = Share(0, Host(cpu_machine(1)), tuple(range(len(statuses))))
    message = {"statuses": list(statuses), "killed": list(killed) or [False] * len(statuses)}
    running = Running(Start(trial, folder, None), (share,), way, ended={0: message})
    return trial_result.of(running, timeout_s=60.0)


def said(kind: str, time_s: float, message: str = "") -> tuple[Outcome, float]:
    """What a rank left, and when."""
    message = message or f"{kind} at {time_s:g}"
    return Outcome(OutcomeKind(kind), message=message, detail=f"detail of {kind}"), time_s


def test_the_first_to_fail_explains_the_others(tmp_path: Path) -> None:
    outcome = judge(tmp_path, [said("ERROR", 2.0), said("ERROR", 1.0)], [1, 1])
    assert outcome == Outcome(
        OutcomeKind.ERROR,
        message="rank 1: ERROR at 1",
        detail="detail of ERROR",
        duration_s=outcome.duration_s,
    )


def test_out_of_memory_explains_the_others_even_if_it_is_told_later(tmp_path: Path) -> None:
    """A peer that lost its connection may be quicker to say so."""
    lost = said("ERROR", 1.0, "RuntimeError: Connection closed by peer")
    outcome = judge(tmp_path, [lost, said("OOM", 2.0)], [1, 1])
    assert (outcome.kind, outcome.message) == (OutcomeKind.OOM, "rank 1: OOM at 2")
    assert outcome.detail == "detail of OOM"


def test_a_kill_from_outside_explains_a_peers_error(tmp_path: Path) -> None:
    lost = said("ERROR", 1.0, "RuntimeError: Connection closed by peer")
    (tmp_path / "stderr.log").write_text("some\nlines\n")
    outcome = judge(tmp_path, [lost, None], [1, KILLED])
    assert outcome.kind is OutcomeKind.HOST_OOM
    assert outcome.message.startswith("rank 1 was killed with SIGKILL")
    assert "--max-concurrent-trials" in outcome.message
    assert outcome.detail == "some\nlines"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (-signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),
        (-signal.SIGBUS, "rank 1 was killed by SIGBUS (is /dev/shm full?)"),
        (7, "rank 1 ended with exit status 7"),
        (0, "the ranks ended without a result"),
    ],
)
def test_a_rank_that_said_nothing(tmp_path: Path, status: int, message: str) -> None:
    outcome = judge(tmp_path, [None, None], [KILLED, status], [True, False])
    assert (outcome.kind, outcome.message) == (OutcomeKind.ERROR, message)


def test_a_command_that_leaves_in_the_midst_of_its_training(tmp_path: Path) -> None:
    (tmp_path / PORTS_FILE).touch()
    progress = Progress(tmp_path)
    progress.count(3)
    outcome = judge(tmp_path, [None], [0], way=Way.COMMAND)
    assert outcome.message == (
        "your command ended with exit status 0 after 3 optimizer steps, before it was measured"
    )


def test_what_was_measured_counts_and_not_how_the_processes_ended(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(ran(5.0).to_json()))
    assert judge(tmp_path, [None], [7]).metrics == ran(5.0).metrics


def test_the_end_of_a_long_log_is_the_detail(tmp_path: Path) -> None:
    lines = [f"line {number} \u2713" for number in range(20_000)]
    (tmp_path / "stderr.log").write_text("\n".join(lines) + "\n")
    assert judge(tmp_path, [None], [7]).detail.splitlines() == lines[-20:]


def test_pinned_memory_is_the_hosts(tmp_path: Path) -> None:
    """`Tensor.pin_memory` is written in C and leaves no frame: the source line tells."""
    path = tmp_path / "script.py"
    path.write_text("x.pin_memory()\n")

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as caught:
        exec(compile(path.read_text(), path, "exec"), {"x": SimpleNamespace(pin_memory=fail)})
    assert failures.classify(caught.value) is OutcomeKind.HOST_OOM


def test_host_memory_beside_a_device_is_not_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_uses_cuda", lambda: True)
    for error in (MemoryError(), CPU_ALLOCATOR):
        assert failures.classify(error) is OutcomeKind.HOST_OOM
    # What cuBLAS says for want of memory.
    monkeypatch.setattr(failures, "_is_nearly_full", lambda: True)
    error = RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")
    assert failures.classify(error) is OutcomeKind.OOM


class Engine:
    """An engine of a script that only evaluates."""

    optimizer = object()
    training = False

    def forward(self, inputs: object) -> None:
        raise ValueError("wrong inputs")

    def backward(self, loss: object) -> None: ...

    def step(self) -> None: ...


def of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text("{")
    RankSpec.of_folder(tmp_path)


def watched(engine: Engine) -> Any:
    Meter(cast(Any, SimpleNamespace(profile=False)), lambda outcome: None).watch(engine)
    return engine


def batches(collate: Callable[[Any], Any]) -> None:
    loaders.watch()
    list(DataLoader([1, 2], collate_fn=collate))  # type: ignore[arg-type]


def in_a_simulation(_: object) -> None:
    def initialize(**_: object) -> None:
        torch.tensor(1.0, dtype=torch.bfloat16).view(torch.uint8)

    model = BorrowedModel(initialize, {"model": torch.nn.Linear(2, 2)}, {})
    model.engine_for_the_script()


@pytest.mark.parametrize(
    ("fail", "is_of_dsat"),
    [
        pytest.param(lambda _: failures.of_text(cast(Any, None)), True, id="a line of dsat's"),
        pytest.param(of_a_rank, True, id="a library that dsat calls"),
        pytest.param(lambda _: watched(Engine()).forward(), False, id="an argument is missing"),
        pytest.param(lambda _: watched(Engine()).forward(1), False, id="below a wrapper"),
        pytest.param(lambda _: batches(int), False, id="in C, below a loader that is timed"),
        pytest.param(in_a_simulation, False, id="torch below the simulation's modes"),
        pytest.param(lambda _: json.loads("{"), False, id="a library that the script calls"),
    ],
)
def test_the_innermost_work_of_dsat_or_the_script_is_blamed(
    fail: Callable[[Path], object], is_of_dsat: bool, tmp_path: Path
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fail(tmp_path)
    assert ("inside dsat" in failures.message(caught.value)) == is_of_dsat
    folder = str(Path(failures.__file__).parent)
    assert (folder in failures.user_traceback(caught.value)) == is_of_dsat


def test_a_lost_connection_is_another_ranks_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
    monkeypatch.setattr(torch.distributed, "is_initialized", functools.partial(exec, lost))
    with pytest.raises(RuntimeError) as caught:
        agreement.Ranks(None).maximum([0.0])
    assert "inside dsat" not in failures.message(caught.value)


def test_a_port_that_is_taken_is_another_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)
    loopback.install()
    with socket.socket() as other:
        other.bind((loopback.ADDRESS, 0))
        other.listen()
        with pytest.raises(OSError, match="in use") as caught:
            rendezvous.TCPStore(*other.getsockname(), 1, is_master=True)
    assert "inside dsat" not in failures.message(caught.value)
