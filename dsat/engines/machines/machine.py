"""Slots of a machine, which `dsat.engines.machines.accelerators` inspects in another process."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dsat.engines.machines.processes import Reach, spawn
from dsat.errors import EngineError, UserInputError
from dsat.values import format as fmt
from dsat.values import host_limits
from dsat.values.codec import Recorded

MARK = "dsat-slots "
_TOPOLOGY = Path("/sys/devices/system/cpu")
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Exit)\b")
# Signs of an accelerator.
_LIBRARIES = ("libcuda.so.1", "libze_loader.so.1")
_DEVICE_FILES = tuple(
    f"/dev/{name}" for name in ("nvidia*", "nvhost*", "dxg", "kfd", "accel*", "davinci*")
)
_PACKAGES = (
    *("habana_frameworks", "intel_extension_for_pytorch", "torch_mlu", "torch_npu"),
    *("torch_sdaa", "torch_supa", "torch_xmlir"),
)
_FIND_LIMIT_S = 180.0
_EQUAL_WITHIN = 0.02
_READ_LIMIT_S = 1.0  # minimum time to wait for an answer, even past the limit
_KINDS = {"cpu": "CPU core", "cuda": "GPU"}  # of a device, in messages


@dataclass(frozen=True)
class Machine(Recorded):
    """Resources of a machine for trials.

    Attributes:
        accelerator: DeepSpeed's name of the accelerator (`cuda`, `cpu`, `xpu`, ...).
        device_name: names of the devices, for messages.
        devices: one entry per slot: the device's value for the visible-devices variable, or a
            CPU core.
        visible_devices: environment variables that select devices; empty on a CPU.
        memory_bytes: memory of the smallest device; on a CPU, of the host within the limits of its
            control groups.
        expandable_segments: whether ranks may use expandable segments of torch's allocator.
        left_out: messages about devices that are not used, with the reasons.
        software: versions (Python, torch, DeepSpeed) that hosts must share; empty if not imported.
        cores: the first hardware thread of each CPU core that processes may use.
        threads: number of hardware threads that processes may use at once.
        allowed: on a CPU, all cores that processes may use; with a quota, `devices` are fewer.
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
    device_names: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @property
    def has_quota(self) -> bool:
        """Return whether a quota of CPU time allows fewer slots than there are cores.

        A quota reserves no particular cores: other containers may run on the same ones.
        """
        return len(self.allowed) > self.threads

    @property
    def is_cpu(self) -> bool:
        return self.accelerator == "cpu"

    @property
    def num_slots(self) -> int:
        return len(self.devices)

    def variables_of(self, slots: Sequence[int]) -> dict[str, str]:
        """Return environment variables that limit a process to the devices of some slots."""
        return {
            variable: ",".join(self.devices[slot] for slot in slots)
            for variable in self.visible_devices
        }

    def devices_of(self, slots: Sequence[int]) -> list[str]:
        """Return the devices of some slots; empty for a machine that was not inspected."""
        return [self.devices[slot] for slot in slots if slot < len(self.devices)]

    def extend(self, count: int) -> Machine:
        """Return the machine with more CPU slots, up to `count`, if only a quota limits them."""
        if not self.has_quota or self.num_slots < self.threads:
            return self
        return replace(self, devices=self.allowed[: max(count, self.num_slots)])

    def at(self, positions: Sequence[int]) -> Machine:
        """Return the machine with only the devices at `positions`, or with all if it is empty."""
        names = dict(enumerate(self.devices))
        return self.only([names.get(n, str(n)) for n in positions], ())

    def only(self, include: Sequence[str], exclude: Sequence[str]) -> Machine:
        """Return the machine with only some of its devices.

        Args:
            include: devices to keep; empty for all.
            exclude: devices to leave out.

        Raises:
            UserInputError: a device of `include` does not exist, or no device is left.
        """
        unknown = [device for device in include if device not in self.devices]
        devices = [device for device in include or self.devices if device not in exclude]
        if unknown:
            problem = f"there is no device {unknown[0]}: this machine has {self.describe()}"
            raise UserInputError(problem, where="entrypoint")
        if not devices:
            raise UserInputError(
                "excludes every device of this machine",
                where="entrypoint",
                hint="Change --include or --exclude.",
            )
        positions = [self.devices.index(device) for device in devices]
        sizes = tuple(self.device_memory_bytes[n] for n in positions if self.device_memory_bytes)
        names = tuple(self.device_names[n] for n in positions if self.device_names)
        return replace(
            self,
            device_name=", ".join(dict.fromkeys(names)) or self.device_name,
            devices=tuple(devices),
            memory_bytes=min(sizes, default=self.memory_bytes),
            device_memory_bytes=sizes,
            device_names=names,
        )

    def devices_by_kind(self) -> dict[str, list[str]]:
        """Return the devices by kind (name and memory); empty on a CPU."""
        by_kind: dict[str, list[str]] = {}
        first: list[tuple[str, int]] = []  # of each kind
        kinds = zip(self.devices, self.device_names, self.device_memory_bytes, strict=False)
        for device, name, size in kinds:
            alike = [entry for entry in first if entry[0] == name and are_close(entry[1], size)]
            first += [] if alike else [(name, size)]
            kind, memory = alike[0] if alike else (name, size)
            by_kind.setdefault(f"{kind} ({fmt.memory(memory, whole=True)})", []).append(device)
        return by_kind

    def describe(self) -> str:
        kind = _KINDS.get(self.accelerator, f"{self.accelerator} device")
        plural = "" if self.num_slots == 1 else "s"
        sizes = sorted(set(self.device_memory_bytes)) or [self.memory_bytes]
        memory = " and ".join(fmt.memory(size, whole=True) for size in sizes)
        left_out = "".join(f"; {reason}" for reason in self.left_out)
        return f"{self.num_slots} {kind}{plural} ({self.device_name}, {memory}){left_out}"


