"""One run of a task on its slots: from the queue to its container's exit.

Follows `master/internal/task/allocation.go`, for tasks that fit on one node.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testing.master.cluster import Cluster


@dataclass(frozen=True)
class Exit:
    """How an allocation ended, as its trial learns it.

    Attributes:
        failure: Why it counts as a failure; None if it does not.
        user_requested_stop: It ended well without an acknowledged preemption.
        reason: Reason in the task's log.
    """

    failure: str | None
    user_requested_stop: bool
    reason: str


PREEMPTION_TIMEOUT_S = 3600.0  # an allocation asked to stop is killed after this


class Allocation:
    """A request for slots; later the container on these slots.

    Args:
        id: `<task id>.<run id>`.
        task_id: The trial's task.
        name: Its name in the log.
        slots: Number of slots needed; 0 for an auxiliary task.
        host: The cluster.
        on_exit: Called once, when the container has ended.

    Attributes:
        node, slot_ids: Its node and slots, once it has started.
        ready: The container has requested its rendezvous, so it can be stopped gracefully.
    """

    def __init__(
        self,
        id: str,
        task_id: str,
        name: str,
        slots: int,
        host: Cluster,
        on_exit: Callable[[Exit], None],
    ) -> None:
        self.id = id
        self.task_id = task_id
        self.name = name
        self.slots = slots
        self.node = 0
        self.slot_ids: tuple[int, ...] = ()
        self.resources_id, self.container_id = str(uuid.uuid4()), str(uuid.uuid4())
        self.started = self.ended = False
        self.preempt = False
        self.acknowledged = False
        self.ready = False
        self._exit_code: int | None = None
        self._host = host
        self._on_exit = on_exit
        self.killed = False

    def start(self, node: int, slot_ids: Sequence[int]) -> None:
        self.node, self.slot_ids, self.started = node, tuple(slot_ids), True

    def terminate(self, reason: str) -> None:
        """Ask the container to stop: by preemption if it is ready, else by a kill."""
        if not self.ready:
            self.kill(reason)
        elif not self.preempt:
            self.preempt = True
            self._host.later(PREEMPTION_TIMEOUT_S, lambda: self.kill("preemption"))

    def kill(self, reason: str) -> None:
        if self.ended:
            return
        if not self.started:
            self._end(reason)
        elif self._exit_code is None:
            self.killed = True
            self._host.log(self.task_id, f"forcibly killing allocation (reason: {reason})")
            self._host.kill_container(self)

    def container_exited(self, exit_code: int) -> None:
        if self._exit_code is None:
            self._exit_code = exit_code
            self._end("a container exited")

    def _end(self, reason: str) -> None:
        self.ended = True
        if not self.started or self.killed or self.acknowledged:
            end = Exit(None, False, f"allocation stopped after {reason}")
        elif self._exit_code:
            failure = (
                "resources failed with non-zero exit code: container failed with "
                f"non-zero exit code: {self._exit_code} (exit code {self._exit_code})"
            )
            end = Exit(failure, False, f"allocation failed: {failure}")
        else:
            end = Exit(None, True, f"allocation stopped early after {reason}")
        level = "ERROR" if end.failure else "INFO"
        self._host.log(self.task_id, f"{self.name} was terminated: {end.reason}", level)
        self._host.release(self)
        self._on_exit(end)
