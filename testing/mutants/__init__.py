"""The mutation gate: small changes that break a documented rule, which tests must catch.

    python -m testing.mutants [--only ID ...] [--tests PATH ...]

`rules/*.yaml` has the mutations, each with the tests that hold its rule. The gate applies one after
the other to a private copy of the repository and runs those tests until one fails. They pass
without a mutation: `make nightly` runs them all before.

mutmut and cosmic-ray generate mutations by themselves, thousands for dsat, and cannot be limited to
hand-written ones.
"""
