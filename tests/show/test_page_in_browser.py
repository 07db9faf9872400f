"""The report in a real browser: headless Chromium, driven by Selenium."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from testing.browser import barriers_of, chromium, errors_of, requests_of
from testing.made_up_runs import HOSTILE
from testing.scenarios import User
from testing.started import Told
from testing.world import Failure, World

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[User, Told]:
    """Run a search whose script fails with a hostile message, and sometimes out of memory."""
    world = World(failures=(Failure("ERROR", {"stage": 3}, HOSTILE),))
    user = User(tmp_path_factory.mktemp("ran"), world)
    user.has()
    return user, user.tunes("--max-trials", 40, "--memory-model", "none", method="random")


def opened(browser: Any, user: User) -> None:
    """Open a run's page, and wait until all plots are drawn."""
    browser.get_log("performance")
    browser.get((user.folder / "run" / "report.html").as_uri())
    WebDriverWait(browser, 60, poll_frequency=0.05).until(
        lambda b: b.execute_script("return document.body.dataset.drawn === 'yes'")
    )


def texts_of(browser: Any, selector: str) -> list[str]:
    """Return the texts of the elements that the browser shows."""
    code = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter((e) => e.checkVisibility()).map((e) => e.innerText)"
    )
    found: list[str] = browser.execute_script(code, selector)
    return found


def test_the_page_draws_sorts_and_filters_and_asks_for_nothing(
    browser: Any, ran: tuple[User, Told]
) -> None:
    user, told = ran
    opened(browser, user)
    assert errors_of(browser) == []
    assert {url.split(":")[0] for url in requests_of(browser)} <= {"file", "data", "blob"}
    assert browser.execute_script("return document.body.dataset.hacked") is None

    measured = [row for row in told.trials if row["metrics"]]
    lost = [row for row in told.trials if row["outcome"] == "OOM"]
    marks = browser.find_elements(By.CSS_SELECTOR, "#plot-0 .mark-symbol.ran_marks > path")
    assert len(marks) == len(measured)
    assert all(mark.rect["width"] > 2 and mark.rect["height"] > 2 for mark in marks[:5])
    crosses = browser.find_elements(By.CSS_SELECTOR, "#plot-0 .mark-text.oom_marks > text")
    assert len(crosses) == len(lost) > 0
    charts = browser.find_elements(By.CSS_SELECTOR, ".chart svg")
    assert len(charts) == len(browser.find_elements(By.CSS_SELECTOR, ".chart")) == 2
    assert all(chart.size["width"] > 500 and chart.size["height"] > 50 for chart in charts)

    micro_batch = browser.find_elements(By.CSS_SELECTOR, "#table thead button")[2]
    micro_batch.click()
    column = [int(text) for text in texts_of(browser, "#table tbody td:nth-child(3)")]
    assert column == sorted(column) and len(column) == len(told.trials)
    micro_batch.click()
    column = [int(text) for text in texts_of(browser, "#table tbody td:nth-child(3)")]
    assert column == sorted(column, reverse=True)

    browser.find_element(By.ID, "filter").send_keys("OOM")
    shown = texts_of(browser, "#table tbody tr")
    assert len(shown) == len(lost) and all("OOM" in text for text in shown)
    assert browser.find_element(By.ID, "count").text == f"{len(lost)} of {len(told.trials)}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_barrier(browser: Any, ran: tuple[User, Told], scheme: str) -> None:
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    opened(browser, ran[0])
    assert barriers_of(browser) == []


def test_it_prints_on_two_pages(browser: Any, ran: tuple[User, Told]) -> None:
    opened(browser, ran[0])
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(re.findall(rb"/Type /Page\b(?!s)", base64.b64decode(printed["data"]))) <= 2


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_window(browser: Any, ran: tuple[User, Told], width: int) -> None:
    size = {"width": width, "height": 4000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(browser, ran[0])
        wide = browser.execute_script(
            "const all = [...document.querySelectorAll('body, .chart svg, .role-legend')];"
            "return all.filter((e) => e.getBoundingClientRect().right > window.innerWidth)"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        scrolled = browser.execute_script("return document.documentElement.scrollWidth")
        assert scrolled <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
