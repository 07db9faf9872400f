"""`dsat estimate`: what each rung of the ladder needs, without running a trial."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsat.app import cards
from dsat.app import source as sources
from dsat.app.cards import Advice
from dsat.app.source import Source
from dsat.engines.local import Host, LocalEngine, LocalOptions, Machine, find_machine
from dsat.errors import DsatError
from dsat.inputs import ds_config, hf_config, script_args
from dsat.inputs import experiment as experiments
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.settings import OPTIMIZERS, EstimateSettings
from dsat.memory import anchors as survey
from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import SIMULATED, MemoryEstimate
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.memory.simulation_client import SimulationUnavailable, Simulator
from dsat.report import format as fmt
from dsat.report.summary import markdown_table
from dsat.space.overrides import overrides_for, strategy_settings
from dsat.space.space import LARGEST_MICRO_BATCH
from dsat.tuning import strategies
from dsat.values.files import cache_folder
from dsat.values.trial import BatchTriple, TrialOptions
from dsat.values.zero_strategy import NVME, Strategy

# Offloading to a disk is the same for the slot as offloading to the host.
LADDER = [s for s in strategies.LADDER if NVME not in (s.offload_optimizer, s.offload_param)]


@dataclass(frozen=True)
class Line:
    """What one strategy needs.

    Attributes:
        slots: data-parallel slots.
        estimate: with a micro batch of one sample.
        largest: the largest micro batch by memory of a slot; 0 if none fits.
    """

    strategy: Strategy
    slots: int
    estimate: MemoryEstimate
    largest: Mapping[int, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "slots": self.slots,
            "memory": self.estimate.to_json(),
            "peak_bytes": self.estimate.peak,
            "largest_micro_batch": {str(size): count for size, count in self.largest.items()},
        }


@dataclass(frozen=True)
class Estimate:
    """What each rung of the ladder needs.

    Attributes:
        name: of the experiment, or of the command's script.
        model: its parameters and activations.
        lines: one for every strategy and number of slots.
        cards: the fewest cards of each usual size.
    """

    name: str
    model: ModelFacts
    lines: Sequence[Line]
    cards: Sequence[Advice]

    def to_json(self) -> dict[str, Any]:
        lines = [line.to_json() for line in self.lines]
        advice = [one.to_json() for one in self.cards]
        return {"name": self.name, "model": vars(self.model), "lines": lines, "cards": advice}

    def __str__(self) -> str:
        said = describe(self.name, self.model, self.lines)
        said += ["", "The fewest cards of each size, by formula, with 5 % to spare:", ""]
        return "\n".join([*said, *(f"- {advice}" for advice in self.cards)])


def estimate(settings: EstimateSettings) -> Estimate:
    """Simulates the script's model, and tells what it needs.

    Raises:
        UserInputError: something of the settings or the files is wrong.
        DsatError: the script cannot be simulated.
    """
    machine = find_machine()
    source = _source(settings, machine)
    experiment, program = source.experiment, source.program
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    engine = LocalEngine(
        experiment,
        program,
        [Host(machine)],
        folder,
        LocalOptions(TrialOptions(timeout_s=survey.TIMEOUT_S)),
        slots_per_trial=1,
    )
    try:
        with Simulator(
            engine, as_cpu=False, cache=cache_folder("memory"), timeout_s=survey.TIMEOUT_S
        ) as simulator:
            facts = simulator.facts(experiment.base_config)
            base = script_args.batch_from_args(
                experiment.base_config, program.args, experiment.arg_mappings
            )
            found = lines(
                base,
                facts,
                simulator,
                slot_counts=settings.slot_counts,
                slot_memories=settings.slot_memories,
                exact=settings.exact or _needs_simulation(base),
            )
            sequence_length = simulator.sequence_length
    except SimulationUnavailable as error:
        log = folder / "simulation" / "stderr.log"
        raise DsatError(
            f"memory cannot be estimated: {error}. The script was run up to its first training "
            f"step; its log is {log}."
        ) from None
    finally:
        engine.close()
    shutil.rmtree(folder, ignore_errors=True)
    advice = cards.advise(facts, partial(configuration, base), ladder(base), sequence_length)
    return Estimate(experiment.name, facts, found, advice)


def _source(settings: EstimateSettings, machine: Machine) -> Source:
    """The user's script, or the one of ours that trains the model of a configuration."""
    if settings.hf_config is None:
        source = sources.read(settings).with_known_start(machine, survey.TIMEOUT_S)
        return source.with_known_config([Host(machine)], 1, survey.TIMEOUT_S)
    path = hf_config.find(settings.hf_config)
    args = ["--hf-config", str(path), "--dtype", settings.dtype]
    if settings.seq_length is not None:
        args += ["--seq-length", str(settings.seq_length)]
    if settings.lora is not None:
        args += ["--lora", json.dumps(dict(settings.lora))]
    if settings.gradient_checkpointing:
        args.append("--gradient-checkpointing")
    args += ["--deepspeed_config", "ds_config.json"]  # a trial's own file takes its place
    program = Entrypoint(module="dsat.in_trial.simulation.config_program", args=tuple(args))
    name = path.parent.name if path.name == hf_config.CONFIG_FILE else path.stem
    command, folder = program.command(), Path.cwd()
    own = experiments.of_command(command, name, folder, settings.ds_config).ds_config
    usual = hf_config.ds_config(settings.dtype, OPTIMIZERS[settings.optimizer])
    config = ds_config.merge(usual, own)
    experiment = experiments.of_dict(command, name, folder, config, "--ds-config")
    return Source(experiment, program, is_command=True)


