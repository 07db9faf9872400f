"""Runs that others have shared: kept, and the priors of searches on the same devices."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from dsat.report import share
from dsat.report.share import SharedRun
from dsat.search.step_time import TERMS
from dsat.values.files import PRIVATE_FOLDER, cache_folder, write_atomically

_log = logging.getLogger(__name__)

_SHARED = "shared"
_DETERMINED = 0.7  # of a term's standard deviation before any trial
_OF_A_MODEL_SD = 0.5  # of a term, from one model to another on the same devices


def take_in(paths: Sequence[Path]) -> list[SharedRun]:
    """Keep runs that others have shared, so that searches on the same devices begin with them.

    A file that was taken in before changes nothing.

    Raises:
        UserInputError: one of the files is no shared run; nothing is kept.
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
    """Return the runs of others that were taken in."""
    return [share.read(path) for path in sorted(cache_folder(_SHARED).glob("*.json"))]


def priors(accelerator: str, device: str) -> dict[str, tuple[float, float]]:
    """Return what others' runs on the same devices tell of the terms of the model of speed.

    Returns:
        Mean and standard deviation of the logarithm of each term that they determined. How fast a
        device computes is left out: the first trial shows that, for the model at hand.
    """
    runs = [run for run in shared() if (run.accelerator, run.device) == (accelerator, device)]
    found = {}
    for name, (_, unknown_sd) in TERMS.items():
        known = [run.terms[name] for run in runs if name in run.terms]
        known = [(mean, sd) for mean, sd in known if sd < _DETERMINED * unknown_sd]
        if known and name != "compute":
            weights = [1 / (sd**2 + _OF_A_MODEL_SD**2) for _, sd in known]
            mean = sum(w * m for w, (m, _) in zip(weights, known, strict=True)) / sum(weights)
            found[name] = (mean, max(_OF_A_MODEL_SD, sum(weights) ** -0.5))
    if found:
        _log.info("the model of speed begins with %d shared runs on %s", len(runs), device)
    return found
