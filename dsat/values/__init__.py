"""Values that all parts exchange (trials, outcomes, objectives), and helpers for text and files.

Only `files`, `hazards` and `host_limits` do I/O. `hazards` needs packaging, and `student` numpy.
"""
