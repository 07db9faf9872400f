"""A search on a cluster when things go wrong: with real processes, trials that only pretend."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.on_cluster import RUNNER, SEARCH, changed, cluster, ended

pytestmark = pytest.mark.slow

OPTIONS = ("--max-concurrent-trials", 2, "--max-micro-batch", 16)
ENDS = {  # of trials, by what they do; the first is the user's own configuration
    "runs": (OutcomeKind.OK, ""),
    "crashes": (OutcomeKind.ERROR, "KeyError: 'no such thing'"),
    "runs out of memory": (OutcomeKind.OOM, "out of memory, by its log"),
    "rejects": (OutcomeKind.INVALID, "the script raised InvalidHP"),
    "leaves": (OutcomeKind.INVALID, "the trial ended without a report"),
    "leaves with a status": (OutcomeKind.ERROR, "the trial failed"),
    "is killed": (OutcomeKind.HOST_OOM, "a rank was killed with SIGKILL"),
    "reports its own": (OutcomeKind.INVALID, "the script reported its own searcher metric, 0"),
}


def test_a_runner_that_is_killed_goes_on_where_it_was_however_trials_end(tmp_path: Path) -> None:
    behaviours = list(ENDS)
    program = changed("pretend", tmp_path, hyperparameters={"behaviours": behaviours})
    with cluster(tmp_path) as there:
        most = ("--max-trials", len(behaviours), "--finals", 0)
        process = there.begin_search(program, *OPTIONS, *most)
        there.until_reported(1)
        there.kill_runner()
        told = ended(process)
        assert told.status == 0, told
        assert len(there.created()) == len(there.master.trials(SEARCH)) == len(behaviours)
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")
        assert there.master.trials(RUNNER)[0].restarts == 1
        found = [outcome for _, outcome in sorted(there.outcomes().items())]  # two run at a time
        for behaviour, outcome in zip(behaviours, found, strict=True):
            kind, message = ENDS[behaviour]
            assert (outcome.kind, outcome.message[: len(message)]) == (kind, message), behaviour


@pytest.mark.nightly
def test_a_command_that_leaves_does_not_end_the_search_but_a_runner_that_is_gone_does(
    tmp_path: Path,
) -> None:
    """Its trials notice it, as nobody else can."""
    with cluster(tmp_path) as there:
        process = there.begin_search("pretend", *OPTIONS, "--max-trials", 60)
        there.until_reported(1)
        os.killpg(process.pid, signal.SIGINT)
        assert ended(process).status == 130
        there.until_reported(3)
        there.user.get_experiment(RUNNER).kill()
        assert there.state(SEARCH) == "CANCELED"
        said = "the search runner, experiment 1, is gone (canceled): ending experiment 2"
        assert any(said in there.master.log(trial.id) for trial in there.master.trials(SEARCH))
