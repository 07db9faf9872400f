"""Write the files of an earlier training: checkpoints, weights and a link."""

import os
from pathlib import Path

import torch

Path("checkpoints").mkdir()
Path("checkpoints/latest").write_text("global_step9999")
resumed = Path("resumed/epoch3")
resumed.mkdir(parents=True)
Path("resumed/latest").write_text(resumed.name)
weights = {"2.bias": torch.full((1,), torch.nan)}
state = {"module": weights, "global_steps": 12, "epoch": 3}
torch.save(state, resumed / "zero_pp_rank_0_mp_rank_00_model_states.pt")
for name in ("last.pth.tar", "older.pt"):
    Path(name).write_bytes(b"of an earlier training")
os.symlink("older.pt", "link.ckpt")
