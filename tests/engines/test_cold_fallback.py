"""A script whose libraries cannot be forked is tuned in fresh processes, without an option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsat.engines.machines.hosts import Host
from dsat.engines.retries import FRESH_PROCESSES_ONLY, NO_SEGMENTS
from dsat.run.run import Run
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import TrialKind
from testing.local import PROGRAMS, bench_of, cpu_machine, warnings_of
from testing.printed import prepared

pytestmark = pytest.mark.slow
UNFORKABLE = "cannot be forked"


@pytest.mark.nightly
def test_the_profile_finds_out_and_later_trials_know(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path) as bench:
        profile = bench.trial(UNFORKABLE, micro_batch=1, kind=TrialKind.PROFILE)
        outcome = bench.run(profile)
        assert outcome.kind is OutcomeKind.OK, bench.log(profile)
        assert warnings_of(outcome) == (FRESH_PROCESSES_ONLY,)
        later = bench.trial(UNFORKABLE, micro_batch=1)
        outcome = bench.run(later)
        assert outcome.kind is OutcomeKind.OK, bench.log(later)
        assert warnings_of(outcome) == ()


def test_only_the_first_trial_is_tried_again(tmp_path: Path) -> None:
    with bench_of("behaviours", tmp_path) as bench:
        outcome = bench.run(bench.trial(UNFORKABLE, micro_batch=1))
    assert outcome.kind is OutcomeKind.ERROR
    assert "this library cannot be forked" in outcome.message


@pytest.mark.nightly
def test_what_refuses_expandable_segments_runs_without(tmp_path: Path) -> None:
    machine = replace(cpu_machine(1), expandable_segments=True)
    with bench_of("behaviours", tmp_path, hosts=[Host(machine)]) as bench:
        outcome = bench.run(bench.trial("refuses segments"))
        assert (outcome.kind, warnings_of(outcome)) == (OutcomeKind.OK, (NO_SEGMENTS,))
        outcome = bench.run(bench.trial("refuses segments", micro_batch=4))
        assert (outcome.kind, warnings_of(outcome)) == (OutcomeKind.OK, ())


@pytest.mark.usefixtures("unchecked_configurations")
def test_a_resumed_run_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS / "tiny")
    ready = prepared("python3 train.py --deepspeed_config ds_config.json", Path(), monkeypatch)
    because = f"{FRESH_PROCESSES_ONLY} (an import started threads)"
    for warnings, remembers in (((), False), ((FRESH_PROCESSES_ONLY,), True), ((because,), True)):
        run = Run()
        run.outcomes[0] = Outcome(OutcomeKind.OK, warnings=warnings)
        assert ready.after(run).settings.cold is remembers
