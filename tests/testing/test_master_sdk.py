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


def search(
    master: StandIn, *behaviours: str, max_restarts: int = 0, runner_restarts: int = 1
) -> Any:
    """A search runner whose trials behave so; the experiment of its trials is number 2."""
    config = {
        "entrypoint": "python3 runner.py",
        "hyperparameters": {"behaviours": list(behaviours), "max_restarts": max_restarts},
        "searcher": {"name": "single", "metric": "none", "max_length": 1},
        "resources": {"slots_per_trial": 0},
        "max_restarts": runner_restarts,
    }
    return client_of(master).create_experiment(config, MODEL_DIR)


def method_events(master: StandIn) -> list[list[Any]]:
    """What the search method was told, from the runner's log."""
    return [json.loads(line) for line in re.findall(r"event: (.*)", master.log(1))]


def told(master: StandIn, behaviour: str) -> list[str]:
    """What the search method was told of one trial, in order."""
    return [
        " ".join(map(str, [kind, *more]))
        for kind, name, *more in method_events(master)
        if name == behaviour
    ]


def until_trials(master: StandIn, experiment_id: int, count: int) -> None:
    master.wait_until(
        lambda: (
            len(master.experiments) >= experiment_id and len(master.trials(experiment_id)) == count
        ),
        f"{count} trials of experiment {experiment_id}",
    )


def until_logged(master: StandIn, trial_id: int, text: str) -> None:
    master.wait_until(lambda: text in master.log(trial_id), f"{text!r} of trial {trial_id}")


# Logins.


def test_login(master: StandIn, home: Path) -> None:
    assert client_of(master).whoami().username == "tester"
    assert "tester" in (home / "auth.json").read_text()
    # The second time the cached token is enough, whatever the password.
    assert Determined(master.url, "tester", "wrong").whoami().username == "tester"
    assert [seen.path for seen in master.seen].count("/api/v1/auth/login") == 1


def test_login_after_the_cached_token_expired(master: StandIn) -> None:
    client_of(master)
    master.expire_tokens()
    assert client_of(master).whoami().username == "tester"


@pytest.mark.parametrize("user", ["tester", "nobody"])
def test_wrong_credentials(master: StandIn, user: str) -> None:
    with pytest.raises(errors.ForbiddenException, match="invalid credentials"):
        Determined(master.url, user, "wrong")


def test_without_a_login(master: StandIn) -> None:
    client = client_of(master)
    master.expire_tokens()
    with pytest.raises(errors.UnauthenticatedException):
        client.get_experiment(1)


# One trial.


def test_an_experiment(master: StandIn, tmp_path: Path) -> None:
    experiment = submit(master, "reports", name="one", labels=["x"])
    assert str(experiment.wait(interval=0.1)) == "ExperimentState.COMPLETED"
    assert (experiment.name, experiment.labels, experiment.progress) == ("one", {"x"}, 1.0)
    [trial] = experiment.list_trials()
    assert trial.hparams == {"behaviour": "reports"}
    [report] = trial.iter_metrics("validation")
    assert (report.steps_completed, report.metrics["loss"]) == (4, 0.25)
    # All of it: a client that leaves a stream in its middle has dropped a connection.
    log = list(trial.iter_logs(follow=True))
    assert any("run 1 of a trial that reports" in line for line in log)
    assert "trial.py" in master.context_files(experiment.id)
    # A trial may leave while its long poll is on the way.
    asked = [seen for seen in master.seen if not seen.path.endswith("/signals/preemption")]
    assert [seen for seen in asked if seen.status != 200] == []


