"""Wheels for a machine without a network that has torch already.

    python -m benchmarks.gpu.wheels FOLDER [--python 3.12]

Fills the folder with wheels of dsat and of what it needs besides torch, at most 64 MiB. On the
machine: `python -m venv --system-site-packages V && V/bin/pip install --no-index --no-deps
FOLDER/*.whl`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import common

MOST_BYTES = 64 * 2**20
# What dsat and deepspeed need besides torch and what torch itself needs (numpy may be missing).
BINARY = ("numpy", "psutil", "pyyaml", "wrapt", "msgpack", "pydantic", "pydantic-core", "ninja")
PURE = (
    "annotated-types einops markdown-it-py mdurl packaging py-cpuinfo pygments rich ruamel.yaml "
    "setuptools threadpoolctl tqdm typing-extensions typing-inspection"
).split()
# No wheels are published of these.
SOURCE = ("deepspeed", "hjson")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    arguments = parser.parse_args()
    pip = [sys.executable, "-m", "pip"]
    folder = ["--dest", str(arguments.folder)]
    foreign = ["--only-binary", ":all:", "--python-version", arguments.python, "--no-deps"]
    pinned = [*BINARY, *PURE]
    # pydantic works with exactly one version of its core: both are resolved together.
    pinned = [name for name in pinned if name not in ("pydantic", "pydantic-core")]
    _run([*pip, "download", "--quiet", *folder, *foreign, *pinned])
    _run([*pip, "download", "--quiet", *folder, *foreign[:-1], "pydantic"])
    built = ["--wheel-dir", str(arguments.folder), "--no-deps", "--no-build-isolation"]
    _run([*pip, "wheel", "--quiet", *built, *SOURCE, str(common.ROOT)])
    size = sum(path.stat().st_size for path in arguments.folder.glob("*.whl"))
    print(f"{len(list(arguments.folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES / 2**20:.0f} MiB")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
