"""The slots of this machine, found in a process of its own.

`python3 -m dsat.engines.local.machine` prints them as JSON. Asking an accelerator how many devices
it has can initialise it, and a process in which it is initialised cannot fork trials; so the asking
is done where nothing else happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from dsat.engines.local import no_accelerator
from dsat.engines.local.cores import physical_cores
from dsat.errors import EngineError, UserInputError
from dsat.values import host_memory
from dsat.values.memory_size import readable

_MARK = "dsat-slots "
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Exit)\b")
_FIND_LIMIT_S = 180.0
_CHECK_LIMIT_S = 60.0
_LOOK_EVERY_S = 0.1
_MOMENT_S = 0.01
_NO_ANSWER = "no answer within {:g} s: the driver may be stuck"
# What other programs hold of a device that is in use; less may be a desktop or a monitor.
_BUSY_FRACTION, _BUSY_BYTES = 0.1, 2**30


@dataclass(frozen=True)
class Machine:
    """What this machine has for trials.

    Attributes:
        accelerator: DeepSpeed's name of it (`cuda`, `cpu`, `xpu`, ...).
        device_name: of the devices, for people.
        devices: one entry per slot: what the visible-devices variable must say, or the processor
            core of a CPU slot.
        visible_devices: environment variables that choose devices; none on a CPU.
        memory_bytes: of the smallest device; of the whole host, or of what its processes are
            allowed of it, on a CPU.
        device_memory_bytes: of each device, where there are any.
        expandable_segments: whether torch's allocator can be told to use them.
        left_out: why other devices are no slots, for people.
        warnings: what else people should know of the slots.
        software: versions of what must be the same on all hosts of a run.
        cores: processor cores that its processes may use, the first hardware thread of each.
        threads: hardware threads that they may use.
    """

    accelerator: str
    device_name: str
    devices: tuple[str, ...]
    visible_devices: tuple[str, ...]
    memory_bytes: int
    device_memory_bytes: tuple[int, ...] = ()
    expandable_segments: bool = False
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    software: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    threads: int = 0

    @property
    def is_cpu(self) -> bool:
        return self.accelerator == "cpu"

    @property
    def num_slots(self) -> int:
        return len(self.devices)

    def variables_of(self, slots: Sequence[int]) -> dict[str, str]:
        """Variables by which a process sees the devices of some slots and no others."""
        return {
            variable: ",".join(self.devices[slot] for slot in slots)
            for variable in self.visible_devices
        }

    def only(self, wanted: Sequence[int], without: Sequence[int]) -> Machine:
        """The machine with some of its devices alone.

        Args:
            wanted: positions of the devices; all if there are none.
            without: positions of devices that are left out.

        Raises:
            UserInputError: there are no such devices, or none are left.
        """
        there = range(self.num_slots)
        missing = [position for position in (*wanted, *without) if position not in there]
        kept = [position for position in wanted or there if position not in without]
        if missing or not kept:
            raise UserInputError(
                f"there is no device {missing[0]}: this machine has {self.describe()}"
                if missing
                else "leaves no device",
                where="entrypoint",
            )
        all_sizes = self.device_memory_bytes
        sizes = tuple(all_sizes[position] for position in kept) if all_sizes else ()
        return replace(
            self,
            devices=tuple(self.devices[position] for position in kept),
            memory_bytes=min(sizes, default=self.memory_bytes),
            device_memory_bytes=sizes,
        )

    def describe(self) -> str:
        plural = "" if self.num_slots == 1 else "s"
        sizes = sorted(set(self.device_memory_bytes)) or [self.memory_bytes]
        memory = " and ".join(readable(size, whole=True) for size in sizes)
        left_out = "".join(f"; {reason}" for reason in self.left_out)
        return (
            f"{self.num_slots} {self.accelerator} slot{plural} "
            f"({self.device_name}, {memory}){left_out}"
        )


def find_machine() -> Machine:
    """Look at the slots of this machine.

    Raises:
        EngineError: torch or deepspeed cannot be imported, or the accelerator does not answer.
    """
    [machine] = find_machines({"this machine": ()})
    return machine


def find_machine_for_simulations() -> Machine:
    """This machine, without its software's versions where it surely has no accelerator: then
    neither torch nor DeepSpeed is asked, which takes seconds.

    Raises:
        EngineError: as of `find_machine`.
    """
    return _of_cores() if no_accelerator.is_certain() else find_machine()


def find_machines(prefixes: Mapping[str, Sequence[str]]) -> list[Machine]:
    """Look at the slots of several machines at the same time.

    Args:
        prefixes: what goes before a command so that it runs on a machine, by the machine's name.

    Raises:
        EngineError: torch or deepspeed cannot be imported on one, or its accelerator does not
            answer.
    """
    begun = [_Question([], os.environ, prefix) for prefix in prefixes.values()]
    try:
        answers = [question.answer(_FIND_LIMIT_S) for question in begun]
    except BaseException:
        for question in begun:
            question.withdraw()
        raise
    return [_machine(name, found) for name, found in zip(prefixes, answers, strict=True)]


def _machine(name: str, found: dict[str, Any] | str) -> Machine:
    """From an answer; raises EngineError if it is why there is none."""
    if isinstance(found, str):
        raise EngineError(
            f"the accelerators of {name} cannot be found: {found}. Check that "
            f"`{sys.executable} -c 'import deepspeed'` works there."
        )
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
    }
    return Machine(**values)


def problems_with(
    machine: Machine, slots: Sequence[int], prefix: Sequence[str] = ()
) -> dict[int, str]:
    """Why fresh processes cannot use slots' devices, by slot; nothing of those that work.

    Args:
        prefix: what goes before a command so that it runs on the machine, if that is another one.
    """
    devices = [machine.devices[slot] for slot in slots]
    variables = ",".join(machine.visible_devices)
    options = ["--check", machine.accelerator, variables, *devices]
    found = _Question(options, os.environ, prefix).answer(_FIND_LIMIT_S)
    if isinstance(found, str):
        return dict.fromkeys(slots, found)
    return {slot: found[machine.devices[slot]] for slot in slots if found[machine.devices[slot]]}


class _Question:
    """A process that may use the accelerator, and answers a question.

    Args:
        options: the question; none asks for the slots.
        env: of the process.
        prefix: what goes before a command so that it runs on the machine in question.
    """

    def __init__(
        self, options: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        command = [*prefix, sys.executable, "-m", "dsat.engines.local.machine", *options]
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def withdraw(self) -> None:
        """Ends the process, unless it is beyond the reach of signals."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=1)

    def answer(
        self, limit_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any] | str:
        """The answer, or why there is none.

        The process may be stuck in the driver, beyond the reach of signals: it is not waited for
        any longer.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self.answer_within(_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                meanwhile()
            if time.monotonic() > deadline:
                self.withdraw()
                return _NO_ANSWER.format(limit_s)

    def answer_within(self, limit_s: float) -> dict[str, Any] | str:
        """The answer, or why there is none; raises TimeoutExpired if there is neither so soon."""
        out, err = self._process.communicate(timeout=limit_s)
        for line in out.splitlines():
            if line.startswith(_MARK):
                found: dict[str, Any] = json.loads(line[len(_MARK) :])
                return found
        lines = err.strip().splitlines() or [f"exit status {self._process.returncode}"]
        # torch's errors go on with advice.
        named = [line for line in lines if _EXCEPTION.match(line)]
        return (named or lines)[-1]


def _of_cores() -> Machine:
    cores = sorted(os.sched_getaffinity(0))
    return Machine(
        accelerator="cpu",
        device_name=_processor_name(),
        devices=tuple(str(core) for core in cores),
        visible_devices=(),
        memory_bytes=host_memory.total_bytes(),
        cores=tuple(physical_cores()),
        threads=len(cores),
    )


def _software() -> tuple[str, ...]:
    import deepspeed
    import torch

    python = platform.python_version()
    return (f"Python {python}", f"torch {torch.__version__}", f"deepspeed {deepspeed.__version__}")


def _inspect() -> Machine:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        return replace(_of_cores(), software=_software())
    variables = _visible_devices_variables(accelerator)
    ids = visible_ids(accelerator.device_count(), variables)
    found, broken = [], []
    for index, device in enumerate(ids):
        try:
            found.append(_Device.of(accelerator, index, device))
        except RuntimeError as error:
            broken.append(f"{name} {device} does not answer: {str(error).splitlines()[0]}")
    if not found:
        raise SystemExit("; ".join(broken) or f"there is no {name} device")
    # A choice of the user's is one.
    chosen = any(os.environ.get(variable) for variable in variables)
    idle = found if chosen else [device for device in found if not device.is_busy] or found
    used = {device.device: device.describe_use(name) for device in found if device.is_busy}
    kept = [device.device for device in idle]
    threads = len(os.sched_getaffinity(0))
    few = f"{len(kept)} devices share {threads} hardware threads, which trials will wait for"
    return Machine(
        accelerator=name,
        device_name=", ".join(dict.fromkeys(device.name for device in idle)),
        devices=tuple(kept),
        visible_devices=tuple(variables),
        memory_bytes=min(device.total_bytes for device in idle),
        device_memory_bytes=tuple(device.total_bytes for device in idle),
        expandable_segments=name == "cuda" and _has_nvml(),
        left_out=(
            *broken,
            *(_invisible(name, device) for device in ids_chosen(variables)[len(ids) :]),
            *(f"{text}, and is left out" for device, text in used.items() if device not in kept),
        ),
        warnings=(
            *(
                f"{text}: trials there may run out of memory"
                for device, text in used.items()
                if device in kept
            ),
            *([few] if threads < len(kept) else []),
        ),
        software=_software(),
        cores=tuple(physical_cores()),
        threads=threads,
    )


@dataclass(frozen=True)
class _Device:
    """A device as a process sees it that does nothing with it."""

    device: str
    name: str
    total_bytes: int
    taken_bytes: int

    @classmethod
    def of(cls, accelerator: Any, index: int, device: str) -> _Device:
        """Raises RuntimeError if the device does not answer."""
        total, taken, name = int(accelerator.total_memory(index)), 0, accelerator.device_name()
        if name == "cuda":
            import torch

            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
            taken = total - free
        return cls(device, name, total, taken)

    @property
    def is_busy(self) -> bool:
        return self.taken_bytes > max(_BUSY_FRACTION * self.total_bytes, _BUSY_BYTES)

    def describe_use(self, accelerator: str) -> str:
        taken, total = readable(self.taken_bytes), readable(self.total_bytes, whole=True)
        return f"{accelerator} {self.device} is in use by other programs ({taken} of {total})"


def _has_nvml() -> bool:
    """Whether NVIDIA's management library is there.

    Without it torch crashes at its first expandable segment (torch 2.15: `get_fabric_access` in
    c10/cuda/PeerToPeerAccess.cpp calls a null pointer). Some containers have none.
    """
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def visible_ids(count: int, variables: Sequence[str]) -> list[str]:
    """What to call each of `count` devices, as the user's own choice of devices has it."""
    return ids_chosen(variables)[:count] or [str(index) for index in range(count)]


