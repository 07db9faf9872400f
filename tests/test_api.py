"""The Python API: the command line's words and defaults, as keywords and values."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dsat
from dsat import api
from dsat.app import local, past_runs
from dsat.app.prepare import Prepared, prepared
from dsat.engines.local.machine import Machine
from dsat.engines.places import local as this_machine
from dsat.errors import (
    DecisionMismatch,
    JournalMismatch,
    SearchFailed,
    UserInputError,
)
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.inputs.option import options_of
from dsat.inputs.settings import Settings
from dsat.search import SEARCHES, RandomSearch, Search
from dsat.tuning.journal import FILE_NAME
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial
from testing.helpers import World
from testing.local import PROGRAMS, cpu_machine
from testing.made_up_runs import Lawful
from testing.simulated import SimulatedEngine


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def take(settings: Any) -> None:
        found.append(settings)

    monkeypatch.setattr(api, "_estimate", take)
    return found


def test_the_api_is_there_only_when_it_is_used() -> None:
    code = "import dsat, sys; assert 'dsat.api' not in sys.modules; dsat.estimate; dir(dsat)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'guess'"):
        dsat.guess  # type: ignore[attr-defined]  # noqa: B018


if TYPE_CHECKING:  # mypy runs this test
    from typing_extensions import assert_type

    def _types_of_results(target: str) -> None:
        assert_type(dsat.tune(target), dsat.Result)
        assert_type(dsat.load_run(target), dsat.Result)
        assert_type(dsat.estimate(target, slots=8), dsat.Estimate)
        assert_type(dsat.estimate(target, longest_sequence=True), dsat.LongestSequences)
        flag = bool(target)
        either = dsat.estimate(target, longest_sequence=flag)
        assert_type(either, dsat.Estimate | dsat.LongestSequences)
        assert_type(dsat.project(target), dsat.Projection)


def test_an_estimate_takes_the_words_of_the_command_line(seen: list[Any], tmp_path: Path) -> None:
    dsat.estimate("train.py", slot_memory=["24GiB", 2**30], slots=8, exact=True)
    dsat.estimate(tmp_path / "a.yaml")
    dsat.estimate(["torchrun", Path("train.py")], ds_config="ds.json")
    assert seen == [
        EstimateSettings(
            command=("train.py",),
            slot_memories=(24 * 2**30, 2**30),
            slot_counts=(8,),
            exact=True,
        ),
        EstimateSettings(config=tmp_path / "a.yaml", model_dir=tmp_path),
        EstimateSettings(command=("torchrun", "train.py"), ds_config=Path("ds.json")),
    ]


def test_wrong_words_of_an_estimate() -> None:
    with pytest.raises(UserInputError, match="slot_memory: invalid memory size 'lots'"):
        dsat.estimate("train.py", slot_memory="lots")
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot_mem'"):
        dsat.estimate("train.py", slot_mem=1)


@pytest.mark.parametrize("target", [[], ["train.py", 3], 7, "deepspeed a/train.py"])
def test_a_target_is_a_path_or_a_command(target: Any) -> None:
    with pytest.raises((UserInputError, TypeError), match="target"):
        dsat.estimate(target)


# -- tune, on an engine of its own that takes no time


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """An engine called "pretend", in a folder that is the current one; what it was made for."""
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: cpu_machine(2))
    monkeypatch.setattr(local, "ENGINES", {})
    monkeypatch.chdir(tmp_path)
    made = []

    def make(ready: Prepared, folder: Path) -> SimulatedEngine:
        made.append(ready)
        assert folder.is_dir()
        slots = ready.plan.slots_per_trial
        return SimulatedEngine(World().outcome, num_slots=slots, slots_per_trial=slots)

    dsat.register_engine("pretend", make)
    return made


TINY = PROGRAMS / "tiny" / "deepspeed.yaml"
SMALL: dict[str, Any] = {"engine": "pretend", "metric": "throughput", "max_trials": 6}


@pytest.mark.slow
def test_a_search_from_python(
    pretend: list[Prepared],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="dsat")
    rows: list[api.Row] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    began_s = time.time()
    result = dsat.tune(TINY, method="random", callbacks=[rows.append], **SMALL)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capsys.readouterr() == ("", "")
    assert result.run_dir == tmp_path / "dsat_runs/tiny-1"
    assert len(result.trials) == 6 == len(rows)
    assert {row["name"] for row in rows} == {row["name"] for row in result.trials}
    assert result.best is not None and result.best_config is not None
    assert result.best_value == result.best["metrics"]["throughput"]
    assert result.stop_reason == "the budget of 6 trials is used" and not result.interrupted
    assert f"Use {result.best['name']}." in str(result) or "Keep your configuration" in str(result)
    assert (result.run_dir / "best_ds_config.json").is_file()
    assert f"run folder {result.run_dir.relative_to(tmp_path)}" in caplog.text
    assert sum(record.name == "dsat.trials" for record in caplog.records) == 6
    [ready] = pretend
    defaults = {"trials_per_config": 5, "early_stopping": None, "search_range_factor": None}
    assert ready.settings.search_options == defaults
    assert result.train_command is not None
    assert str(result.run_dir) in result.train_command
    assert len(repr(result)) < 300 and result.best["name"] in repr(result)
    assert json.loads(json.dumps(result.to_json()))["run_dir"] == str(result.run_dir)
    assert result == dsat.load_run(result.run_dir)
    os.utime(result.run_dir / FILE_NAME, (1e9, 1e9))  # as of a copy
    assert past_runs.load(result.run_dir).changed_s >= round(began_s, 3)


@pytest.mark.slow
def test_a_table_for_pandas(pretend: list[Prepared]) -> None:
    pytest.importorskip("pandas")
    result = dsat.tune(TINY, **SMALL)
    table = result.to_pandas()
    assert list(table["name"]) == [row["name"] for row in result.trials]
    assert table["metrics.throughput"].max() == result.best_value


def test_in_another_thread(pretend: list[Prepared]) -> None:
    with ThreadPoolExecutor() as pool:
        result = pool.submit(dsat.tune, TINY, **SMALL).result()
    assert result.best is not None


def test_ctrl_c_returns_the_best_so_far_and_the_run_can_go_on(pretend: list[Prepared]) -> None:
    heard: list[api.Row] = []

    def press(row: api.Row) -> None:
        heard.append(row)
        if len(heard) == 3:
            raise KeyboardInterrupt

    whole_length = {**SMALL, "stop_when": 0.0}
    part = dsat.tune(TINY, callbacks=[press], **whole_length)
    assert part.interrupted and part.stop_reason is None
    assert part.best is not None and len(part.trials) == 3
    whole = dsat.tune(TINY, run_dir=part.run_dir, resume=True, **whole_length)
    assert not whole.interrupted and len(whole.trials) == 6
    assert whole.trials[:3] == part.trials


def decide_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another kind of CPU, whose last digits lead to another proposal."""
    here = RandomSearch.__init__

    def elsewhere(self: RandomSearch, *args: Any, seed: int, **options: Any) -> None:
        here(self, *args, seed=seed + 1, **options)

    monkeypatch.setattr(RandomSearch, "__init__", elsewhere)


