"""Makes the output folder of a run."""

from collections.abc import Callable, Sequence
from pathlib import Path


class Hydra:
    def run(
        self, config_name: str | None, task_function: Callable[[], None], overrides: Sequence[str]
    ) -> None:
        _run(task_function, overrides, "hydra.run.dir")

    def multirun(
        self, config_name: str | None, task_function: Callable[[], None], overrides: Sequence[str]
    ) -> None:
        _run(task_function, overrides, "hydra.sweep.dir")


def _run(task: Callable[[], None], overrides: Sequence[str], key: str) -> None:
    options = dict(word.split("=", 1) for word in overrides)
    folder = Path(options.get(key, "'outputs/today'")[1:-1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overrides.yaml").write_text("[]")
    task()
