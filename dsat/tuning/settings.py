"""The settings of a search, each declared with its option.

Options of a single method or place are declared with it (`dsat.search.base.Search.options`,
`dsat.engines.places.base.Provider.options`).

The parser and its help (`dsat.cli.parser`), the keywords of the Python API (`dsat.api`) and the
tables of options in the documents follow from these declarations. A setting that is also a field of
`dsat.space.plan.Plan` must be the same on resuming, except `max_trials` and `finals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.command.ds_config import STAGES, did_you_mean
from dsat.errors import UserInputError
from dsat.options import (
    ANY,
    ARG_MAPPING,
    DURATION,
    GLOBAL_BATCH,
    MEMORY_SIZE,
    PATH,
    SWITCH,
    WHOLE_NUMBER,
    WORD,
    Group,
    Kind,
    at_least,
    option,
    options_of,
)
from dsat.prepare.target import Target
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.space.plan import BY_SIMULATION, MEMORY_MODELS
from dsat.values.objective import METRIC_NAMES
from dsat.values.trial import BatchTriple, TrialOptions

TUNE, RUN = "tune", "run"  # commands with an option `--method`
DEFAULT_METHOD = "model"
ALL = "all"  # stands for all settings in --search and --keep


def _setting(value: Any) -> str:
    if value not in (*SETTING_NAMES, ALL):
        hint = did_you_mean(str(value), SETTING_NAMES) + "`dsat tune --help` lists all settings."
        raise ValueError(f"there is no setting {value!r}. {hint}")
    return str(value)


SETTING = Kind(_setting, metavar="SETTING")


@dataclass(frozen=True, kw_only=True)
class Settings(Target):
    """The settings of a search.

    Attributes:
        search_options: values of the method's options, by parameter of the search's constructor.
        place_options: options of a place of hosts, such as Ray, that the user set, by keyword.
        given: where the user set a setting (a flag, a keyword, or a key of the `autotuning`
            section), by name of the setting; those that the user did not set are absent.
    """

    method: str = option(
        "--method",
        kind=WORD,
        default=DEFAULT_METHOD,
        shell_only=True,  # the Python API has a named argument for it
        group=Group.FIRST,
        help="how to search",
    )
    search_options: Mapping[str, Any] = field(default_factory=dict)
    place_options: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict, compare=False)
    arg_mappings: Mapping[str, str] = option(
        "--arg-mapping",
        kind=ARG_MAPPING,
        many=True,
        default=(),
        group=Group.TARGET,
        help="an argument of the script that must follow a DeepSpeed setting, such as "
        "train_micro_batch_size_per_gpu=--batch-size",
    )
    max_trials: int = option(
        "--max-trials",
        old=("-mt",),
        kind=at_least(2),
        default=50,
        group=Group.FIRST,
        help="maximum number of trials, including that of your own configuration and the finals",
    )
    metric: str = option(
        "-m",
        "--metric",
        kind=WORD,
        choices=METRIC_NAMES,
        default="FLOPS_per_gpu",
        group=Group.FIRST,
        help="what to optimise (default of dsat tune: throughput; of dsat asha and the other "
        "methods: FLOPS_per_gpu)",
    )
    finals: int | None = option(
        "--finals",
        kind=at_least(0),
        group=Group.SEARCH,
        help="after the search, run the best configuration and yours again in turns, in at most N "
        "trials, to confirm the gain. Raise N to confirm a small gain; 0 saves the time (default: "
        "up to 7, or 15 while they take less than 30 %% of the search's time). A quarter of "
        "--max-trials is reserved for finals, at least 5, or 2 if --max-trials is 4 to 11",
    )
    seed: int = option(
        "--random-seed",
        old=("-r",),
        kind=at_least(0),
        default=42,
        group=Group.SEARCH,
        help="seed of every random choice",
    )
    memory_model: str = option(
        "--memory-model",
        kind=WORD,
        choices=MEMORY_MODELS,
        default=BY_SIMULATION,
        group=Group.SEARCH,
        help="how to predict which trials do not fit, so that they are not run: simulation runs "
        "DeepSpeed on fake tensors, in seconds for each strategy (on a cluster, the formula is "
        "used instead); formula answers at once; none predicts nothing",
    )
    zero_stages: tuple[int, ...] | None = option(
        "-z",
        "--zero-stages",
        kind=WHOLE_NUMBER,
        many=True,
        choices=STAGES,
        metavar="STAGE",
        group=Group.FIRST,
        help="the ZeRO stages to search (default: 0 1 2 3, or those that your configuration lists)",
    )
    tune: tuple[str, ...] = option(
        "--search",
        old=("--tune",),
        kind=SETTING,
        many=True,
        default=(),
        group=Group.FIRST,
        help="also search these settings, which your configuration sets or which are not searched "
        f"by default: {', '.join(SETTING_NAMES)}",
    )
    fix: tuple[str, ...] = option(
        "--keep",
        old=("--fix",),
        kind=SETTING,
        many=True,
        default=(),
        group=Group.SPACE,
        help="keep these settings as they are; `all` searches stage and micro batch only",
    )
    listed_switches: Mapping[str, tuple[Any, ...]] = option(
        "--vary",
        old=("--switch",),
        kind=SWITCH,
        many=True,
        default=(),
        group=Group.SPACE,
        help="try values of a switch of your script: of a flag (--num_workers=0,4,8), of a "
        "variable (ENV:NAME=1,2), of a field of TrainingArguments (optim=adamw_torch,adafactor)",
    )
    nvme_path: str | None = option(
        "--nvme-path",
        kind=WORD,
        metavar="DIR",
        group=Group.SPACE,
        help="where offloading to NVMe may write, if nothing else fits",
    )
    train_batch_size: int | str | None = option(
        "--train-batch-size",
        kind=GLOBAL_BATCH,
        group=Group.FIRST,
        help="the global batch size, micro batch x accumulation steps x devices: N, that of your "
        "configuration (own), or any (default of dsat tune: own; of dsat asha and the other "
        "methods: own if your configuration gives a train_batch_size, else any)",
    )
    max_train_batch_size: int | None = option(
        "--max-train-batch-size",
        kind=at_least(1),
        group=Group.SPACE,
        help="fill the global batch up to N with gradient accumulation",
    )
    min_micro_batch: int = option(
        "--min-micro-batch",
        kind=at_least(1),
        default=1,
        group=Group.SPACE,
        help="the smallest micro batch",
    )
    max_micro_batch: int | None = option(
        "--max-micro-batch", kind=at_least(1), group=Group.SPACE, help="the largest micro batch"
    )
    divisible_by: int = option(
        "--divisible-by",
        kind=at_least(1),
        default=1,
        group=Group.SPACE,
        help="only micro batches that are multiples of N",
    )
    max_seq_length: int | None = option(
        "--max-seq-length",
        kind=at_least(1),
        group=Group.SPACE,
        help="the longest sequence of your data, in tokens: the verdict warns if it would not "
        "fit (default: the longest seen, or what the model takes if lengths vary)",
    )
    trial_timeout_s: float = option(
        "--trial-timeout",
        kind=DURATION,
        default="30m",
        group=Group.FIRST,
        help="end a trial that takes longer (90s, 10m, 1h)",
    )
    slot_memory_bytes: int | None = option(
        "--slot-memory",
        kind=MEMORY_SIZE,
        group=Group.FIRST,
        help="cap the memory of each device (24GiB) to imitate a smaller GPU; on a CPU trials have "
        "no limit without it",
    )
    start_profile_step: int = option(
        "--start-profile-step",
        kind=at_least(1),
        default=TrialOptions.start_step,
        group=Group.MEASURING,
        help="the first optimizer step that is measured, counted from 1",
    )
    end_profile_step: int = option(
        "--end-profile-step",
        kind=at_least(1),
        default=TrialOptions.end_step,
        group=Group.MEASURING,
        help="measure at least up to this optimizer step (on an accelerator, 2 s or more after 1 s "
        "of warm-up), and longer while the mean step time is uncertain by over 2 %% and the trial "
        "may still be the best",
    )
    max_profile_steps: int = option(
        "--max-measured-steps",
        old=("--max-profile-steps",),
        kind=at_least(1),
        default=TrialOptions.max_steps,
        group=Group.MEASURING,
        help="the most optimizer steps that are measured, unless these take less than 2 s on an "
        "accelerator",
    )
    slots: int | None = option(
        "--devices",
        old=("--slots", "--num_gpus"),
        kind=at_least(1),
        group=Group.FIRST,
        help="GPUs of each trial, or CPU cores where there is none (default: the ranks that your "
        "command starts, or resources.slots_per_trial)",
    )
    max_slots: int | None = option(
        "--max-slots", old=("-ms",), kind=at_least(1), help="use at most N devices at once"
    )
    max_concurrent_trials: int = option(
        "--max-concurrent-trials",
        old=("-mct",),
        kind=at_least(1),
        default=16,
        help="run at most N trials at once",
    )
    engine: str = option(
        "--engine",
        kind=WORD,
        default="auto",
        help="where trials run: on this machine (local), on the machines of a hostfile (ssh), on "
        "the nodes of a Slurm allocation or Ray cluster, or on a Determined cluster. auto takes "
        "the first of these that it finds: for an experiment file, DET_MASTER or a `det user "
        "login`; a hostfile of the command; a Ray job; a Slurm allocation of several nodes; else "
        "this machine",
    )
    cold: bool = option(
        "--no-fork",
        old=("--cold",),
        help="start every rank as a fresh Python process, for scripts that cannot be forked",
    )
    run_dir: Path | None = option(
        "--run-dir",
        kind=PATH,
        metavar="DIR",
        group=Group.RESULT,
        help="folder of the run (default: dsat_runs/NAME-N)",
    )
    resume: bool = option(
        "--resume",
        group=Group.FIRST,
        help="continue the run in --run-dir, or the newest run of this command, if possible one "
        "with the same options",
    )
    run_full_experiment: bool = option(
        "--run-full-experiment",
        group=Group.RESULT,
        help="after the search, train in full length with the best configuration",
    )
    dry_run: bool = option(
        "--dry-run",
        group=Group.FIRST,
        help="print the plan and run no trial; a command that does not name its script is run, up "
        "to its training",
    )
    json: bool = option(
        "--json",
        shell_only=True,
        group=Group.RESULT,
        help="print the result as JSON, everything else to stderr",
    )
    search_runner_config: Path | None = option(
        "--search-runner-config",
        kind=PATH,
        metavar="FILE",
        group=Group.CLUSTER,
        help="experiment configuration of the search runner",
    )
    max_search_runner_restarts: int = option(
        "--max-search-runner-restarts",
        kind=at_least(0),
        default=5,
        group=Group.CLUSTER,
        help="restarts of the search runner",
    )
    detach: bool = option(
        "--detach", group=Group.CLUSTER, help="return as soon as the search is submitted"
    )

    def __post_init__(self) -> None:
        start = self.start_profile_step
        end = min(self.end_profile_step, start + self.max_profile_steps - 1)
        if end < start:
            raise UserInputError(
                f"{end} is before {self.name_of('start_profile_step')} {start}",
                where=self.name_of("end_profile_step"),
            )
        object.__setattr__(self, "end_profile_step", end)
        if self.max_micro_batch is not None and self.max_micro_batch < self.min_micro_batch:
            raise UserInputError(
                f"{self.max_micro_batch} is less than {self.name_of('min_micro_batch')} "
                f"{self.min_micro_batch}",
                where=self.name_of("max_micro_batch"),
            )
        if self.train_batch_size not in (None, ANY) and self.max_train_batch_size is not None:
            raise UserInputError(
                f"cannot be combined with {self.name_of('max_train_batch_size')}",
                where=self.name_of("train_batch_size"),
            )

    def name_of(self, setting: str) -> str:
        """Return the flag, keyword or key that set a setting; by default its flag."""
        return self.given.get(setting) or _FLAGS[setting]

    def trial_options(self, own: BatchTriple | None = None) -> TrialOptions:
        return TrialOptions(
            timeout_s=self.trial_timeout_s,
            start_step=self.start_profile_step,
            end_step=self.end_profile_step,
            max_steps=self.max_profile_steps,
            slot_memory_bytes=self.slot_memory_bytes,
            own_micro_batch=None if own is None else own.micro_batch,
            own_gas=None if own is None else own.gas,
        )


_FLAGS = {own.name: own.flags[-1] for own in options_of(Settings)}
