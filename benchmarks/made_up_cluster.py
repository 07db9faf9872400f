"""Made-up clusters for benchmarks: they answer trials as a recorded table does.

The search was developed with `all_clusters` in view. `held_out` were written later, before anything
had run on them: other GPUs, links, models and batch rules in the same world. Their models are
BERT-large (Devlin et al. (2018)) with its batch of 256, GPT-NeoX-20B (Black et al. (2022)),
Pythia-2.8B (Biderman et al. (2023)), Llama-2-7B (Touvron et al. (2023)), and a GPT of 24 layers in
which two of eight experts see each token, as in Mixtral (Jiang et al. (2024)).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Header
from dsat.command import ds_config
from dsat.space.overrides import overrides_for
from dsat.values.objective import Objective
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple
from testing.world import A100, GIB, STEPS, Gpu, Model, World, with_defaults

_CHOICES: dict[str, list[Any]] = {
    "reduce_bucket_size": [5 * 10**8, 5 * 10**6, 5 * 10**7, 10**9],
    "allgather_bucket_size": [5 * 10**8, 5 * 10**6, 5 * 10**7, 10**9],
    "overlap_comm": [True, False],
    "stage3_prefetch_bucket_size": [5 * 10**7, 5 * 10**6, 5 * 10**8],
    "stage3_param_persistence_threshold": [10**5, 10**4, 10**6],
    "sub_group_size": [10**9, 10**8, 10**7],
}


class Cluster:
    """A model on a made-up cluster; answers trials as a recorded table does.

    Args:
        own: the user's own micro batch.
        batch: the global batch that the user's configuration fixes, if any.
    """

    cap = None

    def __init__(
        self,
        name: str,
        model: Model,
        gpu: Gpu,
        *,
        slots: int,
        own: int = 1,
        batch: int | None = None,
    ) -> None:
        self.world = world = World(model, gpu, slots=slots)
        self.answer = world.answer
        self.header = Header(
            name=name,
            command="train.py",
            ds_config={
                "train_micro_batch_size_per_gpu": own,
                **({} if batch is None else {"train_batch_size": batch}),
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            },
            slots=slots,
            slot_memory_bytes=gpu.memory_bytes,
            profile=world.profile,
            profile_duration_s=world.setup_s + 5,
            about={"machine": "made up", "measured steps": f"{STEPS} to {STEPS}"},
        )

    @property
    def choices(self) -> dict[str, list[Any]]:
        return dict(_CHOICES)

    @functools.cached_property
    def largest_micro_batch(self) -> int:
        """The largest micro batch that fits with any settings."""
        return max(self.world.largest_micro_batch(zero) for zero in self._settings())

    @property
    def profile_outcome(self) -> Outcome:
        return Outcome(
            OutcomeKind.OK,
            profile=self.header.profile,
            duration_s=self.header.profile_duration_s,
        )

    def config(self, settings: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
        """Return the DeepSpeed configuration with these settings and batch sizes."""
        return ds_config.prepare_for_training(self.header.ds_config, overrides_for(settings, batch))

    def run_sd(self, outcome: Outcome) -> float:
        """Return the relative standard deviation of a measured time."""
        return math.hypot(self.world.run_sd, self.world.step_sd / math.sqrt(STEPS))

    def best(self, objective: Objective) -> float:
        """Return the best throughput of all settings and micro batches, at the fixed global batch.

        Without a fixed global batch, the batch is free and there is no accumulation.

        Raises:
            ValueError: the objective is not throughput.
        """
        if objective.metric != "throughput":
            raise ValueError(objective.metric)
        return self._best_throughput

    @functools.cached_property
    def _best_throughput(self) -> float:
        fixed, slots = self.header.train_batch_size, self.header.slots
        return max(
            size * gas * slots / self.world.time(zero, size, gas).total
            for zero in self._settings()
            for size in range(1, self.world.largest_micro_batch(zero) + 1)
            for gas, rest in [(1, 0) if fixed is None else divmod(fixed, size * slots)]
            if gas and not rest
        )

    def _settings(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of settings, completed with DeepSpeed's defaults."""
        for stage in range(4):
            names = [name for name in _CHOICES if name in with_defaults({"stage": stage})]
            for values in itertools.product(*(_CHOICES[name] for name in names)):
                yield with_defaults({"stage": stage, **dict(zip(names, values, strict=True))})


def all_clusters() -> list[Cluster]:
    """Return clusters for GPTs of 1.3 and 6.7 billion parameters, and for a vision transformer."""
    large = Gpu(80 * GIB, 2039e9)
    return [
        Cluster("made-up-8-gpt-1b", Model(24, 2048, 1024, 50304), A100, slots=8),
        Cluster("made-up-8-vit", Model(32, 1280, 257, 1000), large, slots=8, own=8),
        Cluster("made-up-32-gpt-7b", Model(32, 4096, 2048, 50304), large, slots=32),
    ]


def held_out() -> list[Cluster]:
    """Return clusters on which nothing was tuned: other GPUs and links, fixed batches, experts."""
    v100 = Gpu(32 * GIB, 900e9, 125e12, 80, link=300e9)
    l40s = Gpu(48 * GIB, 864e9, 362e12, 142, link=64e9, network=6.25e9)
    h100 = Gpu(80 * GIB, 3350e9, 989e12, 132, link=900e9, network=50e9)
    pythia, neox = Model(32, 2560, 2048, 50304), Model(44, 6144, 2048, 50432)
    experts = Model(24, 1024, 2048, 50304, experts=8, active=2)
    return [
        Cluster(
            "held-out-4-v100-bert", Model(24, 1024, 512, 30522), v100, slots=4, own=8, batch=256
        ),
        Cluster("held-out-16-l40s-pythia", pythia, l40s, slots=16),
        Cluster("held-out-8-h100-llama", Model(32, 4096, 4096, 32000), h100, slots=8, batch=128),
        Cluster("held-out-64-a100-neox", neox, A100, slots=64),
        Cluster("held-out-8-a100-experts", experts, A100, slots=8),
    ]
