"""Cost of a search with many simulated trials: every decision, including journal events.

    python -m benchmarks.search_scale [--trials 20000]

A trial takes no time; sixteen run at once, and the largest micro batch that fits differs between
configurations. `search alone` calls only the search, on a space without an end. `whole run` is the
tuner: journal events are made JSON, read back and kept in memory. It runs on the real space, which
a search may exhaust earlier. The target is 10 s for the default of 20,000 trials; `make bench` runs
10,000. `model` is for expensive trials: it runs at most 1,000, and has no target.
"""

from __future__ import annotations

import json
import platform
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks import common, searching
from dsat.search import SEARCHES
from dsat.space.plan import Plan
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial

SLOTS, CONCURRENT = 8, 16
MOST_OF = {"model": 1000}
PROFILE = ModelProfile(
    num_params=20_000_000_000,
    trainable_params=20_000_000_000,
    param_bytes=2,
    activation_bytes_per_sample=2**18,
    flops_per_sample=1e12,
    slot_memory_bytes=400 * 2**30,
)


def simulated(zero: Mapping[str, Any], micro_batch: int) -> Outcome:
    """Return a success up to a micro batch that depends on the settings; a larger one is faster."""
    noise = zlib.crc32(json.dumps(zero, sort_keys=True).encode())
    if micro_batch > 100_000 + noise % 900_000:
        return Outcome(OutcomeKind.OOM, duration_s=1.0)
    throughput = 1000 * micro_batch / (micro_batch + 1000) * (1 + noise % 97 / 1000)
    metrics = Metrics(throughput, 1.0, 1.0, 1.0, 1.0, throughput * 1e12 / SLOTS, 3, 0.01)
    return Outcome(OutcomeKind.OK, metrics=metrics, duration_s=1.0)


def whole_run(method: str, count: int) -> tuple[int, str | None]:
    """Run tuner, journal events and search on the real space.

    Returns:
        The number of trials, and why the run stopped.
    """

    def outcome_of(trial: Trial) -> Outcome:
        found = simulated(trial.overrides.get("zero_optimization", {}), trial.batch.micro_batch)
        return replace(found, profile=PROFILE if trial.profiles else None)

    plan = Plan(
        method=method,
        metric="throughput",
        max_trials=count,
        zero_stages=(0, 1, 2, 3),
        seed=42,
        slots_per_trial=SLOTS,
        base_config={"train_micro_batch_size_per_gpu": 1},
        own_batch=BatchTriple(SLOTS, 1, 1),
    )
    run = searching.search(plan, outcome_of, concurrent=CONCURRENT)
    return len(run.outcomes), run.stop_reason


def search_alone(method: str, count: int) -> tuple[int, str | None]:
    """Run a search without a tuner; return as `whole_run` does."""
    searching.decide(method, PROFILE, simulated, trials=count, concurrent=CONCURRENT, slots=SLOTS)
    return count, None


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--trials", type=int, default=20_000)
    trials = parser.parse_args().trials
    print(f"Python {platform.python_version()} on {platform.machine()}, {CONCURRENT} at once")
    print(f"{'':26} {'trials':>7} {'total s':>8} {'us/trial':>9}")
    for run in (search_alone, whole_run):
        for method in SEARCHES:
            for count in (trials // 100, trials // 10, trials):
                if count > MOST_OF.get(method, count):
                    continue  # it is for expensive trials, of which nobody runs so many
                began = time.perf_counter()
                done, reason = run(method, count)
                total = time.perf_counter() - began
                name = f"{method}, {run.__name__.replace('_', ' ')}"
                end = f"  {reason}" if reason and done < count else ""
                print(f"{name:26} {done:7} {total:8.2f} {total / done * 1e6:9.0f}{end}")


if __name__ == "__main__":
    main()
