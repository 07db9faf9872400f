"""Decisions on trials and their record: the tuner, its loop and its journal.

The only I/O is that of journals and of the run folder's lock; engines are used by their protocol.
"""
