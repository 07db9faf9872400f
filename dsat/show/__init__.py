"""The view of a run, and its layouts: terminal, report, exports and result files."""
