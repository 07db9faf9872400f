"""A plain DeepSpeed script that no command-line argument configures.

How it passes its configuration to DeepSpeed depends on the trial's `behaviour`, or else on the
variable `WAY`.
"""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import initialize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16
OWN = json.loads(Path("own.json").read_text())
DATA = TensorDataset(torch.randn(20_000, WIDTH), torch.randn(20_000, 1))
FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])


def how() -> str:
    path = FOLDER / "ds_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    return str(config.get("behaviour") or os.environ["WAY"])


def loader_of(config: dict[str, Any]) -> DataLoader[Any]:
    return DataLoader(DATA, config["train_micro_batch_size_per_gpu"], drop_last=True)


def main() -> None:
    way, config = how(), dict(OWN)
    if way == "zero init":
        config["zero_optimization"] = {"stage": 3}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=way == "zero init"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    parts = {"model": model, "model_parameters": model.parameters()}
    loader: DataLoader[Any] | None = None
    if way == "zero init":
        engine, *_ = initialize(**parts, config=config)
        loader = loader_of(config)
    elif way == "args":
        args = Namespace(local_rank=int(os.environ["LOCAL_RANK"]), deepspeed_config="own.json")
        engine, *_ = initialize(args=args, **parts)
        loader = loader_of(json.loads(Path(args.deepspeed_config).read_text()))
    elif way == "positional":
        nothing = [None] * 3
        engine, *_ = deepspeed.initialize(
            None, model, None, model.parameters(), *nothing[:2], 29500, *nothing, config
        )
    else:
        raise AssertionError(way)
    if loader is None:
        loader = DataLoader(DATA, engine.train_micro_batch_size_per_gpu(), drop_last=True)
    batches = iter(loader)
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
