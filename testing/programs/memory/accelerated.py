"""accelerate, with a plugin that reads DeepSpeed's configuration."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from parts import Language, Sentences, arguments, loss_of, micro_batch  # type: ignore[import-not-found]

args = arguments()
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config))
model = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(
    Sentences(), batch_size=micro_batch(args.deepspeed_config), shuffle=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model(batch["input_ids"]), batch["input_ids"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
