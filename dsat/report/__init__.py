"""Layouts of the view of a run: tables, pages, messages and files; they decide nothing."""
