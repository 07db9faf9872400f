"""Files that a search uploads to the cluster, and files that the command refuses to upload."""

from __future__ import annotations

import ast
import io
import re
import tarfile
from pathlib import Path

import pytest

from dsat.cli import main
from dsat.command.entrypoint import Entrypoint
from dsat.determined_cluster import upload
from dsat.errors import UserInputError
from testing.master import StandIn

CONFIG = """
name: mine
entrypoint: {entrypoint}
hyperparameters:
  deepspeed_config: {{train_micro_batch_size_per_gpu: 2, optimizer: {{type: Adam}}}}
resources: {{slots_per_trial: 1}}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    names = "train.py lib/net.py data/big.bin data/small.txt .git/config __pycache__/train.pyc"
    for name in [*names.split(), "dsat_runs/model-1/journal.jsonl"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import dsat\n" if name == "train.py" else "x")
    return folder


def dsat(model: Path, *options: object, entrypoint: str = "python3 train.py") -> int:
    config = model.parent / "deepspeed.yaml"
    config.write_text(CONFIG.format(entrypoint=entrypoint))
    return main.main(["random", str(config), str(model), *map(str, options)])


def uploaded(master: StandIn, model: Path, *includes: Path) -> set[str]:
    """Return the files that trials find in their folder."""
    options = [word for include in includes for word in ("--add-files", include)]
    assert dsat(model, "--detach", *options) == 0
    files = master.context(len(master.experiments))
    assert {"dsat_job.json", "dsat/determined_cluster/runner.py"} <= files.keys()
    assert not [name for name in files if "__pycache__" in name]
    return {name.removeprefix("model/") for name in files if name.startswith("model/")}


WHOLE = {"data/big.bin", "data/small.txt", "lib/net.py", "train.py"}


@pytest.mark.slow
def test_the_model_folder_without_what_determined_leaves_out(
    master: StandIn, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier runs and the targets of links are also left out, however the folder is named."""
    monkeypatch.chdir(model)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "huge.bin").write_text("x")
    (model / "link").symlink_to(tmp_path / "disk")
    (model / "broken").symlink_to(tmp_path / "nowhere")
    for named in (model, tmp_path / "link", Path("..") / model.name):
        assert uploaded(master, named) == WHOLE
    (model / ".detignore").write_text("# mine\n*.bin\nlib/\n")
    assert uploaded(master, model) == {"data/small.txt", "train.py"}


@pytest.mark.parametrize("content", [b"\xff\xfe*\0", b"!\n"])
def test_a_detignore_that_cannot_be_read_is_named(content: bytes, model: Path) -> None:
    (model / ".detignore").write_bytes(content)
    with pytest.raises(UserInputError, match=r"/\.detignore: cannot be read: "):
        upload.collect_files(model, [])


def test_includes_keep_their_names_and_their_own_detignore(
    master: StandIn, model: Path, tmp_path: Path
) -> None:
    extra = tmp_path / "elsewhere" / "extra"
    extra.mkdir(parents=True)
    for name in ("keep.py", "drop.bin", ".detignore"):
        (extra / name).write_text("*.bin")
    single = tmp_path / "elsewhere" / "ds.json"
    single.write_text("{}")
    assert uploaded(master, model, extra, single) == {*WHOLE, "ds.json", "extra/keep.py"}


