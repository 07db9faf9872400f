"""Installation of the adapters in this process, and their activation for a trial."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import pkgutil
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import wrapt

from dsat.in_trial.adapters import trackers
from dsat.in_trial.adapters.calls import Adapter, entrance
from dsat.in_trial.adapters.table import ENGINE, MODELS, TABLE
from dsat.in_trial.adapters.trial import TRIAL, Phase
from dsat.in_trial.adapters.user_files import UserFiles
from dsat.in_trial.rank_files import SPEC_FILE, RankSpec

_FunctionWrapper: Any = wrapt.FunctionWrapper  # its types differ between versions
_BoundFunctionWrapper: Any = wrapt.BoundFunctionWrapper


class _Bound(_BoundFunctionWrapper):  # type: ignore[misc]
    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.__self__, self.__name__)


class _Adapted(_FunctionWrapper):  # type: ignore[misc]
    """An adapted function, which can be copied and pickled like the original one."""

    __bound_function_wrapper__ = _Bound

    def __init__(self, function: Any, adapter: Adapter, owner: Any = None) -> None:
        super().__init__(function, entrance(adapter, owner))
        self._self_place = f"{adapter.module}:{adapter.attribute}"

    def __get__(self, instance: Any, owner: Any) -> Any:
        if isinstance(self.__wrapped__, BuiltinFunctionType):  # does not bind to instances
            return self
        return super().__get__(instance, owner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pkgutil.resolve_name, (self._self_place,)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@functools.cache
def install() -> None:
    """Wrap the functions of `TABLE` when their modules are imported, or now if they already are.

    Call this before other imports: modules that imported a function by name keep the original.
    """
    for name in dict.fromkeys(adapter.module for adapter in TABLE):
        wrapt.register_post_import_hook(adapt, name)


def begin(folder: Path, *, is_below_rank: bool = False) -> None:
    """Activate the adapters for the trial in a folder.

    If the first run only records how ranks start, the folder has no specification. In a process
    that a rank started (`is_below_rank`), only the adapters that protect files are active.
    """
    install()
    TRIAL.folder = folder
    if (folder / SPEC_FILE).exists() and RankSpec.read(folder).is_full_run:
        TRIAL.phase = Phase.TRAINING
        return
    TRIAL.files = UserFiles(folder)
    TRIAL.phase = Phase.BELOW_RANK if is_below_rank else Phase.PREPARING
    os.environ.update(trackers.variables_off(folder))


def adapt(module: ModuleType) -> None:
    """Wrap the functions of `TABLE` in a module that was just imported."""
    for adapter in TABLE:
        if adapter.module != module.__name__:
            continue
        owner, name = owner_of(adapter, module)
        if owner is None or not hasattr(owner, name):
            continue  # absent in this version of the library
        original = getattr(owner, name)
        if isinstance(original, property):
            setattr(owner, name, _adapt_property(original, adapter))
            continue
        wrapt.wrap_object(module, adapter.attribute, _Adapted, (adapter,))
        if module in (io, os):
            _adapt_pathlib(name, original, getattr(module, name))


def _adapt_property(original: Any, adapter: Adapter) -> property:
    enter = entrance(adapter)
    return property(lambda owner: enter(functools.partial(original.fget, owner), owner, (), {}))


def adapt_engine(engine: Any) -> None:
    """Wrap the methods of an engine that trains."""
    for adapter in ENGINE:
        name = adapter.attribute.rpartition(".")[2]
        if hasattr(engine, name):
            setattr(engine, name, _Adapted(getattr(engine, name), adapter, engine))


def adapt_models() -> None:
    """Wrap the constructor of all torch modules."""
    wrapt.wrap_object(MODELS.module, MODELS.attribute, _Adapted, (MODELS,))


def owner_of(adapter: Adapter, module: ModuleType) -> tuple[Any, str]:
    """Return the module or class that holds a function, None if absent, and the function's name."""
    class_name, _, name = adapter.attribute.rpartition(".")
    return (getattr(module, class_name, None) if class_name else module), name


def _adapt_pathlib(name: str, original: Any, replacement: Any) -> None:
    """Replace a function in pathlib, which in Python 3.10 has its own references to it."""
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if getattr(accessor, name, None) is original:
        setattr(accessor, name, replacement)
