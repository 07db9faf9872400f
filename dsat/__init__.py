"""DeepSpeed Autotune: what a training script imports.

Importing this package imports neither torch nor deepspeed nor determined nor transformers.
"""

from dsat.errors import DsatError, UserInputError
from dsat.in_trial.script_api import (
    dsat_reporting_context,
    get_ds_config_from_hparams,
    get_hf_args_with_overwrites,
)

__version__ = "0.1.0"

__all__ = [
    "DsatError",
    "UserInputError",
    "__version__",
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
]
