"""Pages of the site made from files of the repository outside of `docs`.

mkdocs calls these functions (`hooks` in `mkdocs.yml`). Generated pages are not kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Files of the repository that become pages, by their path on the site.
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/RESULTS.md",
    "examples.md": "examples/README.md",
    "gpu.md": "benchmarks/gpu/README.md",
}
PICTURES = {"RESULTS.svg": "benchmarks/RESULTS.svg"}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_with_links(text, source)))
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Redirect links to those files to their paths on the site."""
    for name, source in {**PAGES, **PICTURES}.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def _with_links(text: str, source: str) -> str:
    """Redirect the links of a repository's file to the site; a target without a page is only
    named."""
    places = {ROOT / path: page for page, path in {**PAGES, **PICTURES}.items()}
    places |= {path: path.name for path in (ROOT / "docs").glob("*.md")}

    def replaced(match: re.Match[str]) -> str:
        path = ((ROOT / source).parent / match[2]).resolve()
        if path in places:
            return f"[{match[1]}]({places[path]}{match[3] or ''})"
        return f"{match[1]} (`{path.relative_to(ROOT)}`)"

    return _LINK.sub(replaced, text)
