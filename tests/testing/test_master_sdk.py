"""The stand-in master through the real SDK of Determined: what is built on it can be trusted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.local import PROGRAMS, is_alive, wait_until
from testing.master import StandIn

with warnings.catch_warnings():
    # The SDK warns of its own deprecated parts when it is imported.
    warnings.simplefilter("ignore", FutureWarning)
    from determined.common.api import errors
    from determined.experimental.client import Determined

pytestmark = [
    pytest.mark.slow,
    # The SDK's, of what it imports.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
MODEL_DIR = PROGRAMS / "stand_in"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty token cache."""
    folder = tmp_path / "home"
    monkeypatch.setenv("DET_DEBUG_CONFIG_PATH", str(folder))
    for name in ("DET_MASTER", "DET_USER", "DET_PASS", "DET_USER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def master(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path / "master", nodes=(4,)) as running:
        yield running


def client_of(master: StandIn) -> Any:
    return Determined(master.url, "tester", master.users["tester"])


def submit(master: StandIn, behaviour: str, **more: Any) -> Any:
    """A `single` experiment of a trial that behaves so."""
    config = {
        "entrypoint": "python3 trial.py",
        "hyperparameters": {"behaviour": behaviour},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 4}},
        "max_restarts": 0,
        **more,
    }
    return client_of(master).create_experiment(config, MODEL_DIR)


def until_logged(master: StandIn, trial_id: int, text: str) -> None:
    master.wait_until(lambda: text in master.log(trial_id), f"{text!r} of trial {trial_id}")


def test_logins(master: StandIn, home: Path) -> None:
    client = client_of(master)
    assert client.whoami().username == "tester"
    assert "tester" in (home / "auth.json").read_text()
    # The second time the cached token is enough, whatever the password.
    assert Determined(master.url, "tester", "wrong").whoami().username == "tester"
    assert [seen.path for seen in master.seen].count("/api/v1/auth/login") == 1
    master.accounts.end_all_sessions()
    with pytest.raises(errors.UnauthenticatedException):
        client.get_experiment(1)
    assert client_of(master).whoami().username == "tester"
    master.accounts.end_all_sessions()
    for user in ("tester", "nobody"):
        with pytest.raises(errors.ForbiddenException, match="invalid credentials"):
            Determined(master.url, user, "wrong")


def test_an_experiment(master: StandIn, tmp_path: Path) -> None:
    experiment = submit(master, "reports", name="one", labels=["x"])
    assert str(experiment.wait(interval=0.1)) == "ExperimentState.COMPLETED"
    assert (experiment.name, experiment.labels, experiment.progress) == ("one", {"x"}, 1.0)
    [trial] = experiment.list_trials()
    assert trial.hparams == {"behaviour": "reports"}
    assert master.metrics(trial.id)[0]["loss"] == 0.25
    lines = list(trial.iter_logs())  # all of them: who stops reading drops the request
    assert any("run 1 of a trial that reports" in line for line in lines)
    assert "trial.py" in master.context(experiment.id)
    # A trial may leave while its long poll is on the way.
    asked = [seen for seen in master.seen if not seen.path.endswith("/signals/preemption")]
    assert [seen for seen in asked if seen.status != 200] == []


def test_what_the_master_knows_nothing_of(master: StandIn) -> None:
    client = client_of(master)
    for ask in (client.get_experiment, client.get_trial):
        with pytest.raises(errors.NotFoundException, match="7"):
            ask(7)


def test_a_trial_gets_what_a_real_container_has(master: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "look.py").write_text(
        "import importlib.util, json, os, pathlib\n"
        "import determined as det\n"
        "info = det.get_cluster_info()\n"
        "print('saw:', json.dumps({'task': info.task_type, 'trial': info.trial.trial_id,"
        " 'slots': info.slot_ids, 'addresses': info.container_addrs, 'seed': info.trial.trial_seed,"
        " 'dsat': importlib.util.find_spec('dsat') is not None, 'files': os.listdir(),"
        " 'copy': os.listdir(det.constants.MANAGED_TRAINING_MODEL_COPY),"
        " 'mine': os.environ['MINE'], 'home': str(pathlib.Path.home())}))\n"
    )
    experiment = client_of(master).create_experiment(
        {
            "entrypoint": ["python3", "look.py"],
            "searcher": {"name": "single", "metric": "loss", "max_length": 1},
            "resources": {"slots_per_trial": 2},
            "reproducibility": {"experiment_seed": 17},
            "environment": {"environment_variables": ["MINE=1"]},
        },
        folder,
    )
    assert master.wait_ended(experiment.id) == "STATE_COMPLETED"
    [found] = re.findall(r"saw: (.*)", master.log(1))
    seen = json.loads(found)
    assert seen.pop("home").startswith(str(tmp_path))
    assert seen == {
        "task": "TRIAL",
        "trial": 1,
        "slots": [0, 1],
        "addresses": ["127.0.0.1"],
        "seed": 17,
        "dsat": False,
        "files": ["look.py"],
        "copy": ["look.py"],
        "mine": "1",
    }


def test_a_cancelled_experiment_lets_its_trials_leave(master: StandIn) -> None:
    experiment = submit(master, "waits")
    until_logged(master, 1, "of a trial that waits")
    experiment.cancel()
    assert master.wait_ended(1) == "STATE_CANCELED"
    assert "forcibly" not in master.log(1)


def test_trials_wait_for_slots(tmp_path: Path) -> None:
    with StandIn(tmp_path / "master", nodes=(1,)) as master:
        first, second = submit(master, "waits"), submit(master, "reports")
        until_logged(master, 1, "of a trial that waits")
        second.reload()
        assert str(second.state) == "ExperimentState.QUEUED"
        first.kill()
        assert master.wait_ended(second.id) == "STATE_COMPLETED"


def test_nothing_is_left_when_the_master_goes(tmp_path: Path) -> None:
    with StandIn(tmp_path / "master") as master:
        submit(master, "hangs")
        until_logged(master, 1, "of a trial that hangs")
        processes = master.processes(1)
        url = master.url
    assert not [process for process in processes if is_alive(process.pid)]
    with pytest.raises(errors.MasterNotFoundException):
        Determined(url, "nobody", "x")


def test_nothing_is_left_when_a_test_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from testing.master import StandIn\n"
        "import yaml\n"
        "master = StandIn(Path(sys.argv[1]))\n"
        "config = {'entrypoint': 'setsid sleep 2000 & sleep 2000; true', 'searcher':"
        " {'name': 'single', 'metric': 'x', 'max_length': 1}}\n"
        "master.cluster.create_experiment(yaml.safe_dump(config), b'', 'tester')\n"
        "master.cluster.schedule()\n"
        "master.wait_until(lambda: len(master.processes(1)) >= 4)\n"
        "print(*(each.pid for each in master.processes(1)), flush=True)\n"
        "time.sleep(2000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()
    assert len(pids) >= 4, "the entrypoint, a shell and two that sleep"
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the container")
