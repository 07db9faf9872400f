"""Trials that fail: which of them run again, and what is said of the others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.engines.retries import AGAIN_ALONE, FIXED_PORT
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import TrialKind
from testing.local import PATIENCE_S, Bench, bench_of, ended, launched, wait_until, warnings_of
from testing.scripts import scripts_in
from testing.versions import broken

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench with two slots for trials of one rank."""
    folder = tmp_path_factory.mktemp("singles")
    with bench_of("behaviours", folder, slots=2, imported=True) as bench:
        yield bench


def test_a_trial_that_fails_beside_others_is_run_again_alone(singles: Bench) -> None:
    outcomes = ended(singles, *launched(singles, *["fails beside others"] * 2))
    assert all(outcome.ok for outcome in outcomes), outcomes
    again = [text for outcome in outcomes for text in outcome.warnings if "again alone" in text]
    assert again, "it was said"


# Each start adds a line to a file; from the fourth on it would train.
COUNTS = """
import signal
starts = FOLDER.parents[2] / "starts"
# By a descriptor: a trial changes no older file that Python opens by its name.
with open(os.open(starts, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
    file.write("start\\n")
if len(starts.read_text().splitlines()) < 4:
    {fails}
train(make_engine())
"""


@pytest.mark.parametrize(
    ("fails", "starts"),
    [
        # A warning by Slurm, which may soon end everything: run again once only.
        ("os.kill(os.getpid(), signal.SIGUSR1)", 2),
        # Another program took the port.
        ("raise OSError(98, 'Address already in use')", 2),
        # The settings are the cause.
        ("raise AssertionError('3 is not a multiple of 2')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
)
def test_only_what_is_no_fault_of_the_settings_is_run_again(
    fails: str, starts: int, tmp_path: Path
) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.run("train(make_engine())").well()  # shows that forks work
        ended = scripts.run(COUNTS.format(fails=fails))
    assert not ended.outcome.ok, "it was started again and again"
    assert (tmp_path / "starts").read_text().count("start") == starts


def test_a_trial_on_a_full_disk_has_no_outcome(tmp_path: Path) -> None:
    """The disk would else make its settings look bad, also when the run is resumed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with scripts_in(tmp_path) as scripts:
        scripts.run("train(make_engine())").well()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))  # as full, for this process
        try:
            with pytest.raises(OSError, match="File too large"):
                scripts.run("sys.exit(1)")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


COMPARES = """
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=2)
same = own_config()["train_micro_batch_size_per_gpu"] == parser.parse_known_args()[0].batch_size
assert same, "mismatch"
train(make_engine())
"""


def test_an_error_names_the_flag_that_has_the_users_micro_batch(tmp_path: Path) -> None:
    with scripts_in(tmp_path, own_micro_batch=2) as scripts:
        scripts.run(COMPARES).well()
        for own_again, flag in (("", "--batch_size"), ("assert False", "")):
            found = scripts.run(f"{own_again}{COMPARES}", micro_batch=2 if own_again else 4).outcome
            assert (found.kind, found.batch_flag) == (OutcomeKind.ERROR, flag), found


ACCUMULATES = """
parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, default=2)
parser.parse_known_args()
engine = make_engine()
if BY_ITSELF:
    own, counts = engine.step, itertools.cycle([False, True])
    engine.step = lambda: own() if next(counts) else None
