"""The first minutes with a GPU: one call that yields real numbers, most valuable first.

    python3 -m benchmarks.gpu.first_minutes OUT [--seconds 540] [--steps NAME ...] [--wheels FOLDER]

Installs dsat from wheels, compiles DeepSpeed's operators in the background, and runs the steps in
`STEPS` in order. Each step is a process that is ended when its budget is spent. Each finding is
printed and written to `OUT/STEP.json` at once; `OUT/results.tar.gz` is the file to keep. A second
call runs the missing steps, beginning with those that have not started. This module imports only
Python's standard library, as dsat is not installed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Budgets in seconds, the most valuable step first; steps that need compiled operators are last.
STEPS: Mapping[str, float] = {
    "machine": 30,
    "gpt2_medium": 140,
    "llama_1b": 40,
    "llama_8b_lora": 50,
    "failures": 40,
    "projection": 40,
    "cost_of_measuring": 75,
    "published": 150,
    "operators": 30,
    "tuners": 165,
}
DONE, CUT = "took (s)", "cut"  # last finding of a step that succeeded; of one that was cut off
OPERATORS_LOG = "operators.log"
_USUAL_S = 540.0  # duration of a call that fits the budgets
_LEAST_S = 10.0  # a step with less time does not begin
_KEPT = {".csv", ".json", ".jsonl", ".log", ".py", ".txt"}
_LARGEST_BYTES = 2**20
_COMPILE = """
import time
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
for builder in (FusedAdamBuilder, CPUAdamBuilder):
    began = time.time()
    builder().load(verbose=False)
    print(f"{builder.NAME}: {time.time() - began:.0f} s", flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=_USUAL_S, help="for the whole call; more lengthen budgets"
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), metavar="NAME")
    parser.add_argument("--wheels", type=Path, help="default: the folder that came with the kit")
    parser.add_argument("--short", action="store_true", help="small models, to see that steps run")
    arguments = parser.parse_args(argv)
    ends_s = time.monotonic() + arguments.seconds
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheels = arguments.wheels or ROOT / "wheels"
    if wheels.is_dir():
        install(wheels)
    for lock in out.glob("extensions/**/lock"):  # left by an earlier call's compiler
        lock.unlink()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(out / "extensions"), "PATH": path}
    with open(out / OPERATORS_LOG, "a") as log:
        words = ["nice", sys.executable, "-c", _COMPILE]
        compiler = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
    missing = []
    try:
        for name in arguments.steps or unfinished(out):
            budget_s = STEPS[name] * max(1.0, arguments.seconds / _USUAL_S)
            seconds = min(budget_s, ends_s - time.monotonic() - 2)
            if seconds < _LEAST_S:
                print(f"\n{name}: left for another call", flush=True)
            elif take(name, out, seconds, env, short=arguments.short):
                continue
            missing.append(name)
    finally:
        end(compiler)
        keep(out)
    print(f"\nmissing: {', '.join(missing) or 'none'}; findings: {out / 'results.tar.gz'}")
    return 1 if missing else 0


def install(wheels: Path) -> None:
    """Install dsat and DeepSpeed from wheels, with the requirements that this Python lacks."""
    began_s = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-index", "--find-links", str(wheels), "--no-compile"]
    # DeepSpeed's autotuner needs tabulate.
    subprocess.run([*pip, *options, "deepspeed-autotune", "deepspeed", "tabulate"], check=True)
    # Another build of dsat may have the same version.
    own = ["--force-reinstall", "--no-deps", "deepspeed-autotune"]
    subprocess.run([*pip, *options, *own], check=True)
    print(f"installed in {time.monotonic() - began_s:.1f} s", flush=True)


def unfinished(out: Path) -> list[str]:
    """Return the steps that have not succeeded, beginning with those that have not started."""
    left = [name for name in STEPS if DONE not in findings(out, name)]
    return sorted(left, key=lambda name: bool(findings(out, name)))


def findings(out: Path, name: str) -> dict[str, object]:
    """Return the findings of a step; empty before it has started."""
    path = out / f"{name}.json"
    found: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return found


def take(name: str, out: Path, seconds: float, env: Mapping[str, str], *, short: bool) -> bool:
    """Run a step, and end it after `seconds`; return whether it succeeded."""
    print(f"\n{name} (at most {seconds:.0f} s)\n\n| | |\n|---|---|", flush=True)
    ends_s = time.monotonic() + seconds  # this clock is the same in all processes
    words = [sys.executable, "-m", "benchmarks.gpu.steps", name, str(out), str(ends_s)]
    words += ["--short"] if short else []
    step = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True)
    try:
        step.wait(seconds)
    except subprocess.TimeoutExpired:
        found = {**findings(out, name), CUT: f"after {seconds:.0f} s"}
        (out / f"{name}.json").write_text(json.dumps(found, indent=1))
        print(f"| {CUT} | {found[CUT]} |", flush=True)
    finally:
        end(step)
    keep(out)
    return DONE in findings(out, name)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all of its descendants."""
    import psutil  # a requirement of dsat, installed by `install`

    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):  # the first process may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def keep(out: Path) -> None:
    """Write findings, journals and logs into one archive."""
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            is_small = path.is_file() and path.stat().st_size <= _LARGEST_BYTES
            if is_small and path.suffix in _KEPT and "extensions" not in path.parts:
                archive.add(path, path.relative_to(out))


if __name__ == "__main__":
    sys.exit(main())
