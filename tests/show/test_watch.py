"""The page of `dsat watch` without a browser: who may read it, and when it changes."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dsat.run.folder_lock import FolderLock, is_locked
from dsat.run.run import Run
from dsat.show.summary import STATUS_FILE
from testing.made_up_runs import serving, write_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Run]]:
    """Serve a run with a running trial; yield its folder, the URL of its page, and the run."""
    folder = tmp_path_factory.mktemp("runs") / "model-1"
    write_run(folder, trials=12)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    begun = [number for number, line in enumerate(lines) if '"proposed"' in line]
    (folder / "journal.jsonl").write_text("".join(lines[: begun[6] + 1]))
    run = Run(map(json.loads, lines[: begun[6] + 1]))
    assert run.running
    with serving(folder) as url:
        yield folder, url, run


def answer(url: str, headers: dict[str, str] | None = None, **more: Any) -> tuple[int, str, Any]:
    """Request a URL; return status, text and headers."""
    request = urllib.request.Request(url, headers=headers or {}, **more)
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, found.read().decode(), found.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_page_is_for_browsers_of_this_machine(served: tuple[Path, str, Run]) -> None:
    """The server answers only to its own name, and the page may load nothing from elsewhere."""
    _, url, _ = served
    assert url.startswith("http://127.0.0.1:")
    status, _, headers = answer(url)
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    for path in ("", "state"):
        assert answer(f"{url}{path}", {"Host": "attacker.example"})[0] == 400


@pytest.mark.parametrize(
    "path", ["journal.jsonl", "trials/{trial}/stdout.log", "..%2f../etc/passwd", "requests"]
)
def test_nothing_but_the_report_is_served(served: tuple[Path, str, Run], path: str) -> None:
    _, url, run = served
    assert answer(url + path.format(trial=run.trials[3].name))[0] == 404


def test_another_user_who_finds_the_port_cannot_read_the_page(
    served: tuple[Path, str, Run],
) -> None:
    _, url, _ = served
    port = url.rstrip("/").rpartition("/")[0]
    assert len(url) - len(port) > 20
    for path in ("/", "/state", "/index.html", f"{url[len(port) : -2]}/", "/ä/"):
        assert answer(port + quote(path))[0] == 404


def test_the_page_changes_nothing(served: tuple[Path, str, Run]) -> None:
    folder, url, _ = served
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert answer(url, data=b'{"kind": "stop"}', method="POST")[0] == 501
    assert answer(f"{url}state")[0] == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_the_report_is_sent_again_when_it_changed(served: tuple[Path, str, Run]) -> None:
    folder, url, run = served
    state = json.loads(answer(f"{url}state")[1])
    version = quote(state["version"])
    known = f"{url}state?version={version}"
    assert all(trial.name in state["html"] for trial in run.trials.values())
    assert "html" not in json.loads(answer(known)[1])
    (folder / STATUS_FILE).write_text('{"train_line": "deepspeed train.py --best"}')
    assert run.best is not None and "train.py --best" in json.loads(answer(known)[1])["html"]


def test_the_status_names_the_running_trials(served: tuple[Path, str, Run]) -> None:
    folder, url, run = served
    assert "interrupted" in json.loads(answer(f"{url}state")[1])["status"]
    with closing(FolderLock(folder)):
        status = json.loads(answer(f"{url}state")[1])["status"]
    assert "running" in status and run.running[0].name in status


@pytest.mark.parametrize("becomes", [Path.touch, Path.mkdir, None])
def test_a_folder_that_is_replaced_is_an_answer(
    tmp_path: Path, becomes: Callable[[Path], None] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    write_run(folder, trials=8)
    with serving(folder) as url:
        folder.rename(tmp_path / "moved")
        if becomes is not None:
            becomes(folder)
        assert answer(f"{url}state")[0] == 404
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_is_drawn_at_every_moment_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, trials=8)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    with serving(tmp_path) as url:
        for end in range(2, len(lines) + 1):
            (tmp_path / "journal.jsonl").write_text("".join(lines[:end]))
            status, text, _ = answer(f"{url}state")
            assert status == 200
            run = Run(map(json.loads, lines[:end]))
            assert all(trial.name in text for trial in run.trials.values())


@pytest.mark.slow
def test_looking_at_a_folder_refuses_no_process_that_starts_there(tmp_path: Path) -> None:
    FolderLock(tmp_path).close()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            is_locked(tmp_path)
            time.sleep(0.001)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            FolderLock(tmp_path).close()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
