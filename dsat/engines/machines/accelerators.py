"""Inspection of this machine's accelerators, as a program that prints the slots as JSON.

    python3 -m dsat.engines.machines.accelerators

This needs a separate process, because counting devices can initialise an accelerator, and a process
that has initialised one cannot fork trials.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.engines.machines.machine import (
    MARK,
    Machine,
    has_library,
    machine_of_cores,
    physical_cores,
)
from dsat.values import format as fmt
from dsat.values import host_limits

NAMED = "DSAT_NAMED_DEVICES"  # variable with the devices that the user's command names
# A device is busy if other programs use more than this fraction of its memory, and more than these
# bytes. A desktop or a monitor uses less.
_BUSY_FRACTION, _BUSY_BYTES = 0.1, 2**30
_IN_USE = "DSAT_MEMORY_IN_USE"  # variable with bytes by UUID, before the user's command began
_USED_MEMORY = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
_ANSWER_LIMIT_S = 20.0


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
        return replace(machine_of_cores(), software=_software())
    variables = _visible_devices_variables(accelerator)
    count = accelerator.device_count()
    ids = find_chosen_devices(variables)[:count] or [str(index) for index in range(count)]
    devices, broken = [], []
    for index, device in enumerate(ids):
        try:
            devices.append(_Device.of(accelerator, index, device))
        except RuntimeError as error:
            broken.append(f"{name} {device} does not answer: {str(error).splitlines()[0]}")
    if not devices:
        raise SystemExit("; ".join(broken) or f"there is no {name} device")
    # Devices that the user chose are used even if they are busy.
    selection = find_chosen_devices(variables) or find_chosen_devices([NAMED])
    idle = [
        device for device in devices if not device.is_busy or device.device in selection
    ] or devices
    uses = {device.device: device.describe_use(name) for device in devices if device.is_busy}
    idle_ids = [device.device for device in idle]
    threads = len(host_limits.usable_cores())
    few = f"{len(idle_ids)} devices share only {threads} hardware threads, which slows trials down"
    return Machine(
        accelerator=name,
        device_name=", ".join(dict.fromkeys(device.name for device in idle)),
        devices=tuple(idle_ids),
        visible_devices=tuple(variables),
        memory_bytes=min(device.total_bytes for device in idle),
        device_memory_bytes=tuple(device.total_bytes for device in idle),
        device_names=tuple(device.name for device in idle),
        expandable_segments=name == "cuda" and has_nvml(),
        left_out=(
            *broken,
            *(_explain(name, device) for device in find_chosen_devices(variables)[len(ids) :]),
            *(
                f"{text}, so it is not used"
                for device, text in uses.items()
                if device not in idle_ids
            ),
        ),
        warnings=(
            *(
                f"{text}: trials there may run out of memory"
                for device, text in uses.items()
                if device in idle_ids
            ),
            *([few] if threads < len(idle_ids) else []),
        ),
        software=_software(),
        cores=tuple(physical_cores()),
        threads=threads,
    )


@dataclass(frozen=True)
class _Device:
    """A device, inspected by a process that does not use it.

    Attributes:
        taken_bytes: memory that other programs use; 0 without CUDA.
    """

    device: str
    name: str
    total_bytes: int
    taken_bytes: int

    @classmethod
    def of(cls, accelerator: Any, index: int, device: str) -> _Device:
        """Inspect a device; raise RuntimeError if it does not answer."""
        total, used_bytes, name = int(accelerator.total_memory(index)), 0, accelerator.device_name()
        if name == "cuda":
            import torch

            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            used_bytes = json.loads(os.environ.get(_IN_USE, "{}")).get(f"GPU-{uuid}", total - free)
        return cls(device, name, total, used_bytes)

    @property
    def is_busy(self) -> bool:
        return self.taken_bytes > max(_BUSY_FRACTION * self.total_bytes, _BUSY_BYTES)

    def describe_use(self, accelerator: str) -> str:
        used, total = fmt.memory(self.taken_bytes), fmt.memory(self.total_bytes, whole=True)
        return f"{accelerator} {self.device} is in use by other programs ({used} of {total})"


def variables_of_memory_in_use() -> dict[str, str]:
    """Return an environment variable with the memory in use on NVIDIA devices; empty if unknown."""
    try:
        output = subprocess.run(  # noqa: S603
            _USED_MEMORY, capture_output=True, text=True, check=True, timeout=_ANSWER_LIMIT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no device, no driver, or no answer
        return {}
    rows = [line.split(", ") for line in output.splitlines()]
    used_bytes = {row[0]: int(row[1]) * 2**20 for row in rows if row[-1].isdecimal()}
    return {_IN_USE: json.dumps(used_bytes)}


def has_nvml() -> bool:
    """Return whether NVIDIA's management library is installed.

    Without it torch crashes at its first expandable segment (torch 2.15: `get_fabric_access` in
    c10/cuda/PeerToPeerAccess.cpp calls a null pointer). Some containers lack it.
    """
    return has_library("libnvidia-ml.so.1")


def find_chosen_devices(
    variables: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the devices that the user's environment selects; empty without a selection."""
    for variable in variables:
        devices = [
            part.strip() for part in environment.get(variable, "").split(",") if part.strip()
        ]
        if devices:
            return devices
    return []


def _explain(accelerator: str, device: str) -> str:
    """Return a message that explains why the driver does not show a device that the user chose."""
    if device.startswith("MIG-"):
        return f"{accelerator} {device} is not used: CUDA gives a process only one MIG device"
    return f"{accelerator} {device} is not used: it, or one listed before it, does not exist"


def _visible_devices_variables(accelerator: Any) -> list[str]:
    import torch

    names = getattr(accelerator, "visible_devices_envs", None)
    variables = list(names()) if names is not None else ["CUDA_VISIBLE_DEVICES"]
    # ROCm reads HIP_VISIBLE_DEVICES first: if the user has set it, trials must set it, too.
    hip = [name for name in ("HIP_VISIBLE_DEVICES",) if name in os.environ]
    return [*hip, *variables] if torch.version.hip else [*variables, *hip]


def look() -> None:
    """Print the slots of this machine as a line of JSON after `MARK`."""
    print(MARK + json.dumps(_inspect().to_json()), flush=True)


if __name__ == "__main__":
    look()
    os._exit(0)  # with torch imported, a regular exit takes a second
