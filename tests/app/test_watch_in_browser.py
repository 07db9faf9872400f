"""The watch page in a real browser while a search goes on, with an engine that runs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from dsat.app import mailbox, watch
from dsat.app.folder_lock import FolderLock
from dsat.tuning.journal import FILE_NAME, Journal, read_events
from dsat.tuning.loop import drive
from dsat.tuning.requests import Request, RequestKind
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.browser import barriers_of, chromium, errors_of, requests_of
from testing.helpers import failed, plan_of
from testing.made_up_runs import HOSTILE, Steady, write_run
from testing.simulated import SimulatedEngine

pytestmark = pytest.mark.nightly

LASTS = 9  # the trial that would last for ever


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


class Slow(SimulatedEngine):
    """Its clock is the wall's."""

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        time.sleep(0.1)
        return super().poll(0.1)


class Hostile(Steady):
    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        found = found if found.ok else failed("ERROR", HOSTILE)
        return replace(found, duration_s=1000.0 if trial.id == LASTS else 0.6)


class Search:
    """A search in a thread, with its folder's lock, journal and mailbox as the command has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with ExitStack() as opened:
            opened.callback(FolderLock(self.folder).close)
            journal = opened.enter_context(Journal(self.folder / FILE_NAME))
            info = {"name": f"model {HOSTILE}", "machine": "made up"}
            tuner = Tuner(plan_of("random", max_trials=40), journal, info=info)
            drive(
                tuner,
                Slow(Hostile().outcome, num_slots=1),
                max_concurrent_trials=1,
                requests=lambda: mailbox.take(self.folder),
            )

    def __enter__(self) -> Search:
        self._thread.start()
        wait_for(lambda: (self.folder / FILE_NAME).exists() and bool(self.events))
        return self

    def __exit__(self, *_: object) -> None:
        mailbox.leave(self.folder, Request(RequestKind.STOP))
        mailbox.leave(self.folder, Request(RequestKind.CANCEL, trial_id=LASTS))
        self._thread.join(timeout=20)

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder / FILE_NAME)

    def has_ended(self) -> bool:
        return not self._thread.is_alive()


def wait_for(holds: Any, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.1)


def drawn(browser: Any) -> None:
    WebDriverWait(browser, 60, poll_frequency=0.1).until(
        lambda b: b.execute_script("return document.body.dataset.drawn === 'yes'")
    )


def text_of(browser: Any, selector: str) -> str:
    code = "return document.querySelector(arguments[0])?.innerText ?? ''"
    found: str = browser.execute_script(code, selector)
    return found


def number_of(browser: Any, selector: str) -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, selector))


def test_a_search_is_watched_and_directed(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model-1"
    folder.mkdir()
    with Search(folder) as search, watch.serving(folder) as url:
        browser.get(url)
        drawn(browser)
        before = number_of(browser, "#table tbody tr")
        browser.execute_script("document.getElementById('filter').value = 'gas1'")
        wait_for(lambda: f"#{LASTS}" in _running(browser))
        assert number_of(browser, "#table tbody tr") > before  # they came by themselves
        typed = browser.execute_script("return document.getElementById('filter').value")
        assert typed == "gas1"  # and what was typed is still there

        trial = Run(search.events).trials[LASTS]
        wait_for(lambda: "waits for slots" in text_of(browser, "#running"))
        steps = folder / "trials" / trial.name
        steps.mkdir(parents=True)
        (steps / "steps").write_bytes(b"%8d\n" % 6)
        wait_for(lambda: "step 6" in text_of(browser, "#running"))
        assert trial.name in text_of(browser, "#running")

        refused = browser.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "fetch(`requests${location.search}`, {method: 'POST', body: '{\"kind\": \"stop\"}'})"
            ".then((answer) => done(answer.status))"
        )
        assert refused == 403
        browser.get_log("browser")  # it says so, too
        assert "stop_asked" not in [event["event"] for event in search.events]

        browser.find_element(By.CSS_SELECTOR, f'button[data-trial="{LASTS}"]').click()
        wait_for(lambda: Run(search.events).outcomes.get(LASTS) is not None)
        assert Run(search.events).outcomes[LASTS].kind.value == "CANCELED"
        assert "will be canceled" in text_of(browser, "#said")
        wait_for(lambda: "CANCELED" in text_of(browser, "#table"))

        most = browser.find_element(By.ID, "most")
        most.clear()
        most.send_keys("44")
        browser.find_element(By.CSS_SELECTOR, "#budget button").click()
        wait_for(lambda: "of at most 44 trials" in text_of(browser, "#status"))
        browser.find_element(By.ID, "stop").click()
        wait_for(search.has_ended)
        wait_for(lambda: "the run is over" in text_of(browser, "#status"))
        assert not browser.find_element(By.ID, "controls").is_displayed()

        run = Run(search.events)
        version = str(watch._version(folder))
        wait_for(lambda: browser.execute_script("return document.body.dataset.version") == version)
        drawn(browser)
        measured = [t for t in run.trials.values() if run.value(t) is not None]
        assert number_of(browser, "#plot-0 .mark-symbol.ran_marks > path") == len(measured) > 4
        assert number_of(browser, "#table tbody tr") == len(run.trials)
        assert errors_of(browser) == []
        assert all(url.startswith((url.split("?")[0], "data:")) for url in _web(browser))
        assert browser.execute_script("return document.body.dataset.hacked") is None
        assert HOSTILE in text_of(browser, "h1")
        assert barriers_of(browser) == []


def test_runs_in_a_folder_are_compared(browser: Any, tmp_path: Path) -> None:
    for name, trials in (("model-1", 12), ("model-2", 30)):
        write_run(tmp_path / name, Steady(), trials=trials)
    (tmp_path / "torn-1").mkdir()
    (tmp_path / "torn-1" / FILE_NAME).write_text(f"{HOSTILE}\n")
    with watch.serving(tmp_path) as url:
        browser.get(url)
        errors_of(browser)  # of the page before, whose server has gone
        requests_of(browser)
        browser.refresh()
        drawn(browser)
        assert number_of(browser, "#table tbody tr") == 2
        assert number_of(browser, ".chart svg") == 2
        assert "torn-1" in text_of(browser, "main")
        assert barriers_of(browser) == []
        browser.find_element(By.LINK_TEXT, "model-2").click()
        drawn(browser)
        wait_for(lambda: "the run is over" in text_of(browser, "#status"))
        assert number_of(browser, "#table tbody tr") == 30
        browser.find_element(By.LINK_TEXT, "out").click()
        wait_for(lambda: "step 39" in text_of(browser, "body"))
        assert errors_of(browser) == []
        assert all(url.startswith(url.split("?")[0]) for url in _web(browser))


def _running(browser: Any) -> str:
    code = "return [...document.querySelectorAll('[data-trial]')].map((e) => `#${e.dataset.trial}`)"
    return " ".join(browser.execute_script(code))


def _web(browser: Any) -> list[str]:
    return [url for url in requests_of(browser) if not url.startswith(("data:", "blob:"))]