def test_empty_folders_are_uploaded_and_count_as_no_files(
    master: StandIn, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may write into them."""
    assert dsat(model, "--dry-run") == 0
    before = re.findall("to upload: .*", capsys.readouterr().out)
    for folder in ("model/out/logs", "model/empty.py", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    (model / "linked").symlink_to(tmp_path)
    assert dsat(model, "--dry-run", "--add-files", tmp_path / "cache") == 0
    assert re.findall("to upload: .*", capsys.readouterr().out) == before
    assert dsat(model, "--detach", "--add-files", tmp_path / "cache") == 0
    with tarfile.open(fileobj=io.BytesIO(master.experiment(1).model_def)) as archive:
        folders = {each.name for each in archive if each.isdir()}
    assert {"model/out/logs", "model/empty.py", "model/cache"} <= folders
    assert "model/linked" not in folders


@pytest.mark.parametrize(
    ("entrypoint", "importer", "folders"),
    [
        ("python3 train.py", "lib/net.py", set()),
        ("python3 scripts/train.py", "scripts/train.py", {"scripts"}),
        ("python3 -m lib.net", "lib/net.py", set()),
        ("cd lib && python3 net.py", "lib/net.py", {"lib"}),
        ("bash run.sh", "src/a/net.py", {"src", "src/a"}),  # the script may be in either
    ],
)
def test_a_script_in_a_folder_below_finds_the_package_beside_it(
    entrypoint: str, importer: str, folders: set[str], master: StandIn, model: Path
) -> None:
    (model / "train.py").write_text("import torch\n")
    (model / importer).parent.mkdir(parents=True, exist_ok=True)
    (model / importer).write_text("import dsat\n")
    assert dsat(model, "--detach", entrypoint=entrypoint) == 0
    end = "/dsat/__init__.py"
    beside = {name.removesuffix(end) for name in master.context(1) if name.endswith(end)}
    assert beside == {f"model/{folder}" for folder in folders}


@pytest.mark.parametrize("folders", [(), ("scripts",)])
def test_all_that_is_sent_counts(folders: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    files, sent = {Path("scripts/train.py"): model / "train.py"}, tmp_path / "sent"
    sent.mkdir()
    upload.lay_out(files, "", sent, list(map(Path, folders)))
    size = sum(path.stat().st_size for path in sent.rglob("*") if path.is_file())
    assert upload.check_size(files, list(map(Path, folders))) == size


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("dsat: error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/dsat/x.py", "hide the package dsat"),
        ("model/dsat.py", "hide the package dsat"),
        ("other/train.py", "--add-files"),  # the model folder has one, too
    ],
)
def test_two_of_one_name_are_refused(
    name: str, words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    included = ["--add-files", path] if path.parent.name == "other" else []
    assert dsat(model, "--dry-run", *included) == 2
    err = refused(capsys)
    assert words in err and path.name in err + "x.py"


@pytest.mark.usefixtures("nowhere")
def test_too_much_is_refused_and_the_largest_files_are_named(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most five files are named, largest first. dsat and the files together count."""
    sizes = {"data/big.bin": 60, "lib/w.bin": 20, "a.bin": 8, "b.bin": 4, "c.bin": 2, "d.bin": 1}
    for name, mebibytes in sizes.items():
        with (model / name).open("wb") as file:
            file.truncate(mebibytes * 2**20)  # a sparse file
    assert dsat(model, "--dry-run") == 2
    err = refused(capsys)
    total, limit = map(float, re.findall(r"(\d+\.\d|\d+) MiB", err)[:2])
    assert sum(sizes.values()) < total < sum(sizes.values()) + 5 and limit == 95
    named = re.findall(r"([\w/.]+) \((\d+)(?:\.0)? MiB\)", err)
    assert named == [(name, str(size)) for name, size in sizes.items()][:5]
    assert ".detignore" in err
    (model / ".detignore").write_text("big.bin\n")
    assert dsat(model, "--dry-run") == 0


NOTHING = "nothing in the code uses dsat"
ANCESTOR = "determined.pytorch.dsat"


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import dsat\n", None),
        ("from dsat import get_ds_config_from_hparams\n", None),
        ("if True:\n    import dsat.errors\n", None),
        ("import torch, dsat\n", None),
        ("import torch; import dsat\n", None),
        ("\ufeffimport dsat\n", None),
        ("import torch, \\\n    dsat\n", None),
        (f"import {', '.join(f'a{n}' for n in range(60))}\n", NOTHING),
        ("import torch  # was: import dsat; import dsat\n", NOTHING),
        ("'''\nimport dsat\n'''\n", NOTHING),
        ("import torch\n", NOTHING),
        ("import dsatellite\n", NOTHING),
        ("from determined.pytorch import dsat\n", ANCESTOR),
        ("import determined.pytorch.dsat\n", ANCESTOR),
    ],
)
def test_the_code_must_know_of_dsat(
    model: Path, text: str, problem: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "train.py").write_text(text)
    assert dsat(model, "--dry-run") == (0 if problem is None else 2)
    if problem is not None:
        err = refused(capsys)
        assert problem in err and str(model) in err and "get_ds_config_from_hparams" in err


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("entrypoint", "text", "refuses"),
    [
        ("python3 -m mypkg.train", "import torch\n", False),
        ("./run.sh", "import torch\n", False),
        ("python3 -m train", "print 'dsat of another Python'\n", False),
        ("python3 -m train", "print 'of another Python'\n", True),
        ("python3 -m train", "import torch\n", True),
        ("python3 -m lib.net", "import torch\n", True),
        ("python3 -m determined.launch.deepspeed --trial train:Trial", "import torch\n", True),
        ("python3 -m mypkg.train", "from determined.pytorch import dsat\n", True),
    ],
)
def test_code_that_cannot_be_read_here_is_warned_of(
    entrypoint: str, text: str, refuses: bool, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "train.py").write_text(text)
    assert dsat(model, "--dry-run", entrypoint=entrypoint) == (2 if refuses else 0)
    told = capsys.readouterr()
    assert ("uses dsat" in told.err + told.out) or ANCESTOR in told.err


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("text", ["import dsat\n", f"import {ANCESTOR}\n"])
def test_installed_packages_are_not_the_users_code(
    text: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A virtual environment in the folder may hold Determined, whose code imports its own dsat."""
    (model / "train.py").write_text("import torch\n")
    package = model / ".venv" / "lib" / "python3.11" / "site-packages" / "determined"
    package.mkdir(parents=True)
    (package / "x.py").write_text(text)
    assert dsat(model, "--dry-run") == 2
    assert NOTHING in refused(capsys)


def test_only_sources_that_may_import_dsat_are_parsed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing thousands of other files would take minutes."""
    (model / "lib" / "net.py").write_text("import torch\n")
    files, texts, parse = upload.collect_files(model, ()), [], ast.parse

    def noted(text: bytes) -> ast.Module:
        texts.append(text)
        return parse(text)

    monkeypatch.setattr("ast.parse", noted)
    assert upload.check_script(files, model, Entrypoint()) == {Path("train.py")}
    assert texts == [b"import dsat\n"]
