"""DeepSpeed Autotune: what a training script imports.

Importing this package imports neither torch nor deepspeed nor determined.
"""

from dsat.errors import DsatError, UserInputError
from dsat.script_api import dsat_reporting_context, get_ds_config_from_hparams

__version__ = "0.1.0"

__all__ = [
    "DsatError",
    "UserInputError",
    "__version__",
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
]
