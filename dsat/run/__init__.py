"""Decides trials and remembers them: the tuner, its loop and its journal.

The only I/O is the journal's; engines are driven through their protocol alone.
"""
