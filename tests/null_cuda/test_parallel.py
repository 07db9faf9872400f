"""Memory of eight devices that share layers: predicted, and in torch's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machines
from dsat.simulation.client import Simulator
from dsat.simulation.protocol import Question
from dsat.space.overrides import overrides_for
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.local import Bench, engine_of
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

pytestmark = pytest.mark.nightly

SLOTS, PATIENCE_S = 8, 300.0
SHARED = (DATA_ONLY, Parallelism(tensor=2), Parallelism(tensor=4))
# A model so large that 3 % of it exceed a rank's minor allocations.
SIZES = "--width 512 --layers 6 --length 512 --unchecked"


def test_memory_of_shared_devices_is_predicted(null_cuda: MachineOf, tmp_path: Path) -> None:
    null_cuda(*(Device() for _ in range(SLOTS)))
    entry = f"deepspeed train.py {SIZES} --deepspeed_config ds_config.json"
    few: dict[str, Any] = {
        "timeout_s": PATIENCE_S,
        "max_steps": 4,
        "warm_up_s": 0.1,
        "measured_s": 0.1,
    }
    hosts = [Host(find_machines({"here": ()})[0])]
    engine = engine_of("parallel", tmp_path, entry=entry, hosts=hosts, slots_per_trial=SLOTS, **few)
    base = engine._builder.experiment.base_config
    bench = Bench(engine, tmp_path, SLOTS)
    try:
        trials = []
        for number, (shared, stage) in enumerate((s, z) for s in SHARED for z in (1, 3)):
            batch = BatchTriple.on(SLOTS, shared, micro_batch=2)
            overrides = overrides_for({"stage": stage, **shared.settings}, batch)
            trials.append(Trial(number, TrialKind.SEARCH, f"t{number}", stage, batch, overrides))
        configs = [{**base, **trial.overrides} for trial in trials]
        with Simulator(engine, as_cpu=False, timeout_s=PATIENCE_S) as simulator:
            predicted = simulator.estimates([Question(c, 2, SLOTS) for c in configs])
        for trial, found in zip(trials, predicted, strict=True):
            outcome = bench.run(trial)
            assert outcome.ok and outcome.memory is not None, bench.log(trial)
            assert not isinstance(found, str), found
            used = max(outcome.memory.allocated_bytes.values())
            assert found.peak == pytest.approx(used, rel=0.03), trial.overrides
    finally:
        engine.close()
