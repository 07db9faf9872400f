"""What is uploaded: the user's folder and includes, this package, and the job.

As determined's own client does it: a `.detignore` in the folder or in an included folder is
honoured, links to folders are not followed, and there is a limit on the size.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsat.determined_cluster.job import JOB_FILE, MODEL_FOLDER, PACKAGE_FOLDER
from dsat.errors import UserInputError
from dsat.values.memory_size import readable

LIMIT_BYTES = 95 * 2**20  # determined.common.constants.MAX_CONTEXT_SIZE
_SHOWN = 5
_OURS = Path(__file__).resolve().parents[1]  # this package
_HELPERS = re.compile(r"^\s*(?:import|from)\s+dsat\b", re.MULTILINE)
_ANCESTOR = re.compile(r"determined\.pytorch\.dsat|from determined\.pytorch import .*\bdsat\b")

Ignore = Callable[[str, list[str]], "set[str]"]


@dataclass(frozen=True)
class Entry:
    """A file or a folder of the context.

    Attributes:
        source: where it is.
        target: what it is called in the context, relative.
        size_bytes: of a file; None of a folder.
    """

    source: Path
    target: Path
    size_bytes: int | None


def entries(
    model_dir: Path, includes: Sequence[Path], ignore: Callable[[Path], Ignore]
) -> list[Entry]:
    """All that trials find in their folder, this package left out.

    Args:
        ignore: makes, for a folder, what says which of its names to leave out.

    Raises:
        UserInputError: two things would have the same name.
    """
    found = list(_walk(model_dir.resolve(), Path(), ignore))
    for include in includes:
        include = include.resolve()
        if include.is_dir():
            found.append(Entry(include, Path(include.name), None))
            found += _walk(include, Path(include.name), ignore)
        else:
            found.append(_file(include, Path(include.name)))
    _check_names(model_dir, includes, found)
    return found


def _walk(root: Path, prefix: Path, ignore: Callable[[Path], Ignore]) -> Iterable[Entry]:
    ignored = ignore(root)
    for parent, folders, files in os.walk(root):
        here = Path(parent)
        gone = ignored(parent, [*folders, *files])
        folders[:] = sorted(set(folders) - gone)
        for name in folders:
            yield Entry(here / name, prefix / (here / name).relative_to(root), None)
        for name in sorted(set(files) - gone):
            if (here / name).is_file():
                yield _file(here / name, prefix / (here / name).relative_to(root))


def _file(path: Path, target: Path) -> Entry:
    return Entry(path, target, path.stat().st_size)


def _check_names(model_dir: Path, includes: Sequence[Path], found: Sequence[Entry]) -> None:
    for include in includes:
        name = include.resolve().name
        if sum(entry.target == Path(name) for entry in found) > 1:
            raise UserInputError(
                f"there are two {name!r} among the model folder and what is included",
                where=f"--include {include}",
                hint="Rename one of them.",
            )
    for entry in found:
        if str(entry.target) in (PACKAGE_FOLDER, "dsat.py") and entry.source.resolve() != _OURS:
            raise UserInputError(
                f"{entry.target} would hide the package dsat in the trials",
                where=str(model_dir),
                hint="Rename it, or leave it out with a .detignore.",
            )


def check_size(found: Sequence[Entry], limit_bytes: int = LIMIT_BYTES) -> int:
    """The context's bytes.

    Raises:
        UserInputError: they are too many; the largest files are named.
    """
    files = [(entry.size_bytes, entry) for entry in found if entry.size_bytes is not None]
    total = sum(size for size, _ in files) + sum(entry.size_bytes or 0 for entry in _package())
    if total > limit_bytes:
        files.sort(key=lambda pair: (-pair[0], str(pair[1].target)))
        largest = ", ".join(f"{entry.target} ({readable(size)})" for size, entry in files[:_SHOWN])
        raise UserInputError(
            f"the model folder and the includes have {readable(total)}, and a Determined master "
            f"takes {readable(limit_bytes)}. The largest files: {largest}",
            where="context",
            hint="Name what trials do not need in a .detignore beside the script.",
        )
    return total


def check_script(found: Sequence[Entry], where: Path) -> None:
    """Sees to it that something in the user's code knows of dsat.

    Raises:
        UserInputError: nothing does: on a cluster its trials could not be measured.
    """
    ancestor = False
    for entry in found:
        if entry.size_bytes is None or entry.source.suffix != ".py":
            continue
        text = entry.source.read_text(encoding="utf-8", errors="replace")
        if _HELPERS.search(text):
            return
        ancestor = ancestor or _ANCESTOR.search(text) is not None
    raise UserInputError(
        "the code uses determined.pytorch.dsat" if ancestor else "nothing in the code uses dsat",
        where=str(where),
        hint="On a cluster the script must `import dsat`"
        + (" in its place" if ancestor else "")
        + " and pass dsat.get_ds_config_from_hparams(hparams) to deepspeed.initialize, or use "
        "dsat.get_hf_args_with_overwrites. With --engine local it need not.",
    )


def stage(found: Sequence[Entry], job: str, folder: Path) -> None:
    """Lays out the search runner's context.

    Args:
        job: the text of the job file.
        folder: empty.
    """
    (folder / MODEL_FOLDER).mkdir()
    for entry in found:
        if entry.source != _OURS and _OURS not in entry.source.parents:
            _copy(entry, folder / MODEL_FOLDER)
    (folder / PACKAGE_FOLDER).mkdir()
    for entry in _package():
        _copy(entry, folder / PACKAGE_FOLDER)
    (folder / JOB_FILE).write_text(job, encoding="utf-8")


def _package() -> list[Entry]:

    def ignore(root: Path) -> Ignore:
        return lambda parent, names: {name for name in names if name == "__pycache__"}

    return list(_walk(_OURS, Path(), ignore))


def _copy(entry: Entry, folder: Path) -> None:
    target = folder / entry.target
    if entry.size_bytes is None:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copystat(entry.source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(entry.source, target)


def detignore() -> Callable[[Path], Ignore]:
    """What determined itself leaves out of a folder."""
    from determined.common import detignore as determined_ignore

    def ignore(root: Path) -> Ignore:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pathspec about determined
            found: Ignore = determined_ignore.make_shutil_ignore(root)
        return found

    return ignore
