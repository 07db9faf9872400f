"""Plug for `deepspeed --autotuning`: DeepSpeed's launcher, with dsat as its autotuner.

`python3 -m dsat.cli.autotuner --autotuning tune SCRIPT ARGS` is `deepspeed --autotuning tune SCRIPT
ARGS`. `run_autotuning` has the signature of DeepSpeed's own (launcher/runner.py, 0.15 to 0.19) and
is registered as an entry point of the group `deepspeed.autotuner`; see docs/upstream.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

_ITS_OWN = ("autotuning", "user_script", "user_args")


def run_autotuning(
    args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]
) -> NoReturn:
    """Tune as `dsat tune` or `dsat run` does, in place of this process.

    Args:
        args: of DeepSpeed's launcher; `autotuning` is `tune` or `run`.
        active_resources: slots by host, which the launcher's options name as well.
    """
    words = [sys.executable, "-m", "dsat", *words_of(args)]
    sys.stdout.flush()
    os.execv(sys.executable, words)  # noqa: S606  (a process that has not imported torch)


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the arguments of dsat for those of DeepSpeed's launcher."""
    from deepspeed.launcher import runner

    words, usual = [args.autotuning], vars(runner.parse_args([args.user_script]))
    for name, value in vars(args).items():
        if name not in _ITS_OWN and value != usual[name]:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [*words, args.user_script, *args.user_args]


def main() -> None:
    """Run DeepSpeed's launcher with dsat in the place of its autotuner."""
    from deepspeed.launcher import runner

    runner.run_autotuning = run_autotuning
    runner.main()


if __name__ == "__main__":
    main()
