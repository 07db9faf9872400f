"""Simulations of a few configurations, from which formulas derive the memory of others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsat.command.switches import MODEL_SWITCHES
from dsat.memory.estimate import MOST_TOKENS
from dsat.memory.forecast import FARTHEST
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.simulation.client import SimulationHost, SimulationUnavailable, Simulator
from dsat.simulation.protocol import Question
from dsat.space.plan import Plan
from dsat.space.space import searched_switches
from dsat.values import format as fmt
from dsat.values import slow
from dsat.values.outcome import ModelProfile
from dsat.values.zero_strategy import read_strategy

_log = logging.getLogger(__name__)
# Limit for the script to reach its first step, and for the processor time of each simulation.
TIMEOUT_S = 180.0
_FASTER = f" (at most {TIMEOUT_S:g} s of processor time each; --memory-model formula needs none)"
# Nothing is simulated if the formula allows this multiple of the plan's largest micro batch.
_PLENTY = 4.0
# A simulated peak above this multiple of the limit means that memory is not linear in the micro
# batch (a loss over all pairs of samples, say). A second simulation then follows near the limit.
_FAR = 1.5
# Larger micro batches give no better prediction.
_LARGEST_SIMULATED = 2**16
_MOST_COMBINATIONS = 12  # of a model's switches, the script's own values included


def simulate_strategies(
    engine: SimulationHost,
    plan: Plan,
    profile: ModelProfile,
    configs: Sequence[Mapping[str, Any]],
    *,
    as_cpu: bool,
    say: Callable[[str], None],
) -> Basis:
    """Simulate one configuration of each strategy, with the user's and other values of switches.

    Args:
        engine: runs the script; a simulation occupies none of its slots.
        profile: used instead if the script cannot be simulated, or every micro batch surely fits.
        configs: whole DeepSpeed configurations, one of each strategy.
        as_cpu: whether trials run on a CPU.
        say: receives messages about configurations that cannot be simulated.
    """
    if _is_plenty(plan, profile, configs):
        note = f"all micro batches up to {plan.allowed_micro_batches[-1]} clearly fit"
        return Basis.of_profile(profile, plan.switches, note=note)
    operation = f"simulating memory of {fmt.count(len(configs), 'configuration')}"
    variants: list[Variant] = []
    free_switches = {name: value for name, value in plan.switches.items() if name not in plan.fixed}
    inverted = [{**plan.switches, name: not value} for name, value in free_switches.items()]
    with slow.logged(_log, operation, at_once=True, hint=_FASTER):
        for switches in ({**plan.switches}, *inverted):
            try:
                with Simulator(
                    engine, as_cpu=as_cpu, script_args=switches, timeout_s=TIMEOUT_S
                ) as simulator:
                    variant = variant_of(
                        simulator,
                        configs,
                        switches,
                        slots=plan.slots_per_trial,
                        limit_bytes=profile.slot_memory_bytes,
                        on_device=not as_cpu,
                        say=say,
                    )
                    variants.append(variant)
                    variants += _variants_of_switches(
                        simulator, configs[0], switches, searched_switches(plan, profile.switches)
                    )
            except SimulationUnavailable as error:
                if not variants:
                    return Basis.of_profile(profile, plan.switches, note=str(error))
    return Basis(tuple(variants))


def variant_of(
    simulator: Simulator,
    configs: Sequence[Mapping[str, Any]],
    script_args: Mapping[str, Any],
    *,
    slots: int,
    limit_bytes: int,
    on_device: bool,
    say: Callable[[str], None],
) -> Variant:
    """Simulate each configuration at about the largest micro batch that fits into `limit_bytes`.

    The result has no anchor for a configuration that cannot be simulated.

    Raises:
        SimulationUnavailable: not even the model's passes can be simulated.
    """
    facts = simulator.facts(configs[0])
    basis = Basis((Variant(script_args, facts),))
    model = MemoryModel(basis, slots=slots, limit_bytes=limit_bytes, on_device=on_device)
    cap = min(_LARGEST_SIMULATED, MOST_TOKENS // (simulator.script.sequence_length or 1))
    questions = []
    for config in configs:
        largest = model.largest(model.shape(config, script_args))
        questions.append(Question(config, max(1, int(min(cap, largest))), slots))
    anchors, further = [], []
    for question, answer in zip(questions, simulator.estimates(questions), strict=True):
        if isinstance(answer, str):
            strategy = read_strategy(question.config).label
            say(f"{strategy}: not simulated, so predicted by formula: {answer}")
            continue
        anchors.append(Anchor(question.config, question.micro_batch, answer))
        nearer = int(question.micro_batch * math.sqrt(limit_bytes / max(1, answer.peak)))
        if answer.peak > _FAR * limit_bytes and nearer:
            further.append(question._replace(micro_batch=nearer))
    for question, answer in zip(further, simulator.estimates(further), strict=True):
        if not isinstance(answer, str):
            anchors.append(Anchor(question.config, question.micro_batch, answer))
    return Variant(script_args, facts, tuple(anchors))


def _is_plenty(plan: Plan, profile: ModelProfile, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the formula leaves ample room for the largest allowed micro batch."""
    model = MemoryModel(
        Basis.of_profile(profile, plan.switches),
        slots=plan.slots_per_trial,
        limit_bytes=profile.slot_memory_bytes,
    )
    largest = min(model.largest(model.shape(config, plan.switches)) for config in configs)
    maximum = plan.allowed_micro_batches[-1]
    return largest > _PLENTY * maximum and maximum <= FARTHEST * plan.own_batch.micro_batch


def _variants_of_switches(
    simulator: Simulator,
    config: Mapping[str, Any],
    script_args: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]],
) -> Iterator[Variant]:
    """Yield variants for combinations of the model's switches, except for the script's own.

    Combinations that cannot be simulated are left out: their trials run without a prediction.
    """
    names = [name for name in MODEL_SWITCHES if name in values]
    combinations = itertools.product(*(values[name] for name in names))
    for combination in itertools.islice(combinations, 1, _MOST_COMBINATIONS):
        pairs = zip(names, combination, strict=True)
        changes = {name: value for name, value in pairs if value != values[name][0]}
        with contextlib.suppress(SimulationUnavailable):
            yield Variant({**script_args, **changes}, simulator.facts(config, changes))
