"""The table of all functions that dsat wraps in a user's process."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from dsat.in_trial.adapters import launchers, user_files
from dsat.in_trial.adapters.calls import Adapter, Call
from dsat.in_trial.adapters.install import owner_of
from dsat.in_trial.adapters.table import ENGINE, MODELS, TABLE
from dsat.in_trial.adapters.trial import Phase, RunningTrial

ROWS = [*TABLE, *ENGINE, MODELS]


def is_installed(adapter: Adapter) -> bool:
    """Return whether the installed version of the library has the adapter's target."""
    package = adapter.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return False
    try:
        return SpecifierSet(adapter.versions, prereleases=True).contains(version(package))
    except PackageNotFoundError:  # of the standard library
        return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what is imported
@pytest.mark.parametrize("adapter", ROWS, ids=lambda a: f"{a.module}.{a.attribute}")
def test_a_target_exists(adapter: Adapter) -> None:
    if not is_installed(adapter):
        pytest.skip(f"{adapter.module} {adapter.versions} is not installed")
    owner, name = owner_of(adapter, importlib.import_module(adapter.module))
    assert hasattr(owner, name)


def test_every_target_is_adapted_once_and_described() -> None:
    places = [(adapter.module, adapter.attribute) for adapter in ROWS]
    assert len(set(places)) == len(places)
    assert all((adapter.wrapper.__doc__ or "").strip() for adapter in ROWS)
    assert all(Phase.INERT not in adapter.phases for adapter in ROWS)


@pytest.mark.parametrize(
    ("words", "options", "leading"),
    [
        ("train", {"--size": 4, "--bs": 1, "--lr": 3}, {"--size"}),
        ("test", {"--size": 4, "--bs": 2}, {"--size", "--bs"}),
        ("--size 5", {"--size": 4, "--bs": 2}, {"--size", "--bs"}),
    ],
)
def test_flags_are_those_of_the_parsers_that_parsed(
    monkeypatch: pytest.MonkeyPatch, words: str, options: dict[str, int], leading: set[str]
) -> None:
    trial, function = RunningTrial(), argparse.ArgumentParser._parse_known_args

    def parse(parser: Any, *args: Any, **kwargs: Any) -> Any:
        return launchers.parse_arguments(
            Call(trial, partial(function, parser), "", parser, args, kwargs)
        )

    monkeypatch.setattr(argparse.ArgumentParser, "_parse_known_args", parse)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-s", "--size", default=4)
    parser.add_argument("--bs", default=2)
    commands = parser.add_subparsers()
    train = commands.add_parser("train", add_help=False)
    train.add_argument("--lr", default=3)
    train.add_argument_group("data").add_argument("--bs", default=1)
    commands.add_parser("test", add_help=False)
    argparse.ArgumentParser().add_argument("--unused", default=4)
    parser.parse_args(words.split())
    assert trial.script_options == options
    assert {name for name, flag in trial.script_flags.items() if flag.leads} == leading


@pytest.mark.parametrize(
    ("path", "mode", "is_other"),
    [
        ("old", "w", True),
        ("old", "ab", True),
        ("old", "r+", True),
        ("link", "w", True),
        ("old", "r", False),
        ("new", "w", False),
        ("large", "a", False),
        ("large", "w", True),
        ("trial/old", "w", False),
        ("cache/old", "w", False),
        ("home/.cache/old", "w", False),
        ("/proc/self/comm", "w", False),
        ("/dev/null", "w", False),
    ],
)
def test_what_has_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, mode: str, is_other: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(user_files, "_LARGEST_COPIED_BYTES", 3)
    for name in ("old", "trial/old", "cache/old", "home/.cache/old"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    (tmp_path / "large").write_text("large")
    (tmp_path / "link").symlink_to("old")
    time.sleep(0.02)  # the clock of a file system is coarse
    files = user_files.UserFiles(tmp_path / "trial")
    time.sleep(0.02)
    (tmp_path / "new").write_text("new")
    found = files.instead_of(path, mode)
    assert (found != path) is is_other
    if is_other and "w" not in mode:
        assert found.read_text() == "old"
