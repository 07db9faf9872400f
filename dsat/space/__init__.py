"""What may be tried: knobs, the space they span, and the plan that says how to search it.

Pure values and functions: no I/O.
"""
