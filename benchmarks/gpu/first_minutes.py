"""The first minutes with a GPU: one call that yields real numbers, most valuable first.

    python3 -m benchmarks.gpu.first_minutes OUT [--seconds 540] [--steps NAME ...] [--wheels FOLDER]

Installs dsat from wheels, compiles DeepSpeed's operators in the background, and takes the steps of
`STEPS` in their order, each in a process of its own that ends with its budget. Every finding is
printed and is in `OUT/STEP.json` as soon as it is known; `OUT/results.tar.gz` is what to keep. A
second call takes the steps that are missing, first those that have not begun. Nothing but Python's
own library is imported here: dsat is not installed yet.
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
# Budgets in seconds, the most valuable step first; what needs compiled operators is last.
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
DONE, CUT = "took (s)", "cut"  # the last findings of steps that have succeeded, and that have not
OPERATORS_LOG = "operators.log"
_USUAL_S = 540.0  # of a call, for which the budgets are made
_LEAST_S = 10.0  # in which a step is worth beginning
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
    for lock in out.glob("extensions/**/lock"):  # of a compiler that an earlier call ended
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
    """Install dsat, DeepSpeed and what this Python lacks of their requirements."""
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
    """Return the steps that have not succeeded, first those that have not begun."""
    left = [name for name in STEPS if DONE not in findings(out, name)]
    return sorted(left, key=lambda name: bool(findings(out, name)))


def findings(out: Path, name: str) -> dict[str, object]:
    """Return what a step has found; nothing before it has begun."""
    path = out / f"{name}.json"
    found: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return found


def take(name: str, out: Path, seconds: float, env: Mapping[str, str], *, short: bool) -> bool:
    """Take a step, end it after so many seconds, and return whether it succeeded."""
    print(f"\n{name} (at most {seconds:.0f} s)\n\n| | |\n|---|---|", flush=True)
    ends_s = time.monotonic() + seconds  # of a clock that all processes share
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
    """End a process and all that it has started."""
    import psutil  # which dsat needs, and install has brought

    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):  # it may have ended before its processes
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
