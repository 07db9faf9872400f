"""Layouts of a run's view: tables, pages, messages and files. Writes result files; decides nothing."""
