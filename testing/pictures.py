"""Make the pictures of the README and the documentation from recorded runs.

`python -m testing.pictures [RUN_FOLDER]` writes them into `docs/`. Needs Chromium and vl-convert.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium.webdriver.support.ui import WebDriverWait

from dsat.run.run import Run
from dsat.show import page, past_runs, plots
from dsat.show.view import RunView
from testing.browser import chromium
from testing.shown import RECORDED

DOCS = Path(__file__).parent.parent / "docs"


def main(folder: Path | None) -> None:
    """Write the report's picture from the recorded run, and a plot from another run.

    Args:
        folder: the other run; None keeps its picture unchanged.
    """
    _photograph(past_runs.load(RECORDED).run, DOCS / "report.png")
    if folder is not None:
        view = RunView(past_runs.load(folder).run)
        specs = [plot["spec"] for plot in plots.make_plots(view)]
        _draw(specs, "ran", DOCS / "throughput.svg")


def _draw(specs: list[dict[str, Any]], layer: str, path: Path) -> None:
    """Write the plot that has a layer of this name as SVG."""
    import vl_convert

    spec = next(s for s in specs if any(x.get("name") == layer for x in s.get("layer", [])))
    fixed = {**spec, "width": 640, "background": "white", "autosize": "pad"}
    path.write_text(_trimmed(vl_convert.vegalite_to_svg(fixed)), encoding="utf-8")


def _photograph(run: Run, path: Path) -> None:
    command = (RECORDED / "command.txt").read_text(encoding="utf-8").strip()
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        page.write_page(RunView(run), Path(folder), command)
        browser.set_window_size(1100, 1150)
        browser.get((Path(folder) / page.PAGE_FILE).as_uri())
        WebDriverWait(browser, 60).until(
            lambda b: b.execute_script("return document.body.dataset.drawn === 'yes'")
        )
        path.write_bytes(browser.get_screenshot_as_png())


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
