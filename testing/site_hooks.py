"""Parts of the documentation made from elsewhere: files of the repository beside its pages.

mkdocs calls these functions (`hooks` in `mkdocs.yml`). Nothing that is generated here is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages that are files of the repository, by their place on the site.
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
    """Adds the repository's own files."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_with_links(text, source)))
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link to those files as the site has them."""
    for name, source in {**PAGES, **PICTURES}.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def _with_links(text: str, source: str) -> str:
    """Links of a repository's file as the site has them; what is no page is only named."""
    places = {ROOT / path: page for page, path in {**PAGES, **PICTURES}.items()}
    places |= {path: path.name for path in (ROOT / "docs").glob("*.md")}

    def replaced(match: re.Match[str]) -> str:
        path = ((ROOT / source).parent / match[2]).resolve()
        if path in places:
            return f"[{match[1]}]({places[path]}{match[3] or ''})"
        return f"{match[1]} (`{path.relative_to(ROOT)}`)"

    return _LINK.sub(replaced, text)
