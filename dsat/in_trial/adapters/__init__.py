"""Everything that dsat changes in a user's process: one table of adapters.

`table.TABLE` has a row for each function or method that is wrapped. `install` wraps them when their
modules are imported, before anything else may bind their names. Until a trial begins in the process
(`trial.TRIAL.phase`) they do what they do without dsat.
"""

import importlib.util
import sys
from pathlib import Path

from dsat.in_trial.hook import SPARE_FOLDER

_spare = Path(__file__).parents[2] / SPARE_FOLDER
if importlib.util.find_spec("wrapt") is None and _spare.is_dir():
    sys.path.append(str(_spare))