def test_what_the_master_knows_nothing_of(master: StandIn) -> None:
    client = client_of(master)
    for ask in (client.get_experiment, client.get_trial, client.get_checkpoint):
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


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_two_ranks_by_the_launcher_for_deepspeed(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    """On one node, and on two that are reached by pdsh and sshd.

    The experiment has a name, for the one that a master makes up has parentheses: in the shell
    commands that DeepSpeed 0.19 makes of determined's environment file, of JSON with those, they
    are a syntax error.
    """
    with StandIn(tmp_path / "master", nodes=nodes) as master:
        submit(
            master,
            "reports",
            name="two",
            entrypoint="python3 -m determined.launch.deepspeed python3 trial.py",
            resources={"slots_per_trial": 2},
        )
        assert master.wait_ended(1, timeout_s=120) == "STATE_COMPLETED", master.log(1)
        log = master.log(1)
        assert len(master.metrics(1)) == 1
    other = len(nodes) - 1
    both = f"[[0, 0, 'agent-0', 'node-0'], [1, {other}, 'agent-{other}', 'node-{other}']]"
    for rank in (0, 1):
        assert f"[rank={rank}] || meets {both}" in log
    assert not list(Path("/tmp").glob("hostfile-1.*")), "of this trial"


# Searches.


def test_a_search_and_all_the_ways_in_which_a_trial_may_end(master: StandIn) -> None:
    search(master, "reports", "fails", "is invalid", "leaves silently")
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert told(master, "reports") == [
        "created",
        "completed {'loss': 0.5, 'of': 'reports'} 2",
        "closed",
    ]
    assert told(master, "fails") == ["created", "exited ERRORED", "closed"]
    assert told(master, "is invalid") == ["created", "closed"]
    assert told(master, "leaves silently") == ["created", "closed"]
    assert [str(trial.state) for trial in master.trials(2)] == [
        "STATE_COMPLETED",
        "STATE_ERROR",
        "STATE_COMPLETED",
        "STATE_COMPLETED",
    ]
    assert str(master.experiment(2).state) == "STATE_COMPLETED"
    assert master.experiment(2).progress == 1.0
    # The state that was saved before every POST of operations, and once before all.
    assert len(master.cluster.checkpoints) == 1 + len(master.posted(2))
    [latest] = master.checkpoint_paths(1)
    # Beside it is the folder of the events for TensorBoard.
    assert [path.parent for path in master.checkpoint_folder.glob("*/method.json")] == [latest]
    assert len(json.loads((latest / "method.json").read_text())["events"]) == 10


def test_restarts_of_trials(master: StandIn) -> None:
    search(master, "fails once", "fails", max_restarts=1)
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert told(master, "fails once")[1:] == [
        "completed {'loss': 0.5, 'of': 'fails once'} 2",
        "closed",
    ]
    assert told(master, "fails")[1:] == ["exited ERRORED", "closed"]
    assert [(trial.run_id, trial.restarts) for trial in master.trials(2)] == [(2, 1), (2, 2)]
    assert "run 2 of a trial that fails once" in master.log(2)


def test_a_killed_runner_goes_on_from_its_checkpoint(master: StandIn) -> None:
    search(master, "reports", "waits")
    until_logged(master, 3, "of a trial that waits")
    master.signal(1)
    until_logged(master, 1, "Resuming HP searcher for experiment 2")
    assert re.search(r"run 2 from checkpoint \w+-", master.log(1))
    client_of(master).get_experiment(2).kill()
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert master.trials(1)[0].restarts == 1
    assert len(master.experiments) == 2


def test_a_killed_trial_ends_with_all_its_processes_and_a_stock_runner_with_it(
    master: StandIn,
) -> None:
    """0.37's `SearchRunner` raises on the reason USER_CANCELED, which 0.37's master sends."""
    search(master, "hangs", runner_restarts=0)
    until_logged(master, 2, "of a trial that hangs")
    processes = master.processes(2)
    assert len(processes) >= 2
    client_of(master).get_trial(2).kill()
    assert master.wait_ended(1) == "STATE_ERROR"
    assert "RuntimeError: Invalid exited reason" in master.log(1)
    assert not [process for process in processes if is_alive(process.pid)]
    *_, exited, closed = master.experiment(2).queue.events
    assert exited["trialExitedEarly"]["exitedReason"] == "EXITED_REASON_USER_CANCELED"
    assert "trialClosed" in closed
    assert str(master.experiment(2).state) == "STATE_ACTIVE"


def test_pause_and_activate(master: StandIn) -> None:
    search(master, "waits")
    until_logged(master, 2, "run 1 of a trial that waits")
    experiment = client_of(master).get_experiment(2)
    experiment.pause()
    until_logged(master, 2, "was terminated")
    until_logged(master, 1, "has been paused")
    experiment.reload()
    assert str(experiment.state) == "ExperimentState.PAUSED"
    experiment.activate()
    until_logged(master, 2, "run 2 of a trial that waits")
    assert master.trials(2)[0].restarts == 0
    experiment.kill()
    assert master.wait_ended(2) == "STATE_CANCELED"
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert "experiment 2 is inactive; state=CANCELED" in master.log(1)


def test_a_cancelled_experiment_lets_its_trials_leave(master: StandIn) -> None:
    experiment = submit(master, "waits")
    until_logged(master, 1, "of a trial that waits")
    experiment.cancel()
    assert master.wait_ended(1) == "STATE_CANCELED"
    assert "forcibly" not in master.log(1)


def test_a_closed_trial_that_stays_is_not_closed(master: StandIn) -> None:
    search(master, "stays")
    until_trials(master, 2, 1)
    trial = master.trials(2)[0]
    master.wait_until(lambda: str(trial.state) == "STATE_STOPPING_COMPLETED", "the Close")
    assert trial.allocation is not None
    assert trial.allocation.preempt
    assert not trial.state.is_terminal


def test_trials_wait_for_slots(tmp_path: Path) -> None:
    with StandIn(tmp_path / "master", nodes=(1,)) as master:
        first, second = submit(master, "waits"), submit(master, "reports")
        until_logged(master, 1, "of a trial that waits")
        second.reload()
        assert str(second.state) == "ExperimentState.QUEUED"
        first.kill()
        assert master.wait_ended(second.id) == "STATE_COMPLETED"


# Faults.


def test_a_search_survives_what_the_sdk_retries(master: StandIn) -> None:
    master.fault(r"GET .*/searcher_events", status=502, times=2)
    master.fault(r"POST .*/metrics", kind="drop", times=1)
    master.fault(r"GET .*/searcher/operation", kind="delay", delay_s=0.5)
    search(master, "reports")
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert told(master, "reports")[-1] == "closed"
    assert {seen.status for seen in master.seen} == {200, 502, 0}


def test_a_runner_that_lost_the_answer_to_its_operations_finds_them_taken(master: StandIn) -> None:
    """They are posted again after the restart, and refused, for their event is gone."""
    master.fault(r"POST .*/searcher_operations", kind="drop_answer", times=1)
    search(master, "waits")
    until_logged(master, 1, "run 2 from checkpoint")
    until_trials(master, 2, 1)
    client_of(master).get_experiment(2).kill()
    master.wait_ended(1)
    refused = [seen.status for seen in master.seen if seen.path.endswith("searcher_operations")]
    assert refused[0] == 0
    assert len(master.posted(2)[0]["searcherOperations"]) == 2


def test_a_master_that_restarts(master: StandIn) -> None:
    search(master, "reports", "waits")
    until_logged(master, 3, "of a trial that waits")
    master.restart(down_s=0.3)
    client_of(master).get_experiment(2).cancel()
    assert master.wait_ended(2) == "STATE_CANCELED"
    assert master.wait_ended(1) == "STATE_COMPLETED"
    assert master.trials(1)[0].restarts == 0


def test_events_that_come_again_and_events_of_nowhere(master: StandIn) -> None:
    search(master, "waits")
    until_logged(master, 2, "of a trial that waits")
    count = len(master.posted(2))
    master.redeliver(2, {"id": 1, "initialOperations": {"placeholder": 0}})
    # The runner handles it once more, and its operations are refused with status 500.
    master.wait_until(
        lambda: any(s.status == 500 for s in master.seen), "a refusal of what comes again"
    )
    assert len(master.posted(2)) == count
    client_of(master).get_experiment(2).kill()
    client_of(master).get_experiment(1).kill()
    assert master.wait_ended(1) == "STATE_CANCELED"


def test_a_frozen_trial(master: StandIn) -> None:
    submit(master, "waits")
    until_logged(master, 1, "of a trial that waits")
    master.freeze(1)
    processes = master.processes(1)
    master.wait_until(lambda: {each.status() for each in processes} == {"stopped"}, "a stop")
    master.thaw(1)
    client_of(master).get_experiment(1).cancel()
    assert master.wait_ended(1) == "STATE_CANCELED"


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
        "config = {'entrypoint': 'setsid sleep 600 & sleep 600; true', 'searcher':"
        " {'name': 'single', 'metric': 'x', 'max_length': 1}}\n"
        "master.cluster.create_experiment(yaml.safe_dump(config), b'', 'tester')\n"
        "master._drive()\n"
        "master.wait_until(lambda: len(master.processes(1)) >= 4)\n"
        "print(*(each.pid for each in master.processes(1)), flush=True)\n"
        "time.sleep(600)\n"
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
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the container", 20)
