"""The Python API: the command line's options and defaults, as keywords and values."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import pytest

import dsat
from dsat import api
from dsat.api_options import EstimateOptions, ProjectOptions, TuneOptions, read_keywords
from dsat.cli import parser
from dsat.errors import JournalMismatch, SearchFailed, UserInputError
from dsat.estimating.options import EstimateSettings
from dsat.options import Option, options_of
from dsat.projecting.options import ProjectSettings
from dsat.search import SEARCHES, Problem, RandomSearch
from dsat.tuning import local
from dsat.tuning.make_settings import all_options
from dsat.tuning.settings import Settings
from testing.api_place import Place
from testing.world import Failure, World

if TYPE_CHECKING:  # mypy runs this test
    from typing_extensions import assert_type

    def _types_of_results(target: str) -> None:
        assert_type(dsat.tune(target), dsat.Result)
        assert_type(dsat.load_run(target), dsat.Result)
        assert_type(dsat.estimate(target, devices=8), dsat.Estimate)
        assert_type(dsat.project(target), dsat.Projection)


def press(after: int) -> Callable[[api.Row], None]:
    """Return a callback that raises KeyboardInterrupt at its `after`-th trial."""
    heard: list[api.Row] = []

    def callback(row: api.Row) -> None:
        heard.append(row)
        if len(heard) == after:
            raise KeyboardInterrupt

    return callback


def test_the_api_is_there_only_when_it_is_used() -> None:
    code = "import dsat, sys; assert 'dsat.api' not in sys.modules; dsat.estimate; dir(dsat)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="guess"):
        dsat.guess  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("target", [[], ["train.py", 3], 7, "deepspeed a/train.py"])
def test_a_target_is_a_path_or_a_command(target: Any) -> None:
    with pytest.raises((UserInputError, TypeError), match="target"):
        dsat.estimate(target)


def test_a_search_from_python(
    place: Place, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dsat")
    rows: list[api.Row] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = place.tune(method="random", callbacks=[rows.append])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capsys.readouterr() == ("", "")
    assert result.run_dir == place.user.folder / "dsat_runs" / "made-up-1"
    assert [row["name"] for row in rows] == [row["name"] for row in result.trials]
    assert result.best is not None and result.best_config is not None and result.gain is not None
    assert result.best_value == result.best["metrics"]["throughput"]
    assert not result.interrupted and "6" in (result.stop_reason or "")
    assert f"Use {result.best['name']}." in str(result)
    assert str(result.run_dir.relative_to(place.user.folder)) in caplog.text
    assert sum(record.name == "dsat.trials" for record in caplog.records) == 6
    assert len(repr(result)) < 300 and result.best["name"] in repr(result)
    assert json.loads(json.dumps(result.to_json()))["run_dir"] == str(result.run_dir)
    assert result == dsat.load_run(result.run_dir)


@pytest.mark.slow
def test_in_another_thread(place: Place) -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(place.tune).result().best is not None


def test_ctrl_c_returns_the_best_so_far_and_the_run_can_go_on(place: Place) -> None:
    part = place.tune(callbacks=[press(3)], stop_when=0.0)
    assert part.interrupted and part.stop_reason is None
    assert part.best is not None and len(part.trials) == 3
    whole = place.tune(run_dir=part.run_dir, resume=True, stop_when=0.0)
    assert not whole.interrupted and len(whole.trials) == 6
    assert whole.trials[:3] == part.trials


class Fickle(RandomSearch):
    """A search that decides differently in each process, as on another kind of CPU."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        super().__init__(replace(problem, seed=secrets.randbits(30)), **options)


def test_a_run_continues_where_its_search_would_have_decided_otherwise(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SEARCHES, "fickle", Fickle)
    options = {"method": "fickle", "max_trials": 11, "finals": 0}
    part = place.tune(callbacks=[press(6)], **options)
    known = list(place.launched)
    whole = place.tune(run_dir=part.run_dir, resume=True, **options)
    assert whole.trials[: len(part.trials)] == part.trials
    assert set(known) & set(place.launched) == set(), "nothing that was measured ran again"
    assert len(whole.trials) == 11 and len(set(known) | set(place.launched)) == 11
    assert part.run_dir is not None and [*part.run_dir.glob("journal*")] == [
        part.run_dir / "journal.jsonl"
    ]


