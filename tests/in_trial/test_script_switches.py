"""Switches that dsat discovers in a script, and how it sets them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dsat.command.switches import OTHER_ACCUMULATION, OTHER_LIMITS
from dsat.in_trial import script_switches
from dsat.values import host_limits
from dsat.values.outcome import OutcomeKind, StepFacts
from dsat.values.trial import TrialKind
from testing.scripts import CONFIG, Ended, Scripts, scripts_in

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ARGUMENTS = """
from transformers import TrainingArguments


def arguments(kind=TrainingArguments, deepspeed="ds_config.json", **own):
    return kind(FOLDER / "out", use_cpu=True, deepspeed=deepspeed, **own)


"""


def found(scripts: Scripts, script: str, **more: Any) -> dict[str, tuple[Any, ...]]:
    """Return the switches in a script's profile; the script's own value is the first of each."""
    outcome = scripts.run(script, kind=TrialKind.PROFILE, **more).well().outcome
    assert outcome.profile is not None
    return {name: switch.values for name, switch in outcome.profile.switches.items()}


# -- the Trainer's arguments


def test_a_trainer_has_its_arguments(scripts: Scripts) -> None:
    of_trainer = found(scripts, f"{ARGUMENTS}arguments()\ntrain(make_engine())")
    assert of_trainer["gradient_checkpointing"][:2] == (False, True)
    assert of_trainer["torch_compile"] == (False, True)
    assert "optim" not in of_trainer  # DeepSpeed makes it
    assert "dataloader_persistent_workers" not in of_trainer  # there are none


OWN_OPTIMIZER = """
arguments({own})
model = torch.nn.Linear(16, 1)
train(make_engine(model, optimizer=torch.optim.AdamW(model.parameters())))
"""


def test_its_optimizer_is_one_of_them_if_it_makes_it(tmp_path: Path) -> None:
    script = ARGUMENTS + OWN_OPTIMIZER
    without = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    without["zero_allow_untested_optimizer"] = True
    with scripts_in(tmp_path, ds_config=without) as scripts:
        own = found(scripts, script.format(own="dataloader_num_workers=3, optim='adamw_torch'"))
        assert own["optim"] == ("adamw_torch", "adamw_torch_fused")
        assert own["dataloader_persistent_workers"] == (False, True)
        assert "optim" not in found(scripts, script.format(own="optim='adafactor'"))


TRL = """
class GRPOConfig(TrainingArguments):
    pass


GRPOConfig.__module__ = "trl.trainer.grpo_config"
arguments(type("OwnConfig", (GRPOConfig,), {}))
train(make_engine())
"""


def test_trl_recomputes_all_layers_or_none(scripts: Scripts) -> None:
    """After a generation, TRL enables recomputation as its arguments say, which fails for some
    layers."""
    assert found(scripts, ARGUMENTS + TRL)["gradient_checkpointing"] == (False, True)


SET = """
def kwargs_of(own):
    args = arguments(gradient_checkpointing_kwargs=own)
    return getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs)


args = arguments()
note(
    workers=args.dataloader_num_workers,
    optim=args.optim.value,
    kwargs=kwargs_of({"use_reentrant": False}),
    text=kwargs_of('{"use_reentrant": false}'),
)
"""


def test_arguments_are_set(scripts: Scripts) -> None:
    """Keyword arguments may be text of the command line."""
    wanted = {
        "gradient_checkpointing": "every_2_layers",
        "dataloader_num_workers": 2,
        "TrainingArguments.optim": "adafactor",
        "--seed": "3",
    }
    notes = scripts.run(ARGUMENTS + SET, switches=wanted).notes()
    assert (notes["workers"], notes["optim"]) == (2, "adafactor")
    assert notes["kwargs"] == notes["text"] == {"use_reentrant": False, "every_n_layers": 2}


GROUPS = """
from types import SimpleNamespace
groups = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
make_engine(mpu=groups)
"""


@pytest.mark.parametrize(
    ("script", "switches", "said"),
    [
        (f"{ARGUMENTS}arguments()", {"TrainingArguments.colour": 1}, "has no field colour"),
        ("train(make_engine())", {"--seed": "3", "optim": "x"}, "optim is a field of TrainingArg"),
        (GROUPS, {"attn_implementation": "eager"}, "Ulysses needs its own"),
        ("train(make_engine())", {"attn_implementation": "eager"}, "no known switch"),
        ("train(make_engine())", {"gradient_checkpointing": True}, "no known switch"),
    ],
)
def test_what_a_script_cannot_be_switched_to_is_refused(
    scripts: Scripts, script: str, switches: dict[str, Any], said: str
) -> None:
    outcome = scripts.run(script, switches=switches).outcome
    assert outcome.kind is OutcomeKind.INVALID and said in outcome.message


# -- models of libraries

LIBRARIES = """
class OfLibrary(torch.nn.Module):
    def __init__(self, enable, disable, **supported):
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(16, 16), []
        if enable == disable:
            setattr(self, enable, lambda enable=True: self.calls.append(enable))
        else:
            setattr(self, enable, lambda: self.calls.append(True))
            setattr(self, disable, lambda: self.calls.append(False))
        for name, value in supported.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.inner(x)


