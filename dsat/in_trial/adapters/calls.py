"""Calls that pass through an adapter.

An exception of a function that this module calls does not count as an error of dsat: see
`failures`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from dsat.in_trial.adapters.trial import ALWAYS, TRIAL, Phase, RunningTrial


class Call(NamedTuple):
    """A call of an adapted function by the script or a library.

    Attributes:
        function: the adapted function; wrappers call it through `proceed` and `proceed_with`.
        name: the function as users know it, such as `torch.save`.
        owner: object whose method is called; meaningless for functions.
    """

    trial: RunningTrial
    function: Callable[..., Any]
    name: str
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def proceed(self) -> Any:
        """Call the function with the caller's arguments."""
        return self.function(*self.args, **self.kwargs)

    def proceed_with(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with other arguments."""
        return self.function(*args, **kwargs)

    def replace(self, name: str, position: int, value: Any) -> Call:
        """Return the call with one argument changed; append it if it is absent."""
        if name in self.kwargs:
            return self._replace(kwargs={**self.kwargs, name: value})
        return self._replace(args=(*self.args[:position], value, *self.args[position + 1 :]))

    def argument(self, name: str, position: int) -> Any:
        """Return the value of an argument; None if it is absent."""
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else None)


class Adapter(NamedTuple):
    """Function or method of a library, and the wrapper that is called instead.

    Attributes:
        wrapper: called instead of the function; its docstring's first paragraph is for users.
        versions: versions of the library that have the function; empty for all supported ones.
        phases: phases of the process in which the wrapper is called.
    """

    module: str
    attribute: str
    wrapper: Callable[[Call], Any]
    versions: str = ""
    phases: tuple[Phase, ...] = ALWAYS


def entrance(adapter: Adapter, owner: Any = None) -> Callable[..., Any]:
    """Return a `wrapt` wrapper for an adapter.

    In the adapter's phases it calls the adapter's wrapper, in others the function. `owner`: the
    object, if a method is wrapped in one object only and not in its class.
    """
    wrapper, phases = adapter.wrapper, frozenset(adapter.phases)
    name = f"{adapter.module.partition('.')[0]}.{adapter.attribute}"

    def enter(
        function: Callable[..., Any], instance: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if TRIAL.phase not in phases:
            return function(*args, **kwargs)
        here = instance if owner is None else owner
        return wrapper(Call(TRIAL, function, name, here, args, dict(kwargs)))

    return enter


def caller() -> FrameType:
    """Return the frame that called the adapted function; for use inside its wrapper."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame.f_back or frame
