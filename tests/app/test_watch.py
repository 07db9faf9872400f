"""The pages of `dsat watch` without a browser: who may look, and who may ask for anything."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dsat.app import mailbox, watch
from dsat.report.progress import Status
from dsat.run.run import Run
from dsat.tuning.folder_lock import FolderLock
from testing.made_up_runs import write_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str, Run]]:
    """A run's folder, its page's address and token, and the run, of which a trial runs."""
    folder = tmp_path_factory.mktemp("runs") / "model-1"
    write_run(folder, trials=12)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    begun = [number for number, line in enumerate(lines) if '"proposed"' in line]
    (folder / "journal.jsonl").write_text("".join(lines[: begun[6] + 1]))
    run = Run(map(json.loads, lines[: begun[6] + 1]))
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
        assert f"output of {name}" in text
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
    ("asked", "goes_on", "status"),
    [
        ({"kind": "stop"}, True, 202),
        ({"kind": "stop"}, False, 409),
        ({"kind": "cancel", "trial_id": 0}, True, 409),
        ({"kind": "budget", "max_trials": 80}, True, 202),
        ({"kind": "explode"}, True, 400),
        ("x" * 5000, True, 413),
    ],
)
def test_what_may_be_asked(
    served: tuple[Path, str, str, Run], asked: Any, goes_on: bool, status: int
) -> None:
    folder, base, token, _ = served
    with closing(FolderLock(folder)) if goes_on else nullcontext():
        headers = {"Authorization": f"Bearer {token}"}
        assert answer(f"{base}requests", data=asked, headers=headers)[0] == status
    assert len(mailbox.take(folder)) == (1 if status == 202 else 0)


def test_the_page_has_the_command_to_train_with(served: tuple[Path, str, str, Run]) -> None:
    folder, base, token, run = served
    before = watch._version(folder)
    Status(num_slots=2, at_once=2, train_line="deepspeed train.py --best").write(folder)
    assert watch._version(folder) != before, "an open page fetches it"
    state = json.loads(answer(f"{base}state?token={token}")[1])
    assert run.best is not None and "deepspeed train.py --best" in state["html"]


@pytest.mark.slow
def test_a_page_is_drawn_at_every_moment_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, trials=8)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    with watch.serving(tmp_path) as url:
        base, _, token = url.partition("?token=")
        for end in range(2, len(lines) + 1):
            (tmp_path / "journal.jsonl").write_text("".join(lines[:end]))
            status, text, _ = answer(f"{base}state?token={token}")
            assert status == 200
            run = Run(map(json.loads, lines[:end]))
            assert all(trial.name in text for trial in run.trials.values())


def test_a_run_that_is_not_there_is_not_found(served: tuple[Path, str, str, Run]) -> None:
    _, base, token, _ = served
    gone = base.replace("model-1", "model-2")
    for path in ("", "state", "events"):
        assert answer(f"{gone}{path}?token={token}")[0] == 404
    headers = {"Authorization": f"Bearer {token}"}
    assert answer(f"{gone}requests", data={"kind": "stop"}, headers=headers)[0] == 404


@pytest.mark.slow
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