def test_measurements_of_another_script_or_of_other_software_do_not_count(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dsat")
    options: dict[str, Any] = {"method": "random", "max_trials": 12, "finals": 0}
    script = place.user.folder / "train.py"
    text = script.read_text()
    run_dir = place.tune(callbacks=[press(1)], **options).run_dir
    again = {"run_dir": run_dir, "resume": True, **options}
    for changed, software in ((f"{text}# repaired", "torch 2.9"), (f"{text}# more", "torch 2.0")):
        script.write_text(changed)
        place.software(software, monkeypatch)
        place.tune(callbacks=[press(1)], **again)
        assert len(place.launched) == 1, "the first trial was measured again"
    assert "torch 2.0" in caplog.text and "script changed" in caplog.text
    script.write_text(text)
    place.software("torch 2.9", monkeypatch)
    whole = place.tune(**again)
    assert len(place.launched) == len(whole.trials) - 1, "a change that is undone wastes nothing"
    script.write_text(f"{text}# repaired")
    place.tune(**again)
    assert not place.launched, "a run that is over measures nothing"


def test_a_dry_run_measures_nothing(place: Place) -> None:
    result = place.tune(method="random", dry_run=True)
    assert not place.launched and not Path("dsat_runs").exists()
    assert result.trials == () and result.run_dir is None
    assert "random search" in str(result) and "train.py" in str(result)


@pytest.mark.parametrize(
    "options",
    [
        {"ds_config": "ds.json", "run_dir": Path("my run"), "no_fork": True, "zero_stages": 2},
        {
            "ds_config": Path("ds.json"),
            "method": "random",
            "vary": {"--workers": [0, 4]},
            "keep": ["overlap_comm"],
            "zero_stages": [1, 2],
            "trial_timeout": 90.5,
            "finals": None,
        },
    ],
)
def test_the_command_that_trains_says_the_same_in_the_shell(
    options: dict[str, Any], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(local.ENGINES, "local", place._engine)
    result = dsat.tune("train.py", max_trials=6, engine="local", **options)
    assert result.run_dir is not None and result.train_command is not None
    assert result == dsat.load_run(result.run_dir)
    words = shlex.split(result.train_command)
    assert words[:2] == ["cd", str(Path.cwd())] and words[4:6] == ["-m", "dsat"]
    settings, _ = parser.parse(words[6:])
    run_dir = options.get("run_dir", result.run_dir.relative_to(Path.cwd()))
    resumed = {"resume": True, "run_full_experiment": True, "run_dir": run_dir}
    assert settings == replace(place.settings[-1], **resumed)


@pytest.mark.parametrize("options", [{}, {"engine": "local", "vary": {"--workers": [True]}}])
def test_no_command_trains_what_only_python_can_say(
    options: dict[str, Any], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(local.ENGINES, "local", place._engine)
    usual: dict[str, Any] = {"ds_config": "ds.json", "max_trials": 6, "engine": "made-up"}
    result = dsat.tune("train.py", **{**usual, **options})
    assert result.best is not None and result.run_dir is not None
    assert result.train_command is None and result == dsat.load_run(result.run_dir)
    assert "Train with" not in (result.run_dir / "report.html").read_text()


def test_errors_are_those_of_dsat(place: Place, tmp_path: Path) -> None:
    result = place.tune()
    with pytest.raises(JournalMismatch, match=r"metric.*throughput.*latency"):
        place.tune(run_dir=result.run_dir, resume=True, metric="latency")
    (tmp_path / "file").write_text("")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"run_dir": tmp_path / "file" / "run"}, UserInputError, "file"),
        ({"callbacks": [None]}, UserInputError, r"callbacks.*\[None\]"),
        ({"callbacks": print}, UserInputError, "callbacks.*a list of functions.*print"),
        ({"callbacks": None}, UserInputError, "callbacks.*None"),
        ({"callbacks": [lambda row: 1 // 0]}, ZeroDivisionError, "division"),
        ({"method": "guess"}, UserInputError, "method.*'guess'"),
        ({"engine": "nowhere"}, UserInputError, "engine.*'nowhere'"),
        ({"end_profile_step": 2}, UserInputError, "end_profile_step: 2"),
        ({"method": "random", "max_rungs": 3}, TypeError, "'max_rungs'"),
        ({"slot_memory": "lots"}, UserInputError, "slot_memory.*'lots'"),
        ({"max_trials": 2.5}, UserInputError, "max_trials.*2.5"),
        ({"cold": 1}, UserInputError, "cold.*True or False"),
        ({"zero_stages": [4]}, UserInputError, "zero_stages.*4"),
    ]
    for options, error, said in wrong:
        with pytest.raises(error, match=said):
            place.tune(**options)
    with pytest.raises(UserInputError, match="no such run"):
        dsat.load_run(tmp_path)
    with pytest.raises(UserInputError, match=r"no such file.*a list of words"):
        dsat.tune(f"train.py {'x' * 300}")


@pytest.mark.parametrize("call", ["tune", "estimate", "project"])
def test_a_call_inside_a_trial_is_refused(
    call: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuned script itself reaches the call, which would then recurse without end."""
    monkeypatch.setenv("DSAT_TRIAL_DIR", str(tmp_path))
    with pytest.raises(UserInputError, match=r"inside a trial.*if __name__"):
        getattr(dsat, call)("deepspeed.yaml")
    assert not Path("dsat_runs").exists()


def test_a_search_that_found_nothing_raises_the_scripts_own_error(place: Place) -> None:
    place.user.world = World(failures=(Failure("ERROR", {}, "it broke", "Traceback: it broke"),))
    with pytest.raises(SearchFailed, match="it broke") as found:
        place.tune()
    assert found.value.detail == "Traceback: it broke"


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        (dsat.tune, Settings),
        (dsat.estimate, EstimateSettings),
        (dsat.project, ProjectSettings),
    ],
)
def test_every_option_is_a_keyword_with_its_default(call: Any, settings: Any) -> None:
    parameters = inspect.signature(call).parameters
    for own in all_options() if call is dsat.tune else options_of(settings):
        is_there = own.keyword in parameters
        assert is_there is not own.shell_only or own.name == "method"
        if not own.shell_only:
            assert parameters[own.keyword].default == own.default
            assert f"{own.keyword}: {own.help[:20]}" in call.__doc__
    named = {dsat.tune: TuneOptions, dsat.estimate: EstimateOptions, dsat.project: ProjectOptions}
    positional = {"target", "model_dir", "method", "callbacks", "search_options"}
    assert set(parameters) - positional == set(named[call].__annotations__)
    if call is dsat.tune:
        owns = [own for search in SEARCHES.values() for own in search.options.values()]
        assert {own.keyword for own in owns} <= set(parameters)


# Examples of documented types; by keyword where not any text or number will do.
_OF_TYPES: dict[Any, Any] = {
    float: 0.5,
    bool: True,
    type(None): None,
    PathLike[str]: Path("config.json"),
    Sequence[int]: [1, 2],
    Sequence[int | str]: [2**30, "24GiB"],
    Sequence[str | PathLike[str]]: ["src", Path("data")],
    Mapping[str, str]: {"train_batch_size": "--batch"},
    Mapping[str, Any]: {"r": 8, "target": ["q_proj"]},
    Mapping[str, Sequence[Any]]: {"--num_workers": [0, 4], "bf16": [True, False]},
}
_WORDS = {
    "dtype": "fp16",
    "activation_checkpointing": "on",
    "arg_mapping": "train_batch_size=--batch",
    "engine": "local",
    "gpus_per_node": "8",
    "keep": "all",
    "lora": "r=8,target=q_proj+v_proj",
    "slot_memory": "24GiB",
    "host_memory": "24GiB",
    "search": "reduce_bucket_size",
    "stop_when": "2%",
    "tokens": "1T",
    "train_batch_size": "own",
    "trial_timeout": "10m",
    "vary": "--num_workers=0,4",
}
_NUMBERS = {"slot_memory": 2**30, "host_memory": 2**30, "zero_stages": 2}


@pytest.mark.parametrize(
    ("types", "options"),
    [
        (TuneOptions, list(all_options())),
        (EstimateOptions, list(options_of(EstimateSettings))),
        (ProjectOptions, list(options_of(ProjectSettings))),
    ],
)
def test_every_documented_type_is_taken(types: Any, options: list[Option]) -> None:
    by_keyword = {each.keyword: each for each in options}
    for keyword, hint in get_type_hints(types).items():
        word = _WORDS.get(keyword, by_keyword[keyword].default or "word")
        examples = {**_OF_TYPES, str: word, Sequence[str]: [word]}
        is_union = isinstance(hint, UnionType) or get_origin(hint) is Union
        for one in get_args(hint) if is_union else [hint]:
            value = _NUMBERS.get(keyword, 8) if one is int else examples[one]
            read_keywords(options, {keyword: value}, "tune()")


def test_values_of_python_are_words_of_the_command_line(place: Place) -> None:
    given: dict[str, Any] = {
        "slot_memory": 24 * 2**30,
        "trial_timeout": 90,
        "zero_stages": [3, 1, 3],
    }
    mapped = {"train_micro_batch_size_per_gpu": "batch-size"}
    script = place.user.folder / "train.py"
    for more in (given, {"slot_memory": "24GiB", "trial_timeout": "90s", "zero_stages": ["3", 1]}):
        command = ["train.py", "--deepspeed_config", "ds.json", "--batch-size", "1"]
        usual: dict[str, Any] = {"engine": "made-up", "max_trials": 3, "cold": True}
        dsat.tune(command, arg_mapping=mapped, devices=1, **usual, **more)
    one, other = (replace(each, run_dir=None) for each in place.settings)
    assert one == other and script.exists()
    assert (one.slot_memory_bytes, one.trial_timeout_s, one.zero_stages) == (24 * 2**30, 90, (3, 1))
    assert one.arg_mappings == {"train_micro_batch_size_per_gpu": "--batch-size"} and one.cold


def test_the_autotuning_section_from_python(place: Place) -> None:
    section: dict[str, Any] = {"enabled": True, "num_gpus": 1, "tuner_num_trials": 3}
    section |= {"results_dir": "autotuning_results", "metric": "throughput"}
    place.user.has({"train_micro_batch_size_per_gpu": 1, "autotuning": section})
    command = ["train.py", "--deepspeed_config", "ds.json"]
    result = dsat.tune(command, engine="made-up", train_batch_size="any")
    assert result.best is not None and len(result.trials) == 4
    assert re.fullmatch(r"z\d_gas\d+_tmbspg\d+", result.best["name"])
    assert (place.user.folder / "autotuning_results" / "ds_config_optimal.json").is_file()
