"""What is known of a configuration's memory before it has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PHASES = ("init", "forward", "backward", "step")
SIMULATED, CLOSED_FORM = "simulated", "closed form"


@dataclass(frozen=True)
class MemoryEstimate:
    """Peaks of one rank in bytes, without what the device's libraries take for themselves.

    Attributes:
        init, forward, backward, step: on the device, by phase, from the second optimizer step on.
            Of a rank on a CPU all of its tensors, since device and host are the same memory.
        host_pinned, host_pageable: largest amounts of host memory that tensors held.
        source: which way it was found, `SIMULATED` or `CLOSED_FORM`.
        operations: operators of a step's last micro step, its optimizer step included; 0 if not
            counted.
        collective_bytes: bytes that the rank hands to collectives in that micro step, by operator.
        note: why it was not simulated.
    """

    init: int
    forward: int
    backward: int
    step: int
    host_pinned: int = 0
    host_pageable: int = 0
    source: str = CLOSED_FORM
    operations: int = 0
    collective_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.init, self.forward, self.backward, self.step)

    @property
    def host(self) -> int:
        """Host memory, of both kinds."""
        return self.host_pinned + self.host_pageable

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryEstimate:
        return cls(**{f.name: data[f.name] for f in fields(cls)})
