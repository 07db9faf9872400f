"""`dsat project`: throughput, scaling, time and cost on GPUs of a named model."""
