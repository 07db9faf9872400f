"""Runs that others have shared: kept, and suggested to searches of the same model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from dsat.errors import UserInputError
from dsat.report import share
from dsat.report.share import SharedRun
from dsat.space.space import Suggestion
from dsat.values.files import PRIVATE_FOLDER, cache_folder, write_atomically

_log = logging.getLogger(__name__)
_SHARED = "shared"


def take_in(paths: Sequence[Path]) -> list[SharedRun]:
    """Keep runs that others have shared, so that searches on the same devices begin with them.

    A file that was taken in before changes nothing.
    """
    found = [share.read(path) for path in paths]
    folder = cache_folder(_SHARED)
    folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    for run in found:
        text = share.text_of(run)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        write_atomically(folder / f"{name}.json", text)
    return found


def shared() -> list[SharedRun]:
    """Return the runs of others that were taken in, but for those that cannot be read."""
    found = []
    for path in sorted(cache_folder(_SHARED).glob("*.json")):
        try:
            found.append(share.read(path))
        except UserInputError as error:  # of another version, perhaps
            _log.warning("a shared run is left out: %s", error)
    return found


def suggestions(accelerator: str, device: str, slots: int) -> tuple[Suggestion, ...]:
    """Return the best configurations of others' runs on the same devices."""
    runs = [
        run
        for run in shared()
        if (run.accelerator, run.device, run.slots) == (accelerator, device, slots)
    ]
    return tuple(
        Suggestion(
            run.model.num_params,
            run.model.trainable_params,
            run.best_trial.strategy,
            run.best_trial.config,
            run.best_trial.switches,
        )
        for run in runs
        if run.best_trial is not None
    )