names = [
    ("activation_checkpointing_enable", "activation_checkpointing_disable"),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    ("enable_gradient_checkpointing", "disable_gradient_checkpointing"),
    ("set_grad_checkpointing", "set_grad_checkpointing"),
]
models = [OfLibrary(*pair) for pair in names]
models[0].part = OfLibrary(*names[0])  # which the whole switches itself
unable = OfLibrary(*names[1], supports_gradient_checkpointing=False)
engine = make_engine(torch.nn.Sequential(torch.nn.Linear(16, 16), *models, unable))
note(calls=[model.calls for model in models], others=[models[0].part.calls, unable.calls])
train(engine)
"""


@pytest.mark.parametrize("wanted", [True, False])
def test_a_librarys_model_is_switched_wherever_it_is(scripts: Scripts, wanted: bool) -> None:
    notes = scripts.run(LIBRARIES, switches={"gradient_checkpointing": wanted}).well().notes()
    assert notes == {"calls": [[wanted]] * 4, "others": [[], []]}


MODEL = """
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=2)
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(config)
mlp = model.model.layers[0].mlp
passes = []
# It ends as soon as all is recomputed that is needed.
mlp.register_forward_pre_hook(lambda *_: passes.append(1))


def train_model(engine):
    tokens = torch.arange(56).repeat(engine.train_micro_batch_size_per_gpu(), 1)
    for _ in range(1000):
        passes.clear()
        engine.backward(engine(tokens, labels=tokens).loss)
        note(passes=len(passes), kernel=config._attn_implementation)
        engine.step()


"""
FROZEN = """
model.requires_grad_(False)
mlp.up_proj.weight.requires_grad_(True)
"""


def trained(scripts: Scripts, script: str = "", **switches: Any) -> Ended:
    text = f"{MODEL}{script}\ntrain_model(make_engine(torch.nn.Sequential(model)[0]))"
    return scripts.run(text, switches=switches, micro_batch=1).well()


@pytest.mark.parametrize(
    ("script", "wanted", "passes"),
    [
        ("", True, 2),
        (FROZEN, True, 2),  # as with LoRA: gradients must reach the adapters
        ("model.gradient_checkpointing_enable()", False, 1),
    ],
    ids=["on", "LoRA", "off"],
)
def test_a_transformer_is_switched_on_and_off(
    scripts: Scripts, script: str, wanted: bool, passes: int
) -> None:
    assert trained(scripts, script, gradient_checkpointing=wanted).notes()["passes"] == passes


def test_a_model_of_transformers_has_its_switches(scripts: Scripts) -> None:
    if not hasattr(transformers.PreTrainedModel, "set_attn_implementation"):
        pytest.skip("this transformers chooses the attention kernel when it makes a model")
    script = f"{MODEL}\ntrain_model(make_engine(model))"
    assert found(scripts, script) == {
        "gradient_checkpointing": (False, True),
        "attn_implementation": ("sdpa", "eager"),
        "torch_compile": (False, True),
    }
    assert trained(scripts, attn_implementation="eager").notes()["kernel"] == "eager"


ITSELF = "model.gradient_checkpointing_enable()\n"


def test_a_model_that_the_script_itself_lets_recompute(scripts: Scripts) -> None:
    """As in LLaMA-Factory, the script's arguments do not mention recomputation."""
    script = f"{ARGUMENTS}{MODEL}{ITSELF}arguments()\ntrain_model(make_engine(model))"
    assert found(scripts, script)["gradient_checkpointing"] == (True, False)
    for wanted, passes in (({}, 2), ({"gradient_checkpointing": False}, 1)):
        assert scripts.run(script, switches=wanted).well().notes()["passes"] == passes