train(engine)
"""


@broken("deepspeed", "==0.17.6", "fails unless each micro step calls engine.step")
def test_the_trial_that_profiles_names_the_flag_that_has_the_users_accumulation(
    tmp_path: Path,
) -> None:
    """A script that skips `engine.step` keeps its global batch only while its flag is kept."""
    with scripts_in(tmp_path, own_gas=2) as scripts:
        for by_itself, gas, flag in ((False, 2, "--accum"), (False, 1, "--accum"), (True, 2, "")):
            script = f"import itertools\nBY_ITSELF = {by_itself}\n{ACCUMULATES}"
            ended = scripts.run(script, gas=gas, kind=TrialKind.PROFILE).well()
            assert ended.outcome.accumulation_flag == flag, ended.outcome


BESIDE = """
starts = FOLDER.parents[2] / f"starts{own_config()['number']}"
with open(os.open(starts, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
    file.write("start\\n")
here = FOLDER.parents[2] / f"here{own_config()['number']}"
here.touch()
import time
while not all((FOLDER.parents[2] / f"here{n}").exists() for n in own_config()["waits"]):
    time.sleep(0.02)
raise AssertionError("3 is not a multiple of 2")
"""


def test_an_error_that_came_again_alone_is_the_settings_own(tmp_path: Path) -> None:
    """Later trials with the same error do not run again."""
    with scripts_in(tmp_path, slots=2) as scripts:
        scripts.run("train(make_engine())").well()
        for number in (0, 2):
            trials = [
                scripts.trial(BESIDE, config={"number": n, "waits": [number, number + 1]})
                for n in (number, number + 1)
            ]
            for trial in trials:
                scripts.engine.launch(trial)
            found: dict[int, Outcome] = {}
            while len(found) < 2:
                found.update(scripts.engine.poll(PATIENCE_S))
            assert {outcome.kind for outcome in found.values()} == {OutcomeKind.ERROR}
    starts = [(tmp_path / f"starts{n}").read_text().count("start") for n in range(4)]
    assert sum(starts[:2]) in (3, 4), "at least one was told to be the other's fault"
    assert starts[2:] == [1, 1]


def test_what_the_script_said_before_it_exited_is_quoted(tmp_path: Path) -> None:
    """click prints such errors, for example when a file is not in a list."""
    refuses = "import sys; print(f'Error: {sys.argv[-1]} is not one of a, b', file=sys.stderr)\n"
    with scripts_in(tmp_path) as scripts:
        outcome = scripts.run(f"{refuses}sys.exit(2)").outcome
    said = "the script ended with sys.exit(2) at train.py:3: Error: <trial>/ds_config.json is not "
    said += "one of a, b"
    assert outcome.message == f"rank 0: {said}"


@pytest.mark.parametrize("status", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_error_counts_although_the_process_ends_at_once(status: int, tmp_path: Path) -> None:
    fails = f"try:\n    train(make_engine(), rows=2**44)\nfinally:\n    os._exit({status})"
    with scripts_in(tmp_path) as scripts:
        outcome = scripts.run(fails).outcome
    assert outcome.kind is OutcomeKind.OOM, outcome


LOSES_ITS_PORT = """
import time
here = [FOLDER.parents[2] / f"here{n}" for n in (0, 1)]
mine = here[own_config()["number"]]
if not mine.exists():
    mine.touch()
    while not all(path.exists() for path in here):
        time.sleep(0.02)
    raise OSError(98, "Address already in use")
train(make_engine())
"""


def test_a_port_that_another_trial_has_is_no_reason_to_start_ranks_otherwise(
    tmp_path: Path,
) -> None:
    with scripts_in(tmp_path, slots=2) as scripts:
        for number in (0, 1):
            profile = scripts.trial(
                LOSES_ITS_PORT, kind=TrialKind.PROFILE, config={"number": number}
            )
            scripts.engine.launch(profile)
        found: dict[int, Outcome] = {}
        while len(found) < 2:
            found.update(scripts.engine.poll(PATIENCE_S))
    first, second = found.values()
    assert first.ok and warnings_of(first) == (AGAIN_ALONE,), first
    assert second.ok and warnings_of(second) == (AGAIN_ALONE, FIXED_PORT), second


UNKNOWN_FLAG = """
starts = FOLDER.parents[2] / "starts"
with open(os.open(starts, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
    file.write("start\\n")
parser = argparse.ArgumentParser()
for flag in ("--local_rank", "--deepspeed_config"):
    parser.add_argument(flag)
parser.parse_args()
"""


def test_a_script_that_refuses_an_added_flag_is_not_run_again(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        first = {"kind": TrialKind.PROFILE, "batch_flag": "--batch-size"}
        outcome = scripts.run(UNKNOWN_FLAG, **first).outcome
    assert outcome.refuses("--batch-size") and not outcome.refuses("--batch")
    [starts] = tmp_path.rglob("starts")
    assert starts.read_text() == "start\n"


IS_LOST = """
import time
starts = FOLDER.parents[2] / f"starts{own_config()['number']}"
with open(os.open(starts, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
    file.write("start\\n")
if own_config()["number"] == 0:
    while not (FOLDER.parents[2] / "over").exists():
        time.sleep(0.02)
    train(make_engine())
if own_config()["number"] == 1 and starts.read_text() == "start\\n":
    os.kill(os.getpid(), signal.SIGTERM)
raise AssertionError("3 is not a multiple of 2")
"""


def test_an_error_that_came_again_beside_others_may_be_their_fault(tmp_path: Path) -> None:
    with scripts_in(tmp_path, slots=2) as scripts:
        scripts.run("train(make_engine())").well()
        trials = [scripts.trial(f"import signal{IS_LOST}", config={"number": n}) for n in range(3)]
        for trial in trials[:2]:
            scripts.engine.launch(trial)
        [(number, _)] = scripts.engine.poll(PATIENCE_S)
        assert number == trials[1].id
        scripts.engine.launch(trials[2])
        wait_until((tmp_path / "starts2").exists, "the last trial")
        (tmp_path / "over").touch()
        found: dict[int, Outcome] = {}
        while len(found) < 2:
            found.update(scripts.engine.poll(PATIENCE_S))
    starts = [(tmp_path / f"starts{n}").read_text().count("start") for n in range(3)]
    assert starts == [1, 2, 2]
