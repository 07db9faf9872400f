"""Context of the runner's experiment: your folder and includes, this package, and the job.

The rules of determined's client apply: a `.detignore` in the folder or in an included folder is
read, links to folders are not followed, and the size is limited.
"""

from __future__ import annotations

import ast
import logging
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import wrapt

from dsat.command.entrypoint import Entrypoint
from dsat.determined_cluster.job import JOB_FILE, MODEL_FOLDER, PACKAGE_FOLDER
from dsat.errors import UserInputError
from dsat.in_trial.hook import SPARE_FOLDER
from dsat.run.journal import RUNS_FOLDER
from dsat.values import format as fmt

LIMIT_BYTES = 95 * 2**20  # determined.common.constants.MAX_CONTEXT_SIZE
_SHOWN = 5
_OURS = Path(__file__).resolve().parents[1]  # this package
_log = logging.getLogger(__name__)

Files = Mapping[Path, Path]  # sources (files and folders) by their relative path in the context
Ignore = Callable[[str, list[str]], "set[str]"]


def collect_files(model_dir: Path, includes: Sequence[Path]) -> dict[Path, Path]:
    """Return files and folders for the trials' folder, by relative path, without this package.

    Raises UserInputError if two have the same name, one would hide this package, or a `.detignore`
    is invalid.
    """
    root = model_dir.resolve()  # the ignore rule needs the same path
    found = dict(_walk(root, Path(), _make_ignore_rule(root)))
    for include in includes:
        source = include.resolve()
        if source.name in {target.parts[0] for target in found}:
            raise UserInputError(
                f"{source.name!r} is in the model folder or in --add-files already",
                where=f"--add-files {include}",
                hint="Rename one.",
            )
        if source.is_dir():
            found.update(_walk(source, Path(source.name), _make_ignore_rule(source)))
        else:
            found[Path(source.name)] = source
    for target, source in found.items():
        if target.parts[0] in (PACKAGE_FOLDER, "dsat.py") and not (
            source.is_dir() or _is_ours(source)
        ):
            raise UserInputError(
                f"{target.parts[0]} would hide the package dsat in the trials",
                where=str(model_dir),
                hint="Rename it, or exclude it with a .detignore.",
            )
    return {t: source for t, source in found.items() if not _is_ours(source)}


def _is_ours(source: Path) -> bool:
    return _OURS in (source, *source.parents)


def check_size(found: Files, folders: Collection[Path] = (), limit_bytes: int = LIMIT_BYTES) -> int:
    """Return the size in bytes of the user's files and this package, as `lay_out` copies them.

    Raises UserInputError, with the largest files, if it exceeds the limit.
    """
    sizes = Counter({target: _size(source) for target, source in found.items()})
    sent = [*_trial_files(found, folders).values(), *_package().values()]
    total = sum(map(_size, sent))
    if total > limit_bytes:
        largest = ", ".join(f"{name} ({fmt.memory(n)})" for name, n in sizes.most_common(_SHOWN))
        raise UserInputError(
            f"the upload has {fmt.memory(total)}, but a Determined master accepts at most "
            f"{fmt.memory(limit_bytes)}. The largest files: {largest}",
            where="context",
            hint="Exclude files that trials do not need with a .detignore beside the script.",
        )
    return total


def _size(source: Path) -> int:
    return 0 if source.is_dir() else source.stat().st_size


def check_script(found: Files, where: Path, program: Entrypoint) -> set[Path]:
    """Return the user's files that import dsat, without which trials cannot be measured.

    Raises UserInputError if there are none; only warns if some code is missing or does not parse.
    Installed packages, as in a virtual environment, do not count.
    """
    own = {t: source for t, source in found.items() if "site-packages" not in t.parts}
    scripts = {t: s for t, s in own.items() if s.suffix == ".py" and s.is_file()}
    imports = {t: _imports(source) for t, source in scripts.items()}
    users = {
        t for t, names in imports.items() if any(n.split(".")[0] == "dsat" for n in names or ())
    }
    if users:
        return users
    names = {name for each in imports.values() for name in each or ()}
    ancestor = "determined.pytorch.dsat" in names
    problem = (
        "the code uses determined.pytorch.dsat" if ancestor else "nothing in the code uses dsat"
    )
    hint = (
        "On a cluster, the script must `import dsat`"
        + (" instead" if ancestor else "")
        + " and pass dsat.get_ds_config_from_hparams(hparams) to deepspeed.initialize, or use "
        "dsat.get_hf_args_with_overwrites. With --engine local, this is not needed."
    )
    module = (program.module or program.trial_class.partition(":")[0]).replace(".", "/")
    sources = {Path(program.script), Path(f"{module}.py"), Path(module, "__main__.py")}
    if ancestor or (sources & found.keys() and None not in imports.values()):
        raise UserInputError(problem, where=str(where), hint=hint)
    _log.warning("%s: %s, though some of it could not be read. %s", where, problem, hint)
    return set()


