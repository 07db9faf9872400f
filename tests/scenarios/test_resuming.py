"""Runs that were cut off, extended, changed or repeated: nothing is lost or measured twice."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.cli.parser import parse
from dsat.tuning.settings import Settings
from testing.command import run_of
from testing.scenarios import Harm, User
from testing.world import Failure, World
from tests.scenarios.checks import EACH_METHOD, check_complete, check_result, configuration, of_kind

ROOT = Path(__file__).parents[2]


# -- cut off


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_run_cut_off_anywhere_ends_as_a_whole_one(
    tmp_path: Path, method: str, at_once: int
) -> None:
    trials = 14
    whole = User(tmp_path / "whole", World(at_once=at_once))
    whole.has()
    told = whole.tunes("--max-trials", trials, method=method)
    check_complete(whole, told, trials)
    count = len(whole.events())
    for events in range(1, count, 7 if method == "model" else 5):
        user = replace(whole, folder=tmp_path / f"{events}")
        shutil.copytree(whole.folder, user.folder)
        user.cut(events)
        before = [e["trial_id"] for e in user.events() if e["event"] == "finished"]
        told = user.tunes("--max-trials", trials, "--resume", method=method)
        check_complete(user, told, trials)
        ends = [e["trial_id"] for e in user.events() if e["event"] == "finished"]
        assert ends[: len(before)] == before


@pytest.mark.parametrize("seed", range(3))
def test_a_run_cut_off_before_its_finals_begins_the_same_ones(tmp_path: Path, seed: int) -> None:
    """With noise, the finals also depend on predictions of the search's model."""
    user = User(tmp_path, World(seed=seed, step_sd=0.2, run_sd=0.1))
    user.has()
    options = ("--max-trials", 14, "--stop-when", 0)
    user.tunes(*options)
    [at] = [n for n, event in enumerate(user.events()) if event["event"] == "finals"]
    whole = user.events()[at]
    user.cut(at)
    user.tunes(*options, "--resume")
    [again] = [event for event in user.events() if event["event"] == "finals"]
    times = ("elapsed_s", "time_s")
    assert {k: v for k, v in again.items() if k not in times} == {
        k: v for k, v in whole.items() if k not in times
    }


def test_a_run_killed_at_every_trial_comes_to_its_end(tmp_path: Path) -> None:
    user = User(tmp_path, World(at_once=2))
    user.has()
    trials = 10
    for trial in range(trials + 1):
        resume = ("--resume",) if trial else ()
        killed = Harm(signals={trial: (signal.SIGKILL,)})
        told = user.tunes("--max-trials", trials, *resume, method="asha", harm=killed)
        if told.status != -signal.SIGKILL:
            break
    check_complete(user, told, trials)


def test_the_printed_command_overrides_options_of_an_interrupted_run(tmp_path: Path) -> None:
    user = User(tmp_path / "user")
    user.has()
    options = ("--max-trials", 8, "--random-seed", 0)
    interrupt = Harm(signals={5: (signal.SIGINT,)})
    told = user.tunes(*options, method="random", experiment=True, harm=interrupt)
    line = told.err.partition("Train with it: ")[2].splitlines()[0]
    settings, _ = parse(shlex.split(line.partition(" -m dsat ")[2]))
    assert isinstance(settings, Settings)
    assert (settings.max_trials, settings.finals, settings.seed) == (5, 0, 0)
    assert settings.run_full_experiment and settings.resume


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_journal_torn_in_a_line_goes_on(user: User, part: float) -> None:
    user.tunes("--max-trials", 9, method="asha")
    path = user.folder / "run" / "journal.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    told = user.tunes("--max-trials", 9, "--resume", method="asha")
    check_complete(user, told, 9)


