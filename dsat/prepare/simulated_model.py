"""A model on fake tensors, from the user's script or from a transformers configuration."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.command import ds_config, hf_config, script_args
from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint
from dsat.command.switches import CHECKPOINTING
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine_for_simulations
from dsat.engines.start import LocalOptions
from dsat.errors import DsatError, UserInputError
from dsat.prepare import installed_deepspeed, packages
from dsat.prepare import source as sources
from dsat.prepare.source import Source
from dsat.prepare.target import ModelSettings
from dsat.simulation.client import SimulationUnavailable, Simulator
from dsat.simulation.protocol import ScriptFacts
from dsat.simulation.server import AS_IF_CUDA
from dsat.values.trial import TrialOptions

_log = logging.getLogger(__name__)
_LOG = "simulation/stderr.log"
# Limit for the script to reach its first step, and for the processor time of each simulation.
_TIMEOUT_S = 600.0
_SCRIPT_HINT = " `dsat tune` works without simulation: it then predicts memory by formula."


@dataclass(frozen=True)
class SimulatedModel:
    """A model with a simulator that predicts its memory.

    Attributes:
        name: name of the experiment, the script or the model.
        config: the DeepSpeed configuration, completed by `build`.
        dtype: type of the parameters (bf16, fp16 or fp32); None if a script decides it.
    """

    name: str
    config: dict[str, Any]
    simulator: Simulator
    dtype: str | None = None

    @classmethod
    def build(
        cls, name: str, config: Mapping[str, Any], simulator: Simulator, dtype: str | None = None
    ) -> SimulatedModel:
        """Complete a configuration with the script's optimizer, and replace "auto" sizes."""
        script = simulator.script
        added: dict[str, Any] = {}
        if zero := config.get("zero_optimization"):
            added["zero_optimization"] = ds_config.fill_in_sizes(zero, script.sizes["hidden_size"])
        if script.optimizer:
            added["optimizer"] = dict(script.optimizer)
        return cls(name, {**config, **added}, simulator, dtype)


@contextlib.contextmanager
def simulate(settings: ModelSettings) -> Iterator[SimulatedModel]:
    """Run a model on fake tensors up to its first training step; yield it for simulations.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the script cannot be simulated.
    """
    packages.check("transformers" if settings.model is not None else None)
    source = _read_source(settings)
    experiment, program = source.experiment, source.program
    installed_deepspeed.check(experiment, program)
    config = script_args.batch_from_args(
        experiment.base_config, program.args, experiment.arg_mappings, experiment.hparams
    )
    ds_config.refuse_zenflow(config, where=experiment.ds_config_name)
    recompute = settings.activation_checkpointing
    switches = {} if recompute is None else {CHECKPOINTING: recompute == "on"}
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    keep_log = False
    try:
        with (
            contextlib.closing(start_engine(source, folder, _TIMEOUT_S)) as engine,
            Simulator(
                engine, as_cpu=False, timeout_s=_TIMEOUT_S, model_switches=switches
            ) as simulator,
        ):
            warn_of_length(settings, simulator.script)
            dtype = None if settings.model is None else hf_config.dtype_of(config)
            yield SimulatedModel.build(experiment.name, config, simulator, dtype)
    except SimulationUnavailable as error:
        option, _, problem = str(error).partition(": ")
        if settings.model is not None and option in ("--seq-length", "--lora"):
            raise UserInputError(problem, where=option) from None
        keep_log = True
        hint = "" if settings.model is not None else _SCRIPT_HINT
        raise DsatError(
            f"the model cannot be simulated: {error}.{hint} The log is {folder / _LOG}."
        ) from None
    finally:
        if not keep_log:
            shutil.rmtree(folder, ignore_errors=True)


def start_engine(source: Source, folder: Path, timeout_s: float) -> LocalEngine:
    """Return an engine that runs a script for simulations, with its log in a folder.

    The script must reach its first training step within `timeout_s`.
    """
    experiment = source.experiment
    return LocalEngine(
        replace(experiment, env={**experiment.env, AS_IF_CUDA: "1"}),
        source.program,
        [Host(find_machine_for_simulations())],
        folder,
        LocalOptions(TrialOptions(timeout_s=timeout_s)),
        slots_per_trial=1,
    )


def warn_of_length(settings: ModelSettings, script: ScriptFacts) -> None:
    """Warn if samples are longer than the model's configuration allows."""
    length, limit = settings.seq_length, script.model_takes
    if length is not None and 0 < limit < length:
        _log.warning(
            "--seq-length %s is more than the model's %s positions", f"{length:,}", f"{limit:,}"
        )


def name_of(model: str, path: Path) -> str:
    """Return a model's name, taken from its file, folder or Hub id, or else its type.

    `path` is the result of `hf_config.find` for the argument `model`.
    """
    if path.name != hf_config.CONFIG_FILE:
        return path.stem
    if path.parent.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/REVISION
        return path.parents[2].name.rpartition("--")[2]
    folder = Path(model.removesuffix(hf_config.CONFIG_FILE)).name
    return hf_config.type_of(path) if folder in ("", "..") else folder


def _read_source(settings: ModelSettings) -> Source:
    """Return the user's script, or dsat's own script for a model that the user gave."""
    if settings.model is not None:
        return _script_for(settings, settings.model)
    source = sources.read(settings)
    source = source.run_to_training(_TIMEOUT_S) if source.unknown else source
    if source.program.needs_command:
        raise UserInputError(
            "cannot be simulated, because dsat cannot start its ranks itself: "
            f"{source.program.needs_command}",
            where="command",
            hint="Give a script that torchrun, deepspeed or python3 starts, or use --model.",
        )
    return source


def _script_for(settings: ModelSettings, model: str) -> Source:
    path = hf_config.find(model)
    name = name_of(model, path)
    user_config = settings.ds_config or {"bf16": {"enabled": ds_config.AUTO}}
    user_experiment = experiments.make_experiment([], name, Path.cwd(), user_config)
    config = hf_config.ds_config(settings.dtype, user_experiment.ds_config)
    args = ["--model", str(path), "--dtype", hf_config.dtype_of(config)]
    if settings.seq_length is not None:
        args += ["--seq-length", str(settings.seq_length)]
    if settings.lora is not None:
        args += ["--lora", json.dumps(dict(settings.lora))]
    if settings.activation_checkpointing == "on":
        args.append("--gradient-checkpointing")
    args += ["--deepspeed_config", "ds_config.json"]  # replaced by each trial's own file
    # A module of the current folder must not hide one that dsat imports.
    safe = {"PYTHONSAFEPATH": "1"}
    program = Entrypoint(module="dsat.simulation.config_program", args=tuple(args), env=safe)
    experiment = experiments.make_experiment(
        program.command(), name, Path.cwd(), config, "--ds-config"
    )
    return Source(experiment, program)