def package_folders(program: Entrypoint, users: Collection[Path]) -> set[Path]:
    """Return the folders below the model folder where Python may look for this package.

    Python looks beside the script, which is unknown if dsat cannot read the entrypoint (`cd src &&
    ...`). It is then in a folder of, or above, one of the files that import dsat (`users`).
    """
    script = Path(program.script)
    if program != Entrypoint():
        found = {script.parent} if not script.is_absolute() else set()
    else:
        found = {folder for user in users for folder in user.parents}
    return found - {Path()}


def _imports(source: Path) -> set[str] | None:
    """Return the modules that a source imports, and the imported names with their modules.

    None if it does not parse, for example because it is for another version of Python. To save
    time, a source without the word `dsat` is not parsed, and its result is empty.
    """
    text = source.read_bytes()
    if PACKAGE_FOLDER.encode() not in text:
        return set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's code
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def lay_out(found: Files, job: str, folder: Path, folders: Collection[Path] = ()) -> None:
    """Write the search runner's context into an empty folder, with dsat also in `folders`."""
    contents = {MODEL_FOLDER: _trial_files(found, folders), PACKAGE_FOLDER: _package()}
    for name, files in contents.items():
        (folder / name).mkdir()
        for target, source in files.items():
            copy = folder / name / target
            (copy if source.is_dir() else copy.parent).mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy2(source, copy)
    (folder / JOB_FILE).write_text(job, encoding="utf-8")


def _trial_files(found: Files, folders: Collection[Path]) -> Files:
    """Return the files of the trials' folder, with this package in `folders`."""
    package = _package() if folders else {}
    copies = {f / PACKAGE_FOLDER / t: source for f in folders for t, source in package.items()}
    return {**found, **copies}


def _make_ignore_rule(root: Path) -> Ignore:
    """Return a function that ignores the names that determined ignores, and earlier runs.

    Raises UserInputError if the folder's `.detignore` is not UTF-8 or has an invalid pattern.
    """
    from determined.common import detignore as determined_ignore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pathspec warns about determined
        try:
            ignore: Ignore = determined_ignore.make_shutil_ignore(root)
        except ValueError as error:
            where = str(root / ".detignore")
            raise UserInputError(f"cannot be read: {error}", where=where) from None
    return lambda parent, names: {*ignore(parent, names), RUNS_FOLDER.name}


def _package() -> dict[Path, Path]:
    """Return this package's files, with a copy of wrapt for images that lack it.

    wrapt's compiled part is omitted, because it depends on the version of Python.
    """
    own = _walk(_OURS, Path(), lambda parent, names: {n for n in names if n == "__pycache__"})
    sources = Path(str(wrapt.__file__)).parent.glob("*.py")
    spare = {Path(SPARE_FOLDER, "wrapt", path.name): path for path in sources}
    return {**dict(own), **spare}


def _walk(root: Path, prefix: Path, ignore: Ignore) -> Iterator[tuple[Path, Path]]:
    """Yield target and source of all files and folders below a folder, also of empty folders."""
    for parent, folders, names in os.walk(root):
        here = Path(parent)
        target = prefix / here.relative_to(root)
        if target != Path():
            yield target, here
        ignored = ignore(parent, [*folders, *names])
        folders[:] = sorted(set(folders) - ignored)
        for name in sorted(set(names) - ignored):
            if (here / name).is_file():
                yield target / name, here / name
