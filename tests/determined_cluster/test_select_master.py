"""How the command chooses a master."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsat.determined_cluster.select_master import auth_file, choose
from dsat.determined_cluster.submit import select_place
from dsat.engines.places import PROVIDERS
from dsat.tuning.settings import Settings
from testing.scenarios import User

FAR = "http://gpus.example.com:8080"
NEAR = "http://localhost:8080"


@pytest.fixture
def auth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of Determined's file of logins."""
    monkeypatch.setenv("DET_DEBUG_CONFIG_PATH", str(tmp_path))
    return tmp_path / "auth.json"


@pytest.mark.parametrize(
    ("engine", "env", "logins", "master"),
    [
        ("auto", {}, [], None),
        ("auto", {"DET_MASTER": FAR}, [], FAR),
        ("auto", {"DET_MASTER_ADDR": FAR}, [], FAR),
        ("auto", {"DET_MASTER": ""}, [], None),
        ("auto", {}, [FAR], FAR),
        ("auto", {}, [NEAR], None),
        ("auto", {}, [NEAR, FAR], FAR),
        ("auto", {}, [FAR, "http://other:8080"], None),
        ("auto", {"DET_MASTER": NEAR}, [FAR], NEAR),
        *((place, {"DET_MASTER": FAR}, [FAR], None) for place in PROVIDERS),
        ("determined", {"DET_MASTER": FAR}, [], FAR),
        ("determined", {}, [FAR], FAR),
        ("determined", {}, [], "localhost:8080"),
    ],
)
def test_where_trials_run(
    engine: str,
    env: dict[str, str],
    logins: list[str],
    master: str | None,
    auth: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masters = {
        **{each: {"active_user": "eve", "tokens": {"eve": "t"}} for each in logins},
        "http://once:8080": {"tokens": {"eve": "t"}},  # nobody is active
        "http://gone:8080": {"active_user": "eve", "tokens": {}},  # logged out
    }
    auth.write_text(json.dumps({"version": 2, "masters": masters}))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    choice = choose(engine)
    assert choice.master == master and choice.reason
    if engine == "auto" and "DET_MASTER" in env and master == FAR:
        choice = select_place(Settings(command=("deepspeed", "train.py")))
        assert choice.master is None
        assert choice.reason.startswith(
            "DET_MASTER is set, but a cluster runs only experiment files"
        )


@pytest.mark.parametrize("damaged", ["", "[]", '{"masters": 3}', '{"masters": {"a": null}}'])
def test_a_damaged_file_of_logins_is_none(damaged: str, auth: Path) -> None:
    auth.write_text(damaged)
    assert choose("auto").master is None


def test_the_file_is_where_determined_has_it(
    auth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from determined.common import util

    assert auth_file() == auth
    monkeypatch.delenv("DET_DEBUG_CONFIG_PATH")
    for variable in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
        assert auth_file() == util.get_config_path() / "auth.json"
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("logins", "options", "said"),
    [
        ([], [], None),
        ([NEAR], [], "use --engine determined"),
        ([FAR, "http://other:8080"], [], f"{FAR} and http://other:8080; DET_MASTER chooses"),
        ([NEAR], ["--engine", "local"], None),
    ],
)
def test_an_experiment_says_why_it_is_not_tuned_on_a_cluster(
    logins: list[str],
    options: list[str],
    said: str | None,
    auth: Path,
    user: User,
) -> None:
    masters = {each: {"active_user": "eve", "tokens": {"eve": "t"}} for each in logins}
    auth.write_text(json.dumps({"version": 2, "masters": masters}))
    told = user.types("tune", "deepspeed.yaml", ".", "--dry-run", *options)
    assert told.status == 0, told.err
    first, *_ = told.err.splitlines() or [""]
    prefix = "tuning without a Determined cluster: "
    assert first.startswith(prefix) is (said is not None) and (said or "") in first
