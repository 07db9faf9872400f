"""The pictures of the README and the documentation, from a run that really was made.

`python -m testing.pictures RUN_FOLDER` writes them into `docs/`. Needs Chromium and vl-convert.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

from rich import _export_format
from rich.console import Console
from selenium.webdriver.support.ui import WebDriverWait

from dsat.app import past_runs
from dsat.report import page, terminal
from testing.browser import chromium

DOCS = Path(__file__).parent.parent / "docs"
_WIDTH = 118
# The terminal's picture in whatever fixed-width font there is: nothing is loaded from elsewhere.
_PLAIN_FONT = re.sub(
    r"@font-face \{\{.*?\}\}\s*", "", _export_format.CONSOLE_SVG_FORMAT, flags=re.S
)


def main(folder: Path) -> None:
    """Writes all pictures.

    Args:
        folder: of a run.
    """
    past = past_runs.load(folder)
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print("$ dsat show")
    for each in terminal.of_run(past.run, Path("dsat_runs") / folder.name, past.state):
        console.print(each)
    shown = console.export_svg(title="dsat", code_format=_PLAIN_FONT)
    (DOCS / "terminal.svg").write_text(_trimmed(shown), encoding="utf-8")
    specs = [plot["spec"] for plot in page.parts(past.run, "trials", "")["plots"]]
    _draw(specs, "ran", DOCS / "throughput.svg")
    _draw(specs, "parts", DOCS / "memory.svg")
    _photograph(folder / page.PAGE_FILE, DOCS / "report.png")


def _draw(specs: list[dict[str, Any]], layer: str, path: Path) -> None:
    """The plot that has a layer of this name."""
    import vl_convert

    spec = next(s for s in specs if any(x.get("name") == layer for x in s.get("layer", [])))
    fixed = {**spec, "width": 640, "background": "white", "autosize": "pad"}
    path.write_text(_trimmed(vl_convert.vegalite_to_svg(fixed)), encoding="utf-8")


def _photograph(report: Path, path: Path) -> None:
    with chromium() as browser:
        browser.set_window_size(1100, 1250)
        browser.get(report.resolve().as_uri())
        WebDriverWait(browser, 60).until(
            lambda b: b.execute_script("return document.body.dataset.drawn === 'yes'")
        )
        path.write_bytes(browser.get_screenshot_as_png())


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
