"""Whether what failed in an earlier run may have been mended since."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.tuning.run import Run
from dsat.values.outcome import OutcomeKind

DIGEST = "script"  # its key in a run's info
# Memory that ran out has no other cause than the configuration; all else may have.
_MAY_BE_MENDED = (
    OutcomeKind.ERROR,
    OutcomeKind.INVALID,
    OutcomeKind.TIMEOUT,
    OutcomeKind.HOST_OOM,
    OutcomeKind.DIVERGED,
)
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
_MOST_FILES = 2000


def is_forgotten(earlier: Run, digest: str) -> bool:
    """Whether an earlier run holds failures that a new start should not believe.

    Nothing that ran is worth nothing: the script, a package, the data or the machine was at fault,
    and whoever starts again has most likely seen to it. Beside trials that ran, a failure is
    believed as long as nothing that is known of the script has changed, and what a finished run has
    found stays as it is.

    Args:
        earlier: as its journal says.
        digest: of what is run now; see `digest_of`.
    """
    if not any(outcome.kind in _MAY_BE_MENDED for outcome in earlier.outcomes.values()):
        return False
    if earlier.best is None:
        return True
    return earlier.stop_reason is None and earlier.info.get(DIGEST, digest) != digest


def digest_of(experiment: Experiment, program: Entrypoint) -> str:
    """A digest of the script's folder, of the files that it is given, and of its libraries."""
    folder = experiment.model_dir
    found = [f"{name} {_version(name)}" for name in _PACKAGES]
    for path in _sources(folder):
        found.append(f"{path.relative_to(folder)} {_content(path)}")
    found.append(shlex.join(program.started_by))  # which may hold the program itself
    for arg in (*program.args, *program.started_by):
        path = folder / arg.rpartition("=")[2]
        if os.path.isfile(path):  # an argument may be far too long for a name
            facts = path.stat()
            found.append(f"{arg} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode(errors="replace")).hexdigest()[:16]


def _sources(folder: Path) -> Iterator[Path]:
    """Python files below a folder, those of environments and of dsat's runs left out."""
    count = 0
    for here, below, names in os.walk(folder):
        below[:] = sorted(
            name
            for name in below
            if not name.startswith(".")
            and name not in ("__pycache__", "dsat_runs", "node_modules", "site-packages")
            and not (Path(here) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > _MOST_FILES:
                    return
                yield Path(here) / name


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # a link to nowhere, or not ours to read
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
