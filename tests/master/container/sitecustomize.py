"""Makes a container's folder what `/run/determined` and others are in a real container.

Python imports this at its start, as the folder of this file is first on the path of a container.
Only defaults and constants of the determined package are changed, none of its code.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from wrapt import register_post_import_hook

FOLDER = os.environ.get("HOSTNAME_CONTAINER_FOLDER", "")
TMP = os.environ.get("HOSTNAME_CONTAINER_TMP", "")
SHARED = os.environ.get("HOSTNAME_CONTAINER_SHARED_FS", "")


def inside(path: str) -> str:
    """Where a path of the container is on this machine."""
    for root, folder in (("/run/determined/workdir", "workdir"), ("/run/determined", "run")):
        if path.startswith(root):
            return f"{FOLDER}/{folder}{path[len(root) :]}"
    if path.startswith("/tmp/"):
        return f"{TMP}{path[len('/tmp') :]}"
    return path


def redirect_info(module: ModuleType) -> None:
    """The info files, whose paths are defaults of arguments."""
    for name in ("RendezvousInfo", "TrialInfo", "ResourcesInfo", "ClusterInfo"):
        owner = getattr(module, name)
        for function in (owner._to_file, owner._from_file.__func__):
            function.__defaults__ = tuple(map(inside, function.__defaults__))


def redirect_constants(module: ModuleType) -> None:
    for name in ("CONTAINER_STDOUT", "CONTAINER_STDERR", "MANAGED_TRAINING_MODEL_COPY"):
        setattr(module, name, inside(getattr(module, name)))


def redirect_shared_fs(module: ModuleType) -> None:
    """The mount point of the cluster's file system."""
    if SHARED:
        module.SHARED_FS_CONTAINER_PATH = SHARED  # type: ignore[attr-defined]


def redirect_links(module: ModuleType) -> None:
    """`/tmp/tensorboard`, a link that every container makes."""
    force = module.force_create_symlink
    module.force_create_symlink = lambda src, dst: force(  # type: ignore[attr-defined]
        inside(src), inside(dst)
    )


def redirect_pid_server(module: ModuleType) -> None:
    """The sockets of launchers, which are named after the allocation, not the container."""
    read = module.read_pid_server_addr
    module.read_pid_server_addr = lambda addr: read(inside(addr))  # type: ignore[attr-defined]


def hide_dsat() -> None:
    """The image has no dsat: it comes with the experiment, or not at all."""
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable___dsat")
    ]


if FOLDER:
    hide_dsat()
    for target, redirect in (
        ("determined._info", redirect_info),
        ("determined.constants", redirect_constants),
        ("determined.common.constants", redirect_shared_fs),
        ("determined.util", redirect_links),
        ("determined.ipc", redirect_pid_server),
    ):
        register_post_import_hook(redirect, target)
