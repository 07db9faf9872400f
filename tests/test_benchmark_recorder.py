"""A small table is really recorded, and goes on where its recording was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import record, tables
from benchmarks.record import Spec
from benchmarks.tables import Header, Row
from dsat.trial import ModelProfile, Outcome, OutcomeKind
from tests.local import cpu_machine

pytestmark = pytest.mark.slow

SPEC = Spec(
    name="small",
    accelerator="cpu",
    model="gpt-5m",
    side=16,
    slot_memory_bytes=600 * 2**20,
    seconds_per_trial=2.0,
    settings=record.grid(stage=[1], reduce_bucket_size=[10**6, 10**9]),
    largest=4,
)


def test_a_killed_recording_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = record.record(SPEC, cpu_machine(2), tmp_path, concurrent=2)
    table = tables.read(finished)
    assert [path.name for path in tmp_path.iterdir()] == ["small.jsonl.gz"]
    assert table.header.profile.num_params > 5 * 10**6
    assert table.header.about["concurrent trials"] == 2
    small = [row for row in table.rows if row.settings["reduce_bucket_size"] == 10**6]
    assert [row.micro_batch for row in small] == [1, 2, 4]
    assert all(row.outcome.metrics is not None for row in small)
    # The large bucket is 4 GB, of which the slot has none to spare.
    [large] = [row for row in table.rows if row not in small]
    assert (large.micro_batch, large.outcome.kind.value) == (1, "OOM")
    assert large.outcome.detail == ""

    kept = [table.header.to_json(), table.rows[0].to_json()]
    torn = "".join(json.dumps(line) + "\n" for line in kept) + '{"settings": {"sta'
    finished.unlink()
    (tmp_path / "small.jsonl").write_text(torn)
    capsys.readouterr()
    again = tables.read(record.record(SPEC, cpu_machine(2), tmp_path))
    assert again.header == table.header
    assert again.rows[0] == table.rows[0]
    assert sorted(map(_what, again.rows)) == sorted(map(_what, table.rows))
    assert len(capsys.readouterr().out.splitlines()) == len(table.rows) - 1


def _what(row: Row) -> str:
    return json.dumps([row.settings, row.micro_batch, row.outcome.kind.value])


PROFILE = ModelProfile(1, 1, 4, 1, 1.0, 2**40)
BEGUN = record._header(SPEC, PROFILE, 1.0, {})
OUT_OF_MEMORY = Outcome(OutcomeKind.OOM)


@pytest.mark.parametrize(
    "lines",
    [
        [replace(BEGUN, slot_memory_bytes=2**40)],
        [replace(BEGUN, ds_config={})],
        [replace(BEGUN, command="train.py --model gpt-5m --side 128")],
        [replace(BEGUN, about={"measured steps": "1 to 9"})],
        [BEGUN, Row({"stage": 3}, 1, 1, 1, OUT_OF_MEMORY)],
    ],
    ids=["memory", "configuration", "program", "steps", "grid"],
)
def test_a_table_that_was_begun_with_other_settings_is_left_alone(
    tmp_path: Path, lines: Sequence[Header | Row]
) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="begun with other settings"):
        record.record(SPEC, cpu_machine(1), tmp_path)
    assert path.read_bytes() == before
