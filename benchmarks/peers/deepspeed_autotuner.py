"""DeepSpeed's own autotuner in its fast mode, from `deepspeed.autotuning`.

It makes all decisions. Two parts are replaced: the launches of its resource manager, for which the
table's outcomes are written as a run's files (metrics, model info, log), and the size of the
accelerator's memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.autotuning import autotuner
from deepspeed.autotuning.autotuner import Autotuner
from deepspeed.autotuning.scheduler import ResourceManager
from deepspeed.utils import logger

from benchmarks.ledger import OBJECTIVE, STAGES, BudgetSpent, Ledger
from dsat.values.outcome import Outcome

autotuner.has_mlflow = False  # with MLflow, it would need a variable with a run's number

_OUT_OF_MEMORY = "RuntimeError: out of memory\n"


def play(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run the autotuner to its end, or until the budget is spent; it has no seed."""
    logger.setLevel(logging.ERROR)
    header = ledger.table.header
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        section = {
            "enabled": True,
            "fast": True,
            "metric": OBJECTIVE.metric,
            "results_dir": str(folder / "results"),
            "exps_dir": str(folder / "exps"),
            "max_train_micro_batch_size_per_gpu": ledger.table.largest_micro_batch,
        }
        config = {**header.ds_config, "zero_optimization": {"stage": list(STAGES)}}
        path = folder / "ds_config.json"
        path.write_text(json.dumps({**config, "autotuning": section}))
        args = Namespace(
            user_script="train.py",
            user_args=["--deepspeed_config", str(path)],
            num_nodes=1,
            num_gpus=header.slots,
            hostfile="",
            master_port=29500,
        )
        slots = {"localhost": list(range(header.slots))}
        with contextlib.suppress(BudgetSpent):
            _TableAutotuner(ledger, args, slots).tune()


class _TableAutotuner(Autotuner):  # type: ignore[misc]
    def __init__(self, ledger: Ledger, args: Namespace, slots: Mapping[str, list[int]]) -> None:
        self._ledger = ledger
        super().__init__(args, slots)

    def get_gpu_memory_info(self) -> int:
        return self._ledger.table.header.profile.slot_memory_bytes

    def _get_resource_manager(self, active_resources: Mapping[str, list[int]]) -> ResourceManager:
        manager = super()._get_resource_manager(active_resources)
        manager.__class__ = _TableResourceManager
        manager.ledger = self._ledger
        return manager


class _TableResourceManager(ResourceManager):  # type: ignore[misc]
    ledger: Ledger

    def run(self) -> None:
        """Answer the queued experiments instead of launching them."""
        while self.experiment_queue:
            experiment = self.experiment_queue.pop(0)
            folder = Path(experiment["result_dir"])
            folder.mkdir(parents=True, exist_ok=True)
            config = experiment["ds_config"]
            info = config["autotuning"].get("model_info_path")
            outcome = self.ledger.profile() if info else self.ledger.run(config)
            (folder / "stderr.log").write_text("" if outcome.ok else _OUT_OF_MEMORY)
            if outcome.ok:
                path = Path(info or config["autotuning"]["metric_path"])
                path.write_text(json.dumps(_report(outcome)))
            error = None if outcome.ok else _OUT_OF_MEMORY
            self.finished_experiments[experiment["exp_id"]] = (experiment, error)


def _report(outcome: Outcome) -> dict[str, Any]:
    if outcome.profile is not None:
        return {
            "num_params": outcome.profile.num_params,
            "trainable_num_params": outcome.profile.trainable_params,
            "activation_mem_per_gpu": outcome.profile.activation_bytes_per_sample,
        }
    assert outcome.metrics is not None
    return outcome.metrics.to_json()
