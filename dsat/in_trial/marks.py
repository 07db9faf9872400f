"""Notes about one optimizer step while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dsat.in_trial.clocks import Clock

PHASES = ("forward", "backward", "step")


@dataclass
class StepMarks:
    """Marks of one optimizer step, all its micro steps included.

    Attributes:
        forwards: how often the model was called.
        losses: how often a loss was given to a backward pass.
        rows: samples of each call, None where they cannot be counted.
        tokens: tokens of each call, on whatever device; None where there are none to be seen.
        elements: of all tensors that the model was called with.
        compiled: whether torch compiled something meanwhile.
    """

    begin: Any
    end: Any = None
    forwards: int = 0
    losses: int = 0
    rows: list[int | None] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    elements: int = 0
    compiled: bool = False
    backward_began: Any = None
    phases: dict[str, list[tuple[Any, Any]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )

    @property
    def micro_steps(self) -> int:
        """Number of micro batches that went through; 0 if that cannot be seen.

        A script may call the model twice for one loss (pairs), or give it two losses; and it may
        leave out the engine's `forward` or `backward`, but hardly both.
        """
        seen = [n for n in (self.forwards, self.losses or len(self.phases["backward"])) if n]
        return min(seen, default=0)

    def is_full(self, gas: int, micro_batch: int) -> bool:
        """Tell whether no micro step and no sample is missing, as at the end of an epoch."""
        enough = self.micro_steps == 0 or self.micro_steps >= gas
        return enough and all(rows is None or rows >= micro_batch for rows in self.rows)

    def samples(self, gas: int, micro_batch: int) -> float:
        """Samples that were fed; a micro batch that cannot be counted is taken for full."""
        if not self.rows:
            return float(micro_batch * (self.micro_steps or gas))
        fed = sum(micro_batch if rows is None else rows for rows in self.rows)
        return fed * self.micro_steps / self.forwards

    def tokens_fed(self) -> float:
        """Tokens of all calls; NaN if those of one of them are not known."""
        if not self.tokens or any(count is None for count in self.tokens):
            return math.nan
        return float(sum(float(count) for count in self.tokens))

    def milliseconds(self, clock: Clock) -> list[float]:
        """Latency, then the phases' sums."""
        sums = [sum(clock.ms(a, b) for a, b in self.phases[phase]) for phase in PHASES]
        return [clock.ms(self.begin, self.end), *sums]
