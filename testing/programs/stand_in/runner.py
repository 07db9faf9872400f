"""A search runner: one trial for every behaviour that it is given, all of them at once.

Its own hyperparameters are `behaviours`, `max_restarts` and `slots`.
"""

import json
import logging
import pathlib
import uuid
from typing import Any

import determined as det
from determined import core, searcher


class Behaviours(searcher.SearchMethod):  # type: ignore[misc]
    """Closes every trial after its first report; stops when all are closed."""

    def __init__(self, behaviours: list[str]) -> None:
        self.behaviours = behaviours
        self.events: list[Any] = []
        self.names: dict[str, str] = {}

    def initial_operations(self, _: searcher.SearcherState) -> list[Any]:
        operations: list[Any] = []
        for behaviour in self.behaviours:
            request_id = uuid.uuid4()
            self.names[str(request_id)] = behaviour
            hparams = {"behaviour": behaviour}
            operations.append(searcher.Create(request_id, hparams, checkpoint=None))
            operations.append(searcher.ValidateAfter(request_id, 2))
        return operations

    def on_trial_created(self, _: searcher.SearcherState, request_id: uuid.UUID) -> list[Any]:
        return self._note("created", request_id)

    def on_validation_completed(
        self, _: searcher.SearcherState, request_id: uuid.UUID, metric: object, train_length: int
    ) -> list[Any]:
        self._note("completed", request_id, metric, train_length)
        return [searcher.Close(request_id)]

    def on_trial_exited_early(
        self,
        _: searcher.SearcherState,
        request_id: uuid.UUID,
        exited_reason: searcher.ExitedReason,
    ) -> list[Any]:
        return self._note("exited", request_id, exited_reason.value)

    def on_trial_closed(self, state: searcher.SearcherState, request_id: uuid.UUID) -> list[Any]:
        self._note("closed", request_id)
        if len(state.trials_closed) < len(self.behaviours):
            return []
        return [searcher.Shutdown()]

    def progress(self, state: searcher.SearcherState) -> float:
        return len(state.trials_closed) / len(self.behaviours)

    def save_method_state(self, path: pathlib.Path) -> None:
        state = {"events": self.events, "names": self.names}
        (path / "method.json").write_text(json.dumps(state))

    def load_method_state(self, path: pathlib.Path) -> None:
        state = json.loads((path / "method.json").read_text())
        self.events, self.names = state["events"], state["names"]

    def _note(self, kind: str, request_id: uuid.UUID, *more: object) -> list[Any]:
        self.events.append([kind, self.names[str(request_id)], *more])
        return []


def main(context: core.Context, info: det.ClusterInfo) -> None:
    hparams = info.trial.hparams
    print(f"run {info.trial._trial_run_id} from checkpoint {info.latest_checkpoint}", flush=True)
    method = Behaviours(hparams["behaviours"])
    searcher.RemoteSearchRunner(method, context).run(
        {
            "name": "trials",
            "entrypoint": "python3 trial.py",
            "searcher": {"name": "custom", "metric": "loss", "smaller_is_better": True},
            "max_restarts": hparams.get("max_restarts", 0),
            "resources": {"slots_per_trial": hparams.get("slots", 1)},
        },
        model_dir=".",
    )
    for event in method.events:
        print("event:", json.dumps(event))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    cluster_info = det.get_cluster_info()
    assert cluster_info is not None
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as core_context:
        main(core_context, cluster_info)
