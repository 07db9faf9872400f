"""`dsat estimate`: the memory that each rung of the ladder needs, without running a trial."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsat.app import fewest_cards
from dsat.app.memory_tables import Estimate, Line
from dsat.command import ds_config, hf_config, script_args
from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import read_mapping
from dsat.command.switches import CHECKPOINTING
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine_for_simulations
from dsat.engines.start import LocalOptions
from dsat.errors import DsatError, UserInputError
from dsat.inputs.estimate_settings import EstimateSettings, ModelSettings
from dsat.memory import closed_form
from dsat.memory.estimate import SIMULATED
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.prepare import installed_deepspeed, packages
from dsat.prepare import source as sources
from dsat.prepare.source import Source
from dsat.run import strategies
from dsat.simulation import anchors as survey
from dsat.simulation.client import SimulationUnavailable, Simulator
from dsat.simulation.config_facts import HOW_TO_SIMULATE, Formula
from dsat.simulation.protocol import Question, ScriptFacts
from dsat.simulation.server import AS_IF_CUDA
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.space.overrides import overrides_for, strategy_settings
from dsat.values import parallelism, slow
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.trial import BatchTriple, TrialOptions
from dsat.values.zero_strategy import NVME, Strategy

_log = logging.getLogger(__name__)
_LOG = "simulation/stderr.log"
_IMPORTED = (
    "psutil",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.ops.adam",
    "dsat.in_trial.rank",
    "dsat.simulation.borrowed_model",
)
_WHAT_RAN = (
    " The script was run up to its first training step. `dsat model` also searches scripts that "
    "cannot be simulated: it predicts their memory by formula."
)
# Offloading to a disk is the same for the slot as offloading to the host.
LADDER = [s for s in strategies.LADDER if NVME not in (s.offload_optimizer, s.offload_param)]


def estimate(settings: EstimateSettings) -> Estimate:
    """Simulate the script's model and return the memory that it needs."""
    with simulated(settings) as (name, base, simulator):
        return tables(name, base, simulator, settings)


@contextlib.contextmanager
def simulated(
    settings: EstimateSettings,
) -> Iterator[tuple[str, dict[str, Any], Simulator | Formula]]:
    """Give the name of a script, its DeepSpeed configuration, and what answers for it.

    A simulation does, or a formula where packages for that are missing; see `simulator_of`. An
    optimizer that the script passes to DeepSpeed takes the place of the configuration's.
    """
    if settings.hf_config is not None and hf_config.missing_packages():
        yield _by_formula(settings, hf_config.find(settings.hf_config))
        return
    with simulator_of(settings) as (name, base, simulator):
        own = {"optimizer": simulator.script.optimizer} if simulator.script.optimizer else {}
        yield name, {**base, **own}, simulator


@contextlib.contextmanager
def simulator_of(
    settings: ModelSettings, *, as_cpu: bool = False
) -> Iterator[tuple[str, dict[str, Any], Simulator]]:
    """Give the name of a script, its DeepSpeed configuration, and what simulates it.

    Raises:
        UserInputError: something of the settings or the files is wrong.
        DsatError: the script cannot be simulated, also where the caller finds that out.
    """
    packages.check()
    source = _source(settings)
    experiment, program = source.experiment, source.program
    installed_deepspeed.check(experiment, program)
    base = script_args.batch_from_args(
        experiment.base_config, program.args, experiment.arg_mappings
    )
    recompute = settings.activation_checkpointing
    switches = {} if recompute is None else {CHECKPOINTING: recompute == "on"}
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    keep_log = False
    try:
        with (
            contextlib.closing(simulation_engine(source, folder, survey.TIMEOUT_S)) as engine,
            Simulator(
                engine, as_cpu=as_cpu, timeout_s=survey.TIMEOUT_S, model_switches=switches
            ) as simulator,
        ):
            _warn_of_length(settings, simulator.script)
            yield (
                experiment.name,
                hf_config.with_buckets(base, simulator.script.hidden_size),
                simulator,
            )
    except SimulationUnavailable as error:
        keep_log = True
        what_ran = "" if settings.hf_config is not None else _WHAT_RAN
        raise DsatError(
            f"memory cannot be estimated: {error}.{what_ran} The log is {folder / _LOG}."
        ) from None
    finally:
        if not keep_log:
            shutil.rmtree(folder, ignore_errors=True)


