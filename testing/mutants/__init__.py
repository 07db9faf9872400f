"""The mutation gate: small changes that break a documented rule, which tests must catch.

    python -m testing.mutants [--only ID ...] [--tests PATH ...] [--quick]

`rules/*.yaml` has the mutations. The gate first runs the tests once in a copy of the repository
that records which tests reach which mutated line, in the processes that they start too. Then it
applies each mutation to a private copy and runs the tests that reach it until one fails.

mutmut and cosmic-ray generate mutations by themselves, thousands for dsat, and cannot be limited to
hand-written ones; neither knows which tests reach a line in another process.
"""
