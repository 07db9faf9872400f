"""`dsat project`: throughput, scaling, time and cost on a given type of GPU."""
