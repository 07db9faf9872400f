"""A plain DeepSpeed script that no command-line argument configures.

With the trial's `behaviour` "zero init", its model is partitioned while it is made.
"""

import json
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16
OWN = json.loads(Path("own.json").read_text())
DATA = TensorDataset(torch.randn(20_000, WIDTH), torch.randn(20_000, 1))
FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])


def begins_with_zero_init() -> bool:
    path = FOLDER / "ds_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    return bool(config.get("behaviour") == "zero init")


def main() -> None:
    zero_init, config = begins_with_zero_init(), dict(OWN)
    if zero_init:
        config["zero_optimization"] = {"stage": 3}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    nothing = [None] * 3
    engine, *_ = deepspeed.initialize(
        None, model, None, model.parameters(), *nothing[:2], 29500, *nothing, config
    )
    batches = iter(DataLoader(DATA, engine.train_micro_batch_size_per_gpu(), drop_last=True))
    for _ in range(100 * engine.gradient_accumulation_steps()):
        inputs, targets = next(batches)
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    facts = {
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "gas": engine.gradient_accumulation_steps(),
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "fed": len(inputs),
        "steps": engine.global_steps,
    }
    (FOLDER / f"facts{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
