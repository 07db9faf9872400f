"""A small table is really recorded, and goes on where its recording was killed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import record, tables
from benchmarks.record import Spec
from benchmarks.tables import Row
from dsat.engines.local.hosts import Host
from dsat.tuning.journal import Journal
from testing import warm_host
from testing.local import cpu_machine

pytestmark = pytest.mark.slow

SPEC = Spec(
    name="small",
    accelerator="cpu",
    model="gpt-5m",
    side=16,
    slot_memory_bytes=600 * 2**20,
    seconds_per_trial=2.0,
    settings=record.grid(stage=[1], reduce_bucket_size=[10**6, 10**9]),
    largest=2,
    passes=2,
)


class _Killed(BaseException):
    pass


class _Journal(Journal):
    """Remembers what was recorded; the process is killed before the line `killed_at`."""

    lines: ClassVar[list[dict[str, Any]]] = []
    killed_at = 1000

    def append(self, event: Mapping[str, Any]) -> None:
        if len(self.lines) == self.killed_at:
            raise _Killed
        super().append(event)
        self.lines.append(dict(event))


@pytest.mark.nightly
def test_a_killed_recording_goes_on_in_its_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "Host", functools.partial(Host, prefix=warm_host.prefix()))
    monkeypatch.setattr(record, "Journal", _Journal)
    monkeypatch.setattr(_Journal, "lines", [])
    monkeypatch.setattr(_Journal, "killed_at", 5)
    with pytest.raises(_Killed):
        record.record(SPEC, cpu_machine(2), tmp_path, concurrent=2)
    assert [line.get("pass") for line in _Journal.lines] == [None, 1, 1, 1, 2]
    with open(tmp_path / "small.jsonl", "a") as file:
        file.write('{"settings": {"sta')
    monkeypatch.setattr(_Journal, "killed_at", 1000)
    capsys.readouterr()
    table = tables.read(record.record(SPEC, cpu_machine(2), tmp_path))
    assert [line.count("pass 2") for line in capsys.readouterr().out.splitlines()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["small.jsonl.gz"]

    assert table.header.profile.num_params > 5 * 10**6
    about = table.header.about
    assert (about["concurrent trials"], about["passes"]) == (2, 2)
    small = [row for row in table.rows if row.settings["reduce_bucket_size"] == 10**6]
    # The large bucket is 4 GB, of which the slot has none to spare: once is enough.
    [large] = [row for row in table.rows if row not in small]
    assert (large.micro_batch, large.outcome.kind.value) == (1, "OOM")
    assert large.outcome.detail == ""
    recorded = [Row.from_json(line) for line in _Journal.lines[1:]]
    assert len(recorded) == 5
    for row, size in zip(small, (1, 2), strict=True):
        one, other = (r for r in recorded if r.micro_batch == size and r.settings == row.settings)
        assert row == min(one, other, key=_throughput)


def _throughput(row: Row) -> float:
    assert row.outcome.metrics is not None
    return row.outcome.metrics.throughput