def simulation_engine(source: Source, folder: Path, timeout_s: float) -> LocalEngine:
    """Return an engine that runs a script for simulations, on this machine.

    Args:
        folder: for its log.
        timeout_s: for it to come to its first step.
    """
    experiment = source.experiment
    return LocalEngine(
        replace(experiment, env={**experiment.env, AS_IF_CUDA: "1"}),
        source.program,
        [Host(find_machine_for_simulations())],
        folder,
        LocalOptions(TrialOptions(timeout_s=timeout_s), imported=_IMPORTED),
        slots_per_trial=1,
    )


def tables(
    name: str,
    base: Mapping[str, Any],
    simulator: Simulator | Formula,
    settings: EstimateSettings,
) -> Estimate:
    """Return the tables of a model: a line for every rung with every number of slots."""
    facts, rungs = simulator.facts(base), ladder(base)
    pairs = list(itertools.product(settings.slot_counts, rungs))
    questions = [
        Question(configuration(base, strategy, slots), 1, slots) for slots, strategy in pairs
    ]
    estimates = [
        closed_form.estimate(facts, asked.config, slots=asked.slots, micro_batch=1)
        for asked in questions
    ]
    is_formula = isinstance(simulator, Formula)
    if not is_formula and (settings.exact or needs_simulation(base)):
        with slow.logged(_log, f"simulating {len(questions)} lines of the table"):
            simulated = simulator.estimates(questions)
        estimates = [
            replace(formula, note=answer) if isinstance(answer, str) else answer
            for formula, answer in zip(estimates, simulated, strict=True)
        ]
    answers = list(zip(questions, estimates, strict=True))
    basis = Basis.of_model(
        facts,
        (
            Anchor(asked.config, 1, estimate, asked.slots)
            for asked, estimate in answers
            if estimate.source == SIMULATED
        ),
    )
    lines = []
    for (slots, strategy), (asked, estimate) in zip(pairs, answers, strict=True):
        needed = needed_bytes(basis, asked.config, slots)
        largest = {}
        for size in settings.slot_memories:
            model = MemoryModel(basis, slots=slots, limit_bytes=size, on_device=True)
            most = model.largest(model.shape(asked.config, {}))
            largest[size] = int(min(most, LARGEST_MICRO_BATCH))
        lines.append(Line(strategy, slots, estimate, needed, largest))
    choices = fewest_cards.fewest(basis, base, partial(configuration, base), rungs)
    missing = hf_config.missing_packages() if is_formula else ()
    return Estimate(name, facts, lines, choices, simulator.script.sequence_length, missing)


def _source(settings: ModelSettings) -> Source:
    """Return the user's script, or our own that trains the model of a configuration."""
    if settings.hf_config is not None:
        return _model_of_configuration(settings, hf_config.find(settings.hf_config))
    source = sources.read(settings)
    source = source.with_known_start(survey.TIMEOUT_S) if source.unknown else source
    if source.program.needs_command:
        raise UserInputError(
            "cannot be simulated: its ranks cannot be started by themselves, because "
            f"{source.program.needs_command}",
            where="command",
            hint="Give a script that torchrun, deepspeed or python3 starts, or --hf-config.",
        )
    return source


def _by_formula(
    settings: EstimateSettings, path: Path
) -> tuple[str, dict[str, Any], Simulator | Formula]:
    """Return the name of a model, its DeepSpeed configuration and the formula for it."""
    name, base = _name_of(path), _config_of(settings, path)
    if settings.exact or needs_simulation(base):
        check_packages("--exact" if settings.exact else "optimizer.type")
    if float((settings.lora or {}).get("dropout", 0)):
        check_packages("--lora dropout")
    settings = replace(settings, dtype=hf_config.dtype_of(base))
    formula = Formula(read_mapping(path), settings, str(path))
    _warn_of_length(settings, formula.script)
    return name, hf_config.with_buckets(base, formula.script.hidden_size), formula