@pytest.mark.parametrize("torn", [b"\xff\xfe", b"\0" * 100, b'{"event":"fin'])
def test_a_torn_journal_is_set_aside(user: User, torn: bytes) -> None:
    user.tunes("--max-trials", 9, method="asha")
    user.cut(12)
    path = user.folder / "run" / "journal.jsonl"
    before = path.read_bytes() + torn
    path.write_bytes(before)
    with (user.folder / "train.py").open("a") as script:
        script.write("# changed\n")
    told = user.tunes("--max-trials", 9, "--resume", method="asha")
    check_complete(user, told, 9)
    assert path.with_name("journal-1.jsonl").read_bytes() == before


def test_a_finished_run_is_told_again_and_nothing_is_run(user: User) -> None:
    first = user.tunes("--max-trials", 10)
    again = user.tunes("--max-trials", 10, "--resume")
    for told in (first, again):
        assert told.status == 0
    assert [r["name"] for r in again.trials] == [r["name"] for r in first.trials]
    assert again.json["best"] == first.json["best"] and again.json["gain"] == first.json["gain"]
    more = user.tunes("--max-trials", 10, "--finals", 20, "--resume")
    assert "--finals cannot extend them" in more.err and len(more.trials) == len(first.trials)
    fewer = user.tunes("--max-trials", 5, "--resume")
    assert fewer.status == 0 and len(fewer.trials) == len(first.trials)


@pytest.mark.parametrize("cut", [1, 2, 1000])
@pytest.mark.parametrize("first", ["", '{"event":"another"}\n', '{"event":"paused"}\n'])
def test_a_journal_without_its_first_line_is_refused(user: User, first: str, cut: int) -> None:
    user.tunes("--max-trials", 9, method="asha")
    lines = user.reads("journal.jsonl").splitlines(keepends=True)
    journal = first + "".join(lines[1:cut])
    (user.folder / "run" / "journal.jsonl").write_text(journal)
    told = user.tunes("--max-trials", 9, "--resume", method="asha")
    refusal = re.search(r"line [12] of .* contradicts .* Start a new run", told.err)
    assert (told.status == 1 and refusal) if journal else told.status == 0, told.err


# -- another budget


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_run_goes_on_with_more_trials(user: User, method: str) -> None:
    options = ("--stop-when", 0) if method == "model" else ()
    first = user.tunes("--max-trials", 9, *options, method=method)
    told = user.tunes("--max-trials", 20, *options, "--resume", method=method)
    check_complete(user, told, 20)
    assert len(told.trials) > len(first.trials)
    assert [r["name"] for r in told.trials][: len(first.trials)] == [
        r["name"] for r in first.trials
    ]


@pytest.mark.parametrize(
    ("budget", "done", "finals", "trains"),
    [
        ("--max-trials 60 --finals 0", 55, 0, False),
        ("--max-trials 8", 5, None, False),
        ("--max-trials 8", 5, None, True),
    ],
)
def test_a_resumed_run_keeps_its_own_numbers_of_trials_and_finals(
    user: User, budget: str, done: int, finals: int | None, trains: bool
) -> None:
    """Also after the printed line, which trains with what an interrupted run has found."""
    search = ("--stop-when", 0)
    interrupt = Harm(signals={done: (signal.SIGINT,)})
    user.tunes(*budget.split(), *search, harm=interrupt)
    if trains:
        trained = user.tunes("--max-trials", done, "--finals", 0, *search, "--resume")
        assert len(trained.trials) == done + 1 and not trained.trials[done]["outcome"]
    for _ in range(2):
        told = user.tunes(*search, "--resume")
        assert len(told.trials) == int(budget.split()[1]) and told.json["stop_reason"]
        assert run_of(user.folder / "run").plan.finals == finals


def test_a_run_without_finals_goes_on_into_them(user: User) -> None:
    first = user.tunes("--max-trials", 16, "--finals", 0)
    assert "unconfirmed" in first.json["verdict"][0]
    told = user.tunes("--max-trials", 24, "--finals", 6, "--resume")
    check_complete(user, told, 24)
    assert told.json["finals"]["significant"] and "unconfirmed" not in told.json["verdict"][0]


