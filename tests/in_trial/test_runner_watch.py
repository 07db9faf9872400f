"""Which trial ends a search whose runner is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.in_trial import runner_watch
from dsat.in_trial.runner_watch import RunnerWatch


@dataclass
class Script:
    """A master's scripted answers, the last of which repeats; time passes only while the trial
    sleeps."""

    runner: list[str | None] = field(default_factory=lambda: ["RUNNING"])
    trial: list[str | None] = field(default_factory=lambda: ["RUNNING"])
    killed: list[int] = field(default_factory=list)
    refuses: int = 0
    now_s: float = 0.0

    def ask(self, request: str, **of: int) -> Any:
        if request == "get_GetExperiment":
            assert of == {"experimentId": 1}
            return SimpleNamespace(experiment=_next(self.runner))
        if request == "get_GetTrial":
            assert of == {"trialId": 7}
            return SimpleNamespace(trial=_next(self.trial))
        assert request == "post_KillExperiment"
        if self.refuses:
            self.refuses -= 1
            raise OSError("not now")
        self.killed.append(of["id"])
        return None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    def watch(self) -> RunnerWatch:
        return RunnerWatch(self.ask, runner_id=1, experiment_id=2, trial_id=7)

    def stay(self) -> float:
        """Return the seconds for which a trial waits to be closed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner_watch, "time", self)
            self.watch().stay_until_closed()
        return self.now_s


def _next(answers: list[str | None]) -> Any:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if answer is None:
        raise OSError("connection refused")
    return SimpleNamespace(state=SimpleNamespace(value=f"STATE_{answer}"))


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELED", "ERROR", "DELETED"])
def test_without_a_runner_the_experiment_is_ended(
    state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = ["RUNNING", "QUEUED", "PAUSED", "STOPPING_CANCELED"]
    script = Script(runner=[None, *alive, state], refuses=1)
    watch = script.watch()
    assert [watch.look() for _ in range(5)] == ["", *alive]
    assert script.killed == []
    assert [watch.look() for _ in range(2)] == ["", state]
    assert script.killed == [2]
    printed = capsys.readouterr().out
    assert state.lower() in printed and "experiment 2" in printed


def test_a_trial_stays_until_it_is_closed_but_not_for_ever() -> None:
    closed = Script(trial=["RUNNING", None, "RUNNING", "STOPPING_COMPLETED"])
    assert closed.stay() < 5.0 and closed.killed == []
    paused = Script(runner=["RUNNING", "PAUSED"])
    assert 10.0 <= paused.stay() < 60.0 and paused.killed == []
    assert 60.0 < Script(runner=[None]).stay() < 600.0
    gone = Script(runner=["RUNNING", "ERROR"])
    assert gone.stay() < 60.0 and gone.killed == [2]
