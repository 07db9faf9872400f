"""`dsat estimate --fits` as a check before a launch: in a shell, in a workflow and as a hook."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from testing.command import run_to_end
from testing.started import Told

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
SCRIPT = "-- train.py --deepspeed --deepspeed_config ds_config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the plain example, with configurations whose buckets are no larger than its model."""
    folder = tmp_path_factory.mktemp("guard") / "plain"
    shutil.copytree(ROOT / "examples" / "plain", folder)
    config = json.loads((folder / "ds_config.json").read_text())
    buckets = "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"
    for stage in (0, 3):
        config["zero_optimization"] = {"stage": stage, **dict.fromkeys(buckets, 10**6)}
        (folder / f"stage{stage}.json").write_text(json.dumps(config))
    return folder


def shell(folder: Path, line: str) -> Told:
    """Run a line in a shell."""
    return run_to_end(["/bin/bash", "-c", line], cwd=folder)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE, re.S | re.M)


@pytest.mark.nightly
def test_what_does_not_fit_is_not_launched(folder: Path) -> None:
    own = SCRIPT.replace("ds_config.json", "stage0.json")
    done = shell(folder, f"dsat estimate --json --fits 4x120MiB {own} && echo launch")
    assert done.status == 1, done
    told = json.loads(done.out)
    assert told["fits"] is False and told["largest"] < 2
    assert 114 * 2**20 < told["needed_bytes"] < 142 * 2**20, "4x150MiB would do"
    assert told["batch"] == {"train_batch_size": 8, "micro_batch": 2, "gas": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"dsat estimate --fits 8xmany {SCRIPT}", "invalid memory size"),
        ("dsat estimate --fits 8x80GiB -- fails.py", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_told_is_neither(folder: Path, line: str, message: str) -> None:
    (folder / "fails.py").write_text("import no_such_module\n")
    done = shell(folder, f"{line} && echo launch")
    assert done.status == 2, done
    assert message in done.err and "launch" not in done.out


@pytest.mark.nightly
def test_the_steps_of_the_workflow_run(folder: Path) -> None:
    [workflow] = [yaml.safe_load(block) for block in blocks("yaml") if "runs-on" in block]
    runs = [step["run"] for step in workflow["jobs"]["fits"]["steps"] if "run" in step]
    install, guard = runs
    assert install.split()[:2] == ["pip", "install"] and "deepspeed_autotune" in install
    assert shell(folder, guard).status == 0


@pytest.mark.nightly
def test_the_hook_lets_a_configuration_pass_and_stops_another(folder: Path) -> None:
    [hook] = [block for block in blocks("yaml") if "hooks:" in block]
    (folder / ".pre-commit-config.yaml").write_text(hook)
    assert shell(folder, "git init -q && git add -A").status == 0
    done = shell(folder, "pre-commit run --all-files")
    assert done.status == 0 and "Passed" in done.out, done
    (folder / ".pre-commit-config.yaml").write_text(hook.replace("8x80GiB", "8x120MiB"))
    shell(folder, "git add -A")
    done = shell(folder, "pre-commit run --all-files")
    assert done.status == 1 and "does not fit 8 x 120.0 MiB" in done.out, done
