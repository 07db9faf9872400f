"""Scripts that change older files in their folder, or fail, tuned for real with every launcher.

The scripts bind the names of functions before dsat could wrap these functions.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from testing.catalogue import Failure, Script
from testing.soak import Tally
from testing.tuned_scripts import fault_of, tune

_LAUNCHERS = ("python", "deepspeed", "torchrun", "bash run.sh")
_IMPORTS = """
import io, os, shutil
from os import remove, rename, replace, truncate, unlink
from pathlib import Path
from shutil import copy, copyfile, move, rmtree
import deepspeed, numpy, torch
from numpy import save as save_array
from torch import save
"""
_CHANGES = (
    *("remove('old.pt')", "os.remove('old.pt')", "unlink('old.pt')", "Path('old.pt').unlink()"),
    *("rmtree('old')", "shutil.rmtree('old')", "rename('old', 'older')", "Path('old').rename('x')"),
    *("truncate('old.pt', 1)", "copy('train.py', 'old.pt')", "copyfile('train.py', 'old.pt')"),
    *("move('old.pt', 'older.pt')", "replace('old/model.pt', 'old.pt')", "save([1], 'old.pt')"),
    *("open('old.pt', 'w').write('x')", "io.open('old.pt', 'ab').write(b'x')"),
    *("Path('old.pt').write_text('x')", "save_array('old.npy', numpy.ones(2))"),
)
_TRAINS = """
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {}}}
config["optimizer"]["params"]["torch_adam"] = True
net = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for number in range(1000):
    rows = torch.randn(engine.train_micro_batch_size_per_gpu(), 8)
    engine.backward(engine(rows).square().mean())
    engine.step()
    if number == 1:
        CHANGE
"""
_OLD = "for name in ('old.pt', 'old.npy', 'old/model.pt'):\n    Path(name).write_text('old')\n"
_MAKE = f"from pathlib import Path\nPath('old').mkdir()\n{_OLD}"
_WORDS = "no labels in this data"


def attack(seed: int, count: int) -> Tally:
    """Change older files before and after the engine is made, or fail with the script's own
    error."""
    rng, tally = random.Random(seed), Tally()
    while tally.tried < count:
        launcher, fails = rng.choice(_LAUNCHERS), rng.random() < 0.3
        before, after = rng.choice(_CHANGES), rng.choice(_CHANGES)
        if fails:
            after = f"raise ValueError('{_WORDS}')"
        script = Script(
            "a change",
            "train.py",
            None,
            {
                "train.py": f"{_IMPORTS}{before}\n{_TRAINS.replace('CHANGE', after)}",
                "make.py": _MAKE,
            },
            make="make.py",
            options="--max-trials 2",
            fails=Failure(1, ("ValueError", _WORDS, "train.py")) if fails else None,
        )
        with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
            told = tune(script, Path(above) / "work", launcher)
            finding = fault_of(script, told)
        where = f"{seed}/{tally.tried}: {launcher}: {before}; {after}"
        tally.note(launcher, finding and f"{where}: {finding}")
    return tally
