"""One run of a program."""

from collections.abc import Callable


def _run_hydra(task: Callable[[], None]) -> None:
    from .hydra import Hydra

    Hydra().run(config_name=None, task_function=task, overrides=[])
