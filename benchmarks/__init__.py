"""Benchmarks of dsat against what else there is; `make bench` runs them all."""
