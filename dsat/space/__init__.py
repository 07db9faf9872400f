"""The search space: settings of DeepSpeed, the space they span, and the plan of the search.

Pure values and functions: no I/O.
"""
