"""Nodes of a Ray cluster as hosts of trials: reserved, and reached through Ray alone.

Ray's driver is a process of its own (`driver`): nothing of Ray's is in dsat's process, and the
driver's end is the end of hosts. It holds the reservation, and an actor on each node (`node_actor`)
that runs commands there and hands their pipes on. `python -m dsat.engines.ray.run` is what stands
before such a command, as `srun` does on Slurm. Only the driver imports Ray.
"""

from dsat.engines.ray.choice import Wish
from dsat.engines.ray.reservation import Node, Reservation, is_job

__all__ = ["Node", "Reservation", "Wish", "is_job"]
