"""The mutation gate: small changes that break a documented rule; tests must catch each one.

    python -m testing.mutants [--only ID ...] [--tests PATH ...]

`rules/*.yaml` lists the mutations, each with the tests that guard its rule. The gate applies the
mutations one by one to a private copy of the repository, and runs the tests until one fails.
Without a mutation the tests pass: `make nightly` runs them all first.

mutmut and cosmic-ray do not fit: they generate thousands of mutations of dsat, and cannot be
limited to hand-written ones.
"""
