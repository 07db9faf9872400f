"""Begin of a trial in this process, from which the adapters act."""

from __future__ import annotations

import os
from pathlib import Path

from dsat.in_trial.adapters import trackers
from dsat.in_trial.adapters.install import install
from dsat.in_trial.adapters.trial import TRIAL, Phase
from dsat.in_trial.adapters.user_files import UserFiles
from dsat.in_trial.rank_files import SPEC_FILE, RankSpec


def begin(folder: Path, *, is_alone: bool = False) -> None:
    """Have the adapters act for the trial in a folder, which may have no specification yet.

    In the first run a process does not know whether it is a rank.

    Args:
        is_alone: the user's command has no launcher.
    """
    install()
    if TRIAL.folder is not None:
        return
    TRIAL.folder, TRIAL.is_alone = folder, is_alone
    if (folder / SPEC_FILE).exists() and RankSpec.of_folder(folder).is_full_run:
        TRIAL.phase = Phase.TRAINING
        return
    TRIAL.files = UserFiles(folder)
    TRIAL.phase = Phase.PREPARING
    os.environ.update(trackers.variables_off(folder))
