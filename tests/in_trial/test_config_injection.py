"""The trial's configuration reaches `deepspeed.initialize`, whatever the script passes."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.command import ds_config
from dsat.in_trial.adapters.deepspeed_calls import ZERO_INIT
from dsat.in_trial.config_injection import SEVERAL_ENGINES, agrees
from testing.scripts import CONFIG, Scripts

slow = pytest.mark.slow
# The script's own configuration, and the trial's.
OWN = {**CONFIG, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
TRIAL: dict[str, Any] = {"micro_batch": 4, "zero": {"stage": 2}}
PASSES = f"""
import copy
from types import SimpleNamespace
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
OWN = {OWN}


def passed(config=None, model=None, **more):
    model = model or torch.nn.Linear(16, 1)
    more.setdefault("model_parameters", model.parameters())
    engine = deepspeed.initialize(model=model, config=config, **more)[0]
    return engine, seen(engine)


def seen(engine):
    sizes = engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage()
    clipping = engine.gradient_clipping()
    return [*sizes, None if clipping == GRADIENT_CLIPPING_DEFAULT else clipping]
"""


def test_auto_values_are_the_scripts() -> None:
    config = {"lr": "auto", "zero": {"stage": 2, "size": "auto"}, "clip": "auto"}
    passed = {"lr": 0.5, "zero": {"stage": 1, "size": 7}, "extra": 1}
    expected = {"lr": 0.5, "zero": {"stage": 2, "size": 7}, "clip": "auto"}
    assert ds_config.fill_in_auto(config, passed) == expected
    assert ds_config.fill_in_auto({"zero": {"size": "auto"}}, {"zero": 3}) == {
        "zero": {"size": "auto"}
    }


WAYS = """
path = FOLDER / "own.json"
path.write_text(json.dumps(OWN))
args, model = SimpleNamespace(deepspeed_config=str(path), local_rank=0), torch.nn.Linear(16, 1)
own = copy.deepcopy(OWN)
positional = [None] * 6 + [29500] + [None] * 3 + [copy.deepcopy(OWN)]
positional[1], positional[3] = model, model.parameters()
note(
    dict=passed(own)[1],
    own=own,
    path=passed(str(path))[1],
    config_params=passed(config_params=copy.deepcopy(OWN))[1],
    args=passed(args=args)[1],
    positional=seen(deepspeed.initialize(*positional)[0]),
    agrees=passed({**own_config(), "gradient_clipping": 3.0})[1],
)
train(passed(copy.deepcopy(OWN))[0])
"""


@slow
def test_the_trials_configuration_replaces_the_scripts(scripts: Scripts) -> None:
    """A dictionary is changed in place, as the script may read its batch size from it."""
    notes = scripts.run(PASSES + WAYS, **TRIAL).well().notes()
    own = notes.pop("own")
    assert notes.pop("agrees") == [4, 2, 3.0]
    ways = ("dict", "path", "config_params", "args", "positional")
    assert notes == {way: [4, 2, None] for way in ways}
    assert own["train_micro_batch_size_per_gpu"] == 4 and own["zero_optimization"]["stage"] == 2


ZERO = {"stage": 2, "overlap_comm": False}


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({"gradient_clipping": 3.0}, True),
        ({"train_micro_batch_size_per_gpu": 2}, False),
        ({"train_micro_batch_size_per_gpu": "auto"}, False),
        ({"zero_optimization": {**ZERO, "contiguous_gradients": False}}, True),
        ({"zero_optimization": {**ZERO, "stage": 1}}, False),
        ({"zero_optimization": {"stage": 2}}, False),
    ],
)
def test_which_configurations_agree_with_a_trial(change: dict[str, Any], is_kept: bool) -> None:
    """A library may have completed the trial's file, or changed settings that the trial does not
    set."""
    trial = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": ZERO}
    assert agrees({**OWN, **trial, **change}, trial) is is_kept


SECOND = """
critic = {**OWN, "gradient_clipping": 5.0}
other = {**critic, "train_micro_batch_size_per_gpu": 2}
engines = [passed(copy.deepcopy(config)) for config in (OWN, OWN, critic, other)]
note(seen=[seen for _, seen in engines])
train(engines[0][0])
"""
REFERENCE = """
import sys
ACCELERATED = {accelerated}
plugins = {{"deepspeed_plugins": {{"default": "a plugin"}}}} if ACCELERATED else {{}}
state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state=plugins))
sys.modules["accelerate.state"] = state
reference = {{**OWN, "zero_optimization": {{"stage": 0}}, "gradient_clipping": 3.0}}
if not ACCELERATED:
    del reference["optimizer"]
_, first = passed(reference, model_parameters=None)
engine, second = passed(copy.deepcopy(OWN))
note(seen=[first, second])
train(engine)
"""


@slow
def test_a_second_model_keeps_a_configuration_of_its_own(scripts: Scripts) -> None:
    """If its batch sizes equal the first model's, it gets the trial's: it is fed the same
    batches."""
    ended = scripts.run(PASSES + SECOND, **TRIAL).well()
    assert ended.notes()["seen"] == [[4, 2, None], [4, 2, None], [4, 0, 5.0], [2, 0, 5.0]]
    assert SEVERAL_ENGINES not in ended.warnings, "one alone trains"


@slow
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_reference_model_does_not_keep_the_trained_one_from_the_configuration(
    scripts: Scripts, accelerated: bool
) -> None:
    """accelerate names the trained model; otherwise, a reference has no optimizer."""
    ended = scripts.run(PASSES + REFERENCE.format(accelerated=accelerated), **TRIAL).well()
    assert ended.notes()["seen"] == [[8, 0, 3.0], [4, 2, None]]


INIT = """
lines = "with deepspeed.zero.Init(dtype=torch.float32{passes}): model = torch.nn.Linear(16, 1)"
exec(compile(lines, {file}, "exec"))
note(partitioned=hasattr(model.weight, "ds_id"))
if not hasattr(model.weight, "ds_id"):
    train(make_engine(model))
"""


@slow
@pytest.mark.parametrize(
    ("stage", "passes", "file", "is_warned_of"),
    [
        (2, "", "__file__", True),
        (2, ", enabled=False", "__file__", False),
        (2, "", "'/lib/site-packages/transformers/modeling_utils.py'", False),
        (3, "", "__file__", False),
    ],
)
def test_a_script_that_partitions_its_model_in_every_stage_is_told_so(
    scripts: Scripts, stage: int, passes: str, file: str, is_warned_of: bool
) -> None:
    ended = scripts.run(INIT.format(passes=passes, file=file), zero={"stage": stage})
    assert ended.notes()["partitioned"] is (stage == 3)
    assert (ZERO_INIT in ended.warnings) is is_warned_of


MISTAKES = """
path = FOLDER / "own.json"
path.write_text(json.dumps(OWN))
args = SimpleNamespace(deepspeed_config=str(path), local_rank=0)


def error(**given):
    try:
        passed(**given)
    except Exception as raised:
        return type(raised).__name__


note(
    none=error(),
    two=error(args=args, config=copy.deepcopy(OWN)),
    unknown=error(config=OWN, modle=1),
    gone=error(config="nowhere.json"),
)
"""


@slow
def test_the_scripts_own_mistakes_stay_its_own(scripts: Scripts) -> None:
    found = scripts.run(PASSES + MISTAKES, **TRIAL).notes()
    assert found["unknown"] == "TypeError" and found["gone"] is not None
    assert found["none"] is not None and found["two"] == "AssertionError", found
