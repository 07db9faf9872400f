"""Everything that dsat changes in a user's process: one table of adapters.

`table.TABLE` has a row for each function or method that is wrapped. `install` wraps them when their
modules are imported, before anything else may bind their names. Until a trial begins in the process
(`trial.TRIAL.phase`) they do what they do without dsat.
"""
