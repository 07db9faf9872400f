"""Context of an experiment on a cluster."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from dsat.determined_cluster import upload
from dsat.determined_cluster.upload import Files, check_script, check_size, stage
from dsat.errors import UserInputError
from dsat.inputs.entrypoint import Entrypoint

SCRIPT = Entrypoint(script="./train.py")


def entries(model_dir: Path, *includes: Path) -> Files:
    return upload.files(model_dir, includes)


def names(found: Files) -> list[str]:
    return sorted(map(str, found))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    names = "train.py lib/net.py data/big.bin data/small.txt .git/config __pycache__/train.pyc"
    for name in [*names.split(), "dsat_runs/model-1/journal.jsonl"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import dsat\n" if name == "train.py" else "x")
    return folder


def test_the_model_folder_without_what_determined_leaves_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor earlier runs, nor what links lead to; however the folder is named."""
    monkeypatch.chdir(model)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "huge.bin").write_text("x")
    (model / "link").symlink_to(tmp_path / "disk")
    (model / "broken").symlink_to(tmp_path / "nowhere")
    whole = [*("data/big.bin", "data/small.txt", "lib/net.py", "train.py")]
    for named in (model, Path(), tmp_path / "link", Path("..") / model.name):
        assert names(entries(named)) == whole


def test_a_detignore_is_honoured(model: Path) -> None:
    (model / ".detignore").write_text("# mine\n*.bin\nlib/\n")
    assert names(entries(model)) == ["data/small.txt", "train.py"]


def test_includes_keep_their_names_and_their_own_detignore(model: Path, tmp_path: Path) -> None:
    extra = tmp_path / "elsewhere" / "extra"
    extra.mkdir(parents=True)
    for name in ("keep.py", "drop.bin", ".detignore"):
        (extra / name).write_text("*.bin")
    single = tmp_path / "elsewhere" / "ds.json"
    single.write_text("{}")
    found = names(entries(model, extra, single))
    assert [name for name in found if name.startswith(("extra", "ds"))] == [
        *("ds.json", "extra/keep.py")
    ]


def test_two_of_the_same_name_are_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "train.py"
    other.parent.mkdir()
    other.write_text("")
    with pytest.raises(UserInputError, match=r"'train\.py' is in the model folder"):
        entries(model, other)


@pytest.mark.parametrize("name", ["dsat/x.py", "dsat.py"])
def test_nothing_may_hide_the_package(model: Path, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("")
    with pytest.raises(UserInputError, match="would hide the package dsat"):
        entries(model)


def test_too_much_is_refused_and_the_largest_files_are_named(model: Path) -> None:
    (model / "data" / "big.bin").write_bytes(bytes(3 * 2**20))
    (model / "lib" / "w.bin").write_bytes(bytes(2**20))
    found = entries(model)
    size = check_size(found)
    assert 4 * 2**20 < size < 6 * 2**20
    with pytest.raises(UserInputError) as caught:
        check_size(found, limit_bytes=2 * 2**20)
    text = str(caught.value)
    assert re.search(r"have [45]\.\d MiB, and a Determined master takes 2\.0 MiB", text)
    assert "files: data/big.bin (3.0 MiB), lib/w.bin (1.0 MiB), " in text
    assert ".detignore" in text and "\n" not in text


@pytest.mark.parametrize("script", [Path(), Path("scripts/train.py")])
def test_the_staged_folder_holds_all_that_the_runner_needs(
    model: Path, tmp_path: Path, script: Path
) -> None:
    folder = tmp_path / "staged"
    folder.mkdir()
    stage(entries(model), "{}", folder, script)
    assert (folder / "dsat_job.json").read_text() == "{}"
    assert (folder / "model" / "lib" / "net.py").read_text() == "x"
    assert (folder / "dsat" / "determined_cluster" / "runner.py").is_file()
    beside = folder / "model" / "scripts" / "dsat" / "__init__.py"
    assert beside.is_file() is (script != Path()), "a script in a folder below finds the package"
    assert not list(folder.rglob("__pycache__"))


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
        (f"import {', '.join(f'a{n}' for n in range(60))}\n", "nothing in the code uses dsat"),
        ("import torch  # was: import dsat; import dsat\n", "nothing in the code uses dsat"),
        ("'''\nimport dsat\n'''\n", "nothing in the code uses dsat"),
        ("# import dsat\n", "nothing in the code uses dsat"),
        ("import torch\n", "nothing in the code uses dsat"),
        ("import dsatellite\n", "nothing in the code uses dsat"),
        ("from determined.pytorch import dsat\n", r"the code uses determined\.pytorch\.dsat"),
        ("import determined.pytorch.dsat\n", r"the code uses determined\.pytorch\.dsat"),
    ],
)
def test_the_code_must_know_of_dsat(model: Path, text: str, problem: str | None) -> None:
    (model / "train.py").write_text(text)
    if problem is None:
        check_script(entries(model), model, SCRIPT)
        return
    with pytest.raises(UserInputError, match=problem):
        check_script(entries(model), model, SCRIPT)


@pytest.mark.parametrize(
    ("program", "text", "refused"),
    [
        (Entrypoint(module="mypkg.train"), "import torch\n", False),
        (Entrypoint(), "import torch\n", False),
        (Entrypoint(module="train"), "print 'of another Python'\n", False),
        (Entrypoint(module="train"), "import torch\n", True),
        (Entrypoint(module="lib.net"), "import torch\n", True),
        (Entrypoint(trial_class="train:Trial"), "import torch\n", True),
        (Entrypoint(module="mypkg.train"), "from determined.pytorch import dsat\n", True),
    ],
)
def test_code_that_cannot_be_read_here_is_warned_of(
    model: Path, program: Entrypoint, text: str, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "train.py").write_text(text)
    with pytest.raises(UserInputError) if refused else contextlib.nullcontext():
        check_script(entries(model), model, program)
    assert ("nothing in the code uses dsat" in caplog.text) is not refused
