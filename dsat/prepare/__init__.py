"""A command made ready for trials: its program, its hosts and the plan of a search."""