@pytest.fixture
def launched(pretend: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials that the engine has run, on a machine where none fails but for want of memory."""
    trials: list[Trial] = []

    def outcome(self: World, trial: Trial) -> Outcome:
        trials.append(trial)
        found = Lawful().outcome(trial)
        return replace(found, profile=World.profile) if trial.profiles and found.ok else found

    monkeypatch.setattr(World, "outcome", outcome)
    return trials


def test_a_run_that_is_decided_otherwise_here_begins_again_with_what_was_measured(
    launched: list[Trial], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dsat")
    options = {**SMALL, "method": "random", "max_trials": 12, "finals": 0}

    def press(row: api.Row) -> None:
        if len(launched) == 6:
            raise KeyboardInterrupt

    part = dsat.tune(TINY, callbacks=[press], **options)
    assert part.run_dir is not None
    with (part.run_dir / FILE_NAME).open("a") as journal:  # as on the page of `dsat watch`
        journal.write('{"event":"budget","max_trials":14,"asked":true}\n')
    decide_otherwise(monkeypatch)
    whole = dsat.tune(TINY, run_dir=part.run_dir, resume=True, **options)
    assert len(whole.trials) == 14 > len(launched) - len(part.trials)
    configs = [json.dumps(trial.overrides, sort_keys=True) for trial in launched]
    assert len(set(configs)) == len(configs), "nothing that was measured ran again"
    assert caplog.text.count("the search begins again and reuses what was measured") == 1
    assert len(dsat.load_run(part.run_dir).trials) == 14
    assert (part.run_dir / "journal-1.jsonl").is_file()


def test_a_finished_run_and_that_of_another_version_stay_as_they_are(
    launched: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, "method": "random"}
    result = dsat.tune(TINY, **options)
    assert result.run_dir is not None
    path = result.run_dir / FILE_NAME
    finished = path.read_text()
    first, *others, _ = finished.splitlines(keepends=True)
    decide_otherwise(monkeypatch)
    for text in (finished, "".join([first.replace(dsat.__version__, "0.0.9"), *others])):
        path.write_text(text)
        with pytest.raises(DecisionMismatch, match=r"Cannot resume: trial \d was .* is decided he"):
            dsat.tune(TINY, run_dir=result.run_dir, resume=True, **options)
        assert path.read_text() == text
        assert [*result.run_dir.glob("journal*")] == [path]


OTHER_TORCH = replace(cpu_machine(2), software=("torch 2.0",))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of an experiment, whose script may be changed."""
    return Path(shutil.copytree(PROGRAMS / "tiny", tmp_path / "tiny")) / TINY.name


def test_a_result_of_another_script_is_shown_with_a_warning_and_has_no_finals(
    launched: list[Trial], tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dsat")
    options = {**SMALL, "method": "random", "max_trials": 12}
    run_dir = dsat.tune(tiny, finals=0, **options).run_dir
    launched.clear()
    for change, warnings in (("", 0), ("\n# repaired", 1)):
        with tiny.with_name("train.py").open("a") as script:
            script.write(change)
        dsat.tune(tiny, finals=0, run_dir=run_dir, resume=True, **options)
        said = "its result is shown as it was, although the training script changed"
        assert caplog.text.count(said) == warnings
    assert not launched, "a run that is over measures nothing"
    whole = dsat.tune(tiny, finals=4, run_dir=run_dir, resume=True, **options)
    assert [trial.id for trial in launched] == list(range(len(whole.trials)))


def test_interrupted_while_the_machine_is_looked_at(
    pretend: list[Prepared], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def press(*_: Any) -> Machine:
        raise KeyboardInterrupt

    caplog.set_level("INFO", logger="dsat")
    dsat.tune(TINY, run_dir="run", **SMALL)
    monkeypatch.setattr(this_machine, "find_machine", press)
    for more in ({"run_dir": None}, {"resume": True}, {"run_dir": None, "dry_run": True}):
        settings = replace(pretend[0].settings, **more)
        with pytest.raises(KeyboardInterrupt), prepared(settings):
            pass
    assert [each for each in caplog.messages if each.startswith("interrupted before")] == [
        "interrupted before the first trial was measured: start it again",
        "interrupted before the search went on: continue with the same command",
    ]


def test_measurements_of_another_script_or_of_other_software_do_not_count(
    launched: list[Trial],
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="dsat")
    options = {**SMALL, "method": "random", "max_trials": 12, "finals": 0}
    script = tiny.with_name("train.py")
    own_text, own_machine = script.read_text(), replace(OTHER_TORCH, software=("torch 2.9",))

    def interrupted(row: api.Row) -> None:
        raise KeyboardInterrupt

    def begin(text: str, machine: Machine, **more: Any) -> dsat.Result:
        launched.clear()
        script.write_text(text)
        monkeypatch.setattr(this_machine, "find_machine", lambda *_: machine)
        return dsat.tune(tiny, **more, **options)

    run_dir = begin(own_text, own_machine, callbacks=[interrupted]).run_dir
    assert run_dir is not None
    again = {"run_dir": run_dir, "resume": True}
    repaired = f"{own_text}# repaired"
    for text, machine, said in (
        (repaired, own_machine, "the training script changed: the search begins again without"),
        (repaired, OTHER_TORCH, "software was torch 2.9, now torch 2.0: the search begins again"),
    ):
        begin(text, machine, callbacks=[interrupted], **again)
        assert [trial.id for trial in launched] == [0], "it was measured again"
        assert said in caplog.text
    whole = begin(own_text, own_machine, **again)
    assert len(launched) == len(whole.trials) - 1, "a change that is undone wastes nothing"
    info = json.loads((run_dir / FILE_NAME).read_text().splitlines()[0])["info"]
    assert info["software"] == "torch 2.9"


def test_an_own_search(pretend: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCHES, "mine", RandomSearch)  # so that it is taken back afterwards
    del SEARCHES["mine"]

    class Mine(RandomSearch):
        def __init__(self, *args: Any, times: int, **options: Any) -> None:
            super().__init__(*args, trials_per_config=times, early_stopping=None, **options)

    class Strict(RandomSearch):
        def __init__(self, profile: Any, objective: Any, space: Any, *, seed: int) -> None:
            super().__init__(profile, objective, space, seed=seed)

    dsat.register_search("mine", Mine)
    own = {"times": 2}
    result = dsat.tune(TINY, method="mine", search_options=own, **SMALL)
    assert len(result.trials) == 6
    assert pretend[0].plan.search_options == own
    monkeypatch.setitem(SEARCHES, "strict", Strict)
    with pytest.raises(UserInputError, match="method 'strict' takes no 'trials_per_config'"):
        dsat.tune(TINY, method="strict", search_options={"trials_per_config": 2}, **SMALL)
    with pytest.raises(UserInputError, match="search_options: method 'mine' takes no 'tries'"):
        dsat.tune(TINY, method="mine", search_options={"tries": 2}, **SMALL)
    dsat.register_search("mine", Mine)  # a notebook's cell runs again
    with pytest.raises(ValueError, match="dsat has a method 'random' itself"):
        dsat.register_search("random", Mine)
    for wrong in (Search, dict):
        with pytest.raises(TypeError, match="is no subclass of"):
            dsat.register_search("other", wrong)  # type: ignore[arg-type]


def test_no_engine_of_dsats_own_is_replaced(pretend: list[Prepared]) -> None:
    def make(ready: Prepared, folder: Path) -> SimulatedEngine:
        raise AssertionError("nothing is run")

    dsat.register_engine("pretend", make)  # a notebook's cell runs again
    for name in ("local", "auto"):
        with pytest.raises(ValueError, match=name):
            dsat.register_engine(name, make)


def test_errors_are_those_of_dsat(pretend: list[Prepared], tmp_path: Path) -> None:
    result = dsat.tune(TINY, **SMALL)
    again = {**SMALL, "run_dir": result.run_dir, "resume": True}
    with pytest.raises(JournalMismatch, match="Cannot resume: metric was throughput, now latency"):
        dsat.tune(TINY, **{**again, "metric": "latency"})
    with pytest.raises(UserInputError, match="is no run"):
        dsat.load_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="file: is not a folder"):
        dsat.tune(TINY, run_dir=tmp_path / "file" / "run", **SMALL)
    with pytest.raises(UserInputError, match=r"callbacks: must be functions, not \[None\]"):
        dsat.tune(TINY, callbacks=[None], **SMALL)  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        dsat.tune(TINY, callbacks=[lambda row: 1 // 0], **SMALL)
    with pytest.raises(TypeError, match="not iterable"):
        dsat.tune("no_such_script.py", callbacks=print)  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match=r"there is no such file.*a list of words"):
        dsat.tune(f"train.py {'x' * 300}", **SMALL)
    with pytest.raises(UserInputError, match="method: invalid choice: 'guess'"):
        dsat.tune(TINY, method="guess", **SMALL)
    with pytest.raises(UserInputError, match="engine: invalid choice: 'nowhere'"):
        dsat.tune(TINY, engine="nowhere")
    with pytest.raises(UserInputError, match="end-profile-step 2 is before"):
        dsat.tune(TINY, end_profile_step=2, **SMALL)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_rungs'"):
        dsat.tune(TINY, method="random", max_rungs=3, **SMALL)


@pytest.mark.parametrize("call", ["tune", "estimate", "project"])
def test_a_call_inside_a_trial_is_refused(
    call: str, pretend: list[Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script that is tuned comes to the call: without end, were it answered."""
    monkeypatch.setenv("DSAT_TRIAL_DIR", str(tmp_path))
    options = SMALL if call == "tune" else {}
    with pytest.raises(UserInputError, match=r"inside a trial.*if __name__"):
        getattr(dsat, call)(TINY, **options)
    assert not Path("dsat_runs").exists()


def test_a_search_that_found_nothing_raises_the_scripts_own_error(
    pretend: list[Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = Outcome(OutcomeKind.ERROR, message="it broke", detail="Traceback: it broke")
    monkeypatch.setattr(World, "outcome", lambda self, trial: crash)
    with pytest.raises(SearchFailed, match="the profile trial failed: it broke") as found:
        dsat.tune(TINY, **SMALL)
    assert found.value.detail == "Traceback: it broke"


@pytest.mark.parametrize(
    ("call", "settings"), [(dsat.tune, Settings), (dsat.estimate, EstimateSettings)]
)
def test_every_option_is_a_keyword_with_its_default(call: Any, settings: Any) -> None:
    parameters = inspect.signature(call).parameters
    for own in options_of(settings):
        assert (own.keyword in parameters) is not own.shell_only
        if not own.shell_only:
            assert parameters[own.keyword].default == own.default
            assert f"{own.keyword}: {own.help[:20]}" in call.__doc__


def test_options_of_methods_are_keywords() -> None:
    parameters = inspect.signature(dsat.tune).parameters
    for owns in SEARCHES.values():
        assert {own.keyword for own in owns.options.values()} <= set(parameters)


def test_the_autotuning_section_from_python(pretend: list[Prepared], tmp_path: Path) -> None:
    for path in (PROGRAMS / "tiny").iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "ds_config.json").read_text())
    section = {"enabled": True, "num_gpus": 2, "tuner_num_trials": 3, "metric": "throughput"}
    (tmp_path / "ds_config.json").write_text(json.dumps({**config, "autotuning": section}))
    command = ["train.py", "--deepspeed_config", "ds_config.json"]
    result = dsat.tune(command, method="tune", engine="pretend")
    assert [ready.plan.slots_per_trial for ready in pretend] == [2]
    assert result.best is not None
    assert (tmp_path / "autotuning_results" / "ds_config_optimal.json").is_file()
    with pytest.raises(UserInputError, match="takes a script or a command"):
        dsat.tune("deepspeed.yaml", method="tune", engine="pretend")
