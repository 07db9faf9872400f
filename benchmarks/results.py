"""Run benchmarks and write what they print into benchmarks/RESULTS.md.

    python -m benchmarks.results [--parts scale replay winners_curse ...]

Each benchmark has a section there. Its bars (targets and whether they are met) are moved into the
common table of bars. Sections and bars of other benchmarks stay unchanged.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from dsat.engines.machines.machine import find_machine
from dsat.values.files import write_atomically
from dsat.values.format import duration

REPORT = Path(__file__).with_name("RESULTS.md")
PICTURE = REPORT.with_suffix(".svg")
BARS = "Bars"
_FOR_REAL = "For real, sequences of {} tokens: dsat against `deepspeed --autotuning tune`"


@dataclass(frozen=True)
class Part:
    """A benchmark.

    Attributes:
        title: title of its section.
        words: its module in this folder, and options.
        is_block: its output is plain text, not Markdown.
    """

    title: str
    words: tuple[str, ...]
    is_block: bool = False


PARTS: Mapping[str, Part] = {
    "replay": Part("Replay", ("replay", "--picture", str(PICTURE))),
    "native": Part(_FOR_REAL.format(128), ("native",)),
    "native_16": Part(_FOR_REAL.format(16), ("native", "--side", "16")),
    "winners_curse": Part(
        "The gain that is reported against the gain that there is",
        ("winners_curse", "--seeds", "100"),
    ),
    "finals": Part("What finals cost", ("finals_cost",)),
    "coverage": Part("Whether the intervals of step times hold", ("coverage",)),
    "memory": Part("Simulated memory against real memory", ("memory_accuracy",)),
    "formula": Part("The closed form of memory against the simulation", ("formula",)),
    "published": Part("Predicted memory against published memory", ("published",)),
    "large_models": Part("What an estimate of a large model costs", ("large_models",)),
    "projection": Part("Projected throughput against published throughput", ("projection",)),
    "device_memory": Part(
        "Predicted memory on a CUDA without a device", ("device_memory", "--null")
    ),
    "scale": Part("Cost of a decision", ("search_scale", "--trials", "10000"), is_block=True),
    "trial_start": Part("Start of a trial", ("trial_start",), is_block=True),
}


def run(part: Part) -> str:
    """Run a benchmark in a child process, and return what it prints.

    Raises:
        SystemExit: it failed.
    """
    module, *options = part.words
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    print(f"-- {part.title}", flush=True)
    text = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=common.ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "real_accelerator.py" in line:  # DeepSpeed's log message
                continue
            text += line
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(part.words)} ended with status {process.returncode}")
    return text


def section(part: Part, text: str, about: Mapping[str, str], took_s: float) -> str:
    """Return a section: machine, date and versions, then the output of the benchmark."""
    where = "; ".join(about[name] for name in ("machine", "host"))
    others = [f"{key} {about[key]}" for key in about if key not in ("machine", "host", "date")]
    head = f"{about['date']}, {where}; {', '.join(others)}; took {duration(took_s)}."
    body = f"```\n{text.strip()}\n```" if part.is_block else text.strip()
    return f"{head}\n\n{body}"


def entered(report: str, title: str, text: str) -> str:
    """Return the report with a new section, whose bars are moved to the table of bars.

    Args:
        text: the section; its own bars, if any, are at its end.
    """
    head, *parts = re.split(r"^## ", report, flags=re.MULTILINE)
    sections = {}
    for each in parts:
        name, _, body = each.partition("\n")
        sections[name] = body.strip()
    sections[title], _, bars = (half.strip() for half in text.partition(common.BARS_HEAD))
    rows = {_bar(row): row for row in sections[BARS].splitlines()[2:]}
    rows |= {_bar(row): row for row in bars.splitlines()}
    sections[BARS] = "\n".join([common.BARS_HEAD, *rows.values()])
    return head + "\n\n".join(f"## {name}\n\n{body}" for name, body in sections.items()) + "\n"


def _bar(row: str) -> str:
    return row.split(" | ")[0]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    for name in parser.parse_args().parts:
        part, began_s = PARTS[name], time.perf_counter()
        text, about = run(part), common.about_machine(find_machine())
        told = section(part, text, about, time.perf_counter() - began_s)
        report = entered(REPORT.read_text(encoding="utf-8"), part.title, told)
        write_atomically(REPORT, report)
    print(f"-- {REPORT}")


if __name__ == "__main__":
    main()