def test_a_run_goes_on_by_the_finals_that_are_asked_for(user: User) -> None:
    """All parts of dsat read their number from the run, whose journal records it."""
    assert user.tunes("--max-trials", 4, "--finals", 0, method="random").status == 0
    more = ("--max-trials", 10, "--finals", 4, "--resume")
    told = user.tunes(*more, method="random")
    assert told.status == 0, told.err
    assert run_of(user.folder / "run").plan.finals == 4
    assert [row["kind"] for row in told.trials].count("final") in (2, 4)
    assert "(--finals)" not in " ".join(told.json["verdict"])


def test_more_trials_are_nothing_to_a_search_that_expects_nothing_of_them(user: User) -> None:
    first = user.tunes("--max-trials", 40)
    told = user.tunes("--max-trials", 60, "--resume")
    assert [r["name"] for r in told.trials] == [r["name"] for r in first.trials]
    assert told.json["best"] == first.json["best"]


@pytest.mark.parametrize("method", ["model", "random"])
def test_finals_count_until_the_search_begins_another_trial(user: User, method: str) -> None:
    """One more trial is not enough for another pair of finals, so nothing runs."""
    options = ("--stop-when", 0) if method == "model" else ()
    first = user.tunes("--max-trials", 5, *options, method=method)
    again = user.tunes("--max-trials", 6, "--resume", *options, method=method)
    assert again.trials == first.trials and again.json["finals"] == first.json["finals"]
    assert again.json["verdict"][0] == first.json["verdict"][0]
    assert again.json["finals"]["pairs"] == 1
    more = user.tunes("--max-trials", 10, "--resume", *options, method=method)
    kinds = [row["kind"] for row in more.trials[5:]]
    assert kinds[0] == "search" and kinds[-1] == "final"
    assert more.json["finals"]["pairs"] >= 1 and "unconfirmed" not in more.json["verdict"][0]


def test_more_finals_than_the_rules_ask_for_are_left_aside(user: User) -> None:
    """A version with other rules may have run them."""
    told = user.tunes("--max-trials", 8)
    *events, stopped = user.events()
    assert stopped["event"] == "stopped" and told.trials[-1]["kind"] == "final"
    for event in [e for e in events if e["event"] in ("proposed", "finished")][-4:]:
        if event["event"] == "proposed":
            name, number = event["trial"]["name"], event["trial"]["id"] + 2
            events.append({**event, "trial": {**event["trial"], "name": name + "x", "id": number}})
        else:
            events.append({**event, "trial_id": event["trial_id"] + 2})
    lines = [json.dumps(event) + "\n" for event in (*events, stopped)]
    (user.folder / "run" / "journal.jsonl").write_text("".join(lines))
    again = user.types("show", "run", "--json")
    assert again.status == 0 and again.json["gain"] == told.json["gain"]


# -- another plan


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> User:
    """Return a user with a finished search."""
    user = User(tmp_path_factory.mktemp("ran"))
    user.has()
    assert user.tunes("--max-trials", 3, "--finals", 0, method="asha").status == 0
    return user


OTHER_OPTIONS = """
-z 2: zero stages was | --search overlap_comm: search was | --keep sub_group_size: keep was
--nvme-path /nvme: nvme path was | -r 7: random seed was 42; 7 | --divisor 4: divisor was; 4
--max-train-batch-size 64: max train batch size was | --train-batch-size 16: train batch size was
--min-micro-batch 2: min micro batch was | --max-micro-batch 8: max micro batch was
--max-seq-length 512: max seq length was | --divisible-by 4: divisible by was
--slot-memory 12GiB: slot memory was; 12GiB | --memory-model none: memory model was
--switch torch_compile=False,True: false,true | --start-profile-step 2: steps
""".strip().replace("\n", " | ")
OTHER_PLANS = [
    *(({}, option, words) for option, words in (x.split(": ") for x in OTHER_OPTIONS.split(" | "))),
    ({"gradient_clipping": 1.0}, "", "DeepSpeed configuration"),
    ({"train_micro_batch_size_per_gpu": 2}, "", "train_micro_batch_size_per_gpu"),
    *(({}, option, "") for option in ("--max-slots 1", "--no-fork", "--trial-timeout 60s")),
]


