"""Failures of the system that befall a search: failing calls, full disks, odd surroundings.

Each is drawn from a seed. The engine is the same for all: run the search under the harm, expect one
line that names the failure, then resume and expect the result of an undisturbed search.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import resource
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.soak import Tally
from testing.soak.runs import METHODS, Calm, InChild, Search, complaint, folders, resumed

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
_CALLS = ("open", "write", "fsync", "replace", "mkdir", "ftruncate", "unlink", "rename")
Heal = Callable[[], None]


@contextlib.contextmanager
def _unchanged(above: Path) -> Iterator[Heal]:
    yield lambda: None


@dataclass(frozen=True)
class Harm:
    """A failure of the system.

    Attributes:
        name: for the figures and the findings.
        in_child: called in the command's process before it starts.
        around: context of the command, given the folder above the run's; yields what heals it.
        pause_s: the time that each made-up trial takes.
    """

    name: str
    in_child: InChild = lambda: None
    around: Callable[[Path], AbstractContextManager[Heal]] = _unchanged
    pause_s: float = 0.0


def attack(draw: Callable[[random.Random], Harm]) -> Callable[[int, int], Tally]:
    """Return the attack whose harms are drawn so."""

    def run(seed: int, count: int) -> Tally:
        rng, tally = random.Random(seed), Tally()
        with folders() as new:
            calm = Calm(new)
            while tally.tried < count:
                method, harm, above = rng.choice(METHODS), draw(rng), next(new)
                above.mkdir()
                search = Search(method, above / "run", harm.pause_s)
                with harm.around(above) as heal:
                    told = search.run(harm.in_child)
                    heal()
                    finding = complaint(told) or resumed(search, calm)
                where = f"{seed}/{tally.tried}: {method}, {harm.name}: "
                tally.note(harm.name if told.status else "not met", finding and where + finding)
        return tally

    return run


def failing_call(rng: random.Random) -> Harm:
    """Fail one call to the file system, or all from then on."""
    after, code, for_ever = rng.randrange(1, 200), rng.choice(_ERRORS), rng.random() < 0.5
    return Harm(errno.errorcode[code], lambda: _fail(after, code, for_ever=for_ever))


def surroundings(rng: random.Random) -> Harm:
    """Make clocks jump, descriptors few, files small, or HOME missing."""
    few, small = rng.choice((6, 8, 12, 16, 24)), rng.choice((0, 100, 4096, 20_000))
    return rng.choice(
        (
            Harm("the clock jumps an hour ahead", lambda: _jump(3600.0)),
            Harm("the clock jumps an hour back", lambda: _jump(-3600.0)),
            Harm("few descriptors", lambda: _limit(resource.RLIMIT_NOFILE, few)),
            Harm("few processes", lambda: _limit(resource.RLIMIT_NPROC, 1)),
            Harm("small files only", lambda: _limit(resource.RLIMIT_FSIZE, small)),
            Harm("no HOME", _without_home),
        )
    )


def full_disk(rng: random.Random) -> Harm:
    """Run on a file system of 256 KiB, part of which is used; needs the right to mount."""
    used = rng.randrange(0, 256 * 1024, 4096)

    @contextlib.contextmanager
    def around(above: Path) -> Iterator[Heal]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", above], check=True)
        try:
            (above / "used").write_bytes(b"x" * used)
            yield lambda: _enlarge(above)
        finally:
            subprocess.run(["umount", "-l", above], check=True)

    return Harm("full", around=around)


def read_only_folder(rng: random.Random) -> Harm:
    """Make the run's folders read-only at a random moment."""
    after_s = rng.random() * 1.2

    @contextlib.contextmanager
    def around(above: Path) -> Iterator[Heal]:
        timer = threading.Timer(after_s, _set_writable, (above, False))
        timer.start()

        def heal() -> None:
            timer.cancel()
            timer.join()
            _set_writable(above, True)

        yield heal

    return Harm("read-only", _without_rights, around, pause_s=0.01)


def _enlarge(disk: Path) -> None:
    (disk / "used").unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)


def _fail(after: int, code: int, *, for_ever: bool) -> None:
    """Make the `after`-th call of `os` that writes fail; in this process, which is a child."""
    left = after

    def failing(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if not _reads_only(real, args):
                left -= 1
                if left == 0 or (left < 0 and for_ever):
                    raise OSError(code, os.strerror(code), *_paths(args))
            return real(*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, failing(getattr(os, name)))


def _reads_only(real: Any, args: tuple[Any, ...]) -> bool:
    if real.__name__ == "open":
        flags = args[1] if len(args) > 1 else os.O_RDONLY
        return not flags & (os.O_WRONLY | os.O_RDWR)
    return real.__name__ == "write" and args[0] in (1, 2)


def _paths(args: tuple[Any, ...]) -> tuple[str, ...]:
    return (os.fspath(args[0]),) if args and isinstance(args[0], (str, os.PathLike)) else ()


def _jump(jump_s: float) -> None:
    real, looks = time.time, 0

    def jumped() -> float:
        nonlocal looks
        looks += 1
        return real() + (jump_s if looks > 3 else 0.0)

    time.time = jumped


def _limit(which: int, most: int) -> None:
    resource.setrlimit(which, (most, most))


def _without_home() -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "USER", "TMPDIR"):
        os.environ.pop(variable, None)


def _without_rights() -> None:
    """Give up all capabilities, so that the rights of folders hold for root too."""
    version_3 = 0x20080522  # of linux/capability.h; two sets of (effective, permitted, inheritable)
    header, none = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _set_writable(above: Path, writable: bool) -> None:
    for folder, names, _ in os.walk(above):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(os.stat(path).st_mode)
                os.chmod(path, mode | 0o200 if writable else mode & ~0o222)