def are_close(*sizes: int) -> bool:
    """Return whether memory sizes differ by at most 2 %, which a device's firmware may reserve."""
    return min(sizes) >= (1 - _EQUAL_WITHIN) * max(sizes)


def find_machine(variables: Mapping[str, str] | None = None) -> Machine:
    """Inspect this machine, in a process with these environment variables."""
    [machine] = find_machines({"this machine": ()}, variables)
    return machine


def find_machine_for_simulations() -> Machine:
    """Inspect this machine; without accelerators, import neither torch nor DeepSpeed."""
    return machine_of_cores() if has_no_accelerator() else find_machine()


def has_no_accelerator() -> bool:
    """Return whether `DS_ACCELERATOR` is cpu; if unset, whether there is surely no accelerator.

    Each kind of accelerator needs a driver's library, device files, or a package that extends torch
    (deepspeed 0.19.8: accelerator/real_accelerator.py). If any exists, only torch and DeepSpeed can
    tell.
    """
    setting = os.environ.get("DS_ACCELERATOR")
    if setting:
        return setting == "cpu"
    return (
        not any(glob.glob(pattern) for pattern in _DEVICE_FILES)
        and not any(importlib.util.find_spec(package) for package in _PACKAGES)
        and not any(has_library(library) for library in _LIBRARIES)
    )


def has_library(name: str) -> bool:
    """Return whether a shared library can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def find_machines(
    reaches: Mapping[str, Reach], variables: Mapping[str, str] | None = None
) -> list[Machine]:
    """Inspect several machines in parallel, in processes with these environment variables.

    Args:
        reaches: how commands run on each machine, by the machine's name.

    Raises:
        EngineError: a machine could not be inspected.
    """
    command = [sys.executable, "-m", "dsat.engines.machines.accelerators"]
    deadline = time.monotonic() + _FIND_LIMIT_S
    with contextlib.ExitStack() as stack:
        inspections = []
        for name, reach in reaches.items():
            errors = stack.enter_context(tempfile.TemporaryFile())
            process: Any = spawn(reach, command, variables, errors)
            stack.callback(_end, process)
            process.stdin.close()
            inspections.append((name, process, errors))
        return [_read_machine(*inspection, deadline) for inspection in inspections]


def _read_machine(name: str, process: Any, errors: IO[bytes], deadline: float) -> Machine:
    """Return the machine that a process prints as JSON; raise EngineError if it does not."""
    problem = f"no answer within {_FIND_LIMIT_S:g} s: imports are slow, or a driver hangs"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(_READ_LIMIT_S, deadline - time.monotonic()))
        for line in process.stdout.read().decode(errors="replace").splitlines():
            if line.startswith(MARK):
                return Machine.from_json(json.loads(line[len(MARK) :]))
        errors.seek(0)
        error_lines = errors.read().decode(errors="replace").strip().splitlines()
        lines = error_lines or [f"exit status {process.returncode}"]
        # torch prints advice after the line with the exception.
        problem = ([line for line in lines if _EXCEPTION.match(line)] or lines)[-1]
    raise EngineError(
        f"the accelerators of {name} cannot be inspected: {problem}. Check that "
        f"`{sys.executable} -c 'import deepspeed'` works there."
    )


def _end(process: Any) -> None:
    """Kill a process; wait for it 1 s at most, since it may be stuck in a driver."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    process.stdout.close()


def machine_of_cores() -> Machine:
    """Return this machine with CPU cores as slots."""
    cores = host_limits.usable_cores()
    return Machine(
        accelerator="cpu",
        device_name=_processor_name(),
        devices=tuple(str(core) for core in cores),
        allowed=tuple(str(core) for core in sorted(os.sched_getaffinity(0))),
        visible_devices=(),
        memory_bytes=host_limits.total_bytes(),
        cores=tuple(physical_cores()),
        threads=len(cores),
    )


def physical_cores() -> list[int]:
    """Return one hardware thread of each core that this process may use.

    DeepSpeed's launcher also counts physical cores (`get_numactl_cmd` of deepspeed/utils/numa.py,
    0.19.8). Two ranks on hardware threads of one core would slow each other down.
    """
    first_of: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        path = _TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
        first_of.setdefault(path.read_text() if path.exists() else str(core), core)
    return sorted(first_of.values())


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        return match[1].strip() if match else "CPU"
    return "CPU"
