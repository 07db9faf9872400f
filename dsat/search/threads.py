"""Linear algebra in one thread.

The matrices of a search are so small that BLAS threads mostly wait for each other, and waiting
threads keep busy the cores on which trials are measured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy  # noqa: F401  (whose BLAS the libraries are searched for)

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # in the container of a cluster's search runner, where no trial runs
    _libraries: Any = None
else:
    _libraries = ThreadpoolController()

_F = TypeVar("_F", bound=Callable[..., Any])
_one_at_a_time = threading.RLock()  # the limit is the whole process's


def in_one_thread(function: _F) -> _F:
    """Limit a function's linear algebra to the calling thread."""
    if _libraries is None:
        return function

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time, _libraries.limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited  # type: ignore[return-value]
