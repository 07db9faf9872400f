"""Outcomes of a cluster's trials, by their logs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.determined_cluster.trial_result import of_log
from dsat.in_trial.cluster_rank import ATTACHED_MARK, log_line
from dsat.values.outcome import Outcome, OutcomeKind
from testing.helpers import failed, ran

PREFIX = "[2026-11-21T11:44:47.515877Z] 57b71f93 [rank=1] || "


def line(outcome: Outcome, *, run: str = "5.a.0", ended: bool = False) -> str:
    return PREFIX + log_line(outcome, run=run, ended=ended).decode()


def logged(*lines: str) -> list[str]:
    return [f"{PREFIX}{text}\n" for text in lines]


def test_out_of_memory_on_one_rank_explains_the_others() -> None:
    messages = [
        *logged("loading"),
        line(failed("ERROR", "rank 0: NCCL error")),
        line(failed("OOM", "rank 1: out of memory: tried to allocate 10 MiB")),
    ]
    outcome = of_log(messages, failed=True)
    assert (outcome.kind, outcome.message[:6]) == (OutcomeKind.OOM, "rank 1")


def test_only_the_last_run_of_a_trial_counts() -> None:
    messages = [line(failed("OOM"), run="5.a.0"), line(failed("ERROR", "x"), run="5.a.1")]
    assert of_log(messages, failed=True).kind is OutcomeKind.ERROR


def test_a_measurement_in_the_log_is_one() -> None:
    """The script has no reporting context, or the master was away."""
    noise = logged("warning: Address already in use, trying the next port")
    messages = [*noise, line(ran(3.0), ended=True)]
    for did_fail in (True, False):
        assert of_log(messages, failed=did_fail) == ran(3.0)


def test_a_script_that_leaves_with_a_status_has_not_only_ended() -> None:
    messages = [*logged("config is missing"), line(failed("INVALID", "too short"), ended=True)]
    assert of_log(messages, failed=False).message == "too short"
    outcome = of_log(messages, failed=True)
    assert outcome.kind is OutcomeKind.ERROR and "config is missing" in outcome.detail


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", OutcomeKind.OOM),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", OutcomeKind.OOM),
        ("RuntimeError: CUDA error: out of memory", OutcomeKind.OOM),
        ("container failed with non-zero exit code: 137 (killed)", OutcomeKind.HOST_OOM),
        ("ValueError: no such model", OutcomeKind.ERROR),
        ("nothing in particular", OutcomeKind.ERROR),
    ],
)
def test_without_our_line_the_text_tells(text: str, kind: OutcomeKind) -> None:
    outcome = of_log(logged("starting", text), failed=True)
    assert outcome.kind is kind
    assert outcome.detail == f"starting\n{text}"
    assert outcome.message


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    print({}["x"])',
    "KeyError: 'x'",
)


@pytest.mark.parametrize("rank", ["", "[rank1]: "])
def test_the_last_traceback_is_kept_whatever_follows_it(rank: str) -> None:
    said = ["KeyError: 'a'", "During handling of it:", *(f"{rank}{text}" for text in TRACEBACK)]
    outcome = of_log(logged("loading", *said, *(f"bye {n}" for n in range(30))), failed=True)
    assert outcome.detail == "\n".join(TRACEBACK)
    assert outcome.message == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (logged(*TRACEBACK), True),
        (logged(f"{ATTACHED_MARK}5.a.0", *TRACEBACK), False),
        (logged("nobody knows why"), False),
        ([line(failed("INVALID"), ended=True)], False),
        ([line(replace(failed("INVALID"), before_engine=True), ended=True)], True),
        ([line(replace(failed("ERROR"), before_engine=True))], True),
    ],
)
def test_a_script_that_fails_before_its_engine(lines: list[str], *, expected: bool) -> None:
    outcome = of_log(lines, failed=True)
    assert (outcome.kind, outcome.before_engine) == (OutcomeKind.ERROR, expected)
    assert ATTACHED_MARK.strip() not in outcome.detail


SERVER_SOCKET = (
    "The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    "lines",
    [
        logged("RuntimeError: Address already in use"),
        logged(*TRACEBACK[:3], f"torch.distributed.DistNetworkError: {SERVER_SOCKET}"),
        [line(failed("ERROR", f"rank 0: DistNetworkError: {SERVER_SOCKET}"))],
    ],
)
def test_a_port_that_another_trial_has_taken(lines: list[str]) -> None:
    outcome = of_log(lines, failed=True)
    assert outcome.kind is OutcomeKind.ERROR
    assert "EADDRINUSE" in outcome.message and "-mct 1" in outcome.message


def test_a_torn_line_is_none() -> None:
    torn = line(failed("OOM"))[:-20]
    assert of_log([torn], failed=True).kind is OutcomeKind.ERROR
