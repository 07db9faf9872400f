"""The decorator of a program."""

from collections.abc import Callable

from ._internal.utils import _run_hydra


def main(task: Callable[[], None]) -> Callable[[], None]:
    return lambda: _run_hydra(task)
