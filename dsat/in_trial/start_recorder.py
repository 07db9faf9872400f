"""Records how a command starts its training; stands alone, on the standard library only.

A copy of this file lies as `sitecustomize.py` in a folder in front of `PYTHONPATH`, so every Python
process of the user's command runs it at its start, whatever interpreter it has. Nothing happens
unless the process calls `deepspeed.initialize` for an engine that trains: then it writes down how
it was started and with which configuration, and ends. The training itself never begins.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

FOLDER_VARIABLE = "DSAT_RECORD_DIR"
RECORD_PREFIX = "rank-"
SEVERAL_NODES_FILE = "nodes.json"
# The command sees its training fail, so that `set -e`, `&&` and make stop behind it.
RECORDED_STATUS = 86
_WAIT_FOR_RANKS_S = 120.0
# How launchers tell a process its rank and their number: torch's and DeepSpeed's own, Open MPI,
# MPICH and Intel MPI, Slurm.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_SPAWNED = "--multiprocessing-fork"  # of a process that multiprocessing starts an interpreter for
_BY_ATTRIBUTE = ("deepscale_config", "deepspeed_config")


class _Recorder:
    """Recorder of the start of this process."""

    def __init__(self, folder: str, hook: str, *, goes_on: bool) -> None:
        self._folder = folder
        self._goes_on = goes_on
        self._pid = os.getpid()
        self._env = _without(hook, os.environ)
        self._cwd = os.getcwd()
        self._argv = list(sys.argv)
        self._cores = sorted(os.sched_getaffinity(0))
        self._told = False

    def adapt_deepspeed(self, module: ModuleType) -> None:
        original = module.initialize
        signature = inspect.signature(original)

        def initialize(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the script's own mistake, which DeepSpeed reports
                return original(*args, **kwargs)
            config = _passed(arguments)
            if config is not None and _trains(arguments, config):
                self._record(_without_filled_batch(config))
            return original(*args, **kwargs)

        initialize.__doc__, initialize.__signature__ = original.__doc__, signature  # type: ignore[attr-defined]
        module.initialize = initialize  # type: ignore[attr-defined]

    def adapt_torch_launcher(self, module: ModuleType) -> None:
        """Torch's agent, which `torchrun` and `accelerate launch` use, would wait for the nodes."""
        original = module.launch_agent

        def launch_agent(config: Any, *args: Any, **kwargs: Any) -> Any:
            if config.min_nodes > 1:
                self._refuse_nodes(config.min_nodes)
            return original(config, *args, **kwargs)

        module.launch_agent = launch_agent  # type: ignore[attr-defined]

    def adapt_deepspeed_runners(self, module: ModuleType) -> None:
        """DeepSpeed's launcher for several nodes."""
        for runner in vars(module).values():
            if isinstance(runner, type) and "get_cmd" in vars(runner):
                self._adapt_runner(runner)

    def _adapt_runner(self, runner: Any) -> None:
        original = runner.get_cmd

        def get_cmd(own: Any, environment: Any, active_resources: Any) -> Any:
            if len(active_resources) > 1:
                self._refuse_nodes(len(active_resources))
            return original(own, environment, active_resources)

        runner.get_cmd = get_cmd

    def _refuse_nodes(self, count: int) -> NoReturn:
        _write(os.path.join(self._folder, SEVERAL_NODES_FILE), {"nodes": count})
        os._exit(RECORDED_STATUS)

    def _record(self, config: dict[str, Any]) -> None:
        if self._told and self._goes_on:
            return
        if self._told:  # the script caught what was to end it
            os._exit(RECORDED_STATUS)
        self._told = True
        rank, size = rank_and_size()
        record = {
            "rank": rank,
            "size": size,
            "forked": os.getpid() != self._pid,
            "executable": sys.executable,
            "prefix": sys.prefix,
            "version": list(sys.version_info[:2]),
            "command": list(sys.orig_argv),
            # A spawned process gets those of the process that has spawned it.
            "argv": list(sys.argv) if _SPAWNED in self._argv else self._argv,
            "cwd": self._cwd,
            "cores": self._cores,
            "env": self._env,
            "has_wrapt": importlib.util.find_spec("wrapt") is not None,
        }
        try:
            record["config"] = json.loads(json.dumps(_finite(config), allow_nan=False))
        except (TypeError, ValueError) as error:
            record["config_problem"] = str(error)
        path = os.path.join(self._folder, f"{RECORD_PREFIX}{record['parent']}-{os.getpid()}.json")
        _write(path, record)
        if self._goes_on:
            return
        self._wait_for_others(size)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(RECORDED_STATUS)

    def _wait_for_others(self, size: int) -> None:
        """A launcher ends all of its ranks as soon as one has ended."""
        deadline = time.monotonic() + _WAIT_FOR_RANKS_S
        while time.monotonic() < deadline:
            names = os.listdir(self._folder)
            if sum(name.startswith(RECORD_PREFIX) for name in names) >= size:
                return
            time.sleep(0.02)


