"""Job of the search runner, and configurations of the runner's and of the trials' experiments.

The job is a file in the context of the runner's experiment, and everyone who sees the experiment
can read it. So the job lacks all parts of your configuration that may hold secrets (environment
variables, the pod's specification, credentials of the registry and the storage, `data`,
`integrations`). The configuration of the runner's experiment contains them. If
`--search-runner-config` changes one, that configuration keeps the user's own value below `data`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.command import ds_config
from dsat.command.experiment import Experiment, trial_hparams
from dsat.run.strategies import fallbacks, make_space
from dsat.space.overrides import GAS
from dsat.space.plan import Plan
from dsat.values.codec import Recorded
from dsat.values.trial import Trial, TrialOptions
from dsat.values.zero_strategy import read_strategy

JOB_FILE = "dsat_job.json"
MODEL_FOLDER = "model"
PACKAGE_FOLDER = "dsat"
LABEL = "dsat"
RUNNER_NAME = "(DSAT) "  # prefix of the user's own name
RUNNER_MODULE = "dsat.determined_cluster.runner"
SAID = "[dsat] "  # prefix of each line that the runner logs for the user
RUNNER_LENGTH = 100  # the runner's progress is in percent
VARIED = "_dsat"  # key of the hyperparameters that vary

_ENVIRONMENT_SECRETS = ("environment_variables", "pod_spec", "registry_auth")
_STORAGE = "checkpoint_storage"
_DATA = "data"
_SECRETS = (_STORAGE, _DATA, "integrations")
_TRIALS_SECRETS = "dsat_trials"  # key in the runner's `data`: the trials' secrets, if they differ
_SETTINGS = (ds_config.CONFIG_KEY, ds_config.OVERWRITE_KEY, ds_config.DSAT_SWITCHES_KEY)
# Keys of the runner's experiment that the user cannot change.
OF_RUNNER = frozenset(("entrypoint", "searcher", "hyperparameters"))
# Keys of a training experiment that have no meaning for the search runner.
_OF_TRAINING = (
    "checkpoint_policy min_checkpoint_period min_validation_period optimizations "
    "perform_initial_validation profiling records_per_epoch scheduling_unit"
).split()


@dataclass(frozen=True)
class Job(Recorded):
    """Input of the search runner.

    Attributes:
        config: the user's experiment configuration without possible secrets.
        max_slots: limit on the devices that trials use at the same time; None for no limit.
    """

    plan: Plan
    info: Mapping[str, Any]
    config: Mapping[str, Any]
    hparams: Mapping[str, Any]
    trial: TrialOptions
    max_concurrent_trials: int
    max_slots: int | None = None
    run_full_experiment: bool = False

    @property
    def num_slots(self) -> int:
        """Number of devices that trials may use at the same time."""
        slots = self.max_concurrent_trials * self.plan.slots_per_trial
        return slots if self.max_slots is None else min(slots, self.max_slots)

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))


def remove_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without sections that may hold secrets, for the job file."""
    public = {key: value for key, value in config.items() if key not in _SECRETS}
    storage = config.get(_STORAGE)
    if isinstance(storage, Mapping):
        public[_STORAGE] = {key: storage[key] for key in storage if key.startswith("save_")}
    if isinstance(public.get("environment"), Mapping):
        environment = public["environment"]
        public["environment"] = {
            key: value for key, value in environment.items() if key not in _ENVIRONMENT_SECRETS
        }
    return copy.deepcopy(public)


