"""The first hour with a GPU, and the wheels that a machine without a network needs for it."""
