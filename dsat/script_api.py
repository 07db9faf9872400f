"""What a training script calls. Importing this imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsat import ds_config
from dsat.ds_config import CONFIG_KEY, OVERWRITE_KEY
from dsat.errors import UserInputError


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] = "."
) -> dict[str, Any]:
    """The DeepSpeed configuration of this trial, for `deepspeed.initialize(config=...)`.

    The file that `hparams["deepspeed_config"]` names, with `hparams["overwrite_deepspeed_args"]`
    laid over it: dicts are merged key by key, anything else is replaced. Drop-in for
    `determined.pytorch.dsat.get_ds_config_from_hparams`.

    Args:
        hparams: the trial's hyperparameters. `deepspeed_config` may also be the configuration
            itself, as a dict.
        base_dir: what the path of the configuration is relative to.

    Raises:
        UserInputError: there is no `deepspeed_config`, or its file cannot be read.
    """
    if CONFIG_KEY not in hparams:
        raise UserInputError(
            f"the hyperparameters have no {CONFIG_KEY!r}, only {sorted(hparams)}",
            where="get_ds_config_from_hparams",
            hint="Add it to `hyperparameters` in the experiment configuration.",
        )
    base = hparams[CONFIG_KEY]
    if not isinstance(base, Mapping):
        path = Path(base_dir) / base
        try:
            base = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserInputError(
                f"the DeepSpeed configuration cannot be read: {error}", where=str(path)
            ) from error
    return ds_config.merge(base, hparams.get(OVERWRITE_KEY) or {})


@contextlib.contextmanager
def dsat_reporting_context(
    core_context: Any, op: Any, steps_completed: int | None = None
) -> Iterator[None]:
    """Reports what dsat measures as the trial's result; outside a dsat run it does nothing.

    The engine's `forward`, `backward` and `step` must be called inside. Drop-in for
    `determined.pytorch.dsat.dsat_reporting_context`.

    Args:
        core_context: from `determined.core.init()`.
        op: the first operation of `core_context.searcher.operations()`.
        steps_completed: reported with the metrics; the operation's length by default.
    """
    from dsat.meter import TrialComplete

    try:
        yield
    except TrialComplete as complete:
        if core_context.distributed.rank == 0:
            metrics = complete.measurement.metrics.to_json()
            core_context.train.report_validation_metrics(
                steps_completed=op.length if steps_completed is None else steps_completed,
                metrics=metrics,
            )
            op.report_completed(metrics)
        raise
