"""A run as a file that may be given away: no names, paths, arguments or secrets.

The format is described in docs/sharing.md. A later version of dsat reads files of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.errors import UserInputError
from dsat.inputs import document
from dsat.inputs.ds_config import BATCH_KEYS, flat
from dsat.inputs.switches import SWITCHES
from dsat.report import format as fmt
from dsat.report.run_view import RunView, TrialView
from dsat.report.table import Table
from dsat.space.knobs import KNOBS
from dsat.values.codec import DecodeError, Recorded
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
_LONGEST_WORD = 24  # of a setting's value


@dataclass(frozen=True)
class SharedModel(Recorded):
    """Shape of the model; see `ModelProfile`."""

    num_params: int
    trainable_params: int
    param_bytes: int
    activation_bytes_per_sample: int
    flops_per_sample: float
    longest_sequence: int | None = None


@dataclass(frozen=True)
class SharedHardware(Recorded):
    """Slots of a trial.

    Attributes:
        accelerator: DeepSpeed's name of it; empty if unknown.
        device: name of the devices; empty if unknown.
        slots, slots_per_host: of a trial, and of each host; 0 if all are on one.
        slot_memory_bytes: what a slot may use.
        software: versions of Python, torch and DeepSpeed.
    """

    accelerator: str
    device: str
    slots: int
    slots_per_host: int
    slot_memory_bytes: int
    software: str = ""


@dataclass(frozen=True)
class SharedTrial(Recorded):
    """One configuration that was measured, or ran out of memory.

    Attributes:
        kind: of the trial: `baseline`, `search` or `final`.
        outcome: a value of `OutcomeKind`.
        config: settings by dotted path, batch sizes among them.
        switches: of the script.
        throughput: samples/s over all slots.
        latency_ms: of an optimizer step.
        ci95: half-width of the 95 % confidence interval of `latency_ms`, as a fraction of it.
        predicted_bytes, used_bytes: peak memory of a slot.
    """

    kind: str
    outcome: str
    config: Mapping[str, Any]
    switches: Mapping[str, Any] = field(default_factory=dict)
    throughput: float | None = None
    latency_ms: float | None = None
    ci95: float | None = None
    flops_per_slot: float | None = None
    tokens_per_second: float | None = None
    predicted_bytes: int | None = None
    used_bytes: int | None = None

    @classmethod
    def of(cls, view: RunView, each: TrialView) -> SharedTrial:
        """Return what may be shared of a trial that ended."""
        assert each.outcome is not None
        metrics, config = each.outcome.metrics, flat(view.plan.config(each.trial.overrides))
        switches = {**view.own_switches, **each.trial.script_args}
        measured = metrics and {
            "throughput": metrics.throughput,
            "latency_ms": metrics.latency,
            "ci95": metrics.ci95,
            "flops_per_slot": metrics.FLOPS_per_gpu,
            "tokens_per_second": metrics.tokens_per_second,
        }
        return cls(
            each.trial.kind.value,
            each.outcome.kind.value,
            {key: value for key, value in config.items() if key in _KEPT and _is_plain(value)},
            {key: switches[key] for key in SWITCHES if key in switches},
            predicted_bytes=each.trial.predicted_bytes,
            used_bytes=each.used_bytes,
            **(measured or {}),
        )


@dataclass(frozen=True)
class SharedRun(Recorded):
    """A run without anything that tells whose it is.

    Attributes:
        metric: that was optimised.
        best: position of the recommended trial in `trials`; None if there is none.
    """

    model: SharedModel
    hardware: SharedHardware
    metric: str
    trials: tuple[SharedTrial, ...]
    best: int | None = None
    dsat: str = __version__
    schema: str = SCHEMA
    version: int = VERSION

    @classmethod
    def of(cls, view: RunView) -> SharedRun:
        """Return what may be shared of a run.

        Raises:
            UserInputError: its model was not profiled.
        """
        outcomes = [each.outcome for each in view.trials if each.outcome is not None]
        profile = next((o.profile for o in outcomes if o.profile is not None), None)
        if profile is None:
            raise UserInputError("has no trial that ran to its end", where="run")
        lengths = [o.sequences.longest for o in outcomes if o.sequences is not None]
        kept = [each for each in view.ended if each.trial.kind is not TrialKind.PROFILE]
        info, plan = view.info, view.plan
        positions = [at for at, each in enumerate(kept) if each.is_best]
        return cls(
            SharedModel(
                profile.num_params,
                profile.trainable_params,
                profile.param_bytes,
                profile.activation_bytes_per_sample,
                profile.flops_per_sample,
                max(lengths, default=None),
            ),
            SharedHardware(
                str(info.get("accelerator", "")),
                str(info.get("device", "")),
                plan.slots_per_trial,
                plan.slots_per_host,
                profile.slot_memory_bytes,
                str(info.get("software", "")),
            ),
            plan.metric,
            tuple(SharedTrial.of(view, each) for each in kept),
            positions[0] if positions else None,
        )


def text_of(run: SharedRun) -> str:
    """Return the text of a run's file."""
    return json.dumps(run.to_json(), indent=1) + "\n"


def write(run: SharedRun, path: Path) -> None:
    """Write a run's file.

    Raises:
        UserInputError: there is such a file.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text_of(run))
    except FileExistsError:
        raise UserInputError(
            "exists already", where=str(path), hint="Name another file with --share."
        ) from None


def table(runs: Sequence[SharedRun]) -> Table:
    """Return a row for each run, with its best configuration."""
    rows = []
    for run in runs:
        best, hardware = None if run.best is None else run.trials[run.best], run.hardware
        value = "-"
        if best is not None and best.throughput is not None:
            value = fmt.metric("throughput", best.throughput)
            value += "" if best.ci95 is None else f" ±{fmt.percent(best.ci95)}"
        rows.append(
            (
                f"{hardware.slots} x {hardware.device or 'unknown device'}",
                f"{run.model.num_params:,}",
                "-" if best is None else str(best.config.get("zero_optimization.stage", 0)),
                "-" if best is None else str(best.config.get(BATCH_KEYS[1], "-")),
                value,
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
        run = SharedRun.from_json(data)
        if run.best is not None and not 0 <= run.best < len(run.trials):
            raise DecodeError("best", "is no position in trials")
        return run
    except DecodeError as error:
        raise UserInputError(str(error), where=str(path)) from None


def _is_plain(value: Any) -> bool:
    """Return whether a setting's value is a number, a switch or a short word."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_WORD and value.replace("_", "").isalnum()
    return value is None or isinstance(value, (bool, int, float))
