"""What the benchmark of whole tunings reads and says."""

from __future__ import annotations

from benchmarks import real_scripts
from dsat.report.log_lines import Narrator
from dsat.values.trial import TrialKind
from testing.made_up_runs import run_of_world


def test_the_first_useful_line_is_of_the_first_configuration_that_is_not_the_users() -> None:
    run = run_of_world()
    narrator, useful = Narrator(), []
    for trial_id, outcome in run.outcomes.items():
        trial = run.trials[trial_id]
        if any(map(real_scripts.FIRST.search, narrator.result(run, trial, outcome))):
            useful.append(trial.kind)
    assert useful and useful[0] is TrialKind.SEARCH
    assert not {TrialKind.PROFILE, TrialKind.BASELINE} & set(useful)
