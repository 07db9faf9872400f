"""The steps of CONTRIBUTING.md, followed in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_COPIED = ("dsat", "examples", "testing", "tests/search", "tests/conftest.py", "pyproject.toml")


def _blocks(title: str, language: str) -> list[str]:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.S | re.M)


def _copy(folder: Path) -> Path:
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    return folder


def _follow(title: str, copy: Path, **variables: str) -> str:
    """Apply the changes of a section and run its commands; return what they print."""
    for change in _blocks(title, "diff"):
        told = subprocess.run(
            ["git", "apply"], cwd=copy, input=change, capture_output=True, text=True
        )
        assert told.returncode == 0, told.stdout + told.stderr
    printed = ""
    for commands in _blocks(title, "sh"):
        folder = copy
        for line in commands.splitlines():
            words = line.split()
            if words[0] == "cd":
                folder = copy / words[1]
                continue
            program = ["-m", "dsat"] if words[0] == "dsat" else []
            told = subprocess.run(
                [sys.executable, *program, *words[1:]],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(copy), **variables},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert told.returncode == 0, (line, told.stdout, told.stderr)
            printed += told.stdout + told.stderr
    return printed


@pytest.mark.nightly
def test_add_a_setting(tmp_path: Path) -> None:
    assert "use_multi_rank_bucket_allreduce" in _follow("Add a setting", _copy(tmp_path))


@pytest.mark.nightly
def test_add_a_search(tmp_path: Path) -> None:
    printed = _follow("Add a search", _copy(tmp_path))
    assert re.search(r"\d+ passed", printed), printed


@pytest.mark.nightly
def test_add_a_place(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    blaunch = programs / "blaunch"  # LSF's own runs a command on a host
    blaunch.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    blaunch.chmod(0o755)
    variables = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LSB_HOSTS": f"other other {socket.gethostname()} {socket.gethostname()}",
    }
    printed = _follow("Add a place", _copy(tmp_path / "copy"), **variables)
    assert "lsf" in printed.split("usage")[1]
    assert "at most 50 trials" in printed


@pytest.mark.nightly
def test_add_an_option(tmp_path: Path) -> None:
    assert '"max_accumulation": 4' in _follow("Add an option", _copy(tmp_path))


@pytest.mark.nightly
def test_add_a_metric(tmp_path: Path) -> None:
    assert "optimising data" in _follow("Add a metric", _copy(tmp_path))


@pytest.mark.nightly
def test_add_an_export(tmp_path: Path) -> None:
    _follow("Add an export", _copy(tmp_path))
    rows = (tmp_path / "recorded_run.jsonl").read_text().splitlines()
    assert len(rows) == 8 and json.loads(rows[0])["metrics.throughput"] > 0
