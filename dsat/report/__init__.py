"""Tables, pages, messages and files, drawn from the journal alone: summaries, tables, log lines.

Writes result files; decides nothing.
"""
