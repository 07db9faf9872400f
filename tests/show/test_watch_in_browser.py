"""The page of `dsat watch` in a real browser, during a search and after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from testing.browser import barriers_of, chromium, errors_of, requests_of
from testing.local import wait_until
from testing.made_up_runs import HOSTILE, serving
from testing.scenarios import User
from testing.world import Failure, World

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


def drawn(browser: Any) -> None:
    WebDriverWait(browser, 60, poll_frequency=0.1).until(
        lambda b: b.execute_script("return document.body.dataset.drawn === 'yes'")
    )


def text_of(browser: Any, selector: str) -> str:
    code = "return document.querySelector(arguments[0])?.innerText ?? ''"
    found: str = browser.execute_script(code, selector)
    return found


def number_of_rows(browser: Any) -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, "#table tbody tr"))


def test_a_search_is_watched(browser: Any, tmp_path: Path) -> None:
    user = User(tmp_path, World(failures=(Failure("ERROR", {"stage": 3}, HOSTILE),)), pause_s=1.0)
    user.has()
    started = user.starts(*user.words("--max-trials", 12, "--finals", 0, method="random"))
    folder = tmp_path / "run"
    wait_until(lambda: (folder / "trials").exists(), "a trial")
    with serving(folder) as url:
        browser.get(url)
        drawn(browser)
        before = number_of_rows(browser)
        browser.execute_script("document.getElementById('filter').value = 'gas1'")
        wait_until(lambda: number_of_rows(browser) > before, "a row without a reload")
        typed = browser.execute_script("return document.getElementById('filter').value")
        assert typed == "gas1", "it is kept"
        told = started.wait()
        assert told.status == 0
        wait_until(lambda: "finished" in text_of(browser, "#status"), "the end")
        drawn(browser)
        assert number_of_rows(browser) == len(told.trials)
        web = [x for x in requests_of(browser) if not x.startswith(("data:", "blob:"))]
        assert all(address.startswith("http://127.0.0.1") for address in web)
        assert errors_of(browser) == []
        assert browser.execute_script("return document.body.dataset.hacked") is None
        assert barriers_of(browser) == []
