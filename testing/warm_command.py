"""The command line, whose supervisors and looks at the accelerators a warm host forks.

Such a command takes ten seconds of a core less. Tests of what becomes of processes, of what they
import and of how long they take need the command itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsat.app import estimate
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine, find_machines
from dsat.engines.places import local as this_machine
from testing import warm_host

_ROOT = Path(__file__).parents[1]
_CODE = """
import sys
sys.path[0] = sys.argv[1]
from testing import warm_command
warm_command.main(sys.argv[2:])
"""


def words(prefix: Sequence[str] = ()) -> list[str]:
    """Return the words in place of `python3 -m dsat`.

    Args:
        prefix: of a warm host; by default of one on a CPU.
    """
    prefix = prefix or warm_host.prefix()
    return [sys.executable, "-c", _CODE, str(_ROOT), str(len(prefix)), *prefix]


def use(prefix: Sequence[str], put: Callable[[object, str, object], None] = setattr) -> None:
    """Has everything in this process that runs on this machine run behind a prefix.

    Args:
        put: sets an attribute, as `setattr` does or pytest's `monkeypatch.setattr`.
    """

    def find_machine(variables: Mapping[str, str] | None = None) -> Machine:
        [machine] = find_machines({"this machine": prefix}, variables)
        return machine

    put(this_machine, "find_machine", find_machine)
    put(estimate, "find_machine_for_simulations", find_machine)
    for module in (this_machine, estimate):
        put(module, "Host", functools.partial(Host, prefix=tuple(prefix)))


def main(args: Sequence[str]) -> None:
    from dsat.cli.main import main as command

    count, *rest = args
    use(rest[: int(count)])
    sys.exit(command(rest[int(count) :]))
