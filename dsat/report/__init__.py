"""What people look at, drawn from the journal alone: summaries, tables, log lines.

Writes result files; decides nothing.
"""
