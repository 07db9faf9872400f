"""Differences between versions of torch and transformers, one module for each."""