COMPILED = """
calls = []
original = deepspeed.DeepSpeedEngine.compile
deepspeed.DeepSpeedEngine.compile = lambda self, *args, **kwargs: calls.append(1)
"""
NOTED = "engine = make_engine()\nnote(compiled=bool(calls))\ntrain(engine)"


@pytest.mark.parametrize(
    ("wanted", "arguments", "is_compiled"),
    [
        ({"torch_compile": True}, "", True),
        ({"torch_compile": True}, f"{ARGUMENTS}arguments()\n", False),  # the Trainer does it
        ({}, "", False),
    ],
)
def test_an_engine_is_compiled_where_nobody_else_does_it(
    scripts: Scripts, wanted: dict[str, Any], arguments: str, is_compiled: bool
) -> None:
    ended = scripts.run(f"{arguments}{COMPILED}{NOTED}", switches=wanted)
    assert ended.notes()["compiled"] is is_compiled


# -- Lightning

LIGHTNING = """
import importlib
from types import SimpleNamespace

found = []
for own, automatic, batches, check in (
    (2, True, 16, 0.5), (4, True, 16, 6), (8, True, 17, 6), (8, True, 0.5, 1), (1, False, 16, 6)
):
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = importlib.import_module(f"{package}.strategies.deepspeed")
        script = SimpleNamespace(automatic_optimization=automatic)
        module.DeepSpeedStrategy({"gradient_accumulation_steps": 4} if own == 4 else None).setup(
            SimpleNamespace(
                accumulate_grad_batches=own,
                lightning_module=script,
                limit_train_batches=batches,
                val_check_interval=check,
            )
        )
        found.append(module.seen.pop())
note(found=found)
train(make_engine())
"""
STRATEGY = """
seen = []
class DeepSpeedStrategy:
    def __init__(self, config):
        self.config = config
    def setup(self, trainer):
        assert "gradient_accumulation_steps" not in (self.config or {})
        batches, check = trainer.limit_train_batches, trainer.val_check_interval
        seen.append([trainer.accumulate_grad_batches, batches, check])
"""


def test_lightning_counts_optimizer_steps_as_the_engine_makes_them(scripts: Scripts) -> None:
    """It must do so before the schedule of the learning rate is made.

    Limits in micro batches stand for the same optimizer steps, rounded down, but at least one. They
    are for the user's own accumulation, even if the script's flag has the trial's.
    """
    for package in ("lightning/pytorch", "pytorch_lightning"):
        folder = scripts.work / package / "strategies"
        folder.mkdir(parents=True)
        for path in (folder, *folder.parents):
            if path == scripts.work:
                break
            (path / "__init__.py").touch()
        (folder / "deepspeed.py").write_text(STRATEGY)
    ended = scripts.run(LIGHTNING, gas=4).well()
    found = ([4, 32, 0.5], [4, 16, 6], [4, 8, 3], [4, 0.5, 1], [1, 16, 6])
    assert ended.notes()["found"] == [each for each in found for _ in range(2)]
    assert {OTHER_ACCUMULATION, OTHER_LIMITS} <= set(ended.warnings)
    by_flag = scripts.run(LIGHTNING, gas=4, own_steps=StepFacts(8)).well()
    assert by_flag.notes()["found"][2:4] == [[4, 8, 3]] * 2


@pytest.mark.parametrize(
    ("own", "launchers", "ranks", "expected"),
    [
        (range(4), range(4), 2, 2),  # a container's, shared
        (range(4, 8), range(16), 4, 4),  # bound by the launcher
    ],
)
def test_workers_are_as_many_as_there_are_cores_to_use(
    monkeypatch: pytest.MonkeyPatch, own: range, launchers: range, ranks: int, expected: int
) -> None:
    affinities = {0: set(own), os.getppid(): set(launchers)}
    monkeypatch.setattr(os, "sched_getaffinity", affinities.__getitem__)
    monkeypatch.setattr(host_limits, "usable_cores", lambda: list(own))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert script_switches.cores_of_this_rank() == expected