def ids_chosen(variables: Sequence[str]) -> list[str]:
    """The devices that the user's environment names; none if it leaves the choice open."""
    for variable in variables:
        chosen = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
        if chosen:
            return chosen
    return []


def _invisible(accelerator: str, device: str) -> str:
    """That a device was chosen which the driver does not show."""
    if device.startswith("MIG-"):
        return f"{accelerator} {device} is left out: CUDA gives a process one MIG device"
    return f"{accelerator} {device} is left out: there is none, or one before it is not there"


def _visible_devices_variables(accelerator: Any) -> list[str]:
    names = getattr(accelerator, "visible_devices_envs", None)
    found = list(names()) if names is not None else ["CUDA_VISIBLE_DEVICES"]
    # ROCm looks at its own name first, so one that the user has set must follow.
    return [*found, *(name for name in ("HIP_VISIBLE_DEVICES",) if name in os.environ)]


def _check(accelerator: str, variables: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
    """Uses each device in a process that sees no other.

    The processes are forked, so that torch is imported once; importing it touches no device.

    Returns:
        What is wrong with each device; an empty text if it works.
    """
    import torch  # noqa: F401

    children: dict[str, tuple[int, int]] = {}
    for device in devices:
        answer, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.update(dict.fromkeys(variables, device))
            # Stuck in the driver, it would hold open what others wait for the end of.
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (1, 2):
                os.dup2(null, descriptor)
            _use(accelerator, write)
        os.close(write)
        children[device] = pid, answer
    deadline = time.monotonic() + _CHECK_LIMIT_S
    return {device: _answer(*child, deadline) for device, child in children.items()}


def _use(accelerator: str, write: int) -> NoReturn:
    """Uses the one device that is visible, and writes why it cannot be used; or nothing."""
    import torch

    try:
        torch.empty(1, device=accelerator).add_(1).cpu()
    except Exception as error:
        # torch's errors go on with advice.
        first = (str(error).splitlines() or [""])[0]
        os.write(write, f"{type(error).__name__}: {first}".encode())
    finally:
        os._exit(0)


def _answer(pid: int, answer: int, deadline: float) -> str:
    """What a child has written until it ended; it may never do, stuck in the driver."""
    if not select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
        os.kill(pid, signal.SIGKILL)
        return f"no answer within {_CHECK_LIMIT_S:g} s: the driver may be stuck"
    text = os.read(answer, 4096).decode(errors="replace")
    if text:
        return text
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"a process that used it was killed by {signal.Signals(-status).name}" if status else ""


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def answer_to(options: Sequence[str]) -> None:
    """Prints the answer to a question: the options of this module as a program."""
    if options[:1] == ["--check"]:
        answer: Mapping[str, Any] = _check(options[1], options[2].split(","), options[3:])
    else:
        answer = asdict(_inspect())
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    answer_to(sys.argv[1:])
    os._exit(0)  # an orderly end takes the interpreter a second, with torch in it
