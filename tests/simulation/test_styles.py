"""Simulations of scripts of several styles; benchmarks/styles.py makes the table of all styles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsat.simulation.client import SimulationUnavailable
from testing.catalogue import STYLES, Style
from testing.styles import real_peaks, simulated
from testing.versions import needs

pytestmark = pytest.mark.slow
STEADY = ("forward", "backward", "step")


def style(name: str) -> Style:
    [found] = [style for style in STYLES if style.name == name]
    return found


null_cuda = needs("torch", "2.11", "the null CUDA is made of headers of CUDA 13")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "on_device"),
    [
        ("the same, stage 3", False),
        ("two forward passes for a loss", False),
        ("vision and language", False),
        pytest.param("packed sequences", True, marks=null_cuda),
        pytest.param("torch_autocast section, stage 3", True, marks=null_cuda),
        pytest.param("Lightning's DeepSpeedStrategy", True, marks=null_cuda),
    ],
)
def test_a_real_rank_needs_what_was_simulated(name: str, on_device: bool, tmp_path: Path) -> None:
    one = style(name)
    real = real_peaks(one, tmp_path, 4, on_device=on_device)
    estimate = simulated(one, tmp_path, 4, on_device=on_device)
    peak = max(getattr(estimate, phase) for phase in STEADY)
    assert peak == pytest.approx(max(real[phase] for phase in STEADY), rel=0.01)


def test_a_loss_may_use_the_micro_batch_as_a_number(tmp_path: Path) -> None:
    one = replace(style("engine.backward(loss)"), variant="contrastive")
    real, estimate = real_peaks(one, tmp_path, 4), simulated(one, tmp_path, 4)
    for phase in STEADY:
        assert getattr(estimate, phase) == pytest.approx(real[phase], rel=0.01), phase


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fp16", marks=pytest.mark.nightly),
        "CUDA named everywhere",
        "Trainer that wants a GPU",
    ],
)
def test_what_no_cpu_trains_is_simulated(name: str, tmp_path: Path) -> None:
    """A memory prediction needs no GPU."""
    one = style(name)
    estimate = simulated(one, tmp_path, 4)
    assert (estimate.source, estimate.note) == ("simulated", "")
    assert estimate.peak > estimate.forward > 2**24


@pytest.mark.parametrize(
    ("own", "other", "switch", "value"),
    [
        ("Trainer", "Trainer, gradient checkpointing", "gradient_checkpointing", True),
        pytest.param(
            *("transformers, SDPA", "transformers, eager attention"),
            *("attn_implementation", "eager"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_model_is_switched_as_the_script_could_have(
    own: str, other: str, switch: str, value: object, tmp_path: Path
) -> None:
    one = style(own)
    switched = simulated(one, tmp_path, 4, switches={switch: value})
    written = simulated(replace(style(other), stage=one.stage), tmp_path, 4)
    assert switched.peak == pytest.approx(written.peak, rel=0.001)


@pytest.mark.nightly
def test_what_is_compiled_is_simulated_as_it_was_written(tmp_path: Path) -> None:
    compiled, written = (
        simulated(style(name), tmp_path, 4)
        for name in ("engine.compile()", "engine.backward(loss)")
    )
    assert compiled == written


def test_a_script_that_calls_its_model_itself_is_told_so_at_once(tmp_path: Path) -> None:
    """dsat could not tell which of its calls belong to the training loop."""
    one = replace(style("engine.backward(loss)"), variant="the model itself")
    with pytest.raises(SimulationUnavailable, match="calls its model itself, and not the engine"):
        simulated(one, tmp_path, 4)
