"""A run as a file that may be given away: no names, paths, arguments or secrets.

The format is described in docs/sharing.md. A later version of dsat reads files of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.command import document
from dsat.command.ds_config import BATCH_KEYS, flat
from dsat.command.switches import SWITCHES
from dsat.errors import UserInputError
from dsat.report import format as fmt
from dsat.report.run_view import RunView, TrialView
from dsat.report.table import Table
from dsat.space.knobs import KNOBS
from dsat.values.codec import DecodeError, Recorded
from dsat.values.files import written_atomically
from dsat.values.objective import METRIC_NAMES
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.text import printable
from dsat.values.trial import TrialKind

SCHEMA, VERSION = "dsat-run", 1
# The only settings that leave the machine: those that decide speed and memory, and name nothing.
_KEPT = frozenset(
    (
        *BATCH_KEYS,
        *(knob.path for knob in KNOBS),
        *("zero_optimization.stage", "optimizer.type", "data_types.grad_accum_dtype"),
        *(f"zero_optimization.offload_{part}.device" for part in ("optimizer", "param")),
        *(f"{kind}.enabled" for kind in ("bf16", "fp16", "torch_autocast")),
    )
)
_LONGEST_NAME = 200
_LONGEST_WORD = 24  # of a setting's value


@dataclass(frozen=True)
class SharedTrial(Recorded):
    """One configuration, and how its trial ended.

    Attributes:
        strategy: name of its `Strategy`.
        config: settings by dotted path, batch sizes among them.
        switches: of the script.
        predicted_bytes, used_bytes: peak memory of a slot.
    """

    kind: TrialKind
    outcome: OutcomeKind
    strategy: str
    config: Mapping[str, Any]
    switches: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics | None = None
    predicted_bytes: int | None = None
    used_bytes: int | None = None

    @classmethod
    def of(cls, view: RunView, each: TrialView, outcome: Outcome) -> SharedTrial:
        """Return what may be shared of a trial."""
        config = flat(view.plan.config(each.trial.overrides))
        switches = {**view.own_switches, **each.trial.script_args}
        return cls(
            each.trial.kind,
            outcome.kind,
            each.trial.strategy,
            {key: value for key, value in config.items() if key in _KEPT and _is_plain(value)},
            {key: switches[key] for key in SWITCHES if _is_plain(switches.get(key, ()))},
            outcome.metrics,
            each.trial.predicted_bytes,
            each.used_bytes,
        )


@dataclass(frozen=True)
class SharedRun(Recorded):
    """A run without anything that tells whose it is.

    Attributes:
        model: without the names of its inputs.
        metric: that was optimised.
        trials: those that ended, the profile's left out.
        best: position of the recommended trial in `trials`; None if there is none.
        best_value: of the metric; the median of its runs in the finals, if there were any.
        slots, slots_per_host: of a trial, and of each host; 0 if all are on one.
        accelerator, device: DeepSpeed's name of the slots, and their product name.
        software: versions of Python, torch and DeepSpeed.
        longest_sequence: of the data, in tokens.
    """

    model: ModelProfile
    metric: str
    trials: tuple[SharedTrial, ...]
    best: int | None
    slots: int
    slots_per_host: int = 0
    accelerator: str = ""
    device: str = ""
    software: str = ""
    longest_sequence: int | None = None
    best_value: float | None = None
    dsat: str = __version__
    schema: str = SCHEMA
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.best is not None and not 0 <= self.best < len(self.trials):
            raise ValueError("best is no position in trials")
        if self.metric not in METRIC_NAMES:
            raise ValueError("metric is unknown")
        for told in (self.accelerator, self.device, self.software):
            if printable(told, _LONGEST_NAME) != told:
                raise ValueError("a name holds what is no name")

    @property
    def best_trial(self) -> SharedTrial | None:
        """The recommended trial."""
        return None if self.best is None else self.trials[self.best]

    @classmethod
    def of(cls, view: RunView) -> SharedRun:
        """Return what may be shared of a run.

        Raises:
            UserInputError: its model was not profiled.
        """
        ended = [(each, each.outcome) for each in view.trials if each.outcome is not None]
        if view.profile is None:
            raise UserInputError("has no trial that ran to its end", where="run")
        kept = [pair for pair in ended if pair[0].trial.kind is not TrialKind.PROFILE]
        lengths = [o.sequences.longest for _, o in kept if o.sequences is not None]
        told = {key: str(value) for key, value in view.info.items()}
        return cls(
            _without_names(view.profile),
            view.plan.metric,
            tuple(SharedTrial.of(view, each, outcome) for each, outcome in kept),
            next((at for at, (each, _) in enumerate(kept) if each.is_best), None),
            view.plan.slots_per_trial,
            view.plan.slots_per_host,
            told.get("accelerator", ""),
            told.get("device", ""),
            told.get("software", ""),
            longest_sequence=max(lengths, default=None),
            best_value=view.best_value,
        )


def text_of(run: SharedRun) -> str:
    """Return the text of a run's file."""
    return json.dumps(run.to_json(), indent=1) + "\n"


def write(run: SharedRun, path: Path) -> None:
    """Write a run's file.

    Raises:
        UserInputError: there is such a file.
    """
    if path.exists():
        raise UserInputError(
            "exists already", where=str(path), hint="Name another file with --share."
        )
    with written_atomically(path) as temporary:
        temporary.write_text(text_of(run), encoding="utf-8")


def table(runs: Sequence[SharedRun]) -> Table:
    """Return a row for each run, with its best configuration."""
    rows = []
    for run in runs:
        best = run.best_trial
        config = {} if best is None else best.config
        rows.append(
            (
                f"{run.slots} x {run.device or 'unknown device'}",
                f"{run.model.num_params:,}",
                str(config.get("zero_optimization.stage", "-")),
                str(config.get(BATCH_KEYS[1], "-")),
                fmt.metric(run.metric, run.best_value),
                fmt.memory(None if best is None else best.used_bytes),
            )
        )
    heads = ("devices", "parameters", "stage", "micro batch", "best", "memory used")
    return Table(heads, rows)


def read(path: Path) -> SharedRun:
    """Read a file that `text_of` made.

    Raises:
        UserInputError: it is none, or of a later version.
    """
    try:
        data = json.loads(document.read_text(path))
    except ValueError as error:
        raise UserInputError(f"is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UserInputError(
            "is not a shared run", where=str(path), hint="`dsat export --share FILE` writes one."
        )
    if data.get("version") != VERSION:
        raise UserInputError(
            f"has version {printable(str(data.get('version')), 20)} of the format, and this dsat "
            f"reads {VERSION}",
            where=str(path),
            hint="Update dsat.",
        )
    try:
        return SharedRun.from_json(data)
    except DecodeError as error:
        raise UserInputError(str(error), where=str(path)) from None


def _without_names(profile: ModelProfile) -> ModelProfile:
    """Return a profile without what the user has named: inputs, kernels of a hub, an optimizer."""
    switches = {
        name: replace(switch, values=tuple(filter(_is_plain, switch.values)))
        for name, switch in profile.switches.items()
    }
    optimizer = profile.optimizer
    if not optimizer.by_element:  # others are all of torch or DeepSpeed
        optimizer = replace(optimizer, kind="")
    return replace(
        profile, batch_dimensions={}, fed_instead={}, switches=switches, optimizer=optimizer
    )


def _is_plain(value: Any) -> bool:
    """Return whether a setting's value is a number, a switch or a short word."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_WORD and value.replace("_", "").isalnum()
    return value is None or isinstance(value, (bool, int, float))
