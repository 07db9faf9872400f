"""Make one archive for a machine with torch but without a network: dsat, DeepSpeed and this kit.

    python -m benchmarks.gpu.wheels FILE [--python 3.12]

The archive, of at most 64 MiB, contains `benchmarks`, and wheels of dsat, of DeepSpeed, and of all
that these two need besides torch. dsat and the kit are those of the last commit. DeepSpeed is built
without operators, in the version that is installed here. See README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import common

MOST_BYTES = 64 * 2**20
# Requirements of dsat, DeepSpeed and its autotuner, without torch and torch's own requirements;
# numpy is included, as it may be missing.
BINARY = ("numpy", "psutil", "pyyaml", "wrapt", "msgpack", "ninja")
PURE = (
    "annotated-types einops markdown-it-py mdurl packaging py-cpuinfo pygments rich ruamel.yaml "
    "setuptools tabulate threadpoolctl tqdm typing-extensions typing-inspection"
).split()
# pydantic needs exactly one version of its core, so both are resolved together.
RESOLVED = ("pydantic", "pydantic-core")
# Packages without published wheels.
SOURCE = ("deepspeed", "hjson")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", default="3.12")
    arguments = parser.parse_args()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    foreign = ["--only-binary", ":all:", "--python-version", arguments.python]
    with tempfile.TemporaryDirectory() as folder:
        download = [*pip, "download", "--quiet", "--dest", folder, *foreign]
        _run([*download, "--no-deps", *BINARY, *PURE])
        _run([*download, RESOLVED[0]])
        source = Path(folder) / "source"
        _run(["git", "-C", str(common.ROOT), "archive", "-o", f"{source}.tar", "HEAD"])
        with tarfile.open(f"{source}.tar") as archive:
            archive.extractall(source, filter="data")
        built = ["--wheel-dir", folder, "--no-deps", "--no-build-isolation"]
        sources = [f"{name}=={version(name)}" for name in SOURCE]
        _run([*pip, "wheel", "--quiet", *built, *sources, str(source)])
        wheels = sorted(Path(folder).glob("*.whl"))
        with tarfile.open(arguments.file, "w") as archive:
            for wheel in wheels:
                archive.add(wheel, f"gpu-kit/wheels/{wheel.name}")
            archive.add(source / "benchmarks", "gpu-kit/benchmarks")
    size = arguments.file.stat().st_size
    print(f"{arguments.file}: {len(wheels)} wheels, {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES / 2**20:.0f} MiB")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})


if __name__ == "__main__":
    main()
