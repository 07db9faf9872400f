"""Trials as processes on this machine."""

from dsat.engines.local.engine import LocalEngine, LocalOptions
from dsat.engines.local.machine import Machine, find_machine

__all__ = ["LocalEngine", "LocalOptions", "Machine", "find_machine"]