@pytest.mark.parametrize(("change", "options", "said"), OTHER_PLANS)
def test_another_plan_is_another_run(
    ran: User, tmp_path: Path, change: dict[str, Any], options: str, said: str
) -> None:
    """Only options that do not affect trials may change."""
    shutil.copytree(ran.folder, tmp_path, dirs_exist_ok=True)
    user = replace(ran, folder=tmp_path)
    if change:
        user.has({"train_micro_batch_size_per_gpu": 1, **change})
    before = user.reads("journal.jsonl")
    more = ("--max-trials", 3, "--finals", 0, "--resume", *options.split())
    told = user.tunes(*more, method="asha")
    assert told.status == (2 if said else 0), told.err
    assert ("Cannot resume: " in told.err) is bool(said)
    assert [part for part in said.split("; ") if part not in told.err] == [], told.err
    assert user.reads("journal.jsonl") == before, "nothing is lost"


def test_the_options_that_the_page_lists_may_change(user: User) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    said = page.partition("### Cannot resume\n")[2].partition("To continue a run")[0]
    listed = re.findall("`(--[a-z-]+)`", said)
    assert listed
    user.tunes("--max-trials", 4)
    options = [word for flag in listed for word in (flag, 60) if flag != "--no-fork" or word != 60]
    told = user.tunes("--resume", *options)
    assert told.status == 0, told.err


def test_another_device_is_another_run(ran: User) -> None:
    user = replace(ran, world=replace(ran.world, device_name="NVIDIA H100 80GB HBM3"))
    told = user.tunes("--max-trials", 3, "--finals", 0, "--resume", method="asha")
    assert told.status == 2
    assert "A100" in told.err and "H100" in told.err and "device" in told.err


# -- earlier runs of the folder


@pytest.mark.parametrize("method", ["model", "asha"])
def test_errors_are_tried_again_and_what_was_measured_is_not(user: User, method: str) -> None:
    """The run was interrupted and the machine repaired: only finals repeat a measurement."""
    mended = user.world
    failure = Failure("ERROR", {"strategy": "z1"}, "a full disk")
    user.world = replace(user.world, failures=(failure,))
    first = user.tunes("--max-trials", 14, "--finals", 0, method=method)
    assert first.status == 0 and any(row["outcome"] == "ERROR" for row in first.trials)
    user.cut(len(user.events()) - 1)  # before it stopped
    shutil.rmtree(user.folder / "run" / "trials")
    user.world = mended
    second = user.tunes("--max-trials", 20, "--finals", 6, "--resume", method=method)
    check_result(user, second)
    assert all(row["outcome"] == "OK" for row in second.trials)
    known = {configuration(row) for row in first.trials if row["outcome"] == "OK"}
    ran = {path.name for path in (user.folder / "run" / "trials").iterdir()}
    again = [row for row in of_kind(second, "baseline", "search") if configuration(row) in known]
    assert len(again) > 2 and any(row["stage"] == 1 for row in second.trials)
    assert not ran & {row["name"] for row in again}
    assert all(row["name"] in ran for row in of_kind(second, "final"))
    assert len(second.trials) <= 20, "what was measured before the interruption counts"


