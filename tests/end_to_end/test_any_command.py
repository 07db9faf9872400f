"""`dsat METHOD -- COMMAND` with launchers that dsat does not know."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import kinds_of, run_of, run_to_end, typed
from testing.local import PROGRAMS, processes_of, read_json
from testing.printed import printed_in

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# It imports neither transformers nor DeepSpeed, which accelerate imports late.
PLAIN_LOOP = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
net = torch.nn.Linear(4, 4)
loader = torch.utils.data.DataLoader(torch.randn(4000, 4), 2)
net, opt, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for batch in loader:
    accelerator.backward(net(batch).square().mean())
    opt.step()
    opt.zero_grad()
"""


def test_two_ranks_of_accelerate_alone_know_each_other_in_the_first_trial(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN_LOOP)
    shutil.copy(PROGRAMS / "frameworks" / "plugin.yaml", tmp_path)
    command = "accelerate launch --config_file plugin.yaml --num_processes 2"
    options = "--max-trials 2 --run-dir . --start-profile-step 2 --end-profile-step 3"
    told = typed(tmp_path, "tune", *options.split(), "--", *f"{command} train.py".split())
    assert told.status == 0, told
    assert kinds_of(run_of(tmp_path))[0] is OutcomeKind.OK


def test_the_answer_to_accelerate_launch_is_its_own_configuration(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "frameworks", place)
    own = (
        "# mine\ndistributed_type: DEEPSPEED\nuse_cpu: true\nmixed_precision: 'no'\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 2\n"
        "num_processes: 1  # one\n"
    )
    (place / "accelerate.yaml").write_text(own)
    options = "binary --max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages"
    options += " 1 --train-batch-size own --run-dir . --start-profile-step 2 --end-profile-step 3"
    options += " --keep gradient_checkpointing"  # for which the script has no flag
    command = "accelerate launch --config_file accelerate.yaml loop.py --epochs 1"
    command += " --per_device_train_batch_size 4 --grad_accum 2"
    told = typed(place, *options.split(), "--", *command.split())
    assert told.status == 0, told
    assert (place / "accelerate.yaml").read_text() == own
    run = run_of(place)
    assert set(kinds_of(run)) == {OutcomeKind.OK}, "the flag of the batch follows"
    copy = (place / "best_files/accelerate.yaml").read_text()
    assert "# mine" in copy and "# one" in copy and "best_ds_config.json" in copy
    assert "zero_stage" not in copy and "mixed_precision" not in copy
    told = run_to_end(["bash", "-c", printed_in(place)])
    assert run.best is not None
    assert f"trained {run.best.batch.micro_batch} at {run.best.stage}\n" in told.out, told
    assert f"accumulated {run.best.batch.gas}\n" in told.out, told
    other = {trial.accumulation_flag for trial in run.trials.values() if trial.batch.gas != 2}
    assert other == {"--grad_accum"}


def test_a_program_in_the_command_itself_is_run_again_in_each_trial(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "own_ranks", place)
    options = "binary --max-trials 3 --finals 0 -m throughput --zero-stages 1 --run-dir run"
    options += " --max-micro-batch 16 --run-full-experiment --end-profile-step 4"
    command = ["python", "-c", (place / "alone.py").read_text()]
    told = typed(place, *options.split(), "--", *command)
    assert told.status == 0, told
    assert "starts 1 rank. Each trial runs the whole command" in " ".join(told.err.split())
    assert not processes_of(place / "run")
    run = run_of(place / "run")
    assert set(kinds_of(run)) == {OutcomeKind.OK} and len(run.trials) == 3
    micro_batch = read_json(place / "run" / "best_ds_config.json")["train_micro_batch_size_per_gpu"]
    trained = (place / "run" / "full" / "stdout.log").read_text()
    assert f"trained with {micro_batch}\n" in trained
