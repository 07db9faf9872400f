"""Command line: argv in, text and an exit status out.

Holds parsing and printing only.
"""

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 0, 1, 2, 70, 130
