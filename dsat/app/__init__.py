"""One run on one machine, put together from all the parts below.

Reads settings and starts engines; does not parse a command line.
"""
