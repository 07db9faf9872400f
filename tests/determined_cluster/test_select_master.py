"""Choice of a master, and patience with one that cannot be reached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsat.determined_cluster.master import retry_while_unreachable
from dsat.determined_cluster.select_master import auth_file, choose, logins_of
from dsat.engines.places import PROVIDERS

FAR = "http://gpus.example.com:8080"
NEAR = "http://localhost:8080"


@pytest.mark.parametrize(
    ("engine", "env", "logins", "master"),
    [
        ("auto", {}, {}, None),
        ("auto", {"DET_MASTER": FAR}, {}, FAR),
        ("auto", {"DET_MASTER_ADDR": FAR}, {}, FAR),
        ("auto", {"DET_MASTER": ""}, {}, None),
        ("auto", {}, {FAR: "eve"}, FAR),
        ("auto", {}, {NEAR: "eve"}, None),
        ("auto", {}, {NEAR: "eve", FAR: "eve"}, FAR),
        ("auto", {}, {FAR: "eve", "http://other:8080": "eve"}, None),
        ("auto", {"DET_MASTER": NEAR}, {FAR: "eve"}, NEAR),
        *((place, {"DET_MASTER": FAR}, {FAR: "eve"}, None) for place in PROVIDERS),
        ("determined", {"DET_MASTER": FAR}, {}, FAR),
        ("determined", {}, {FAR: "eve"}, FAR),
        ("determined", {}, {}, "localhost:8080"),
    ],
)
def test_where_trials_run(
    engine: str, env: dict[str, str], logins: dict[str, str], master: str | None, tmp_path: Path
) -> None:
    masters = {each: {"active_user": user, "tokens": {user: "t"}} for each, user in logins.items()}
    (tmp_path / "auth.json").write_text(json.dumps({"version": 2, "masters": masters}))
    env = {**env, "DET_DEBUG_CONFIG_PATH": str(tmp_path)}
    choice = choose(engine, fits=True, env=env)
    assert choice.master == master
    assert choice.reason


def test_a_command_for_this_machine_stays_here() -> None:
    choice = choose("auto", fits=False, env={"DET_MASTER": FAR})
    assert choice.master is None and "though DET_MASTER is set" in choice.reason


def test_logins_are_determineds_own(tmp_path: Path) -> None:
    path = auth_file({"DET_DEBUG_CONFIG_PATH": str(tmp_path)})
    assert path == tmp_path / "auth.json"
    assert logins_of(path) == {}
    masters = {
        FAR: {"active_user": "eve", "tokens": {"eve": "t"}},
        NEAR: {"tokens": {"eve": "t"}},  # logged in once, but nobody is active
        "http://gone:8080": {"active_user": "eve", "tokens": {}},  # logged out
    }
    path.write_text(json.dumps({"version": 2, "masters": masters}))
    assert logins_of(path) == {FAR: "eve"}
    for damaged in ("", "[]", '{"masters": 3}', '{"masters": {"a": null}}'):
        path.write_text(damaged)
        assert logins_of(path) == {}


def test_the_file_is_where_determined_has_it(tmp_path: Path) -> None:
    from determined.common import util

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DET_DEBUG_CONFIG_PATH", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert auth_file(os.environ) == util.get_config_path() / "auth.json"
        patch.delenv("XDG_CONFIG_HOME")
        patch.setenv("HOME", str(tmp_path))
        assert auth_file(os.environ) == util.get_config_path() / "auth.json"


class Flaky:
    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __call__(self) -> str:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")
        return "here"


def test_a_master_that_is_away_is_waited_for() -> None:
    pauses: list[float] = []
    said: list[str] = []
    assert retry_while_unreachable(Flaky(7), said.append, sleep=pauses.append) == "here"
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert len(said) == 1 and "refused" in said[0]


@pytest.mark.parametrize(
    ("statuses", "least_s", "most_s"),
    [
        *(([status], 0, 0) for status in (400, 401, 403, 404, 501)),
        *(([status], 1800, 1830) for status in (502, 503, 599)),
        ([500], 120, 150),  # more slots than the cluster has
        ([502] * 7 + [500], 211, 241),  # a master that restarts before its database
    ],
)
def test_how_long_a_request_is_repeated(statuses: list[int], least_s: float, most_s: float) -> None:
    import requests
    from determined.common.api import errors

    pauses: list[float] = []
    said: list[str] = []
    named = {401: errors.UnauthenticatedException(), 403: errors.ForbiddenException("no")}

    def fail() -> None:
        status = statuses[min(len(pauses), len(statuses) - 1)]
        response = requests.Response()
        response.status_code = status
        raise named.get(status) or errors.APIException(response)

    with pytest.raises(errors.BadRequestException):
        retry_while_unreachable(fail, said.append, sleep=pauses.append)
    assert least_s <= sum(pauses) <= most_s
    assert len(said) == (len(set(statuses)) if pauses else 0)
    assert ("the master answers with an error (" in "".join(said)) is (500 in statuses)
