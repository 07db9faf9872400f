"""Command line: argv in, text and an exit status out.

This package parses, prints and handles signals; all other work is elsewhere.
"""

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 0, 1, 2, 70, 130
