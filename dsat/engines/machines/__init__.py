"""Hosts, their slots, and how commands run there."""
