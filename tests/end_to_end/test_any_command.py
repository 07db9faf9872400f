"""`dsat METHOD -- WHATEVER STARTS A TRAINING`, with launchers that dsat does not know itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import kinds_of, run_of, run_to_end, typed
from testing.local import PROGRAMS, processes_of, read_json

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def found(place: Path, options: str, command: Sequence[str]) -> str:
    """What a search says that ends well."""
    told = typed(place, "binary", *options.split(), "--", *command)
    assert told.status == 0, told
    return " ".join(told.out.split())


def test_the_answer_to_accelerate_launch_is_its_own_configuration(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "accelerated", place)
    script = (place / "train.py").read_text().replace("repeat(loader)", "repeat(loader, 2)")
    script += "print('trained', model.train_micro_batch_size_per_gpu(), 'at', "
    script += "model.zero_optimization_stage())\n"
    (place / "train.py").write_text(script)
    (place / "accelerate.yaml").write_text(
        "# mine\ndistributed_type: DEEPSPEED\nuse_cpu: true\nmixed_precision: 'no'\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 1\n"
        "num_processes: 1  # one\n"
    )
    options = "--max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages 1"
    options += " --max-micro-batch 16 --run-dir run --start-profile-step 2 --end-profile-step 3"
    command = "accelerate launch --config_file accelerate.yaml train.py"
    found(place, options, [*command.split(), "--per_device_train_batch_size", "4"])
    run = run_of(place / "run")
    assert kinds_of(run) == [OutcomeKind.OK] * 3, "the flag of the batch follows"
    copy = (place / "run" / "accelerate.yaml").read_text()
    assert "# mine" in copy and "# one" in copy and "best_ds_config.json" in copy
    assert "zero_stage" not in copy and "mixed_precision" not in copy
    line = (place / "run" / "summary.md").read_text().partition("Train with it: `")[2]
    told = run_to_end(["bash", "-c", line.partition("`")[0]])
    assert run.best is not None
    assert f"trained {run.best.batch.micro_batch} at {run.best.stage}\n" in told.out, told


@pytest.mark.nightly
def test_a_trainer_under_accelerate_launch_without_deepspeed_arguments(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(ROOT / "examples" / "hf_trainer", place)
    (place / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\n"
        "deepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: false\n"
        "  gradient_accumulation_steps: 1\n"
        "machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nnum_processes: 1\n"
    )
    options = "--max-trials 3 --finals 0 --memory-model formula -m throughput --zero-stages 3"
    options += " --max-micro-batch 8 --run-dir run"
    command = "accelerate launch --config_file accelerate.yaml train.py --output_dir output"
    found(place, options, [*command.split(), "--per_device_train_batch_size", "2"])
    run = run_of(place / "run")
    assert kinds_of(run) == [OutcomeKind.OK] * 2
    assert {trial.stage for trial in run.trials.values()} == {2, 3}
    assert len({trial.batch.micro_batch for trial in run.trials.values()}) > 1


def test_what_cannot_be_tuned_is_told_by_the_first_run(tmp_path: Path) -> None:
    """Not the status of the process that was ended for it."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    (tmp_path / "train.py").write_text(
        "import deepspeed\nfrom torch.nn import Linear\nfrom deepspeed.pipe import PipelineModule\n"
        "deepspeed.init_distributed(); net = PipelineModule([Linear(8, 8)], num_stages=1)\n"
        f"deepspeed.initialize(model=net, model_parameters=net.parameters(), config={config})\n"
    )
    told = typed(tmp_path, *"binary -m throughput -- python train.py".split())
    assert told.status == 2
    assert "error: command: rank 0: " in told.err
    assert "pipeline parallel models cannot be tuned" in told.err
    assert "exit status" not in told.err and "Traceback" not in told.err


def test_a_command_that_lacks_a_launcher_fails_as_it_does_without_dsat(tmp_path: Path) -> None:
    """DeepSpeed asks MPI then, and the printed command would do so too."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is no MPI')\n")
    (tmp_path / "train.py").write_text(
        "import deepspeed\nfrom torch.nn import Linear\nnet = Linear(8, 8)\n"
        f"deepspeed.initialize(model=net, model_parameters=net.parameters(), config={config})\n"
    )
    command = ["bash", "-c", "echo $RANK$MASTER_ADDR > given; python train.py"]
    told = typed(tmp_path, *"binary -m throughput --run-dir run --".split(), *command)
    assert told.status == 1, told.out
    assert "ImportError: there is no MPI. This is your script's own error" in told.err
    assert [path.name[:8] for path in (tmp_path / "run" / "trials").iterdir()] == ["baseline"]
    assert (tmp_path / "given").read_text() == "\n"


@pytest.mark.nightly
def test_a_program_in_the_command_itself_is_run_again_in_each_trial(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "own_ranks", place)
    options = "--max-trials 3 --finals 0 -m throughput --zero-stages 1 --max-micro-batch 16"
    options += " --run-dir run --run-full-experiment --end-profile-step 4"
    said = found(place, options, ["python", "-c", (place / "alone.py").read_text()])
    assert "Your command starts 1 rank. Each trial runs it again: its ranks cannot be" in said
    assert not processes_of(place / "run")
    run = run_of(place / "run")
    assert set(kinds_of(run)) == {OutcomeKind.OK} and len(run.trials) == 3
    micro_batch = read_json(place / "run" / "best_ds_config.json")["train_micro_batch_size_per_gpu"]
    trained = (place / "run" / "full" / "stdout.log").read_text()
    assert f"trained with {micro_batch}\n" in trained
