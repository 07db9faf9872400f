"""The documentation as a site: built, and opened in a browser of desktop and of phone size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsat.estimating.options import EstimateSettings
from dsat.options import options_of
from dsat.projecting.options import ProjectSettings
from dsat.show.settings import READ_ONLY
from dsat.tuning.settings import Settings
from testing.browser import chromium

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a warning."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    told = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert told.returncode == 0 and "WARNING" not in told.stderr, told.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.mark.slow
def test_it_loads_nothing_from_elsewhere_and_has_every_option(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    foreign = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://[^>]+>")
    assert {p.name: found for p in pages if (found := foreign.findall(p.read_text()))} == {}
    options = (site / "options" / "index.html").read_text()
    commands = (EstimateSettings, ProjectSettings, *READ_ONLY.values())
    for settings in (Settings, *commands):
        assert all(own.flags[-1] in options for own in options_of(settings))


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1400, 390])
def test_no_page_is_wider_than_the_window(site: Path, browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = []
    for page in sorted(site.rglob("index.html")):
        browser.get(page.as_uri())
        if browser.execute_script("return document.documentElement.scrollWidth") > width:
            wide.append(str(page.relative_to(site)))
    assert wide == []
