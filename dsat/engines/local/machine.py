"""The slots of this machine, found in a process of its own.

`python3 -m dsat.engines.local.machine` prints them as JSON. Asking an accelerator how many devices
it has can initialise it, and a process in which it is initialised cannot fork trials; so the asking
is done where nothing else happens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dsat.errors import EngineError

_MARK = "dsat-slots "


@dataclass(frozen=True)
class Machine:
    """What this machine has for trials.

    Attributes:
        accelerator: DeepSpeed's name of it (`cuda`, `cpu`, `xpu`, ...).
        device_name: of the first device, for people.
        devices: one entry per slot: what the visible-devices variable must say, or the processor
            core of a CPU slot.
        visible_devices: environment variables that choose devices; none on a CPU.
        memory_bytes: of one device; of the whole host on a CPU.
    """

    accelerator: str
    device_name: str
    devices: tuple[str, ...]
    visible_devices: tuple[str, ...]
    memory_bytes: int

    @property
    def is_cpu(self) -> bool:
        return self.accelerator == "cpu"

    @property
    def num_slots(self) -> int:
        return len(self.devices)

    def describe(self) -> str:
        plural = "" if self.num_slots == 1 else "s"
        return (
            f"{self.num_slots} {self.accelerator} slot{plural} "
            f"({self.device_name}, {self.memory_bytes / 2**30:.0f} GiB)"
        )


def find_machine() -> Machine:
    """The slots of this machine.

    Raises:
        EngineError: torch or deepspeed cannot be imported, or the accelerator does not answer.
    """
    command = [sys.executable, "-m", "dsat.engines.local.machine"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    for line in process.stdout.splitlines():
        if line.startswith(_MARK):
            data = json.loads(line[len(_MARK) :])
            data = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
            return Machine(**data)
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    raise EngineError(
        f"the accelerators of this machine cannot be found: {last}. Check that "
        f"`{sys.executable} -c 'import deepspeed'` works."
    )


def _inspect() -> Machine:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        import psutil

        cores = sorted(os.sched_getaffinity(0))
        return Machine(
            accelerator="cpu",
            device_name=_processor_name(),
            devices=tuple(str(core) for core in cores),
            visible_devices=(),
            memory_bytes=int(psutil.virtual_memory().total),
        )
    variables = _visible_devices_variables(accelerator)
    device_name = name
    if name == "cuda":
        import torch

        device_name = torch.cuda.get_device_name(0)
    return Machine(
        accelerator=name,
        device_name=device_name,
        devices=tuple(visible_ids(accelerator.device_count(), variables)),
        visible_devices=tuple(variables),
        memory_bytes=int(accelerator.total_memory(0)),
    )


def visible_ids(count: int, variables: Sequence[str]) -> list[str]:
    """What to call each of `count` devices, as the user's own choice of devices has it."""
    for variable in variables:
        chosen = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
        if chosen:
            return chosen[:count]
    return [str(index) for index in range(count)]


def _visible_devices_variables(accelerator: object) -> list[str]:
    names = getattr(accelerator, "visible_devices_envs", None)
    return list(names()) if names is not None else ["CUDA_VISIBLE_DEVICES"]


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


if __name__ == "__main__":
    print(_MARK + json.dumps(asdict(_inspect())))
