"""The command-line entry point."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from dsat.cli import settings_from_argv, streams
from dsat.cli.exit_status import EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    streams.make_safe()
    try:
        settings = settings_from_argv.parse(given)
        from dsat.cli import commands  # most of dsat, which `--help` does not need

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, _interrupt)
        return commands.run(settings, given)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        from dsat.cli import output

        return output.report(error)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
