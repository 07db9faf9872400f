"""Linear algebra in one thread.

The matrices of a search are so small that BLAS threads mostly wait for each other, and waiting
threads keep busy the cores on which trials are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy  # noqa: F401  (whose BLAS is limited)

_F = TypeVar("_F", bound=Callable[..., Any])

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # in the container of a cluster's search runner, where no trial runs

    def in_one_thread(function: _F) -> _F:
        """Return a function as it is."""
        return function

else:
    _libraries = ThreadpoolController()

    def in_one_thread(function: _F) -> _F:
        """Limit a function's linear algebra to the calling thread."""
        limited: _F = _libraries.wrap(limits=1, user_api="blas")(function)
        return limited
