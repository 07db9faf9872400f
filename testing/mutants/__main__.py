"""Run the mutation gate: `python -m testing.mutants --help`."""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.mutants.catalogue import ROOT, Mutation, load

_LIMIT_S = 1800.0  # for all tests of one mutation
# DeepSpeed compiles its operators once, not once per copy.
_OPERATORS = {"TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions")}
_running = set[int]()  # process groups of running tests
_later_s = itertools.count(1)


@dataclass(frozen=True)
class Verdict:
    """Whether the tests caught a mutation.

    Attributes:
        state: "caught", "SURVIVED" or "equivalent".
        by: the test that failed; or the broken rule; or why the mutation is equivalent.
    """

    mutation: Mutation
    state: str
    by: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations alone")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="in place of a rule's own tests")
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    given = parser.parse_args()
    mutations = load()
    if unknown := set(given.only or ()) - {mutation.id for mutation in mutations}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    chosen = [each for each in mutations if not given.only or each.id in given.only]
    if problems := [problem for each in chosen if (problem := each.problem())]:
        parser.error("; ".join(problems))
    if given.list:
        print("\n".join(f"{each.id}: {each.path}: {each.rule}" for each in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mut", ignore_cleanup_errors=True) as folder:
        try:
            verdicts = list(_run_all(chosen, given.tests, Path(folder), given.jobs))
        finally:  # also after an interrupt
            for group in _running:
                os.killpg(group, signal.SIGKILL)
    counts = Counter(each.state for each in verdicts)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return int(counts["SURVIVED"] > 0)


def _run_all(
    mutations: Sequence[Mutation], tests: Sequence[str] | None, folder: Path, jobs: int
) -> Iterator[Verdict]:
    waiting: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Verdict | BaseException] = queue.SimpleQueue()
    for mutation in mutations:
        waiting.put(mutation)

    def work(copy: Path) -> None:
        try:
            _copy(copy)
            while True:
                mutation = waiting.get_nowait()
                ended.put(_run(mutation, copy, tests or mutation.tests.split()))
        except queue.Empty:
            return
        except BaseException as error:
            ended.put(error)

    for number in range(jobs):
        threading.Thread(target=work, args=(folder / f"m{number}",), daemon=True).start()
    for _ in mutations:
        verdict = ended.get()
        if isinstance(verdict, BaseException):
            raise verdict
        print(f"{verdict.state:10} {verdict.mutation.id}  {verdict.by}", flush=True)
        yield verdict


def _copy(target: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.split(b"\0"):
        path = Path(os.fsdecode(name))
        if name and (ROOT / path).is_file():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def _run(mutation: Mutation, copy: Path, tests: Sequence[str]) -> Verdict:
    """Apply a mutation to a copy, and run tests until one fails."""
    if mutation.equivalent:
        return Verdict(mutation, "equivalent", mutation.equivalent)
    path = copy / mutation.path
    original, before = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(mutation.applied(original), encoding="utf-8")
    # Python recompiles a module only if its size or its time in whole seconds differs.
    later_ns = before.st_mtime_ns + next(_later_s) * 10**9
    os.utime(path, ns=(later_ns, later_ns))
    try:
        by = _failure(copy, tests)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return Verdict(mutation, "caught" if by else "SURVIVED", by or mutation.rule)


def _failure(copy: Path, tests: Sequence[str]) -> str:
    """Return the name of the first test that fails; empty if all pass.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    base = copy.with_name(f"{copy.name}t")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not nightly and not cluster"]
    command += ["-p", "no:cacheprovider", f"--basetemp={base}", *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env={**_OPERATORS, **os.environ, "PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        told, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "no end"
    finally:
        _running.discard(process.pid)
        shutil.rmtree(base, ignore_errors=True)
    if process.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told, re.M)
    if found is None:
        raise RuntimeError(told[-2000:])
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
