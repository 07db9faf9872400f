"""Calls that pass through an adapter.

An exception that comes through a frame of this module is not dsat's: see `failures`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from dsat.in_trial.adapters.trial import ALWAYS, TRIAL, Phase, RunningTrial

# Takes the trial, the original function, the object that a method belongs to, and the arguments.
Wrapper = Callable[[RunningTrial, "Original", Any, tuple[Any, ...], dict[str, Any]], Any]


class Adapter(NamedTuple):
    """Function or method of a library, and the wrapper that is called instead.

    Attributes:
        wrapper: what is called; the first line of its docstring describes it for users.
        versions: of the library that have it; empty for all that are supported.
    """

    module: str
    attribute: str
    wrapper: Wrapper
    versions: str = ""
    phases: tuple[Phase, ...] = ALWAYS

    @property
    def name(self) -> str:
        """The function as users know it, such as `torch.save`."""
        return f"{self.module.partition('.')[0]}.{self.attribute}"


class Original:
    """The adapted function, which may be called."""

    __slots__ = ("function", "name")

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def entrance(adapter: Adapter, owner: Any = None) -> Callable[..., Any]:
    """Return a wrapper for `wrapt` that calls an adapter's, or passes the call on.

    `owner` is the object that has the function, if it is not a class.
    """
    wrapper, phases, name = adapter.wrapper, frozenset(adapter.phases), adapter.name

    def enter(
        function: Callable[..., Any], instance: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if TRIAL.phase not in phases:
            return function(*args, **kwargs)
        here = instance if owner is None else owner
        return wrapper(TRIAL, Original(function, name), here, args, dict(kwargs))

    return enter


def call_with(
    original: Original, name: str, position: int, value: Any, args: Any, kwargs: Any
) -> Any:
    """Call the adapted function with another value of one argument."""
    if name in kwargs:
        return original(*args, **{**kwargs, name: value})
    return original(*args[:position], value, *args[position + 1 :], **kwargs)


def caller() -> FrameType:
    """Return the frame that called the adapted function; for use inside its wrapper."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame.f_back or frame
