"""An unmodified Determined script without a master.

Installed in a rank before the user's script runs. determined itself is not imported here, and need
not be there: it is adapted as soon as the script imports it. From then on `det.get_cluster_info()`
answers with the trial's hyperparameters, and `det.core.init()` gives a context whose metrics,
checkpoints and searcher operations stay in the trial's folder. Works with determined 0.28 to 0.37,
whose parts it builds on (`determined._info`, `determined.core._context._dummy_init`, the Dummy
contexts).
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wrapt

from dsat.errors import InvalidTrial
from dsat.in_trial import loopback

_CHIEF_PORTS = ("pub_port", "pull_port")
_SUPPORTED = ((0, 28), (0, 37))  # first and last


@dataclass(frozen=True)
class LocalTask:
    """Answers to a script's questions about its task.

    Attributes:
        trial_id, slots: of the trial.
        hparams: hyperparameters, `deepspeed_config` and `overwrite_deepspeed_args` among them.
        experiment_config: the whole experiment configuration.
        length: of the one searcher operation, in the script's own unit.
        seed: `info.trial.trial_seed`.
        folder: where reports and checkpoints go.
        ports: two free ports for the chief's broadcasts.
        devices: identifiers of the slots' devices; empty on a CPU.
        hosts: addresses of the trial's hosts, which have equally many of its slots.
    """

    trial_id: int
    slots: int
    hparams: Mapping[str, Any]
    experiment_config: Mapping[str, Any]
    length: int
    seed: int
    folder: Path
    ports: Sequence[int]
    devices: Sequence[str] = ()
    hosts: Sequence[str] = (loopback.ADDRESS,)

    @property
    def slots_per_host(self) -> int:
        return self.slots // len(self.hosts)


def install(task: LocalTask) -> None:
    """Makes determined, in this process, believe that it runs `task`; once it is imported."""
    wrapt.register_post_import_hook(functools.partial(_adapt, task), "determined")


def _adapt(task: LocalTask, determined: Any) -> None:
    """Adapts determined, which has just been imported.

    Raises:
        InvalidTrial: it is of a version that works otherwise.
    """
    _check_version(determined.__version__)
    from determined import _info, core

    _info._info = _cluster_info(task)
    init = functools.partial(_init, task)
    core.init = init
    core._context.init = init
    _listen(core.DistributedContext, task.ports, task.hosts[0])


def _check_version(version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = _SUPPORTED
    if found is None or not first <= (int(found[1]), int(found[2])) <= last:
        raise InvalidTrial(
            f"the script imports determined {version}, and dsat works with 0.28 to 0.37. Run "
            "pip install 'dsat[determined]'"
        )


def _cluster_info(task: LocalTask) -> Any:
    from determined import _info

    config = _with_defaults(task.experiment_config)
    config["hyperparameters"] = dict(task.hparams)
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


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    config = {**_CONFIG_DEFAULTS, **given}
    for section in _FILLED_IN_BY_KEY:
        config[section] = {**_CONFIG_DEFAULTS[section], **(given.get(section) or {})}
    return config


# Other sections hold a single key, that of the unit.
_FILLED_IN_BY_KEY = ("optimizations", "profiling", "searcher")

# What a master fills in (master/pkg/schemas/expconf of 0.37) and the harness reads.
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
    "searcher": {"smaller_is_better": True},
}


def _init(
    task: LocalTask,
    *,
    distributed: Any = None,
    checkpoint_storage: Any = None,
    preempt_mode: Any = None,
    tensorboard_mode: Any = None,
) -> Any:
    """In place of `determined.core.init`, with its parameters."""
    import determined
    from determined import core
    from determined.core import _context

    if distributed is None and task.slots > 1:
        raise ValueError("you must provide a valid DistributedContext for a multi-slot task")
    context = _context._dummy_init(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage or str(task.folder / "checkpoints"),
        preempt_mode=preempt_mode or core.PreemptMode.WorkersAskChief,
    )
    reports = _Reports(task.folder / "reports.jsonl", context.distributed.rank == 0)
    context.info = determined.get_cluster_info()
    searcher = context.info.trial._config["searcher"]
    context.train = _train_context(reports, task.folder / "tensorboard", searcher)
    context.searcher = _searcher_context(context.distributed, task, reports)
    return context


class _Reports:
    """Reports of the script, appended to a file by the chief."""

    def __init__(self, path: Path, is_chief: bool) -> None:
        self._path = path
        self._is_chief = is_chief

    def add(self, kind: str, **values: Any) -> None:
        if not self._is_chief:
            return
        from determined import util

        line = json.loads(util.json_encode({"kind": kind, **values}))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _train_context(reports: _Reports, tensorboard: Path, searcher: Mapping[str, Any]) -> Any:
    from determined import core, util

    better = min if searcher["smaller_is_better"] else max

    class TrainContext(core.DummyTrainContext):  # type: ignore[misc]
        best: float | None = None

        def _report_trial_metrics(
            self, group: Any, steps_completed: int, metrics: Any, *args: Any, **kwargs: Any
        ) -> None:
            group = getattr(group, "value", group)
            reports.add("metrics", group=group, steps_completed=steps_completed, metrics=metrics)
            value = metrics.get(searcher.get("metric"))
            if group == "validation" and util.is_numerical_scalar(value):
                self.best = float(value if self.best is None else better(self.best, value))

        def get_experiment_best_validation(self) -> float | None:
            """By it the harness knows which checkpoints the policy `best` is about."""
            return self.best

    tensorboard.mkdir(exist_ok=True)
    return TrainContext(tensorboard)


def _searcher_context(distributed: Any, task: LocalTask, reports: _Reports) -> Any:
    from determined import core

    class Operation(core.DummySearcherOperation):  # type: ignore[misc]
        def report_progress(self, length: float) -> None:
            if not self._is_chief:
                raise RuntimeError("you must only call op.report_progress() from the chief worker")
            reports.add("progress", length=length)

        def report_completed(self, searcher_metric: Any) -> None:
            super().report_completed(searcher_metric)
            reports.add("completed", searcher_metric=searcher_metric)

    class SearcherContext(core.DummySearcherContext):  # type: ignore[misc]
        def operations(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for plain in super().operations(*args, **kwargs):
                operation = Operation(plain.length, plain._is_chief)
                yield operation
                plain._completed = operation._completed

        def get_configured_units(self) -> Any:
            return core._parse_searcher_units(dict(task.experiment_config))

    return SearcherContext(distributed, task.length)


def _listen(context: Any, ports: Sequence[int], address: str) -> None:
    """Gives every trial ports of its own, and keeps the chief's sockets off other networks.

    determined binds two fixed ports on all interfaces, which two trials on one machine cannot.
    """
    from determined import ipc

    original = context.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, port in zip(_CHIEF_PORTS, ports, strict=True):
            kwargs.setdefault(name, port)
        original(self, *args, **kwargs)

    context.__init__ = init
    server, numeric = ipc.ZMQBroadcastServer.__init__, socket.gethostbyname(address)

    @functools.wraps(server)
    def serve(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("pub_url", "pull_url"):
            if kwargs.get(name):
                kwargs[name] = kwargs[name].replace("tcp://*:", f"tcp://{numeric}:")
        server(self, *args, **kwargs)

    ipc.ZMQBroadcastServer.__init__ = serve


def adapt_trial_classes(*, on_cpu: bool) -> None:
    """Adapt what determined's Trial classes need beyond a task.

    DeepSpeedTrial insists on a GPU, although its context works on a CPU device as well. Checkpoints
    get no copy of the model folder, which a container has at a fixed place.
    """
    import torch
    from determined import load, util
    from determined.pytorch import deepspeed

    load.trial_class_from_entrypoint = functools.partial(
        _load_trial_class, load.trial_class_from_entrypoint, deepspeed.DeepSpeedTrial
    )
    util.write_user_code = lambda *args, **kwargs: None
    if not on_cpu:
        return

    def init_device(context: Any) -> None:
        context.n_gpus = 0
        context.device = torch.device("cpu")

    deepspeed.DeepSpeedTrialContext._init_device = init_device


def _load_trial_class(original: Callable[[str], Any], deepspeed_trial: Any, spec: str) -> Any:
    """In place of `determined.load.trial_class_from_entrypoint`: says what is wrong with `spec`.

    Raises:
        InvalidTrial: `spec` does not name a DeepSpeedTrial.
    """
    module = spec.partition(":")[0]
    try:
        found = original(spec)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # one that the user's module imports
        raise InvalidTrial(
            f"--trial {spec}: there is no module {error.name!r} in {os.getcwd()}"
        ) from error
    except (AttributeError, AssertionError) as error:
        if module not in sys.modules:
            raise  # from the user's module itself
        raise InvalidTrial(
            f"--trial {spec} names no Trial class; give module:Class. "
            + _trials_in(sys.modules[module], deepspeed_trial)
        ) from error
    if not issubclass(found, deepspeed_trial):
        raise InvalidTrial(
            f"--trial {spec} is no DeepSpeedTrial, and only DeepSpeed's training can be tuned. "
            + _trials_in(sys.modules[module], deepspeed_trial)
        )
    return found


def _trials_in(module: Any, deepspeed_trial: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, deepspeed_trial)
    ]
    return f"{module.__name__} has {', '.join(names) if names else 'no DeepSpeedTrial'}"
