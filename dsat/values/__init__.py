"""Frozen values that all parts exchange: trials, outcomes, objectives, ZeRO strategies.

They import the standard library only, and do no I/O but `files`, which writes atomically.
"""