def restore_secrets(config: Mapping[str, Any], runner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's configuration with the secrets that the job file lacks.

    They are read from the experiment of the search runner.
    """
    secrets = (runner.get(_DATA) or {}).get(_TRIALS_SECRETS)
    # The user's values take precedence: the runner's `checkpoint_storage` keeps more checkpoints.
    return ds_config.merge(_secrets_of(runner) if secrets is None else secrets, config)


def _secrets_of(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {key: config[key] for key in _SECRETS if key in config}
    environment = config.get("environment")
    if isinstance(environment, Mapping):
        secrets = {key: environment[key] for key in _ENVIRONMENT_SECRETS if key in environment}
        hidden.update({"environment": secrets} if secrets else {})
    return hidden


def runner_config(
    user: Experiment, plan: Plan, *, max_restarts: int, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of the search runner's `single` experiment, with `changes`."""
    config = {key: value for key, value in user.config.items() if key not in _OF_TRAINING}
    storage = config.get(_STORAGE)
    if isinstance(storage, Mapping) and storage.get("save_trial_latest") == 0:
        config[_STORAGE] = {**storage, "save_trial_latest": 1}  # the last checkpoint is the result
    resources = dict(config.get("resources") or {})
    for key in ("max_slots", "shm_size"):
        resources.pop(key, None)
    config.update(
        name=f"{RUNNER_NAME}{user.name}",
        labels=_labels(config, user.name),
        entrypoint=["python3", "-m", RUNNER_MODULE, JOB_FILE],
        resources={**resources, "slots_per_trial": 0},
        searcher={
            "name": "single",
            "metric": plan.metric,
            "smaller_is_better": plan.objective.smaller_is_better,
            "max_length": {"batches": RUNNER_LENGTH},
        },
        # For display in the web UI only.
        hyperparameters={
            "method": plan.method,
            "metric": plan.metric,
            "max_trials": plan.max_trials,
            "zero_stages": " ".join(map(str, plan.zero_stages)),
            "seed": plan.seed,
        },
        max_restarts=max_restarts,
    )
    changed = ds_config.merge(config, changes)
    data = changed.get(_DATA) or {}
    if _secrets_of(changed) != _secrets_of(config) and isinstance(data, Mapping):
        changed[_DATA] = {**data, _TRIALS_SECRETS: _secrets_of(user.config)}
    return changed


def describe_state(state: str) -> str:
    """Return a state of an experiment as text: `stopping canceled` for `STOPPING_CANCELED`."""
    return state.lower().replace("_", " ")


def search_tag(runner_id: int) -> str:
    """Return the first words of the description of the trials' experiment."""
    return f"(#{runner_id}) generated"


def full_run_tag(runner_id: int) -> str:
    """Return the first words of the description of the full-length run's experiment."""
    return f"(#{runner_id}) best of the search"


def custom_config(job: Job, runner_id: int, runner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the trials' `custom` experiment.

    `runner` is the configuration of the runner's experiment, which has the secrets.
    """
    config = _user_config(job, search_tag(runner_id), runner)
    config["labels"] = _labels(config, job.info["name"])
    if job.max_slots is not None:
        config["resources"]["max_slots"] = job.max_slots
    config["searcher"] = {
        "name": "custom",
        "metric": job.plan.metric,
        "smaller_is_better": job.plan.objective.smaller_is_better,
    }
    config["hyperparameters"] = {
        **_make_constants(job.hparams),
        ds_config.DSAT_MODE_KEY: True,
        VARIED: _varied_ranges(job.plan),
    }
    # A restarted trial would run out of memory again.
    config.setdefault("max_restarts", 0)
    return config


def full_run_config(
    job: Job, runner_id: int, runner: Mapping[str, Any], best: Trial
) -> dict[str, Any]:
    """Return the configuration of the user's experiment with the best trial's settings."""
    config = _user_config(job, full_run_tag(runner_id), runner)
    hparams = trial_hparams(job.hparams, best.overrides, best.script_args)
    config["hyperparameters"] = _make_constants(hparams)
    return config


def _labels(config: Mapping[str, Any], name: str) -> list[str]:
    """Return labels by which the web UI finds the experiments of a search."""
    return list(dict.fromkeys([*(config.get("labels") or []), LABEL, name]))


def _make_constants(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters in which each mapping with a key `type` is declared a constant.

    Otherwise the master would read such a mapping (optimizer, scheduler) as a range, or refuse it.
    The settings of DeepSpeed and of dsat each become one constant.
    """
    return {name: _make_constant(value, name in _SETTINGS) for name, value in hparams.items()}


def _make_constant(value: Any, whole: bool = False) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {"type": "const", "val": value} if whole or "type" in value else _make_constants(value)


def _user_config(job: Job, tag: str, runner: Mapping[str, Any]) -> dict[str, Any]:
    config = restore_secrets(job.config, runner)
    about = config.get("description") or config.get("name", "")
    config["description"] = f"{tag} - {about}"
    slots = {"slots_per_trial": job.plan.slots_per_trial}
    config["resources"] = {**(config.get("resources") or {}), **slots}
    return config


def _varied_ranges(plan: Plan) -> dict[str, Any]:
    """Return the ranges of the values that vary among trials, for the web UI's plots.

    The plots omit constants, and treat a nested configuration as a constant.
    """
    space = make_space(plan)
    strategies = {read_strategy(plan.base_config), *space.strategies, *fallbacks(plan)}
    micro_batches = space.micro_batches  # ascending, perhaps a million
    sizes = {plan.own_batch.micro_batch, *micro_batches[:1], *micro_batches[-1:]}
    listed = [values for branch in space.branches for key, values in branch.searched if key == GAS]
    settings = [{GAS: gas} for values in listed for gas in values] or [{}]
    return {
        "strategy": {"type": "categorical", "vals": sorted({s.name for s in strategies})},
        "stage": {"type": "categorical", "vals": sorted({s.stage for s in strategies})},
        "micro_batch": _integer(sizes),
        "gradient_accumulation": _integer(  # the smallest micro batch has the most steps
            {1, plan.own_batch.gas, *(space.batch(min(sizes), s).gas for s in settings)}
        ),
    }


def varied_values(trial: Trial) -> dict[str, Any]:
    """Return a trial's values of the hyperparameters in `_varied_ranges`."""
    return {
        "strategy": trial.strategy,
        "stage": trial.stage,
        "micro_batch": trial.batch.micro_batch,
        "gradient_accumulation": trial.batch.gas,
    }


def _integer(values: Collection[int]) -> dict[str, Any]:
    least, most = min(values), max(values)
    if least == most:
        return {"type": "const", "val": least}
    return {"type": "int", "minval": least, "maxval": most}
