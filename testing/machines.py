"""Made-up machines that behave like real ones: memory ends somewhere, launches cost, noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsat.space.overrides import GAS
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain

_GIB = 2**30


class Machine:
    """Decides what becomes of a proposal; everything about it is drawn from a seed.

    A micro step takes max(L, a + b * micro batch), the strategies add their traffic as they do in
    DeepSpeed, and two of five knobs change the whole by a few percent. The micro batch that fits is
    off the prediction by 2 %, and large buckets take from it. Measured times vary by 2 %.
    """

    def __init__(self, seed: int, *, slots: int | None = None, noise: float = 0.02) -> None:
        rng = np.random.default_rng([seed, 4711])
        self._rng = np.random.default_rng([seed, 4712])
        self.noise = noise
        self.slots = int(rng.choice([1, 2, 8])) if slots is None else slots
        params = int(10 ** rng.uniform(8.0, 9.0))
        slot_memory = int(rng.choice([24, 40, 80])) * _GIB
        free = slot_memory - _state_bytes(params, 1, self.slots)
        self.profile = _profile(params, max(1, int(free / 2 ** rng.uniform(3, 7.5))), slot_memory)
        self.space = Space(
            strategies=plain(0, 1, 2, 3),
            micro_batches=range(1, 2**20),
            slots=self.slots,
            freedom=Freedom(),
            num_params=params,
        )
        # Seconds. The samples that memory allows take between 0.3 and 30 times the rest.
        fit = max(8, free // self.profile.activation_bytes_per_sample)
        self.sample_s = float(10 ** rng.uniform(-3, -1))
        whole = self.sample_s * fit
        self.micro_step_s = float(whole * 10 ** rng.uniform(-2.5, -0.7))
        self.floor_s = float(whole * 10 ** rng.uniform(-1.5, -0.3))
        self.traffic_s = float(whole * 10 ** rng.uniform(-3, -1.3)) if self.slots > 1 else 0.0
        self.hidden = float(rng.uniform(0, 0.8))
        self.hook_s = float(whole * 10 ** rng.uniform(-3.5, -1.7))
        self.optimizer_s = float(whole * 10 ** rng.uniform(-2.5, -1))
        self._effects = self._draw_effects(rng)
        off = rng.normal(0, 0.015)
        self._memory_error = [math.exp(off + rng.normal(0, 0.005)) for _ in range(4)]

    def largest(self, settings: Mapping[str, Any]) -> int:
        """The largest micro batch that fits."""
        return max(0, int(self.predicted(settings) * self._memory_error[settings["stage"]]))

    def predicted(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch by a memory model that knows of buckets."""
        stage = settings["stage"]
        bucket = 0
        if stage > 0:
            copies = 2 if settings.get("overlap_comm") else 1
            wanted = min(settings.get("reduce_bucket_size", 0), self.profile.num_params)
            bucket = 2 * copies * wanted // 4
        state = _state_bytes(self.profile.num_params, stage, self.slots)
        free = self.profile.slot_memory_bytes - state - bucket
        return max(0.0, free / self.profile.activation_bytes_per_sample)

    def step_s(self, settings: Mapping[str, Any], micro_batch: Any, gas: int = 1) -> Any:
        """The time of an optimizer step, noise aside."""
        stage, slots = settings["stage"], self.slots
        hooks = (0.0, 0.2, 1.0, 3.0)[stage] * self.hook_s
        compute = np.maximum(self.floor_s, self.micro_step_s + self.sample_s * micro_batch)
        exposed = 1 - self.hidden * bool(settings.get("overlap_comm"))
        every = (0.0, 0.0, 1.0, 3.0)[stage] * self.traffic_s * exposed + hooks
        once = (2.0, 2.0, 1.0, 0.0)[stage] * self.traffic_s * exposed
        once += self.optimizer_s / (slots if stage else 1)
        factor = math.exp(
            sum(self._effects.get((stage, key, str(value)), 0.0) for key, value in settings.items())
        )
        return (gas * (compute + every) + once) * factor

    def throughput(self, settings: Mapping[str, Any], micro_batch: Any) -> Any:
        """Samples a second, noise aside."""
        gas = int(settings.get(GAS, 1))
        return micro_batch * gas * self.slots / self.step_s(settings, micro_batch, gas)

    def outcome(self, proposal: Proposal) -> Outcome:
        if proposal.micro_batch > self.largest(proposal.settings):
            return Outcome(OutcomeKind.OOM)
        true = float(self.throughput(proposal.settings, proposal.micro_batch))
        value = true * math.exp(self._rng.normal(0, self.noise))
        step_ms = 1000 * proposal.micro_batch * self.slots / value
        return Outcome(
            OutcomeKind.OK,
            metrics=Metrics(
                throughput=value,
                latency=step_ms,
                forward=step_ms / 3,
                backward=step_ms / 2,
                step=step_ms / 6,
                FLOPS_per_gpu=value * self.profile.flops_per_sample / self.slots,
                num_steps=5,
                ci95=0.01,
            ),
        )

    def best(self) -> float:
        """The largest throughput of the whole space."""
        best = 0.0
        for branch in self.space.branches:
            # Buckets and overlap decide what fits; of the other knobs the best value counts.
            chosen: dict[str, Any] = {"stage": branch.strategy.stage}
            free: list[tuple[str, tuple[Any, ...]]] = []
            for key, values in branch.knobs:
                if key in ("reduce_bucket_size", "overlap_comm"):
                    free.append((key, values))
                else:
                    effects = [self._effect(branch, key, value) for value in values]
                    chosen[key] = values[int(np.argmin(effects))]
            for combination in itertools.product(*(values for _, values in free)):
                settings = chosen | dict(zip([key for key, _ in free], combination, strict=True))
                sizes = np.arange(1, self.largest(settings) + 1)
                if len(sizes):
                    best = max(best, float(self.throughput(settings, sizes).max()))
        return best

    def _effect(self, branch: Any, key: str, value: Any) -> float:
        return self._effects.get((branch.strategy.stage, key, str(value)), 0.0)

    def _draw_effects(self, rng: np.random.Generator) -> dict[tuple[int, str, str], float]:
        effects: dict[tuple[int, str, str], float] = {}
        matters: dict[str, float] = {}
        shared: dict[tuple[str, str], float] = {}
        for branch in self.space.branches:
            for key, values in branch.knobs:
                scale = matters.setdefault(key, float(rng.choice([0.0, 0.0, 0.0, 0.01, 0.02])))
                if key == "overlap_comm":
                    continue
                if key.endswith("bucket_size"):
                    # Small ones need more operations.
                    for value in values:
                        cost = scale / 2 * max(0.0, 8.5 - math.log10(value))
                        effects[branch.strategy.stage, key, str(value)] = cost
                    continue
                for value in values[1:]:
                    drawn = shared.setdefault((key, str(value)), float(rng.normal(0.7, 0.7)))
                    effect = scale * (drawn + 0.3 * float(rng.normal()))
                    effects[branch.strategy.stage, key, str(value)] = max(effect, -0.03)
        return effects


def _state_bytes(params: int, stage: int, slots: int) -> int:
    """Return the bytes of parameters, gradients and Adam's state of a slot, in 16 bits."""
    shard = -(-params // slots)
    return (18 * params, 4 * params + 12 * shard, 2 * params + 14 * shard, 16 * shard)[stage]


def _profile(params: int, activations: int, slot_memory: int) -> ModelProfile:
    return ModelProfile(
        num_params=params,
        trainable_params=params,
        param_bytes=2,
        activation_bytes_per_sample=activations,
        flops_per_sample=6.0 * params * 512,
        slot_memory_bytes=slot_memory,
    )


THROUGHPUT = Objective("throughput")