@pytest.mark.parametrize("kind", ["TIMEOUT", "OOM"])
def test_a_failure_that_would_repeat_is_not_run_again(user: User, kind: str) -> None:
    user.world = World(failures=(Failure(kind, {"micro_batch": 16}, "as always"),))
    options = ("--max-trials", 14, "--finals", 0)
    user.tunes(*options, method="random")
    ends = [e["event"] == "finished" and e["outcome"]["kind"] == kind for e in user.events()]
    user.cut(ends.index(True) + 1)
    user.world = World()
    told = user.tunes(*options, "--resume", method="random")
    again = {r["outcome"] for r in told.trials if r["train_micro_batch_size_per_gpu"] == 16}
    assert kind in again


@pytest.mark.parametrize("kind", ["ERROR", "OOM"])
def test_a_first_trial_that_failed_is_run_again_unless_memory_ran_out(
    user: User, kind: str
) -> None:
    user.world = World(failures=(Failure(kind, {}, "no luck"),))
    options = ("--max-trials", 14, "--finals", 0)
    assert user.tunes(*options, method="random").status == 1
    user.world = World()
    told = user.tunes(*options, "--resume", method="random")
    assert told.status == (0 if kind == "ERROR" else 1)
    set_aside = user.folder / "run" / "journal-1.jsonl"
    assert set_aside.exists() is (kind == "ERROR"), "what ran out of memory would only do so again"
    refused = user.tunes(*options, method="random")
    assert refused.status == 2 and "run" in refused.err, "it already holds a run"


@pytest.mark.parametrize("signals", [{}, {0: (signal.SIGINT,)}, {0: (signal.SIGKILL,)}])
def test_results_of_an_older_script_are_not_those_of_the_newer(
    user: User, signals: dict[int, tuple[int, ...]]
) -> None:
    user.tunes("--max-trials", 9, method="random")
    names = ("best_ds_config.json", "best_ds_metrics.json", "status.json", "report.html")
    before = [user.reads(name) for name in names]
    script = user.folder / "train.py"
    text = script.read_text()
    script.write_text(f"{text}# changed\n")
    user.world = replace(user.world, failures=(Failure("ERROR", {}, "no luck"),))
    user.tunes("--max-trials", 20, "--resume", method="random", harm=Harm(signals=signals))
    assert not any((user.folder / "run" / name).exists() for name in names[:3])
    shown = user.types("show", "run")
    assert "No configuration ran" in shown.out or "No trial" in shown.out, shown.out
    assert "best_ds_config.json" not in shown.out
    aside = [name.replace(".", "-1.") for name in names]
    assert [user.reads(name) for name in aside] == before
    script.write_text(text)
    user.world = replace(user.world, failures=())
    assert user.tunes("--max-trials", 20, "--resume", method="random").status == 0
    assert user.best_config()


# -- failures


def test_interruptions_do_not_enlarge_the_budget_of_a_run_with_failures(user: User) -> None:
    user.world = replace(user.world, failures=(Failure("ERROR", {"stage": 2}, "as always"),))
    options = ("--max-trials", 20, "--stop-when", 0)
    user.tunes(*options, harm=Harm(signals={6: (signal.SIGINT,)}))
    for at in (10, 14, 18):
        user.tunes(*options, "--resume", harm=Harm(signals={at: (signal.SIGINT,)}))
    told = user.tunes(*options, "--resume")
    check_result(user, told)
    assert len(told.trials) <= 20


@pytest.mark.parametrize("at", [4, 6, 12])
def test_the_training_command_of_an_interrupted_run_begins_no_trial(user: User, at: int) -> None:
    """A switch without a flag can only be set by dsat, so its command resumes the run."""
    user.world = replace(user.world, failures=(Failure("ERROR", {"stage": 2}, "as always"),))
    first = user.tunes("--max-trials", 14, harm=Harm(signals={at: (signal.SIGINT,)}))
    again = ("--max-trials", len([row for row in first.trials if row["outcome"]]), "--finals", 0)
    told = user.tunes(*again, "--resume")
    assert [row["name"] for row in told.trials] == [row["name"] for row in first.trials]
    assert told.json["best"] == first.json["best"]
