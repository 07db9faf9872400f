"""Preparation of a command for trials or simulations: program, configuration, hosts, packages."""
