"""The part of dsat that runs on a Ray cluster, behind `dsat.engines.places.ray`.

The driver holds the reservation, and an actor on each node (`node_actor`) that runs commands there
and streams their output, so that nothing listens but Ray. A command is
`python -m dsat.engines.ray.run`, as `srun` is on Slurm. Only the driver imports Ray.
"""
