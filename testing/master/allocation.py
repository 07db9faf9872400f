"""One run of a task on its slots: from the queue to its last container's exit.

After `master/internal/task/allocation.go`. Pure: processes are another module's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Exit:
    """End of an allocation, for its trial.

    Attributes:
        failure: Why it counts as a failure; None if it does not.
        user_requested_stop: It ended well without an acknowledged preemption.
        reason: What the task's log says of it.
    """

    failure: str | None
    user_requested_stop: bool
    reason: str


@dataclass
class Container:
    """A node's share of an allocation."""

    rank: int
    node: int
    slot_ids: tuple[int, ...]
    address: str
    resources_id: str
    container_id: str
    exit_code: int | None = None
    daemon: bool = False
    asked_rendezvous: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.exit_code)


PREEMPTION_TIMEOUT_S = 3600.0  # an allocation asked to stop is killed after this


class Host(Protocol):
    """Interface of the cluster for allocations."""

    def kill_containers(self, allocation: Allocation) -> None: ...

    def release(self, allocation: Allocation) -> None: ...

    def later(self, delay_s: float, call: Callable[[], None]) -> None: ...

    def log(self, task_id: str, text: str, level: str = ...) -> None: ...


class Allocation:
    """A request for slots, then the containers that got them.

    Args:
        id: `<task id>.<run id>`.
        task_id: The trial's task.
        name: As the log calls it.
        slots: How many it needs; 0 for an auxiliary task.
        host: The cluster.
        on_exit: Called once, when the last container has ended.
    """

    def __init__(
        self,
        id: str,
        task_id: str,
        name: str,
        slots: int,
        host: Host,
        on_exit: Callable[[Exit], None],
    ) -> None:
        self.id = id
        self.task_id = task_id
        self.name = name
        self.slots = slots
        self.containers: list[Container] = []
        self.began_s: float | None = None  # by the cluster's clock
        self.ended_s: float | None = None
        self.preempt = False
        self.acknowledged = False
        self.ended = False
        self._host = host
        self._on_exit = on_exit
        self._killed_while_running = False
        self._killed_daemons = False
        self._failure: str | None = None

    @property
    def started(self) -> bool:
        """Return whether it has its slots."""
        return self.began_s is not None

    @property
    def ready(self) -> bool:
        """Return whether all containers met; before that it cannot be stopped gracefully."""
        return bool(self.containers) and all(each.asked_rendezvous for each in self.containers)

    def container(self, resources_id: str) -> Container | None:
        return next((each for each in self.containers if each.resources_id == resources_id), None)

    def assigned(self, containers: list[Container]) -> None:
        self.containers = containers

    def acknowledge(self) -> None:
        self.acknowledged = True

    def set_daemon(self, resources_id: str) -> None:
        """Marks a container that is not waited for, as that of a node which only runs sshd."""
        container = self.container(resources_id)
        if container is not None and len(self.containers) > 1:
            container.daemon = True

    def terminate(self, reason: str) -> None:
        """Asks it to stop: by preemption where it can hear of it, else by a kill."""
        if self._try_exit(reason):
            return
        if not self.ready:
            self._kill(reason)
        elif not self.preempt:
            self.preempt = True
            self._host.later(PREEMPTION_TIMEOUT_S, lambda: self.kill("preemption"))

    def kill(self, reason: str) -> None:
        if not self._try_exit(reason):
            self._kill(reason)

    def container_exited(self, resources_id: str, exit_code: int) -> None:
        container = self.container(resources_id)
        if container is None or container.exit_code is not None:
            return
        container.exit_code = exit_code
        failed = exit_code != 0 and not self._killed_while_running and not self._killed_daemons
        if failed and self._failure is None:
            self._failure = (
                "resources failed with non-zero exit code: container failed with "
                f"non-zero exit code: {exit_code} (exit code {exit_code})"
            )
        self._try_exit("a container exited")

    def _try_exit(self, reason: str) -> bool:
        if self.ended:
            return True
        if not self.containers or all(each.exit_code is not None for each in self.containers):
            self._terminated(reason)
            return True
        if all(each.exit_code is not None for each in self.containers if not each.daemon):
            if not any(each.failed for each in self.containers):
                self._killed_daemons = True
            self._kill(reason)
        elif any(each.failed for each in self.containers):
            self._kill(reason)
        return False

    def _kill(self, reason: str) -> None:
        if all(each.exit_code is None for each in self.containers):
            self._killed_while_running = True
            self._host.log(self.task_id, f"forcibly killing allocation (reason: {reason})")
        self._host.kill_containers(self)

    def _terminated(self, reason: str) -> None:
        self.ended = True
        if not self.containers or self._killed_while_running or self.acknowledged:
            end = Exit(None, False, f"allocation stopped after {reason}")
        elif self._failure is not None:
            end = Exit(self._failure, False, f"allocation failed: {self._failure}")
        else:
            end = Exit(None, True, f"allocation stopped early after {reason}")
        level = "ERROR" if end.failure else "INFO"
        self._host.log(self.task_id, f"{self.name} was terminated: {end.reason}", level)
        self._host.release(self)
        self._on_exit(end)
