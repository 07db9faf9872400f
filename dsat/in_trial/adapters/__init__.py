"""Adapters of the functions that dsat wraps in a user's process.

`table` lists every function and method that is wrapped. `install` wraps those of `TABLE` when their
modules are imported, before other modules can bind their names. Until a trial begins in the process
(`trial.TRIAL.phase`), wrapped functions behave as without dsat.
"""

import importlib.util
import sys
from pathlib import Path

from dsat.in_trial.hook import SPARE_FOLDER

_spare = Path(__file__).parents[2] / SPARE_FOLDER
if importlib.util.find_spec("wrapt") is None and _spare.is_dir():
    sys.path.append(str(_spare))
