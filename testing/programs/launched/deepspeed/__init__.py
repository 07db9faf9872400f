"""Stands in for DeepSpeed where only the start of a training matters, and imports at once."""


def initialize(args=None, model=None, optimizer=None, model_parameters=None, config=None):  # type: ignore[no-untyped-def]
    raise SystemExit("a training began that was only to be recorded")
