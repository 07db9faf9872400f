"""Preparation of a command for trials: its program, its hosts and its packages."""
