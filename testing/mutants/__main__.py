"""Run the mutation gate: `python -m testing.mutants --help`."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.mutants.catalogue import ROOT, Mutation, load
from testing.mutants.plugin import RESULTS, TESTS
from testing.mutants.reach import in_order, instrument, reached

_QUICK = "not slow and not nightly and not cluster"
_ALL = "not nightly and not cluster"
_CHUNK_S = 60.0  # of tests, as long as they took without a mutation, in one process
_PATIENCE = 5  # times as long: other programs may be running
_CACHE = ROOT / ".cache" / "mutants"
# DeepSpeed compiles its operators once, not once per copy.
_OPERATORS = {"TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions")}
_OWN_TEST = Path("tests", "test_mutants.py")  # any mutation fails it
_running = set[int]()  # process groups of tests
_later_s = itertools.count(1)

Results = Mapping[str, tuple[float, bool]]  # seconds and failure, by test


@dataclass(frozen=True)
class Verdict:
    """How the tests took a mutation."""

    mutation: Mutation
    state: str  # "caught", "SURVIVED" or "equivalent"
    tests: int
    by: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations alone")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="these tests alone")
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    given = parser.parse_args()
    mutations = load()
    if unknown := set(given.only or ()) - {mutation.id for mutation in mutations}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    if problems := [problem for each in mutations if (problem := each.problem())]:
        parser.error("; ".join(problems))
    chosen = [each for each in mutations if not given.only or each.id in given.only]
    if given.list:
        print("\n".join(f"{each.id}: {each.path}: {each.rule}" for each in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mut", ignore_cleanup_errors=True) as folder:
        try:
            tests, results = _tests_of(mutations, Path(folder), given)
            verdicts = list(_run_all(chosen, tests, results, Path(folder), given.jobs))
        finally:  # interrupted, perhaps
            for group in _running:
                os.killpg(group, signal.SIGKILL)
    _print_table(verdicts)
    return any(each.state == "SURVIVED" for each in verdicts)


# -- which tests reach what


def _tests_of(
    mutations: Sequence[Mutation], folder: Path, given: argparse.Namespace
) -> tuple[dict[str, list[str]], Results]:
    """Return the tests that reach each mutation, and how each test ends without one."""
    options = ["-m", _QUICK if given.quick else _ALL, *given.tests]
    known = _CACHE / f"{_digest(mutations, options)}.json"
    if known.exists():
        tests, results = json.loads(known.read_text(encoding="utf-8"))
        return tests, results
    copy, record, ended = folder / "r", folder / "record", folder / "ended.json"
    _copy(copy)
    instrument(copy, mutations, record)
    print("Running the tests once, to see which mutations each one reaches.", flush=True)
    workers = ["-n", str(given.jobs), "--dist", "loadfile", "-q"]
    _pytest(copy, [*workers, *options], {RESULTS: str(ended)}, None)
    results = json.loads(ended.read_text(encoding="utf-8"))
    found = reached(record, mutations, results)
    _CACHE.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps([found, results]), encoding="utf-8")
    shutil.rmtree(copy, ignore_errors=True)
    return found, results


def _digest(mutations: Sequence[Mutation], options: Sequence[str]) -> str:
    """Return a digest of all that decides which tests reach what."""
    known = [(each.file, each.old) for each in mutations], options
    digest = hashlib.sha256(repr(known).encode())
    for path in _files():
        if path.parts[0] in ("dsat", "tests", "testing"):
            digest.update(str(path).encode() + (ROOT / path).read_bytes())
    return digest.hexdigest()[:16]


def _files() -> list[Path]:
    """Return the files of the repository, relative to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = (Path(os.fsdecode(name)) for name in listed.split(b"\0") if name)
    return sorted(path for path in paths if (ROOT / path).is_file() and path != _OWN_TEST)


def _copy(target: Path) -> None:
    for path in _files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def _pytest(
    copy: Path, options: Sequence[str], variables: Mapping[str, str], timeout_s: float | None
) -> int | None:
    """Run pytest in a copy; return its exit status, or None if it took too long."""
    base = copy.with_name(f"{copy.name}t")
    command = [sys.executable, "-m", "pytest", "-p", "testing.mutants.plugin"]
    command += ["-p", "no:cacheprovider", f"--basetemp={base}", *options]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env={**_OPERATORS, **os.environ, "PYTHONPATH": str(copy), **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if timeout_s is None else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if timeout_s is None else subprocess.DEVNULL,
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = None
    _running.discard(process.pid)
    shutil.rmtree(base, ignore_errors=True)
    return status


# -- mutants


def _run_all(
    mutations: Sequence[Mutation],
    tests: Mapping[str, Sequence[str]],
    results: Results,
    folder: Path,
    jobs: int,
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
                ended.put(_run(mutation, copy, tests[mutation.id], results))
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


def _run(mutation: Mutation, copy: Path, tests: Sequence[str], results: Results) -> Verdict:
    """Run the tests that reach a mutation, and those of the folder that mirrors its own."""
    if mutation.equivalent:
        return Verdict(mutation, "equivalent", 0, mutation.equivalent)
    mirrored = Path("tests", *Path(mutation.file).parent.parts).as_posix()
    unseen = [test for test in results if test.startswith(f"{mirrored}/") and test not in tests]
    order = in_order(tests, mirrored, results) + in_order(unseen, mirrored, results)
    path = copy / mutation.path
    original, before = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(mutation.applied(original), encoding="utf-8")
    # Python compiles a module again only if its size or the second of its date differ.
    later_ns = before.st_mtime_ns + next(_later_s) * 10**9
    os.utime(path, ns=(later_ns, later_ns))
    count = 0
    try:
        for chunk in _chunks(order, results):
            count += len(chunk)
            if by := _failure(copy, chunk, sum(results[test][0] for test in chunk)):
                return Verdict(mutation, "caught", count, by)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return Verdict(mutation, "SURVIVED", count)


def _chunks(tests: Sequence[str], results: Results) -> Iterator[list[str]]:
    chunk: list[str] = []
    seconds = 0.0
    for test in tests:
        if chunk and seconds > _CHUNK_S:
            yield chunk
            chunk, seconds = [], 0.0
        chunk.append(test)
        seconds += results[test][0]
    if chunk:
        yield chunk


def _failure(copy: Path, tests: Sequence[str], usual_s: float) -> str:
    """Return what fails of some tests; empty if all pass."""
    wanted, ended = (copy.with_name(f"{copy.name}-{name}.json") for name in ("wanted", "ended"))
    wanted.write_text(json.dumps(tests), encoding="utf-8")
    ended.unlink(missing_ok=True)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    variables = {TESTS: str(wanted), RESULTS: str(ended)}
    status = _pytest(copy, ["-x", "-q", *files], variables, 60 + _PATIENCE * usual_s)
    if status == 0:
        return ""
    if status is None:
        return "no end"
    results = json.loads(ended.read_text(encoding="utf-8")) if ended.exists() else {}
    return next((test for test, (_, failed) in results.items() if failed), "imports")


def _print_table(verdicts: Sequence[Verdict]) -> None:
    print()
    for each in sorted(verdicts, key=lambda each: (each.state, each.mutation.id)):
        if each.state == "SURVIVED":
            print(f"{each.mutation.id}  {each.mutation.path}  {each.tests} tests")
            print(f"    {each.mutation.rule}")
    counts = Counter(each.state for each in verdicts)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(main())
