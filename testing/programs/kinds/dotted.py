"""Arguments `section.key=value`, as with OmegaConf, that override a JSON file with comments."""

import json
import re
import sys
from pathlib import Path

import deepspeed
from small import batches, net, tell

conf = json.loads(re.sub(r"^\s*//.*$", "", Path("dotted.json").read_text(), flags=re.M))
for word in sys.argv[1:]:
    key, value = word.split("=")
    section, name = key.split(".")
    conf[section][name] = int(value)
model = net()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=conf["deepspeed"]
)
for _ in range(conf["train"]["epochs"]):
    for (batch,) in batches(conf["train"]["batch_size"]):
        engine.backward(engine(batch).square().mean())
        engine.step()
tell(engine.global_steps, conf["train"]["batch_size"])
