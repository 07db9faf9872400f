"""The live table on a terminal during a search."""

from __future__ import annotations

import io
import sys
from unittest import mock

from dsat.show.live import LiveView
from dsat.values.table import Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_filled_in_on_a_terminal_alone() -> None:
    shown = []
    for stream in (Terminal(), io.StringIO()):
        with mock.patch.object(sys, "stderr", stream), LiveView() as view:
            view.show("8 GPUs: 0 of 7", Table(("strategy",), [("stage 1 (formula)",)]))
            view.show("8 GPUs: 1 of 7", Table(("strategy",), [("stage 1",)]))
            assert view.is_live == stream.isatty()
        shown.append(stream.getvalue())
    assert "8 GPUs: 1 of 7" in shown[0] and "stage 1 (formula)" in shown[0]
    assert not shown[1]
