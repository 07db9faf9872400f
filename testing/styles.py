"""Memory of the catalogue's styles of scripts: simulated, and measured on a real rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command import entrypoint, experiment
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.start import LocalOptions
from dsat.memory.estimate import MemoryEstimate
from dsat.simulation.client import SimulationUnavailable, Simulator
from dsat.simulation.protocol import Question
from dsat.simulation.server import AS_IF_CUDA
from dsat.values.trial import TrialOptions
from testing import warm_host
from testing.allocator import counting_library, measured
from testing.catalogue import ROOT, Style
from testing.local import PATIENCE_S, cpu_machine, environment_of_a_rank
from testing.null_cuda import Device, NullCuda, build


def simulated(
    style: Style,
    folder: Path,
    micro_batch: int,
    *,
    switches: Mapping[str, Any] | None = None,
    on_device: bool = False,
) -> MemoryEstimate:
    """Simulate the memory of a style.

    Args:
        folder: for logs.
        switches: switches of the model that differ from the style.
        on_device: simulate a GPU, even if a CPU can train the style.
    """
    config = style.config(micro_batch)
    entry = ["python3", *style.words("ds_config.json", micro_batch)]
    user = experiment.make_experiment(entry, "style", style.folder, config, "the style")
    as_cpu = style.on_cpu and not on_device
    if not as_cpu:
        user = replace(user, env={AS_IF_CUDA: "1"})
    program = entrypoint.parse(entry, style.folder)
    engine = LocalEngine(
        user,
        program,
        [Host(cpu_machine(1), reach=warm_host.prefix())],
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
    style: Style, folder: Path, micro_batch: int, *, on_device: bool = False
) -> dict[str, int]:
    """Return the peak bytes of a real rank by phase, on this machine's CPU or on the null CUDA.

    Args:
        folder: for the configuration and compiled libraries.
        on_device: use the null CUDA, even if the CPU can train the style.

    Raises:
        RuntimeError: the run failed; the message is the end of its log.
    """
    config = folder / "real.json"
    total = {"train_batch_size": micro_batch}
    config.write_text(json.dumps({**style.config(micro_batch), **total}))
    environment = environment_of_a_rank(OMP_NUM_THREADS="1")
    if style.on_cpu and not on_device:
        environment["LD_PRELOAD"] = str(counting_library(folder))
    else:
        null = NullCuda(build(ROOT / ".cache" / "null_cuda"), folder / "books", [Device()])
        of_device = null.environment(DS_ACCELERATOR="cuda")
        environment |= {k: v for k, v in of_device.items() if os.environ.get(k) != v}
    words = style.words(str(config), micro_batch)
    return measured(words, style.folder, environment)
