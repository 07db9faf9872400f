from __future__ import annotations

from pathlib import Path

import pytest

from dsat.app import mailbox
from dsat.tuning.requests import Request, RequestKind


def test_requests_are_taken_once_in_their_order(tmp_path: Path) -> None:
    assert mailbox.take(tmp_path) == []
    sent = [
        Request(RequestKind.CANCEL, trial_id=3),
        Request(RequestKind.BUDGET, max_trials=80),
        Request(RequestKind.STOP),
    ]
    for request in sent:
        mailbox.leave(tmp_path, request)
    assert (tmp_path / "requests").stat().st_mode & 0o077 == 0
    assert mailbox.take(tmp_path) == sent
    assert mailbox.take(tmp_path) == []


def test_what_is_no_request_is_told_and_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox.leave(tmp_path, Request(RequestKind.STOP))
    for number, text in enumerate(("", "[]", '{"kind": "explode"}')):
        (tmp_path / "requests" / f"{number:020}.json").write_text(text)
    assert mailbox.take(tmp_path) == [Request(RequestKind.STOP)]
    assert caplog.text.count("is no request, and was deleted") == 3
    assert list((tmp_path / "requests").iterdir()) == []
