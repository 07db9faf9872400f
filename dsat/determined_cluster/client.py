"""Log in to a master from your machine, and follow a search to its end."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

from dsat.determined_cluster import result, trial_result
from dsat.determined_cluster.job import SAID, describe_state, search_tag
from dsat.determined_cluster.master import (
    ANSWERS_AGAIN,
    OVER,
    UNREACHABLE,
    Master,
    describe_error,
    describe_request,
    is_ending,
    silence_determined,
    state_name,
)
from dsat.determined_cluster.result import RESULT_MARK
from dsat.errors import UserInputError
from dsat.values.text import hide_secrets

FIRST_WITHOUT = (0, 38)
LOCAL = "With --engine local, dsat tunes on this machine's own accelerators."
_INTERVAL_S = 2.0
_TAIL = 100  # lines of the log of a runner that failed
_LATE = 2  # further requests after the end, since the last lines may arrive late


def check_installed(master: str) -> None:
    """Raise UserInputError unless a version of determined with custom searches is installed."""
    if importlib.util.find_spec("determined") is None:
        problem = "determined is not installed, but tuning on a cluster needs it"
    elif importlib.util.find_spec("determined.searcher") is None:
        problem = "the installed determined has no custom searchers, unlike 0.28 to 0.37"
    else:
        return
    raise UserInputError(
        problem, where=master, hint=f"Run pip install 'determined>=0.28,<0.38'. {LOCAL}"
    )


def connect(address: str, say: Callable[[str], None]) -> Master:
    """Log in to a master that supports custom searches.

    Raises UserInputError for a wrong address, wrong credentials or an unsupported version.
    """
    with silence_determined():
        from determined.experimental import Determined

    with explain_errors(address):
        master = Master(Determined(master=address), say)
        version = master.version()
    if version is not None and version >= FIRST_WITHOUT:
        raise UserInputError(
            f"the master is Determined {'.'.join(map(str, version))}, but dsat needs custom "
            "searches, which Determined removed in 0.38",
            where=master.address,
            hint=LOCAL,
        )
    return master


def follow(
    master: Master, experiment_id: int, say: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """Pass the search runner's lines to `say` until the runner ends.

    Returns:
        The runner's state (one of `OVER`), and its result (see `result.to_json`), empty if none.
    """
    num_shown, state, late = 0, "", 0
    while True:
        with explain_errors(master.address):
            previous, state = state, master.state(experiment_id)
            lines = master.ask(lambda: _runner_lines(master, experiment_id))
        if state != previous and state not in ("ACTIVE", *OVER):
            say(f"experiment {experiment_id} is {describe_state(state)}")
        for line in lines[num_shown:]:
            # This process reports an unreachable master itself.
            if not line.startswith((RESULT_MARK, UNREACHABLE, ANSWERS_AGAIN)):
                say(line)
        num_shown = max(num_shown, len(lines))
        outcome = result.from_lines(lines) if state in OVER else {}
        if state in OVER and (outcome or late >= _LATE):
            return state, outcome
        late += state in OVER
        time.sleep(_INTERVAL_S)


def reason_of_failure(master: Master, runner_id: int) -> str:
    """Return why a search runner failed, from the end of its log; empty if unknown."""
    with explain_errors(master.address):
        log = [line for t in master.trials(runner_id) for line in t.iter_logs(tail=_TAIL)]
    return hide_secrets(trial_result.reason_of_failure(log))


def end_search_of(master: Master, runner_id: int) -> int | None:
    """Kill the trials' experiment of a lost runner; return its id, or None if it does not run."""
    with explain_errors(master.address):
        experiment = master.find(search_tag(runner_id))
        state = "DELETED" if experiment is None else state_name(experiment.state)
        if is_ending(state):
            return None
        master.kill(experiment.id)
        return int(experiment.id)


def _runner_lines(master: Master, experiment_id: int) -> list[str]:
    lines = []
    for trial in master.trials(experiment_id):
        for message in trial.iter_logs(search_text=SAID.strip(" ]")):
            for line in message.splitlines():
                starts = [line.find(mark) for mark in (SAID, RESULT_MARK) if mark in line]
                if starts:
                    lines.append(line[min(starts) :].removeprefix(SAID))
    return lines


@contextlib.contextmanager
def explain_errors(master: str) -> Iterator[None]:
    """Convert determined's errors, and errors of the connection, to UserInputError."""
    from determined.common.api import errors
    from requests.exceptions import SSLError

    try:
        yield
    except (errors.UnauthenticatedException, errors.ForbiddenException, EOFError) as error:
        raise UserInputError(
            "the master does not accept your credentials",
            where=master,
            hint=f"Log in with `det -m {master} user login USER`, or set DET_USER and DET_PASS.",
        ) from error
    except errors.APIException as error:
        raise UserInputError(describe_request(error), where=master) from error
    except SSLError as error:
        raise UserInputError(
            f"the master's certificate is not accepted: {describe_error(error)}",
            where=master,
            hint="Set DET_MASTER_CERT_FILE to the file of the master's certificate, and unset "
            "REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE, which have precedence.",
        ) from error
    except (errors.BadRequestException, OSError, ValueError, KeyError) as error:
        raise UserInputError(
            f"no Determined master answers there: {describe_error(error)}",
            where=master,
            hint=f"Check DET_MASTER. {LOCAL}",
        ) from error
