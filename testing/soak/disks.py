"""Disks that fill up and folders that turn read-only, under whole searches with made-up trials."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from testing.soak import Tally
from testing.soak.runs import METHODS, Calm, Search, complaint, folders, resumed, wait

_NOBODY = (
    65534  # the user `nobody` of Linux: what root may not do to a folder, others may not either
)


def full_disks(seed: int, count: int) -> Tally:
    """Searches on a file system of 256 KiB, of which a seeded part is taken already."""
    rng, tally = random.Random(seed), Tally()
    with folders() as new:
        calm = Calm(new)
        while tally.tried < count:
            method, disk = rng.choice(METHODS), next(new)
            disk.mkdir()
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk],
                capture_output=True,
                check=False,
            )
            if mounted.returncode:  # not everybody may
                return tally
            try:
                taken = rng.randrange(0, 256 * 1024, 4096)
                (disk / "taken").write_bytes(b"x" * taken)
                search = Search(method, disk / "run")
                told = search.run()
                ending = "full" if told.status else "enough"
                (disk / "taken").unlink()
                subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
                finding = complaint(told) or resumed(search, calm)
                where = f"{seed}/{tally.tried}: {method}, {taken} taken: "
                tally.note(ending, where + finding if finding else "")
            finally:
                subprocess.run(["umount", "-l", disk], check=True)
    return tally


def read_only_folders(seed: int, count: int) -> Tally:
    """At a seeded moment nobody may write into a run's folders any more; later one may again."""
    rng = random.Random(seed)
    tally = Tally()
    with folders() as new:
        calm = Calm(new)
        while tally.tried < count:
            method = rng.choice(METHODS)
            above = Path(tempfile.mkdtemp(prefix="dsat-soak-"))
            search = Search(method, above / "run", pause_s=0.01)
            pid, said = search.start(_without_rights)
            time.sleep(rng.random() * 1.2)
            _set_writable(above, False)
            told = wait(pid, said)
            _set_writable(above, True)
            ending = "met" if told.status else "not met"
            finding = complaint(told) or resumed(search, calm, _without_rights)
            tally.note(ending, f"{seed}/{tally.tried}: {method}: {finding}" if finding else "")
            subprocess.run(["rm", "-r", above], check=True)
    return tally


def _without_rights() -> None:
    """Gives up all capabilities: the rights of folders hold for root, too, from then on."""
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
