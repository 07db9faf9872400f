"""DeepSpeed Autotune: functions for training scripts, and the Python API.

Importing this package does not import torch, deepspeed, determined or transformers. The functions
for scripts and the API (`tune`, `estimate`, `load_run`, ...; see `dsat.api`) are imported on first
use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  # an image on a cluster may have any Python
    raise ImportError("dsat needs Python 3.10 or newer, not " + sys.version.split()[0])

from dsat.errors import DsatError, UserInputError

if TYPE_CHECKING:
    from dsat.api import (
        Estimate,
        Projection,
        Result,
        estimate,
        load_run,
        project,
        register_engine,
        register_search,
        tune,
    )
    from dsat.in_trial.script_api import (
        dsat_reporting_context,
        get_batch_config_from_mbs_gas_and_slots,
        get_ds_config_from_hparams,
        get_hf_args_with_overwrites,
    )

__version__ = "0.1.0"

__all__ = [
    "DsatError",
    "Estimate",
    "Projection",
    "Result",
    "UserInputError",
    "__version__",
    "dsat_reporting_context",
    "estimate",
    "get_batch_config_from_mbs_gas_and_slots",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
    "load_run",
    "project",
    "register_engine",
    "register_search",
    "tune",
]


if not TYPE_CHECKING:  # otherwise a type checker accepts any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        is_of_scripts = name.startswith(("dsat_", "get_"))
        module = "dsat.in_trial.script_api" if is_of_scripts else "dsat.api"
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
