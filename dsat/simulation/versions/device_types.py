"""Device types whose functions are implemented in Python.

torch 2.10 and later register a Python module. Older versions need a device guard and hooks in C++
(`c10/core/impl/DeviceGuardImplInterface.h`, `ATen/detail/PrivateUse1HooksInterface.h`), which are
compiled once for each version of torch and Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from dsat.values.files import PRIVATE_FOLDER, cache_folder, written_atomically

_SOURCE = Path(__file__).with_name("device_guard.cpp")
_NAME = "dsat_device_guard"


def register(name: str, module: Any) -> None:
    """Register a device type, with its functions in `module`, for the rest of the process."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is not None:
        setup(name, backend_module=module)
        return
    _load_guard()
    older: Any = torch  # its annotations lack these functions in some versions
    older.utils.rename_privateuse1_backend(name)
    older.utils.generate_methods_for_privateuse1_backend()
    older._register_device_module(name, module)


def _load_guard() -> None:
    """Load the device guard from the cache, or compile it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    text = _SOURCE.read_bytes()
    versions = f"{torch.__version__} {platform.python_version()} {platform.machine()}"
    key = hashlib.sha256(text + versions.encode()).hexdigest()[:16]
    library = cache_folder("devices") / key / f"{_NAME}.so"
    if library.is_file():
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        return
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise RuntimeError(
            f"simulating a device with torch {torch.__version__} needs a C++ compiler. Install "
            "g++, or use torch 2.10"
        )
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(prefix="dsat-") as building:
        cpp_extension.load(_NAME, [str(_SOURCE)], build_directory=building, is_python_module=False)
        with contextlib.suppress(OSError):  # the cache is optional
            library.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            with written_atomically(library) as temporary:
                shutil.copyfile(Path(building) / library.name, temporary)
