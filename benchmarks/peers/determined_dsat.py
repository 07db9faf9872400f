"""Determined's DeepSpeed Autotune, from `determined.pytorch.dsat`.

Its search methods get the events that Determined's master would send, in the same order, and
arguments from its own parser. No part of it is replaced.
"""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import yaml
from determined import searcher
from determined.pytorch import dsat
from determined.pytorch.dsat import _run_dsat, _utils

from benchmarks.ledger import OBJECTIVE, STAGES, Ledger
from dsat.values.outcome import ModelProfile, Outcome

METHODS = ("asha", "binary", "random")
_CONFIG_FILE = "ds_config.json"


def play(method: str, ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run one of its search methods with its defaults, one trial at a time."""
    logging.getLogger("determined.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        master = _Master(_search_method(method, ledger, seed, max_trials, folder), ledger, folder)
        master.run()


def _search_method(
    method: str, ledger: Ledger, seed: int, max_trials: int, folder: Path
) -> searcher.SearchMethod:
    header = ledger.table.header
    (folder / _CONFIG_FILE).write_text(json.dumps(header.ds_config))
    experiment = {
        "name": header.name,
        "entrypoint": header.command,
        "hyperparameters": {"deepspeed_config": _CONFIG_FILE},
        "resources": {"slots_per_trial": header.slots},
    }
    (folder / "deepspeed.yaml").write_text(yaml.safe_dump(experiment))
    words = [method, str(folder / "deepspeed.yaml"), str(folder)]
    words += ["--max-trials", str(max_trials), "--max-concurrent-trials", "1"]
    words += ["--metric", OBJECTIVE.metric, "--random-seed", str(seed)]
    words += ["--zero-stages", *map(str, STAGES)]
    args = _utils.get_full_parser().parse_args(words)
    args.experiment_id = 1
    config = _run_dsat.get_custom_dsat_exp_conf_from_args(args)
    return _run_dsat.get_search_method_class(method)(args=args, exp_config=config)


class _Master:
    """Determined's master for a custom searcher: executes operations and sends events."""

    def __init__(self, method: searcher.SearchMethod, ledger: Ledger, folder: Path) -> None:
        self._method = method
        self._ledger = ledger
        self._folder = folder
        self._state = searcher.SearcherState()
        self._hparams: dict[uuid.UUID, dict[str, Any]] = {}
        self._operations: deque[searcher.Operation] = deque()

    def run(self) -> None:
        """Run trials until the search method shuts down, or has no more operations."""
        self._operations.extend(self._method.initial_operations(self._state))
        while self._operations:
            operation = self._operations.popleft()
            if isinstance(operation, searcher.Shutdown):
                return
            if isinstance(operation, searcher.Create):
                self._hparams[operation.request_id] = json.loads(operation.hparams)
                self._state.trials_created.add(operation.request_id)
                self._tell(self._method.on_trial_created(self._state, operation.request_id))
            elif isinstance(operation, searcher.ValidateAfter):
                self._validate(operation.request_id, operation.length)
            elif isinstance(operation, searcher.Close):
                self._close(operation.request_id)

    def _validate(self, request_id: uuid.UUID, length: int) -> None:
        outcome = self._run(self._hparams[request_id])
        if outcome.ok:
            metric = _metric(outcome)
            self._tell(
                self._method.on_validation_completed(self._state, request_id, metric, length)
            )
            return
        self._state.failures.add(request_id)
        reason = searcher.ExitedReason.ERRORED
        self._tell(self._method.on_trial_exited_early(self._state, request_id, reason))
        self._close(request_id)

    def _run(self, hparams: dict[str, Any]) -> Outcome:
        config = dsat.get_ds_config_from_hparams(hparams, self._folder)
        if config["autotuning"].get("model_info", {}).get("profile"):
            return self._ledger.profile()
        return self._ledger.run(config)

    def _close(self, request_id: uuid.UUID) -> None:
        self._state.trials_closed.add(request_id)
        self._tell(self._method.on_trial_closed(self._state, request_id))

    def _tell(self, operations: list[searcher.Operation]) -> None:
        self._operations.extend(operations)


def _metric(outcome: Outcome) -> dict[str, Any]:
    """Return what a trial reports: the metrics or the model info of DeepSpeed's autotuning mode."""
    if outcome.profile is not None:
        return _model_info(outcome.profile)
    assert outcome.metrics is not None
    return outcome.metrics.to_json()


def _model_info(profile: ModelProfile) -> dict[str, Any]:
    return {
        "num_params": profile.num_params,
        "trainable_num_params": profile.trainable_params,
        "activation_mem_per_gpu": profile.activation_bytes_per_sample,
        "gpu_mem": profile.slot_memory_bytes,
    }
