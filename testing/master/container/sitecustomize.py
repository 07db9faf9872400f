"""Redirects `/run/determined` and other paths of a real container to a container's folder.

Python imports this module when it starts, as this folder is first on a container's path. The module
changes only paths, ports, waits and the device in the packages, not what they do.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook, wrap_function_wrapper

FOLDER = os.environ.get("HOSTNAME_CONTAINER_FOLDER", "")
TMP = os.environ.get("HOSTNAME_CONTAINER_TMP", "")
SHARED = os.environ.get("HOSTNAME_CONTAINER_SHARED_FS", "")
MASTER_PORT = os.environ.get("HOSTNAME_CONTAINER_MASTER_PORT", "")
GRACE_S = os.environ.get("HOSTNAME_CONTAINER_GRACE_S", "")


def inside(path: str) -> str:
    """Return the path on this machine for a path in a container."""
    for root, folder in (("/run/determined/workdir", "workdir"), ("/run/determined", "run")):
        if path.startswith(root):
            return f"{FOLDER}/{folder}{path[len(root) :]}"
    if path.startswith("/tmp/"):
        return f"{TMP}{path[len('/tmp') :]}"
    return path


def redirect_info(module: ModuleType) -> None:
    """Redirect the info files, whose paths are default arguments."""
    for name in ("RendezvousInfo", "TrialInfo", "ResourcesInfo", "ClusterInfo"):
        owner = getattr(module, name)
        for function in (owner._to_file, owner._from_file.__func__):
            function.__defaults__ = tuple(map(inside, function.__defaults__))


def redirect_constants(module: ModuleType) -> None:
    for name in ("CONTAINER_STDOUT", "CONTAINER_STDERR", "MANAGED_TRAINING_MODEL_COPY"):
        setattr(module, name, inside(getattr(module, name)))


def redirect_shared_fs(module: ModuleType) -> None:
    """Redirect the mount point of the cluster's file system."""
    if SHARED:
        module.SHARED_FS_CONTAINER_PATH = SHARED  # type: ignore[attr-defined]


def redirect_links(module: ModuleType) -> None:
    """Redirect `/tmp/tensorboard`, a link that every container makes."""
    force = module.force_create_symlink
    module.force_create_symlink = lambda src, dst: force(  # type: ignore[attr-defined]
        inside(src), inside(dst)
    )


def redirect_pid_server(module: ModuleType) -> None:
    """Redirect launchers' sockets, named after the allocation, and shorten their wait at the
    end."""
    read = module.read_pid_server_addr
    module.read_pid_server_addr = lambda addr: read(inside(addr))  # type: ignore[attr-defined]

    def with_grace(wrapped: Any, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "grace_period": float(GRACE_S)})

    wrap_function_wrapper(module, "PIDServer.run_subprocess", with_grace)


def redirect_port(module: ModuleType) -> None:
    """Change the rendezvous port of DeepSpeed's launcher, as containers share this machine's
    ports."""
    module.TORCH_DISTRIBUTED_DEFAULT_PORT = int(MASTER_PORT)  # type: ignore[attr-defined]


def put_on_cpu(module: ModuleType) -> None:
    """Put DeepSpeedTrial on the CPU, as it refuses a node without GPUs."""

    def _init_device(context: Any) -> None:
        import torch

        context.n_gpus = len(context.env.slot_ids)
        context.device = torch.device("cpu")

    module.DeepSpeedTrialContext._init_device = _init_device


def expect_all_lines(module: ModuleType) -> None:
    """Shorten the wait of dsat's runner for late log lines: only a real agent's lines come late."""
    module._LATE_LOGS_S = (0.1, 0.1)  # type: ignore[attr-defined]


def hide_dsat() -> None:
    """Hide the installed dsat, as a container image has none: trials must import the uploaded
    one."""
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable___deepspeed_autotune")
    ]


if FOLDER:
    hide_dsat()
    for target, redirect in (
        ("determined._info", redirect_info),
        ("determined.constants", redirect_constants),
        ("determined.common.constants", redirect_shared_fs),
        ("determined.util", redirect_links),
        ("determined.ipc", redirect_pid_server),
        ("determined.pytorch.deepspeed._deepspeed_context", put_on_cpu),
        ("deepspeed.constants", redirect_port),
        ("dsat.determined_cluster.master", expect_all_lines),
    ):
        register_post_import_hook(redirect, target)
