"""The dsat command with supervisors and accelerator queries forked from a warm host.

This saves ten seconds of CPU time per command. Tests of processes, imports or durations need the
plain command.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine, find_machines
from dsat.engines.places import local as this_machine
from dsat.prepare import installed_deepspeed, simulated_model
from testing import warm_host

_ROOT = Path(__file__).parents[1]
_CODE = """
import sys
sys.path[0] = sys.argv[1]
from testing import warm_command
warm_command.main(sys.argv[2:])
"""
_CHECK = """
import sys
from dsat.in_trial import config_check
sys.argv[1:] = {files}
config_check.main()
"""


def words(prefix: Sequence[str] = ()) -> list[str]:
    """Return the command that replaces `python3 -m dsat`.

    Args:
        prefix: the prefix of a warm host; by default that of a host on a CPU.
    """
    prefix = prefix or warm_host.prefix()
    return [sys.executable, "-c", _CODE, str(_ROOT), str(len(prefix)), *prefix]


def use(prefix: Sequence[str], put: Callable[[object, str, object], None] = setattr) -> None:
    """Make dsat in this process run everything on this machine behind a prefix.

    Args:
        put: sets an attribute, like `setattr` or pytest's `monkeypatch.setattr`.
    """

    def find_machine(variables: Mapping[str, str] | None = None) -> Machine:
        [machine] = find_machines({"this machine": prefix}, variables)
        return machine

    put(this_machine, "find_machine", find_machine)
    put(simulated_model, "find_machine_for_simulations", find_machine)
    for module in (this_machine, simulated_model):
        put(module, "Host", functools.partial(Host, reach=tuple(prefix)))
    put(installed_deepspeed, "_ask", functools.partial(check_configurations, prefix=tuple(prefix)))


def check_configurations(questions: str, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """Let DeepSpeed validate configurations, as `dsat.prepare.installed_deepspeed` does."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/questions.json", f"{folder}/answer.json"]
        Path(files[0]).write_text(questions, encoding="utf-8")
        command = [*(prefix or warm_host.prefix()), sys.executable, "-c"]
        subprocess.run([*command, _CHECK.format(files=files)], check=True, cwd=folder)
        found: dict[str, Any] = json.loads(Path(files[1]).read_text(encoding="utf-8"))
        return found


def main(args: Sequence[str]) -> None:
    from dsat.cli.main import main as command

    count, *rest = args
    use(rest[: int(count)])
    sys.exit(command(rest[int(count) :]))
