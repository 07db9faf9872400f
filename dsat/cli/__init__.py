"""Command line: argv in, text and an exit status out.

Holds parsing and printing only.
"""