def _warn_of_length(settings: ModelSettings, script: ScriptFacts) -> None:
    """Warn of samples that are longer than the model's configuration lets expect."""
    asked, takes = settings.seq_length, script.model_takes
    if asked is not None and 0 < takes < asked:
        _log.warning(
            "--seq-length %s is more than the %s tokens that the model takes by its configuration "
            "(max_position_embeddings)",
            f"{asked:,}",
            f"{takes:,}",
        )


def check_packages(where: str) -> None:
    """Raise UserInputError if packages are missing that simulate the model of a configuration."""
    missing = ", ".join(hf_config.missing_packages())
    if missing:
        problem = f"needs a simulation, and {missing} is not installed"
        raise UserInputError(problem, where=where, hint=HOW_TO_SIMULATE)


def _name_of(path: Path) -> str:
    if path.name != hf_config.CONFIG_FILE:
        return path.stem
    if path.parent.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/REVISION
        return path.parents[2].name.rpartition("--")[2]
    return path.parent.name


def _config_of(settings: ModelSettings, path: Path) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a model without a script."""
    given = experiments.of_command([], _name_of(path), Path.cwd(), settings.ds_config or {})
    return hf_config.ds_config(settings.dtype, given.ds_config)


def _model_of_configuration(settings: ModelSettings, path: Path) -> Source:
    """Return the source of our own script that trains the model of a transformers configuration."""
    config = _config_of(settings, path)
    args = ["--hf-config", str(path), "--dtype", hf_config.dtype_of(config)]
    if settings.seq_length is not None:
        args += ["--seq-length", str(settings.seq_length)]
    if settings.lora is not None:
        args += ["--lora", json.dumps(dict(settings.lora))]
    if settings.activation_checkpointing == "on":
        args.append("--gradient-checkpointing")
    args += ["--deepspeed_config", "ds_config.json"]  # a trial's own file takes its place
    program = Entrypoint(module="dsat.simulation.config_program", args=tuple(args))
    experiment = experiments.of_command(
        program.command(), _name_of(path), Path.cwd(), config, "--ds-config"
    )
    return Source(experiment, program)


def needs_simulation(config: Mapping[str, Any]) -> bool:
    """Tell optimizers that the closed form, which is Adam's, does not cover."""
    kind = str((config.get("optimizer") or {}).get("type", "Adam"))
    return kind.lower() not in ("adam", "adamw")


def ladder(base: Mapping[str, Any]) -> list[Strategy]:
    """Return the rungs that DeepSpeed accepts with the user's other settings."""
    return [strategy for strategy in LADDER if strategy.stage >= ds_config.least_stage(base)]


def needed_bytes(basis: Basis, config: Mapping[str, Any], slots: int) -> int:
    """Return what a slot must have for one sample, without what DeepSpeed takes if it is there."""
    model = MemoryModel(basis, slots=slots, limit_bytes=0, on_device=True)
    return model.predicted_bytes(model.shape(config, {}), 1)


def configuration(
    base: Mapping[str, Any], strategy: Strategy, slots: int, shared: Parallelism | None = None
) -> dict[str, Any]:
    """Return the user's configuration with another strategy, at its own micro steps.

    Args:
        shared: how slots share samples; as in the user's, where so many can, if it is not given.
    """
    own = parallelism.of_config(base)
    shared = shared or (DATA_ONLY if slots % own.shared else own)
    settings = {**strategy_settings(strategy, base), "stage": strategy.stage}
    if shared != own:
        settings |= shared.settings
    gas = _gas(base, slots, shared)
    merged = ds_config.for_use(base, overrides_for(settings, BatchTriple(gas, 1, gas)))
    return ds_config.without_batch_sizes(merged)


def _gas(base: Mapping[str, Any], slots: int, shared: Parallelism) -> int:
    total, micro, gas = (base.get(key) for key in ds_config.BATCH_KEYS)
    if isinstance(gas, int):
        return gas
    if isinstance(total, int) and isinstance(micro, int):
        return max(1, total // (micro * shared.data(slots)))
    return 1
