"""Decisions on trials and their record: the tuner, its loop and its journal.

The only I/O here is on journals and on the lock of the run's folder. Engines do everything else.
"""
