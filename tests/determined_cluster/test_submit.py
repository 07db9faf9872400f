"""The command with a cluster: where it submits a search, what it follows, what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from determined.common.api import errors

from dsat import api as dsat_api
from dsat.cli import main
from dsat.command.ds_config import DSAT_TRIAL_KEY
from dsat.determined_cluster.client import explain_errors
from dsat.determined_cluster.master import describe_request
from dsat.errors import UserInputError
from dsat.search import SEARCHES, RandomSearch
from testing.local import PROGRAMS
from testing.master import StandIn
from testing.master.logs import LogLine
from testing.master.states import State
from testing.on_cluster import RUNNER, changed, quick_cluster

PRETEND = PROGRAMS / "pretend"


def dsat(*options: object, model: Path = PRETEND) -> int:
    words = ["random", model / "deepspeed.yaml", model, "--metric", "throughput", *options]
    return main.main(list(map(str, words)))


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the single error line with which the command ended."""
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("dsat: error: ") and err.count("dsat: error: ") == 1, err
    return last


def test_a_search_is_submitted_from_python(
    master: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PRETEND / "deepspeed.yaml"
    result = dsat_api.tune(config, method="random", metric="throughput", detach=True)
    assert (result.run_dir, result.best) == (None, None)
    assert result.url == f"{master.url}/det/experiments/1"
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UserInputError) as caught:
        dsat_api.tune(config, engine="determined", no_fork=True)
    assert caught.value.where == "no_fork"
    with pytest.raises(UserInputError, match="callbacks: work on this machine only"):
        dsat_api.tune(config, callbacks=[print])
    monkeypatch.setitem(SEARCHES, "mine", RandomSearch)
    with pytest.raises(UserInputError, match="'mine' works on this machine only"):
        dsat_api.tune(config, method="mine", metric="throughput", detach=True)


def test_a_trial_on_the_cluster_submits_nothing(
    master: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = SimpleNamespace(hparams={DSAT_TRIAL_KEY: {}})
    info = SimpleNamespace(task_type="TRIAL", trial=trial)
    monkeypatch.setattr("determined.get_cluster_info", lambda: info)
    with pytest.raises(UserInputError, match="inside a trial"):
        dsat_api.tune(PRETEND / "deepspeed.yaml", metric="throughput", detach=True)
    assert master.experiments == []


def test_the_search_is_submitted_where_the_user_wants_it(
    master: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = tmp_path / "runner.yaml"
    changes.write_text("{workspace: Vision, project: nets, resources: {priority: 50}}\n")
    options = ("--max-search-runner-restarts", 2, "--search-runner-config", changes)
    assert dsat(*options, "--detach", "--json") == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["experiment_id"], found["state"]) == (1, None)
    assert found["url"] == f"{master.url}/det/experiments/1"
    assert "DET_MASTER is set" in told.err and "Created experiment 1" in told.err
    assert "dsat watch 1" in told.err
    config = master.experiment(1).config
    assert (config["workspace"], config["project"]) == ("Vision", "nets")
    assert config["max_restarts"] == 2 and config["resources"]["priority"] == 50
    changes.write_text("{workspace: Nowhere, project: none}\n")
    assert dsat("--search-runner-config", changes) == 2
    assert "the master refuses" in refused(capsys)


def test_a_whole_configuration_of_the_ancestors_runner_starts_dsats_runner(
    master: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = tmp_path / "runner.yaml"
    changes.write_text(
        "{name: mine, entrypoint: python3 -m determined.pytorch.dsat._run_dsat, max_restarts: 5,"
        " searcher: {name: single, metric: loss, max_length: 0}, hyperparameters: {a: 1},"
        " resources: {slots_per_trial: 0, resource_pool: small}}\n"
    )
    assert dsat("--search-runner-config", changes, "--detach") == 0
    said = f"note: {changes}: dsat sets entrypoint, hyperparameters, searcher itself"
    assert said in capsys.readouterr().err
    config = master.experiment(1).config
    assert "dsat.determined_cluster.runner" in config["entrypoint"]
    assert config["searcher"]["max_length"] == {"batches": 100}
    assert "a" not in config["hyperparameters"]
    assert (config["name"], config["max_restarts"]) == ("mine", 5)
    assert config["resources"]["resource_pool"] == "small"


@pytest.mark.slow
def test_the_last_whole_result_of_a_log_counts(
    tmp_path: Path,
) -> None:
    """A result may be cut off, lack its beginning, or be from a runner that died while printing
    it."""
    ds = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam"},
        "monitor": {"numbers": [number**9 for number in range(2000)]},
    }
    program = changed(tmp_path, hyperparameters={"deepspeed_config": ds})
    with quick_cluster(tmp_path) as there:
        told = there.search(program, "--max-trials", 6, "--json", "--detach")
        assert told.status == 0
        first = there.dsat("watch", RUNNER, "--json")
        assert first.status == 0 and len(json.loads(first.out)["trials"]) == 6
        log = there.master.cluster.logs[there.master.trials(RUNNER)[0].task_id]
        places = [n for n, line in enumerate(log) if "[dsat-result] " in line.log]
        assert len(places) > 2, "it is long"
        lines = [log[place] for place in places]
        assert all(len(line.log) < 4000 for line in lines)
        del log[places[0] : places[-1] + 1]
        torn = [changed_line(line, lambda text: text[:-9] + "!!!!\n") for line in lines]
        noise = changed_line(lines[0], lambda text: "[dsat-result] what is this?\n")
        whole, begun = [noise, *lines, noise], lines[:-1]
        for rest, is_told in (
            ([*whole, *begun], True),
            ([*begun, *whole, *torn], True),
            ([*begun, lines[0]], False),
            ([lines[0], *lines[2:]], False),
            (torn, False),
            ([noise], False),
        ):
            log += rest
            again = there.dsat("watch", RUNNER, "--json")
            found = json.loads(again.out)
            assert (again.status == 0) is is_told and (found.get("over") is True) is is_told
            if is_told:
                assert without_folder(found) == without_folder(json.loads(first.out))
            del log[-len(rest) :]


def changed_line(line: LogLine, change: Any) -> LogLine:
    return LogLine(**{**vars(line), "log": change(line.log)})


def without_folder(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "run_dir"}


def test_the_help_of_watch_names_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["watch", "--help"])
    assert "experiment" in capsys.readouterr().out


