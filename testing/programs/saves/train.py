"""Save and load checkpoints in every common way, and report to trackers, as real scripts do."""

import argparse
import os
import tempfile
from os import remove, rename
from pathlib import Path
from shutil import rmtree

import hydra  # type: ignore[import-not-found]
import torch
from safetensors.torch import save_file
from torch import nn
from torch import save as save_tensors

WIDTH = 16

# Imported after the functions above are bound, so that dsat cannot replace these names.
import deepspeed  # noqa: E402
import wandb  # type: ignore[import-not-found]  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from transformers import GPT2Config, GPT2Model  # noqa: E402

hydra.main(lambda: None)()


class Fixed:
    """Arguments whose configuration cannot be assigned."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.local_rank, self._path = args.local_rank, args.deepspeed_config

    @property
    def deepspeed_config(self) -> str:
        return str(self._path)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
deepspeed.add_config_arguments(parser)
parser.set_defaults(local_rank=-1)  # no launcher starts this script
options = parser.parse_args()
args = Fixed(options)

with tempfile.NamedTemporaryFile() as cache:  # a cache of prepared data
    torch.save(torch.ones(WIDTH), cache.name)
    assert torch.load(cache.name).sum() == WIDTH

with tempfile.TemporaryDirectory() as folder:  # a model prepared for this training
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    GPT2Model(GPT2Config(**sizes)).save_pretrained(folder)
    prepared = GPT2Model.from_pretrained(folder)

model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
assert args.local_rank == engine.local_rank, "DeepSpeed writes it there"
path, state = engine.load_checkpoint("checkpoints")
if os.environ.get("DSAT_TRIAL_DIR") and os.environ.get("WANDB_MODE") == "disabled":
    assert (path, state) == (None, None), "a trial resumed from another run's checkpoint"
_, client = engine.load_checkpoint("resumed")
assert client["epoch"] == 3 and "module" not in client, "the script's own state"
assert not any(weight.isnan().any() for weight in model.parameters()), "and no weights"
with tempfile.TemporaryDirectory() as folder:  # values that a later part reads
    torch.save(torch.ones(WIDTH), f"{folder}/cache.pt")
    assert torch.load(f"{folder}/cache.pt").sum() == WIDTH
tracked = wandb.init(project="mine", mode="online")
assert tracked == "disabled" or not os.environ.get("DSAT_TRIAL_DIR")
writer = SummaryWriter("events")
for step in range(options.steps):
    batch = torch.randn(engine.train_micro_batch_size_per_gpu(), WIDTH, device=engine.device)
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    writer.add_scalar("loss", loss.item(), step)
    rmtree("checkpoints", ignore_errors=True)  # removes old checkpoints to make room
    engine.save_checkpoint("checkpoints")
    save_tensors(model.state_dict(), "model.pt")
    save_file(model.state_dict(), "model.safetensors")
    prepared.save_pretrained("model")
    torch.save(model.state_dict(), "last.tmp")  # as in timm, and below as in Lightning
    if os.path.exists("last.pth.tar"):
        os.unlink("last.pth.tar")
    os.replace("last.tmp", "last.pth.tar")
    Path("older.pt").unlink()
    rename("resumed", "before")
    rmtree("before", ignore_errors=True)
    remove("link.ckpt")
    os.symlink("model.pt", "link.ckpt")
    Path("own.txt").write_text("of this training")
    os.replace("own.txt", "moved.txt")
    os.remove("moved.txt")
writer.close()
