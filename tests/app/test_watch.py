"""The pages of `dsat watch` without a browser: who may look, and who may ask for anything."""

from __future__ import annotations

import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from dsat.app import local, mailbox, observers, watch
from dsat.app.folder_lock import FolderLock
from dsat.app.prepare import Prepared
from dsat.cli.main import main
from dsat.report.progress import Status
from dsat.tuning.requests import Request, RequestKind
from dsat.tuning.run import Run
from testing.made_up_runs import Steady, write_run
from testing.simulated import SimulatedEngine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str, Run]]:
    """A run's folder, its page's address and token, and the run, of which two trials run."""
    folder = tmp_path_factory.mktemp("runs") / "model-1"
    write_run(folder, Steady(), trials=12)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    begun = [number for number, line in enumerate(lines) if '"proposed"' in line]
    (folder / "journal.jsonl").write_text("".join(lines[: begun[8] + 1]))
    run = Run(map(json.loads, lines[: begun[8] + 1]))
    assert run.running
    with watch.serving(folder.parent) as url:
        base, _, token = url.partition("?token=")
        yield folder, f"{base}runs/model-1/", token, run


def answer(
    url: str, *, data: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str, Any]:
    """Status, text and headers."""
    body = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(url, body, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, found.read().decode(), found.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@pytest.mark.parametrize("path", ["", "state", "events", "trials/x/stdout.log"])
def test_nothing_is_told_without_the_token(served: tuple[Path, str, str, Run], path: str) -> None:
    _, base, right, _ = served
    for token in ("", "?token=", "?token=wrong", "?token=%C3%A9"):
        status, text, _ = answer(base + path + token)
        assert status == 403 and right not in text and "tmbspg" not in text


def test_the_page_is_for_browsers_of_this_machine(served: tuple[Path, str, str, Run]) -> None:
    """It answers by its own name alone, and may load nothing from elsewhere."""
    _, base, token, _ = served
    assert base.startswith("http://127.0.0.1:")
    status, _, headers = answer(f"{base}?token={token}")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    status, _, _ = answer(f"{base}?token={token}", headers={"Host": "attacker.example"})
    assert status == 400


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("trials/{trial}/stdout.log", 200),
        ("trials/{trial}/trial.json", 404),
        ("trials/..%2f../journal.jsonl", 404),
        ("trials/../journal.jsonl", 404),
        ("trials/nobody/stdout.log", 404),
    ],
)
def test_files_of_trials_and_no_others(
    served: tuple[Path, str, str, Run], path: str, status: int
) -> None:
    _, base, token, run = served
    name = run.trials[3].name
    found, text, headers = answer(f"{base}{path.format(trial=name)}?token={token}")
    assert found == status
    if status == 200:
        assert f"step 39 of {name}" in text
        assert headers["Content-Type"].startswith("text/plain")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_only_the_token_in_a_header_may_ask(served: tuple[Path, str, str, Run]) -> None:
    folder, base, token, _ = served
    with closing(FolderLock(folder)):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
            # The token in the address is not enough: a foreign form could send there.
            status, text, _ = answer(
                f"{base}requests?token={token}", data={"kind": "stop"}, headers=headers
            )
            assert status == 403 and "Refused" in text
        assert mailbox.take(folder) == []


@pytest.mark.parametrize(
    ("asked", "goes_on", "status", "said"),
    [
        ({"kind": "stop"}, True, 202, "No further trial"),
        ({"kind": "stop"}, False, 409, "this run is not active"),
        ({"kind": "cancel", "trial_id": "running"}, True, 202, "will be canceled"),
        ({"kind": "cancel", "trial_id": 0}, True, 409, "does not run"),
        ({"kind": "cancel"}, True, 409, "does not run"),
        ({"kind": "budget", "max_trials": 80}, True, 202, "There may be 80 trials"),
        ({"kind": "budget", "max_trials": 3}, True, 409, "12 trials already"),
        ({"kind": "budget", "max_trials": "many"}, True, 400, "no request"),
        ({"kind": "explode"}, True, 400, "no request"),
        ([1, 2], True, 400, "no request"),
        (b"[" * 4000, True, 400, "no request"),
        ("x" * 5000, True, 413, "too long"),
    ],
)
def test_what_may_be_asked(
    served: tuple[Path, str, str, Run], asked: Any, goes_on: bool, status: int, said: str
) -> None:
    folder, base, token, run = served
    if isinstance(asked, dict) and asked.get("trial_id") == "running":
        asked = {**asked, "trial_id": run.running[0].id}
    with closing(FolderLock(folder)) if goes_on else nullcontext():
        headers = {"Authorization": f"Bearer {token}"}
        found, text, _ = answer(f"{base}requests", data=asked, headers=headers)
    assert (found, json.loads(text)["message"].count(said)) == (status, 1)
    left = mailbox.take(folder)
    assert len(left) == (1 if status == 202 else 0)
    if left:
        assert left[0] == Request.from_json(asked)


