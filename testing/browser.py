"""A real browser for tests: headless Chromium, driven by Selenium."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_core_python
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser session; end it on exit."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    assert not missing, f"{missing} missing: apt-get install chromium chromium-driver"
    options = Options()
    options.binary_location = str(programs["chromium"])
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver: Any = webdriver.Chrome(options, Service(str(programs["chromedriver"])))
    try:
        yield driver
    finally:
        driver.quit()


def requests_of(browser: Any) -> list[str]:
    """Return the URLs that the browser requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


def errors_of(browser: Any) -> list[str]:
    """Return the errors in the browser's console since the last call."""
    return [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def barriers_of(browser: Any) -> list[tuple[str, list[str]]]:
    """Return the accessibility violations that axe-core reports: each rule with up to 3
    elements."""
    axe = Path(axe_core_python.__file__).parent / "axe.min.js"
    browser.execute_script(axe.read_text(encoding="utf-8"))
    found = browser.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run().then(done)"
    )
    return [(v["id"], [n["html"][:200] for n in v["nodes"]][:3]) for v in found["violations"]]
