"""What users look at: one view of a run, laid out by terminal, report, exports and files."""
