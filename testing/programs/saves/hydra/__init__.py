"""A stand-in for Hydra, with the modules and calls of hydra-core 1.3."""

from collections.abc import Callable


def main(task: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        from ._internal.hydra import Hydra

        Hydra().run(config_name=None, task_function=task, overrides=[])
        Hydra().multirun(config_name=None, task_function=task, overrides=[])

    return run
