"""The longest sequence by strategy, slots and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dsat.app import longest
from dsat.app.estimate import configuration
from dsat.app.longest import UNIT_TOKENS
from dsat.inputs.cards import Card
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory import SIMULATED
from dsat.report.longest_sequence import Longest
from dsat.simulation.client import Simulator
from testing.simulation_host import MIB, FakeSimulationHost, by_formula, facts_of

GIB = 2**30
FACTS = facts_of(100 * MIB)  # 30 MiB for each 1,024 tokens
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
BF16 = {"bf16": {"enabled": True}}


def rows(
    host: FakeSimulationHost, *, slots: int, exact: bool = False, card: Card | None = None
) -> list[Longest]:
    settings = EstimateSettings(exact=exact, slot_counts=(slots,), slot_memories=(8 * GIB,))
    with Simulator(host, as_cpu=False, workspace_bytes=0) as simulator:
        simulator.facts(BF16)
        return longest.rows(simulator, BF16, settings, card)


def test_memory_that_grows_with_the_square_of_the_length_is_followed_to_its_end() -> None:
    """The facts are those of much longer sequences, of which attention's scores are all."""
    names = [f.name for f in fields(FACTS) if f.name.endswith("_per_sample")]
    steep = replace(FACTS, **{name: 24 * getattr(FACTS, name) for name in names})

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        units = request["sequence_length"] / UNIT_TOKENS
        return by_formula(FACTS)({**request, "sequence_length": units**2 / 32 * UNIT_TOKENS})

    host = FakeSimulationHost(steep, answer, sequence_length=512)
    for row in rows(host, slots=1, exact=True):
        assert row.source == SIMULATED and row.tokens
        asked = {"config": configuration(BF16, row.strategy, 1), "slots": 1, "micro_batch": 1}
        peak = max(
            answer({**asked, "sequence_length": row.tokens})["estimate"][phase]
            for phase in ("init", "forward", "backward", "step")
        )
        assert 0.85 * 8 * GIB < peak < 8 * GIB, row.strategy
