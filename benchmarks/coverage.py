"""Whether the confidence intervals of measured step times contain the true mean.

    python3 -m benchmarks.coverage [--runs 1000]

Steps are drawn from random processes with a known mean, and measured until the meter's rule stops
(after at most 20 steps). The table shows how often the 95 % interval contains the mean, and the
median number of steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks import common
from dsat.in_trial.steps import CI_TARGET, steps_wanted, summarize

FIRST_STEPS, MOST_STEPS = 5, 20
TRUE_MEAN = 1.0


@dataclass(frozen=True)
class Noise:
    """How steps vary around their mean.

    Attributes:
        spread: standard deviation of a step, as a fraction of the mean.
        correlation: correlation of each step with the one before (AR(1)).
        heavy: the noise has the tails of Student's t with three degrees of freedom.
        accidents: share of steps that take half as long again; the mean excludes this extra time.
        slow: share of steps that take 12 % longer; the mean includes them.
    """

    name: str
    spread: float
    correlation: float = 0.0
    heavy: bool = False
    accidents: float = 0.0
    slow: float = 0.0

    def steps(self, rng: np.random.Generator) -> Iterator[float]:
        error = rng.normal() * self.spread
        while True:
            accident = 0.5 if self.accidents and rng.random() < self.accidents else 0.0
            two = 0.12 * ((rng.random() < self.slow) - self.slow) if self.slow else 0.0
            yield TRUE_MEAN * max(0.05, 1 + error + accident + two)
            new = rng.standard_t(3) / math.sqrt(3) if self.heavy else rng.normal()
            error = (
                self.correlation * error + math.sqrt(1 - self.correlation**2) * new * self.spread
            )


NOISES = (
    Noise("independent, 0.3 %", 0.003),
    Noise("independent, 1 %", 0.01),
    Noise("independent, 2 %", 0.02),
    Noise("independent, 5 %", 0.05),
    Noise("independent, 10 %", 0.1),
    Noise("AR(1) 0.5, 2 %", 0.02, 0.5),
    Noise("AR(1) 0.5, 5 %", 0.05, 0.5),
    Noise("AR(1) 0.8, 2 %", 0.02, 0.8),
    Noise("AR(1) 0.8, 5 %", 0.05, 0.8),
    Noise("AR(1) 0.95, 5 %", 0.05, 0.95),
    Noise("1 %, and 30 % of steps 12 % slower", 0.01, slow=0.30),
    Noise("heavy tails, 5 %", 0.05, heavy=True),
    Noise("1 %, and one step in 20 an accident", 0.01, accidents=0.05),
)


def measure(steps: Iterator[float]) -> tuple[float, float, int]:
    """Measure until the interval is narrow; return mean, relative half-width and number of
    steps."""
    values: list[float] = []
    wanted = FIRST_STEPS
    while True:
        values += itertools.islice(steps, wanted - len(values))
        found = summarize(values)
        if found.ci95 <= CI_TARGET or len(values) >= MOST_STEPS:
            return found.mean, found.ci95, len(values)
        wanted = steps_wanted(len(values), found.ci95, MOST_STEPS)


def coverage(noise: Noise, runs: int) -> tuple[float, float]:
    """Return how often the interval contains the mean, and the median number of steps."""
    rng = np.random.default_rng(0)
    held, counts = 0, []
    for _ in range(runs):
        mean, ci95, count = measure(noise.steps(rng))
        held += abs(mean - TRUE_MEAN) <= ci95 * mean
        counts.append(count)
    return held / runs, float(np.median(counts))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    common.print_explanation(__doc__)
    common.print_head("noise of a step", "held", "steps")
    for noise in NOISES:
        held, steps = coverage(noise, runs)
        common.print_row(noise.name, f"{held:.3f}", f"{steps:.0f}")


if __name__ == "__main__":
    main()