def test_a_run_that_is_over_takes_no_requests(tmp_path: Path) -> None:
    """Its process may still live: it trains in full length, or writes the report."""
    write_run(tmp_path, Steady(), trials=3)
    with closing(FolderLock(tmp_path)):
        assert watch._leave(tmp_path, Request(RequestKind.STOP))[0] == 409
        assert mailbox.take(tmp_path) == []


def test_the_page_has_the_command_to_train_with(served: tuple[Path, str, str, Run]) -> None:
    folder, base, token, run = served
    before = watch._version(folder)
    Status(num_slots=2, at_once=2, train_line="deepspeed train.py --best").write(folder)
    assert watch._version(folder) != before, "an open page fetches it"
    state = json.loads(answer(f"{base}state?token={token}")[1])
    assert run.best is not None and "deepspeed train.py --best" in state["html"]


def test_the_page_has_the_command_as_soon_as_a_trial_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be long until the next trial starts."""
    monkeypatch.setattr(observers, "write_files", lambda *_, **__: None)
    run = write_run(tmp_path, Steady(), trials=3)
    status = Status(num_slots=1, at_once=1, train_line="train.py --best")
    keeper = observers.FileKeeper(cast(Prepared, None), tmp_path, lambda: status)
    assert run.best is not None
    keeper.ended(run, run.best, run.outcomes[run.best.id])
    assert Status.of_run(tmp_path) == status


def test_a_run_that_is_not_there_is_not_found(served: tuple[Path, str, str, Run]) -> None:
    _, base, token, _ = served
    gone = base.replace("model-1", "model-2")
    for path in ("", "state", "events"):
        assert answer(f"{gone}{path}?token={token}")[0] == 404
    headers = {"Authorization": f"Bearer {token}"}
    assert answer(f"{gone}requests", data={"kind": "stop"}, headers=headers)[0] == 404


def test_connections_beyond_many_are_closed(served: tuple[Path, str, str, Run]) -> None:
    _, base, token, _ = served
    port = urlsplit(base).port or 0
    with ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection((watch.LOOPBACK, port), timeout=60))
            for _ in range(watch._MOST_CONNECTIONS + 20)
        ]
        assert idle[-1].recv(1) == b""
    for _ in range(600):  # until their threads have ended
        with suppress(OSError):
            assert answer(f"{base}state?token={token}")[0] == 200
            return
        time.sleep(0.1)
    pytest.fail("the page does not answer after idle connections were closed")


def test_a_taken_port_is_told(
    served: tuple[Path, str, str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, base, _, _ = served
    port = urlsplit(base).port
    assert main(["watch", str(folder), "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_is_served_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command with an engine that runs nothing, which looks at the page and stops it."""
    out, seen = io.StringIO(), list[tuple[str, int]]()

    class Looks(SimulatedEngine):
        def poll(self, timeout_s: float) -> list[Any]:
            if len(self._known) == 4 and not seen:
                words = out.getvalue().split()
                url = next(word for word in words if word.startswith("http://127.0.0.1"))
                base, _, token = url.partition("?token=")
                state = json.loads(answer(f"{base}state?token={token}")[1])
                headers = {"Authorization": f"Bearer {token}"}
                status, _, _ = answer(f"{base}requests", data={"kind": "stop"}, headers=headers)
                seen.append((state["html"], status))
            return super().poll(100.0)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4}')
    world = Steady()
    monkeypatch.setitem(
        local.ENGINES, "local", lambda ready, folder: Looks(world.outcome, num_slots=1)
    )
    words = "random --engine local --slots 1 -m throughput --finals 0 --memory-model none --watch"
    with redirect_stdout(out):
        main([*words.split(), "--ds-config", "ds.json", "--", "train.py"])
    [(html, status)] = seen
    assert "All trials" in html and status == 202
    told = out.getvalue()
    [folder] = (tmp_path / "dsat_runs").iterdir()
    left = Status.of_run(folder)
    assert left is not None and left.train_line in told and "train.py" in left.train_line
    assert "ssh -L" in told and "stopped: it was asked to stop" in told
    events = (tmp_path / "dsat_runs").glob("*/journal.jsonl")
    kinds = [json.loads(line)["event"] for line in next(events).read_text().splitlines()]
    assert kinds[-2:] == ["stop_asked", "stopped"]
