"""One simulated step of each strategy, which is then scaled to any number of GPUs."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.command import ds_config
from dsat.errors import DsatError
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.memory.strategies import apply_strategy, compared
from dsat.prepare.simulated_model import SimulatedModel
from dsat.projecting.traced_work import Cluster, scaled, work_of
from dsat.search.gpus import GpuModel
from dsat.search.normal import Array
from dsat.simulation.protocol import Question
from dsat.values import slow
from dsat.values.parallelism import Parallelism, read_parallelism
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.zero_strategy import Strategy, read_strategy

_log = logging.getLogger(__name__)
SIZES = tuple(2**n for n in range(10))  # 1 to 512 GPUs
_STEP_TOKENS = 16_384  # of each device
# Of each device, if samples are not sequences: as in the reference training of torchvision 0.20
# (references/classification/train.py), and Goyal et al. (2017), arXiv:1706.02677.
_STEP_SAMPLES = 32
_LEAST_TRACED = 8  # slots; collectives among fewer cannot be scaled to more


@dataclass(frozen=True)
class Traced:
    """A simulated script: its model, and one step of each strategy.

    Attributes:
        base: the user's DeepSpeed configuration.
        model: the passes of the model without DeepSpeed.
        traces: a step of each strategy, and its memory.
        failures: why strategies could not be simulated, by the label of the strategy.
        sequence_length: tokens of a sample; None if samples are not sequences.
    """

    base: Mapping[str, Any]
    facts: ModelFacts
    model: ModelTrace
    traces: Mapping[Strategy, tuple[StepTrace, Anchor]]
    failures: Mapping[str, str]
    sequence_length: int | None

    @property
    def own(self) -> Strategy:
        """Strategy of the user's configuration."""
        return read_strategy(self.base)

    def own_micro_batch(self, slots: int) -> int:
        """Return the micro batch of the user's configuration, as DeepSpeed derives it.

        1 if the configuration has no batch sizes.
        """
        total, micro, gas = (self.base.get(key) for key in ds_config.BATCH_KEYS)
        if isinstance(micro, int):
            return micro
        if not isinstance(total, int):
            return 1
        steps = gas if isinstance(gas, int) else 1
        return max(1, self.global_batch(slots) // (steps * self.parallelism.data(slots)))

    @property
    def parallelism(self) -> Parallelism:
        """Sizes of parallelism in the user's configuration."""
        return read_parallelism(self.base)

    @property
    def has_batch(self) -> bool:
        """Return whether the configuration has a batch size; else dsat chooses one."""
        return any(isinstance(self.base.get(key), int) for key in ds_config.BATCH_KEYS)

    def global_batch(self, slots: int) -> int:
        """Return the samples of an optimizer step, the same for all strategies.

        Without batch sizes in the configuration, the samples of a data-parallel group are the
        smallest power of two with at least 16,384 tokens for each slot, or 32 for each slot if
        samples are not sequences.
        """
        total, *of_device = (self.base.get(key) for key in ds_config.BATCH_KEYS)
        if isinstance(total, int):
            return total // self.parallelism.tensor  # AutoTP divides it; see `resolve_batch`
        given = [size for size in of_device if isinstance(size, int)]
        shared = self.parallelism.shared
        if self.has_batch:
            each = math.prod(given)
        elif self.sequence_length:
            samples = shared * _STEP_TOKENS / self.sequence_length
            each = 2 ** math.ceil(math.log2(max(1.0, samples)))
        else:
            each = shared * _STEP_SAMPLES
        return self.parallelism.data(slots) * each

    def gas(self, slots: int, micro_batch: int) -> int:
        """Return the accumulation steps of the global batch; 0 if there is no whole number."""
        groups = self.parallelism.data(slots) * micro_batch
        found, left = divmod(self.global_batch(slots), groups)
        return 0 if left else found

    def config(self, strategy: Strategy, slots: int) -> dict[str, Any]:
        """Return the configuration of a strategy, without batch sizes."""
        if strategy == self.own:
            return ds_config.drop_batch_sizes(ds_config.prepare_for_training(self.base))
        return apply_strategy(self.base, strategy, slots)

    def work(self, strategy: Strategy, micro_batch: int, cluster: Cluster) -> Array:
        """Return the work of a strategy on a cluster; see `traced_work.work_of`."""
        step, _ = self.traces[strategy]
        of_slots = scaled(step, cluster.slots, sharded=strategy.stage > 0)
        stage, parallelism = strategy.stage, self.parallelism
        return work_of(of_slots, self.model, micro_batch, cluster, stage, parallelism)

    @functools.cached_property
    def _basis(self) -> Basis:
        return Basis.of_model(self.facts, (anchor for _, anchor in self.traces.values()))

    def memory(
        self, strategy: Strategy, slots: int, micro_batch: int, gpu: GpuModel
    ) -> tuple[int, bool]:
        """Return the predicted peak of a GPU in bytes, and whether that fits with 5 % to spare."""
        gas = {ds_config.BATCH_KEYS[2]: max(1, self.gas(slots, micro_batch))}
        model = MemoryModel(self._basis, slots=slots, limit_bytes=gpu.memory_bytes, on_device=True)
        shape = model.shape({**self.config(strategy, slots), **gas}, {})
        return model.predicted_bytes(shape, micro_batch), model.fits(shape, micro_batch)


def trace(
    simulated: SimulatedModel,
    slots: int,
    choose: Callable[[Traced], Sequence[Strategy]],
    *,
    accumulates: bool = False,
) -> Traced:
    """Simulate one step of the user's configuration and of other strategies.

    Args:
        slots: the number of GPUs to project to.
        choose: returns the strategies to simulate, given the traced model.
        accumulates: whether to trace several micro steps even if the configuration has only one.

    Raises:
        SimulationUnavailable: the script cannot be simulated.
        DsatError: no strategy can be simulated.
    """
    base, simulator = simulated.config, simulated.simulator
    facts, model = simulator.traced_facts(base)
    found = Traced(base, facts, model, {}, {}, simulator.script.sequence_length)
    # Simulate more slots than any group has, so that collectives of groups and of all ranks differ.
    shared, group = found.parallelism.shared, ds_config.secondary_group(base)
    slots = shared * math.ceil(max(slots, _LEAST_TRACED, 2 * shared, 2 * group) / shared)
    strategies = list(dict.fromkeys(choose(found)))
    # Two micro steps suffice: all except the last are like the first.
    accumulates = accumulates or any(found.gas(n, 1) > 1 for n in (*SIZES, slots))
    gas = {ds_config.BATCH_KEYS[2]: 2 if accumulates else 1}
    questions = [Question({**found.config(s, slots), **gas}, 1, slots) for s in strategies]
    answers: dict[int, tuple[MemoryEstimate, StepTrace] | str] = {}
    labels = " | ".join(strategy.label for strategy in strategies)

    def progress() -> str:
        return f", {len(answers)} of {len(questions)} strategies are simulated"

    with (
        slow.logged(_log, f"simulating {labels}", at_once=True, hint=progress),
        contextlib.suppress(KeyboardInterrupt),  # keep what is simulated
    ):
        answers.update(simulator.trace_each(questions))
    failures, traces = {}, {}
    for number, (strategy, asked) in enumerate(zip(strategies, questions, strict=True)):
        answer = answers.get(number, "interrupted")
        if isinstance(answer, str):
            failures[strategy.label] = answer
        else:
            anchor = Anchor(asked.config, asked.micro_batch, answer[0], slots)
            traces[strategy] = answer[1], anchor
    if not traces:
        raise DsatError(f"no strategy can be simulated: {next(iter(failures.values()))}")
    return replace(found, traces=traces, failures=failures)


def worthwhile(found: Traced, gpu: GpuModel, count: int, *, always: bool) -> list[Strategy]:
    """Return the strategies that fit by formula on some number of GPUs, the user's own first.

    Offloading is slow, so strategies with it are included only if no other fits `count` GPUs.

    Args:
        count: the number of GPUs to project to.
        always: whether to include the user's own strategy even if it never fits.
    """

    def fits(each: Strategy, sizes: Sequence[int]) -> bool:
        return any(found.memory(each, slots, 1, gpu)[1] for slots in sizes)

    fitting = [each for each in compared(found.base) if fits(each, SIZES)]
    plain = [each for each in fitting if not each.offloads]
    chosen = plain if any(fits(each, [count]) for each in plain) else fitting
    own = [found.own] if always or fits(found.own, SIZES) or not chosen else []
    return list(dict.fromkeys([*own, *chosen]))