def test_only_a_search_is_followed(master: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main.main(["watch", "7"]) == 2
        assert master.url in refused(capsys)
    config = {"entrypoint": "x", "searcher": {"name": "custom", "metric": "loss"}}
    master.cluster.create_experiment(json.dumps(config), b"", "tester")
    assert main.main(["watch", "1"]) == 2
    assert "not a search of dsat" in refused(capsys)


@pytest.mark.parametrize(
    ("statuses", "least_s", "most_s"),
    [
        *(([status], 0, 0) for status in (401, 403, 404, 501)),
        ([599], 1800, 1830),
        *(([status], 1800, 1830) for status in (408, 429)),  # of a proxy that is busy
        ([502], 1800, 3000),  # determined's client retries this
        ([500], 120, 150),  # more slots than the cluster has
        ([599] * 7 + [500], 211, 241),  # a master that restarts before its database
        ([599] * 7 + [200], 91, 91),  # a master that was unavailable
    ],
)
def test_how_long_a_request_is_repeated(
    statuses: list[int],
    least_s: float,
    most_s: float,
    master: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When the command gives up, the search continues, and users read how to follow it again."""
    pauses: list[float] = []
    really, here = time.sleep, threading.get_ident()

    def pause(seconds: float) -> None:  # other threads of the tests sleep as usual
        if threading.get_ident() == here:
            pauses.append(seconds)
        else:
            really(seconds)

    monkeypatch.setattr("time.sleep", pause)
    gone = r"GET .*/experiments/1$"
    assert dsat("--detach") == 0
    capsys.readouterr()
    for number, status in enumerate(statuses):
        times = None if number == len(statuses) - 1 else 1
        if status != 200:
            master.fault(gone, status=status, times=times, after=1)
    if statuses[-1] == 200:  # it then learns that another user has ended the search
        master.experiment(1).change_state(State.STOPPING_KILLED, "user requested kill")
    assert main.main(["watch", "1"]) == (1 if statuses[-1] == 200 else 2)
    assert least_s <= sum(pauses) <= most_s + 10
    told = capsys.readouterr()
    said = re.findall(r"the master (?:does not answer|answers with an error) \(", told.err)
    assert len(said) == (len({*statuses} - {200}) if sum(pauses) else 0)
    if statuses[-1] != 200:
        assert "dsat no longer follows" in told.err and "dsat watch 1" in told.err
        assert ("credentials" in told.err) is (statuses[-1] in (401, 403))


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DET_PASS", "wrong", "does not accept your credentials"),
        ("DET_MASTER", "http://127.0.0.1:9", "no Determined master answers there"),
        ("DET_MASTER", "ftp://x:y:z", "no Determined master answers there"),
    ],
)
def test_a_master_that_is_not_there_for_the_user(
    variable: str,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert dsat() == 2
    err = refused(capsys)
    assert said in err and ("--engine local" in err) is (variable == "DET_MASTER")
    for noise in ("HTTPConnectionPool", "object at 0x"):
        assert noise not in err


def page(status: int) -> requests.Response:
    """Return an answer of a proxy, or of another server."""
    response = requests.Response()
    response.status_code, response._content = status, b"<!DOCTYPE html>\n<html></html>"
    return response


def test_a_web_page_in_place_of_an_answer_is_described() -> None:
    for error, said in (
        (errors.APIException(page(407)), "the master refuses: status 407"),
        (errors.APIException(page(429)), "the master does not answer: status 429"),
        (errors.APIException(page(500)), "the master answers with an error: status 500"),
        (errors.NotFoundException(""), "the master refuses: status 404"),
    ):
        assert describe_request(error) == said
    told = pytest.raises(UserInputError, match="answers there: the answer is not JSON")
    with told, explain_errors("https://m"):
        page(200).json()


def test_a_certificate_that_is_not_trusted_is_named() -> None:
    told = pytest.raises(UserInputError, match=r"certificate is not acc.*DET_MASTER_CERT_FILE")
    with told, explain_errors("https://m"):
        raise requests.exceptions.SSLError("self-signed certificate")


def test_a_name_may_have_any_character(master: StandIn, tmp_path: Path) -> None:
    """JSON escapes an emoji as two surrogates, but YAML refuses these, and the others unescaped."""
    name = "my 🚀\x85\x7f"
    assert dsat("--detach", model=changed(tmp_path, name=name)) == 0
    assert master.experiment(1).config["name"] == f"(DSAT) {name}"


def test_a_master_without_custom_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandIn(tmp_path / "master", version="0.38.1-rc2") as master:
        for name, value in master.client_environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        assert dsat() == 2
        err = refused(capsys)
        assert "removed in 0.38" in err and "--engine local" in err
        assert master.experiments == []


@pytest.mark.usefixtures("nowhere")
def test_a_determined_without_custom_searches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name.endswith(".searcher") else found(name)
    )
    assert dsat() == 2
    assert "no custom searchers" in refused(capsys)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("engine", ["determined", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        ["--no-fork"],
        ["--resume"],
        ["--run-dir", "x"],
        ["--arg-mapping", "train_micro_batch_size_per_gpu=--b"],
        ["--vary", "--workers=0,2"],
        ["--vary", "ENV:OMP_NUM_THREADS=1,2"],
        ["--search", "bind_cores_to_rank"],
    ],
)
def test_what_is_for_this_machine_only(
    options: list[str], engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dsat("--engine", engine, *options) == 2
    assert f"{options[0]}: " in refused(capsys)


@pytest.mark.usefixtures("nowhere")
def test_the_plan_is_shown_without_asking_anybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(tmp_path, resources={"slots_per_trial": 2, "max_slots": 4})
    for options, slots in (((), 4), (("--max-slots", 2), 2)):
        assert dsat("--dry-run", *options, model=model) == 0
        out = capsys.readouterr().out
        for fact in ("random search", "throughput", "stage 1", "to upload: ", f"{slots} devices"):
            assert fact in out
