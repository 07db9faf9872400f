"""Adapters of determined, with which an unmodified Determined script runs without a master.

`det.get_cluster_info()` returns the trial's hyperparameters. `det.core.init()` returns a context
with one searcher operation, which writes metrics and checkpoints to the trial's folder. The
adapters rely on internals of determined 0.28 to 0.37.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsat.errors import InvalidTrial
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.rank_files import LocalTask
from dsat.values import hazards

_CHIEF_PORTS = ("pub_port", "pull_port")
_SUPPORTED = ">=0.28,<0.38"


def get_cluster_info(call: Call) -> Any:
    """Return the trial's information, as in a trial on a Determined cluster."""
    if call.trial.task is None:
        return call.proceed()
    _check_version()
    return _cluster_info(call.trial.task)


def _check_version() -> None:
    """Raise InvalidTrial if the version of determined is not supported."""
    import determined

    version = determined.__version__
    if not hazards.is_one_of(version, _SUPPORTED):
        raise InvalidTrial(
            f"the script imports determined {version}, and dsat works with 0.28 to 0.37. Run "
            f"pip install 'determined{_SUPPORTED}'"
        )


@functools.lru_cache(maxsize=1)
def _cluster_info(task: LocalTask) -> Any:
    from determined import _info

    config = {**_CONFIG_DEFAULTS, **task.experiment_config, "hyperparameters": dict(task.hparams)}
    for section in ("optimizations", "profiling", "searcher"):  # others must not be merged: they
        # would get a second unit, as in {"batches": 0, "epochs": 1}
        config[section] = {**_CONFIG_DEFAULTS[section], **(config[section] or {})}
    return _info.ClusterInfo(
        master_url="http://127.0.0.1:8080",
        cluster_id="dsat-local",
        agent_id=socket.gethostname(),
        slot_ids=list(range(task.slots_per_host)),
        task_id=f"{task.trial_id}.local",
        allocation_id=f"{task.trial_id}.local.0",
        session_token="",
        task_type="TRIAL",
        trial_info=_info.TrialInfo(
            trial_id=task.trial_id,
            experiment_id=0,
            trial_seed=task.seed,
            hparams=dict(task.hparams),
            config=config,
            steps_completed=0,
            trial_run_id=0,
            debug=False,
            inter_node_network_interface=None,
        ),
        rendezvous_info=_info.RendezvousInfo(
            list(task.hosts),
            int(os.environ.get("CROSS_RANK", "0")),
            [task.slots_per_host] * len(task.hosts),
        ),
        resources_info=_info.ResourcesInfo(gpu_uuids=list(task.devices)),
    )


# Defaults that a master fills in (master/pkg/schemas/expconf, 0.37) and the harness reads.
_CONFIG_DEFAULTS: dict[str, Any] = {
    "checkpoint_policy": "best",
    "checkpoint_storage": {"type": "directory", "container_path": "."},
    "debug": False,
    "min_checkpoint_period": {"batches": 0},
    "min_validation_period": {"batches": 0},
    "optimizations": {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "average_training_metrics": True,
        "gradient_compression": False,
    },
    "perform_initial_validation": False,
    "profiling": {"enabled": False},
    "records_per_epoch": 0,
    "scheduling_unit": 100,
    "searcher": {"metric": "throughput", "smaller_is_better": True},
}


def init(call: Call) -> Any:
    """Return a context that needs no master: reports and checkpoints go to the trial's folder."""
    task, folder, kwargs = call.trial.task, call.trial.folder, call.kwargs
    if task is None:
        return call.proceed()
    _check_version()
    assert folder is not None
    import determined
    from determined import core
    from determined.core import _context

    class SearcherContext(core.DummySearcherContext):  # type: ignore[misc]
        def get_configured_units(self) -> Any:
            return core._parse_searcher_units(dict(task.experiment_config))

    if kwargs.get("distributed") is None and task.slots > 1:
        raise ValueError("you must provide a valid DistributedContext for a multi-slot task")
    context = _context._dummy_init(
        distributed=kwargs.get("distributed"),
        checkpoint_storage=kwargs.get("checkpoint_storage") or str(folder / "checkpoints"),
        preempt_mode=kwargs.get("preempt_mode") or core.PreemptMode.WorkersAskChief,
    )
    is_chief = context.distributed.rank == 0
    reports = folder / "reports.jsonl" if is_chief else Path(os.devnull)
    context.info = determined.get_cluster_info()
    searcher = context.info.trial._config["searcher"]
    context.train = _train_context(reports, folder / "tensorboard", searcher)
    context.searcher = SearcherContext(context.distributed, task.length)
    return context


def _train_context(reports: Path, tensorboard: Path, searcher: Mapping[str, Any]) -> Any:
    from determined import core, util

    better = min if searcher["smaller_is_better"] else max

    class TrainContext(core.DummyTrainContext):  # type: ignore[misc]
        best: float | None = None

        def _report_trial_metrics(
            self, group: Any, steps_completed: int, metrics: Any, *args: Any, **kwargs: Any
        ) -> None:
            group = getattr(group, "value", group)
            report = {"group": group, "steps_completed": steps_completed, "metrics": metrics}
            with open(reports, "a", encoding="utf-8") as file:
                file.write(util.json_encode(report) + "\n")
            value = metrics.get(searcher.get("metric"))
            if group == "validation" and util.is_numerical_scalar(value):
                self.best = float(value if self.best is None else better(self.best, value))

        def get_experiment_best_validation(self) -> float | None:
            """Return the best metric so far, by which policy `best` keeps checkpoints; or None."""
            return self.best

    tensorboard.mkdir(exist_ok=True)
    return TrainContext(tensorboard)


def connect(call: Call) -> None:
    """Use separate ports for each trial.

    determined binds two fixed ports on all interfaces; two trials on one machine cannot share them.
    """
    task = call.trial.task
    if task is not None:
        for name, port in zip(_CHIEF_PORTS, task.ports, strict=True):
            call.kwargs.setdefault(name, port)
    call.proceed()


def serve(call: Call) -> None:
    """Bind the chief's sockets to the trial's own address, not to all interfaces."""
    task, kwargs = call.trial.task, call.kwargs
    if task is not None:
        numeric = socket.gethostbyname(task.hosts[0])
        for name in ("pub_url", "pull_url"):
            if kwargs.get(name):
                kwargs[name] = kwargs[name].replace("tcp://*:", f"tcp://{numeric}:")
    call.proceed()


def write_user_code(call: Call) -> None:
    """Copy no model code into checkpoints: its folder exists only in a cluster's containers."""
    if call.trial.task is None:
        call.proceed()


def choose_device(call: Call) -> None:
    """Let a DeepSpeedTrial train on CPU cores, although determined requires a GPU."""
    task = call.trial.task
    if task is None or task.devices:
        call.proceed()
        return
    import torch

    call.owner.n_gpus = 0
    call.owner.device = torch.device("cpu")