def _without(hook: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables as they would be without the hook."""
    own = (hook, os.path.join(os.path.dirname(hook), "packages"))
    found = {name: value for name, value in env.items() if name != FOLDER_VARIABLE}
    entries = found.pop("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and os.path.abspath(entry) not in own]
    return {**found, "PYTHONPATH": os.pathsep.join(kept)} if kept else found


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks; 0 and 1 without a launcher."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, size in _RANKS:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _write(path: str, content: Any) -> None:
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def _passed(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration that a call of `deepspeed.initialize` names, if it can be read."""
    args = arguments.get("args")
    found = [arguments.get(name) for name in ("config", "config_params")]
    found += [getattr(args, name, None) for name in _BY_ATTRIBUTE]
    value = next((value for value in found if value is not None), None)
    if isinstance(value, dict):
        return value
    if not isinstance(value, (str, os.PathLike)):
        return None
    try:
        if os.path.exists(value):
            with open(value, encoding="utf-8") as file:
                text = file.read()
        else:
            text = base64.urlsafe_b64decode(str(value)).decode()
        import hjson  # DeepSpeed reads its configuration with it

        content = hjson.loads(text)
    except (OSError, ValueError):  # DeepSpeed will say so
        return None
    return dict(content) if isinstance(content, dict) else None


def _trains(arguments: dict[str, Any], config: dict[str, Any]) -> bool:
    named = any(arguments.get(name) is not None for name in ("optimizer", "model_parameters"))
    return named or "optimizer" in config


def _without_filled_batch(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the global batch size if accelerate has filled it in: it follows from the others."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.accelerator":
            return {key: value for key, value in config.items() if key != "train_batch_size"}
        frame = frame.f_back
    return config


def _finite(value: Any) -> Any:
    """Without what JSON has no word for: accelerate never prints, "every infinite steps"."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if v not in (float("inf"), -float("inf"))}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


class AfterImport:
    """Finds modules as the interpreter would, and has them adapted once they are imported."""

    def __init__(self, adapt: dict[str, Callable[[ModuleType], None]]) -> None:
        self._adapt = adapt

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        adapt = self._adapt.get(name)  # stays: whoever asks for a spec may not import it
        if adapt is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, adapt)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Another loader, whose module is adapted once it was run."""

    def __init__(self, loader: Any, adapt: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._adapt = adapt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._adapt(module)


def run_hidden_sitecustomize(hiding: str) -> None:
    """The environment may have a `sitecustomize` of its own, which the file `hiding` hides."""
    own = os.path.dirname(os.path.abspath(hiding))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def what_records(
    folder: str, hook: str, *, goes_on: bool = False
) -> dict[str, Callable[[ModuleType], None]]:
    """Return what adapts modules, by their names, so that this process records its start.

    Args:
        folder: of the records.
        hook: the file that runs at the start of the process.
        goes_on: the training follows.
    """
    recorder = _Recorder(folder, os.path.dirname(os.path.abspath(hook)), goes_on=goes_on)
    return {
        "deepspeed": recorder.adapt_deepspeed,
        "deepspeed.launcher.multinode_runner": recorder.adapt_deepspeed_runners,
        "torch.distributed.launcher.api": recorder.adapt_torch_launcher,
    }


def _install() -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        adapt = what_records(folder, __file__)
        sys.meta_path.insert(0, AfterImport(adapt))
    run_hidden_sitecustomize(__file__)


if __name__ == "sitecustomize":
    _install()
