"""Typical scripts, tuned as by a new user: the time until there is an answer.

    python -m benchmarks.real_scripts [NAME ...]

Five small scripts, each modelled on one with which many people begin: the picture classifier of
DeepSpeed's first tutorial, `run_glue` and `run_clm` of transformers, nanoGPT and HelloDeepSpeed.
Each is copied into a new folder, and tuned with the command that usually starts it. The first
useful line is the first result of a configuration other than the user's own. The verdict is the end
of the command. Nothing is downloaded.

Further scripts fail before `deepspeed.initialize`: how much later do they fail under dsat?
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import common
from testing.catalogue import REAL, Script, of_suite
from testing.tuned_scripts import DSAT, environment, prepare

FIRST_LINE_S, VERDICT_S = 60.0, 240.0
ERROR_LATER_S = 2.0
FIRST = re.compile(r"\[\d+/\d+\] (?!profile|baseline)\S+: ")
_RUNS = 3  # runs of each failing script
_MISSED = "**missed**"


def tune(script: Script) -> bool:
    """Tune a script in a copy of its folder, print its row, and return whether it was tuned."""
    with tempfile.TemporaryDirectory(prefix="dsat-real-") as above:
        folder = Path(above) / "user"
        command = [*DSAT, "model", "--", *prepare(script, folder, "python", 1)]
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
                print(line, end="", file=sys.stderr, flush=True)
                if FIRST.search(line):
                    first_s = min(first_s, time.monotonic() - began)
        verdict_s, tuned = time.monotonic() - began, process.returncode == 0
    in_time = first_s <= FIRST_LINE_S and verdict_s <= VERDICT_S
    met = "met" if tuned and in_time else f"{_MISSED} (status {process.returncode})"
    common.print_row(script.name, f"{first_s:.0f} s", f"{verdict_s:.0f} s", met)
    return tuned


def fail(script: Script) -> None:
    """Print the median time until a script fails: by itself, and under dsat."""
    with tempfile.TemporaryDirectory(prefix="dsat-real-") as above:
        folder = Path(above) / "user"
        alone = prepare(script, folder, "python", 1)
        taken = []
        for command in (alone, [*DSAT, "model", "--", *alone]):
            runs = [common.run(command, folder, environment()) for _ in range(_RUNS)]
            assert all(status and "error" in said.lower() for status, said, _ in runs), runs
            taken.append(statistics.median(seconds for *_, seconds in runs))
    later_s = taken[1] - taken[0]
    met = "met" if later_s <= ERROR_LATER_S else _MISSED
    common.print_row(script.name, *(f"{each:.1f} s" for each in (*taken, later_s)), met)


def main() -> None:
    parser = common.parser(__doc__)
    scripts = {script.name: script for script in of_suite(REAL)}
    names = [*scripts, "errors"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    chosen = parser.parse_args().names or names
    common.choose(chosen, names, parser)
    common.print_head("script", "first useful line", "verdict", "")
    tuned = [tune(script) for name, script in scripts.items() if name in chosen]
    if "errors" in chosen:
        print()
        common.print_head("error", "by itself", "by dsat", "later", "")
        for script in of_suite(REAL, failing=True):
            fail(script)
    if not all(tuned):
        raise SystemExit("a script could not be tuned")


if __name__ == "__main__":
    main()
