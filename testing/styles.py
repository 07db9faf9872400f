"""The ways in which people write training scripts, each simulated and run for real on the CPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.in_trial.simulation.server import AS_IF_CUDA
from dsat.inputs import ds_config, entrypoint, experiment
from dsat.memory import MemoryEstimate
from dsat.memory.simulation_client import Question, SimulationUnavailable, Simulator
from dsat.values.trial import TrialOptions
from testing import warm_host
from testing.allocator import counting_library, measured
from testing.local import PATIENCE_S, PROGRAMS, cpu_machine, environment_of_a_rank
from testing.null_cuda import Device, NullCuda, build

FOLDER = PROGRAMS / "styles"
_ROOT = Path(__file__).parents[1]
_BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
_FP16: Mapping[str, Any] = {"fp16": {"enabled": True}}
_FP32: Mapping[str, Any] = {}
_MASTER: Mapping[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
_AUTOCAST: Mapping[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
_MUON: Mapping[str, Any] = {**_BF16, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
_MUON_STAGE_3: Mapping[str, Any] = {**_MUON, "zero_optimization": {"reduce_scatter": False}}
_OWN_OPTIMIZER: Mapping[str, Any] = {**_BF16, "zero_allow_untested_optimizer": True}


@dataclass(frozen=True)
class Style:
    """One way to write a script.

    Attributes:
        name: for people.
        script: in `testing/programs/styles`.
        variant: of the script.
        stage: of ZeRO.
        settings: of the DeepSpeed configuration, beyond batch, stage and optimizer.
        needs: a package that is no part of the development environment.
        own_optimizer: the script makes it, so the configuration names none.
        on_cpu: DeepSpeed trains it on a CPU too; otherwise a real run takes the null CUDA.
    """

    name: str
    script: str
    variant: str = ""
    stage: int = 2
    settings: Mapping[str, Any] = field(default_factory=lambda: _BF16)
    needs: str = ""
    own_optimizer: bool = False
    on_cpu: bool = True

    @property
    def is_possible(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def config(self, micro_batch: int) -> dict[str, Any]:
        base: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 2_000_000},
        }
        if self.own_optimizer:
            del base["optimizer"]
            base["zero_force_ds_cpu_optimizer"] = False
        return ds_config.merge(base, copy.deepcopy(dict(self.settings)))

    def words(self, config: str) -> list[str]:
        return [self.script, f"--variant={self.variant}", "--deepspeed_config", config]


STYLES = (
    Style("engine.backward(loss)", "core.py"),
    Style("loss.backward()", "core.py", "loss.backward", stage=3),
    Style("fp32", "core.py", stage=1, settings=_FP32),
    Style("fp16", "core.py", settings=_FP16, on_cpu=False),
    Style(
        "fp16, stage 0, loss.backward()",
        "core.py",
        "loss.backward",
        stage=0,
        settings=_FP16,
        on_cpu=False,
    ),
    Style("torch.autocast of the script", "core.py", "autocast", settings=_FP32),
    Style("torch_autocast section", "core.py", settings=_AUTOCAST),
    Style("torch_autocast section, stage 3", "core.py", stage=3, settings=_AUTOCAST),
    Style("bf16 master weights, gradients and states", "core.py", settings=_MASTER),
    Style("the same, stage 3", "core.py", stage=3, settings=_MASTER),
    Style("the same with torch_autocast", "core.py", stage=3, settings={**_MASTER, **_AUTOCAST}),
    Style("Muon", "core.py", settings=_MUON),
    Style("Muon, stage 3", "core.py", stage=3, settings=_MUON_STAGE_3),
    Style("torch.utils.checkpoint, reentrant", "core.py", "reentrant"),
    Style("torch.utils.checkpoint, non-reentrant", "core.py", "non-reentrant", stage=3),
    Style("deepspeed.zero.Init", "core.py", "zero.Init", stage=3),
    Style("engine.compile()", "core.py", "compile"),
    Style("Trainer", "trainer.py"),
    Style("Trainer that wants a GPU", "trainer.py", "gpu", on_cpu=False),
    Style("Trainer, gradient checkpointing", "trainer.py", "gradient_checkpointing", stage=3),
    Style(
        "accelerate, optimizer of the script",
        "accelerated.py",
        settings=_OWN_OPTIMIZER,
        own_optimizer=True,
    ),
    Style(
        "Lightning's DeepSpeedStrategy",
        "on_lightning.py",
        settings=_OWN_OPTIMIZER,
        needs="lightning",
        own_optimizer=True,
        on_cpu=False,
    ),
    Style("CUDA named everywhere", "only_cuda.py", settings=_FP32, on_cpu=False),
    Style("transformers, SDPA", "transformers_models.py"),
    Style("transformers, eager attention", "transformers_models.py", "eager attention"),
    Style("tied weights", "transformers_models.py", "tied weights", stage=3),
    Style("LoRA of PEFT", "transformers_models.py", "lora", needs="peft"),
    Style("mixture of experts", "transformers_models.py", "moe"),
    Style("packed sequences", "transformers_models.py", "packed"),
    Style("vision", "transformers_models.py", "vision", settings=_FP32),
    Style("vision and language", "transformers_models.py", "vision and language"),
)


def simulated(
    style: Style,
    folder: Path,
    micro_batch: int,
    *,
    switches: Mapping[str, Any] | None = None,
    on_device: bool = False,
) -> MemoryEstimate:
    """Simulate a style.

    Args:
        folder: for logs.
        switches: of the model, that are not as the style has them.
        on_device: rather than on a CPU, if that could train it.
    """
    config = style.config(micro_batch)
    entry = ["python3", *style.words("ds_config.json")]
    user = experiment.of_command(entry, "style", FOLDER, config, "the style")
    as_cpu = style.on_cpu and not on_device
    if not as_cpu:
        user = replace(user, env={AS_IF_CUDA: "1"})
    program = entrypoint.parse(entry, FOLDER)
    engine = LocalEngine(
        user,
        program,
        [Host(cpu_machine(1), prefix=warm_host.prefix())],
        folder,
        LocalOptions(TrialOptions(timeout_s=PATIENCE_S, end_step=5)),
        slots_per_trial=1,
    )
    try:
        with Simulator(
            engine, as_cpu=as_cpu, timeout_s=PATIENCE_S, model_switches=switches
        ) as simulator:
            [found] = simulator.estimates([Question(config, micro_batch, 1)])
    finally:
        engine.close()
    if isinstance(found, str):
        raise SimulationUnavailable(found)
    return found


def real_peaks(
    style: Style,
    folder: Path,
    micro_batch: int,
    timeout_s: float = PATIENCE_S,
    *,
    on_device: bool = False,
) -> dict[str, int]:
    """Peak bytes of a real rank by phase, on this machine's CPU or on the null CUDA.

    Args:
        folder: for the configuration and what is compiled.
        on_device: rather than on the CPU, if that can train it.

    Raises:
        RuntimeError: the run failed; with the end of its log.
    """
    config = folder / "real.json"
    total = {"train_batch_size": micro_batch}
    config.write_text(json.dumps({**style.config(micro_batch), **total}))
    environment = environment_of_a_rank(OMP_NUM_THREADS="1")
    if style.on_cpu and not on_device:
        environment["LD_PRELOAD"] = str(counting_library(folder))
    else:
        null = NullCuda(build(_ROOT / ".cache" / "null_cuda"), folder / "books", [Device()])
        of_device = null.environment(DS_ACCELERATOR="cuda")
        environment |= {k: v for k, v in of_device.items() if os.environ.get(k) != v}
    return measured(style.words(str(config)), FOLDER, environment, timeout_s=timeout_s)
