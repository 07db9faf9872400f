"""The command-line entry point."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from dsat.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, streams

# Signals within this time are one interruption: terminals and service managers send several.
_TOGETHER_S = 0.5
_AGAIN_S = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    streams.make_safe()
    status = _run(list(sys.argv[1:] if argv is None else argv))
    lost = streams.why_output_is_lost()
    if lost is not None:
        print(f"dsat: error: output is lost: {lost.strerror}", file=sys.stderr)
    return EXIT_FAILED if lost is not None and status == EXIT_OK else status


def _run(argv: Sequence[str]) -> int:
    try:
        from dsat.cli import parser  # not above: Ctrl-C may come while it is imported

        settings, line = parser.parse(argv)
        from dsat.cli import commands  # most of dsat, which `--help` does not need
        from dsat.engines.agent.rank_process import FOR_DSAT

        interruption = _Interruption()
        for number in FOR_DSAT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, interruption)
        otherwise, sys.unraisablehook = sys.unraisablehook, interruption.repeat_ignored
        try:
            return commands.run(settings, line)
        finally:
            sys.unraisablehook = otherwise
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        from dsat.cli import output

        return output.report(error)


class _Interruption:
    """Signal handler that raises KeyboardInterrupt once for signals that arrive together.

    Python ignores exceptions in finalizers, such as one that closes a connection. If it ignores the
    KeyboardInterrupt, the handler sends the signal again.
    """

    def __init__(self) -> None:
        self._last_s, self._number = -math.inf, int(signal.SIGINT)
        self._otherwise = sys.unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > _TOGETHER_S:
            self._last_s, self._number = now_s, number
            raise KeyboardInterrupt

    def repeat_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Send the signal again if Python ignored its exception. Serves as `sys.unraisablehook`."""
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            self._last_s = -math.inf
            # Not at once: an exception in this hook is ignored too.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), self._number))
            again.daemon = True
            again.start()
        else:
            self._otherwise(ignored)
