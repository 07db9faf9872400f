"""Log lines of tasks, as the agent ships them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANK = re.compile(r" ?\[rank=([0-9]+)\] ?(.*)", re.DOTALL)
_LEVEL = re.compile(r" ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class LogLine:
    """One line; `log` ends with a newline."""

    timestamp: str
    log: str
    level: str | None = None
    rank: int | None = None
    stdtype: str = "stdout"
    source: str = "task"
    container_id: str = ""
    agent_id: str = ""

    @property
    def message(self) -> str:
        """The line as the client prints it."""
        where = f" {self.container_id[:8]}" if self.container_id else ""
        rank = "" if self.rank is None else f" [rank={self.rank}]"
        level = f"{self.level}: " if self.level else ""
        return f"[{self.timestamp}]{where}{rank} || {level}{self.log}"


def parse(line: str, **fields: str) -> LogLine:
    """Parse a line of output, which may begin with a rank and a level, as `ship_logs.py` does."""
    rank = None
    if match := _RANK.match(line):
        rank, line = int(match[1]), match[2]
    level = None
    if match := _LEVEL.match(line):
        level, line = match[1], match[2]
    return LogLine(log=line, level=level, rank=rank, **fields)