def _needs_simulation(config: Mapping[str, Any]) -> bool:
    """Whether the closed form, which is Adam's, does not know the optimizer."""
    kind = str((config.get("optimizer") or {}).get("type", "Adam"))
    return not kind.lower().endswith(("adam", "adamw"))


def ladder(base: Mapping[str, Any]) -> list[Strategy]:
    """The rungs that DeepSpeed accepts with the user's other settings."""
    return [strategy for strategy in LADDER if strategy.stage >= ds_config.least_stage(base)]


def lines(
    base: Mapping[str, Any],
    facts: ModelFacts,
    simulator: Simulator,
    *,
    slot_counts: Sequence[int],
    slot_memories: Sequence[int],
    exact: bool,
) -> list[Line]:
    """Every rung with every number of slots.

    Args:
        base: the user's DeepSpeed configuration.
        facts: of the model.
        simulator: of the script.
        slot_counts: numbers of data-parallel slots.
        slot_memories: memory of a slot, in bytes.
        exact: each rung is simulated; otherwise only the formula is asked.
    """
    rungs = ladder(base)
    if exact:
        with contextlib.suppress(SimulationUnavailable):  # each line says so by itself
            simulator.prepare(
                [(configuration(base, s, slots), 1, slots) for slots in slot_counts for s in rungs]
            )
    found = []
    for slots in slot_counts:
        for strategy in rungs:
            config = configuration(base, strategy, slots)
            estimate = closed_form.estimate(facts, config, slots=slots, micro_batch=1)
            anchors: tuple[Anchor, ...] = ()
            if exact:
                simulated = simulator.estimate(config, micro_batch=1, slots=slots)
                if simulated.source == SIMULATED:
                    estimate, anchors = simulated, (Anchor(config, 1, simulated),)
            basis = Basis((Variant({}, facts, anchors),))
            largest = {}
            for size in slot_memories:
                model = MemoryModel(basis, slots=slots, limit_bytes=size)
                most = model.largest(model.shape(config, {}))
                largest[size] = int(min(most, LARGEST_MICRO_BATCH))
            found.append(Line(strategy, slots, estimate, largest))
    return found


def configuration(base: Mapping[str, Any], strategy: Strategy, slots: int) -> dict[str, Any]:
    """The user's configuration with another strategy, and the micro steps that it asks for."""
    settings = {**strategy_settings(strategy, base), "stage": strategy.stage}
    gas = _gas(base, slots)
    merged = ds_config.for_use(base, overrides_for(settings, BatchTriple(gas * slots, 1, gas)))
    return {key: value for key, value in merged.items() if "batch_size" not in key}


def _gas(base: Mapping[str, Any], slots: int) -> int:
    total, micro, gas = (base.get(key) for key in ds_config.BATCH_KEYS)
    if isinstance(gas, int):
        return gas
    if isinstance(total, int) and isinstance(micro, int):
        return max(1, total // (micro * slots))
    return 1


def describe(name: str, facts: ModelFacts, lines: Sequence[Line]) -> list[str]:
    """The table for people, and the first line of the ladder that fits each size."""
    said = [
        f"{name}: {facts.num_params:,} parameters, {facts.trainable_params:,} of them trained; "
        f"activations {fmt.memory(facts.backward_bytes_per_sample)} per sample"
    ]
    sizes = list(lines[0].largest)
    for slots in dict.fromkeys(line.slots for line in lines):
        of_slots = [line for line in lines if line.slots == slots]
        heads = ["strategy", "slot at micro batch 1", "host per slot"]
        heads += [f"largest on {fmt.memory(size)}" for size in sizes]
        rows = [
            [
                line.strategy.label,
                fmt.memory(line.estimate.peak),
                fmt.memory(line.estimate.host) if line.estimate.host else "-",
                *(str(count or "-") for count in line.largest.values()),
            ]
            for line in of_slots
        ]
        said += ["", f"{slots} slot{'s' if slots > 1 else ''}:", ""]
        said += markdown_table(heads, rows, numbers=heads[1:])
        first = [_first(of_slots, size) for size in sizes]
        fits = ", ".join(
            f"{fmt.memory(size)}: {found}" for size, found in zip(sizes, first, strict=True)
        )
        said += ["", f"the first of them that fits: {fits}"]
    sources = " and ".join(dict.fromkeys(line.estimate.source for line in lines))
    return [
        *said,
        "",
        f"Found by {sources}, with 5 % to spare for the largest micro batches; what the device's "
        "context and the communication library take comes on top.",
    ]


def _first(lines: Sequence[Line], size: int) -> str:
    return next((line.strategy.label for line in lines if line.largest[size]), "none")
