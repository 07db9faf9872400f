"""Cache of outcomes in front of another engine."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.command import ds_config
from dsat.engines import Engine
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind


class CachedEngine:
    """Engine that answers known trials at once, and has another engine run the rest.

    Args:
        engine: runs the unknown trials.
        known: outcomes by `key`.
        plan: of the trials.
    """

    def __init__(self, engine: Engine, known: Mapping[str, Outcome], plan: Plan) -> None:
        self._engine = engine
        self._known = known
        self._plan = plan
        self._answers: list[tuple[int, Outcome]] = []

    @property
    def num_slots(self) -> int:
        return self._engine.num_slots

    def launch(self, trial: Trial) -> None:
        again = trial.kind is TrialKind.FINAL  # it confirms a known outcome
        outcome = None if again else self._known.get(key(trial, self._plan))
        if outcome is None or (trial.profiles and outcome.profile is None):
            self._engine.launch(trial)
        else:
            self._answers.append((trial.id, outcome))

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        answers, self._answers = self._answers, []
        return answers or self._engine.poll(timeout_s)

    def cancel(self, trial_id: int) -> None:
        self._engine.cancel(trial_id)

    def close(self) -> None:
        self._answers = []
        self._engine.close()


def key(trial: Trial, plan: Plan) -> str:
    """Return a key that is equal for trials that measure the same; a profile trial does not."""
    return ds_config.fingerprint(
        {
            "profile": trial.kind is TrialKind.PROFILE,
            "config": plan.config(trial.overrides),
            "script_args": dict(trial.script_args),
        }
    )
