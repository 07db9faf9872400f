"""Scripts as people have them, tuned as a new user would: how soon there is an answer.

    python -m benchmarks.real_scripts [NAME ...] [--method model] [--output FILE]

Five small scripts of our own, each modelled on one that many people begin with: the picture
classifier of DeepSpeed's first tutorial, `run_glue` and `run_clm` of transformers, nanoGPT and
HelloDeepSpeed. Each is copied into a fresh folder and tuned by the command that its kind is started
with. The first useful line tells what a configuration other than the user's own does; the verdict
is the end of the command. Nothing is fetched.

And scripts that fail before `deepspeed.initialize`: how much later than by themselves.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsat.values.files import write_atomically
from testing.catalogue import REAL, Script, of_suite
from testing.tuned_scripts import DSAT, environment, prepare

FIRST_LINE_S, VERDICT_S = 60.0, 240.0
ERROR_LATER_S = 2.0
FIRST = re.compile(r"\[\d+/\d+\] (?!profile|baseline)\S+: ")


@dataclass(frozen=True)
class Answered:
    """How a script's tuning went.

    Attributes:
        first_line_s, verdict_s: from the command on; infinite if there was none.
        status: of the command.
    """

    name: str
    first_line_s: float
    verdict_s: float
    status: int

    @property
    def met(self) -> bool:
        in_time = self.first_line_s <= FIRST_LINE_S and self.verdict_s <= VERDICT_S
        return in_time and self.status == 0


@dataclass(frozen=True)
class Failed:
    """How a script's own error was shown: by itself, and by dsat; medians of seconds."""

    name: str
    alone_s: float
    shown_s: float

    @property
    def met(self) -> bool:
        return self.shown_s - self.alone_s <= ERROR_LATER_S


def tune(script: Script, method: str) -> Answered:
    """Tunes one of the scripts, in a copy of its folder."""
    with tempfile.TemporaryDirectory(prefix="dsat-real-") as above:
        folder = Path(above) / "user"
        command = [*DSAT, method, "--", *prepare(script, folder, "python", 1)]
        began, first_s = time.monotonic(), float("inf")
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if FIRST.search(line):
                    first_s = min(first_s, time.monotonic() - began)
        verdict_s = time.monotonic() - began
    return Answered(script.name, first_s, verdict_s, process.returncode)


def fail(script: Script, runs: int) -> Failed:
    """Runs a script that fails, by itself and by dsat."""
    with tempfile.TemporaryDirectory(prefix="dsat-real-") as above:
        folder = Path(above) / "user"
        alone = prepare(script, folder, "python", 1)
        shown = [*DSAT, "model", "--", *alone]
        return Failed(script.name, *(_seconds(command, folder, runs) for command in (alone, shown)))


def _seconds(command: Sequence[str], folder: Path, runs: int) -> float:
    """The median of how long a command takes that fails."""
    taken = []
    for _ in range(runs):
        began = time.monotonic()
        ended = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
        )
        taken.append(time.monotonic() - began)
        assert ended.returncode, ended.stdout
        assert "Error" in ended.stderr or "error" in ended.stderr, ended.stderr
    return statistics.median(taken)


def lines(answers: Sequence[Answered], failures: Sequence[Failed]) -> list[str]:
    """Two tables for people, in Markdown."""
    rows = ["| script | first useful line | verdict | |", "|---|---|---|---|"]
    for a in answers:
        met = "met" if a.met else f"**missed** (status {a.status})"
        rows.append(f"| {a.name} | {a.first_line_s:.0f} s | {a.verdict_s:.0f} s | {met} |")
    rows += ["", "| error | by itself | by dsat | later | |", "|---|---|---|---|---|"]
    for f in failures:
        later = f"{f.shown_s - f.alone_s:.1f} s"
        met = "met" if f.met else "**missed**"
        rows.append(f"| {f.name} | {f.alone_s:.1f} s | {f.shown_s:.1f} s | {later} | {met} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scripts = {script.name: script for script in of_suite(REAL)}
    names = [*scripts, "errors"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--method", default="model")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each error")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all figures, as JSON")
    args = parser.parse_args()
    chosen, answers = args.names or names, []
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in (name for name in scripts if name in chosen):
        answers.append(tune(scripts[name], args.method))
        print(f"-- {name}: {answers[-1].verdict_s:.0f} s", flush=True)
    failing = of_suite(REAL, failing=True) if "errors" in chosen else []
    failures = [fail(script, args.runs) for script in failing]
    print("\n".join(lines(answers, failures)))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        found = {"answers": [asdict(a) for a in answers], "errors": [asdict(f) for f in failures]}
        write_atomically(args.output, json.dumps(found))
    if not all(a.status == 0 for a in answers):
        raise SystemExit("a script could not be tuned")


if __name__ == "__main__":
    main()
