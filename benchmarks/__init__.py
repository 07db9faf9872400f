"""Benchmarks of dsat, alone and against other tuners; `make bench` runs them all."""
