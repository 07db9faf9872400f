"""Checks `console` blocks in the documents: each must show what its commands print.

`python -m testing.shown` rewrites the outputs. Commands that read runs (`show`, `compare`,
`export`) see the recorded run, a real one of `make demo`. Others start in the repository's folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "testing" / "recorded_run"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.S | re.M)
_PROMPT, _MORE = "$ ", "..."
_LOOKS = ("show", "compare", "export")
_LIMIT_S = 600
# Lines that are printed only on a slow machine.
_IF_SLOW = (
    "checking the configuration with DeepSpeed",
    "importing torch and DeepSpeed",
    "counting the model's parameters and activations",
    "simulation: building the model",
    "your command runs, up to its first optimizer step",
)


@dataclass(frozen=True)
class Block:
    """The commands of a block, and the lines that it shows below them."""

    commands: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def looks(self) -> bool:
        """Whether the last command reads the recorded run."""
        return shlex.split(self.commands[-1])[1] in _LOOKS

    @property
    def is_cut(self) -> bool:
        """Whether the block shows only the first lines of the output."""
        return self.shown[-1:] == (_MORE,)

    def printed(self) -> list[str]:
        """Run the commands; return the lines to show.

        A block that reads a run shows all lines. Others show as many lines as they do now: the last
        ones, or the first ones if the block ends with `...`.
        """
        if not self.looks:
            lines = _ran(self.commands, ROOT)
            return (
                [*lines[: len(self.shown) - 1], _MORE] if self.is_cut else lines[-len(self.shown) :]
            )
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "dsat_runs" / "train-1"
            shutil.copytree(RECORDED, run)
            for name in ("best_ds_config.json", "report.html"):  # files that every run has
                (run / name).touch()
            return _ran(self.commands, Path(folder))


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a document that show an output, or read the recorded run."""
    for match in _BLOCK.finditer(text):
        block = _block_of(match[1])
        if block.shown or block.looks:
            yield block


def _block_of(text: str) -> Block:
    lines = text.splitlines()
    commands = tuple(line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT))
    return Block(commands, tuple(line for line in lines if not line.startswith(_PROMPT)))


def _ran(commands: tuple[str, ...], folder: Path) -> list[str]:
    """Return what commands print, run one by one in a shell."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-c", " && ".join(commands)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return [line for line in lines if not line.startswith(_IF_SLOW)]


def main() -> None:
    """Rewrite the outputs in all documents."""

    def renewed(match: re.Match[str]) -> str:
        block = _block_of(match[1])
        if not (block.shown or block.looks):
            return match[1]
        lines = [*(f"{_PROMPT}{command}" for command in block.commands), *block.printed()]
        return "\n".join(lines) + "\n"

    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        path.write_text(_BLOCK.sub(renewed, text), encoding="utf-8")


if __name__ == "__main__":
    main()
