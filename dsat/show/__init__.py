"""The view of a run, and its output: terminal, report, exports and result files."""
