#!/usr/bin/env python

# In[1]:


import deepspeed
import torch
from small import WIDTH, batches, net, tell

# In[2]: the learning rate


probe = net()
opt = torch.optim.SGD(probe.parameters(), lr=1e-6)
best, least = 0.0, float("inf")
for k in range(40):
    opt.param_groups[0]["lr"] = 1e-6 * 10 ** (k / 8)
    loss = (probe(torch.randn(16, WIDTH)) - 1).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if loss.item() < least:
        best, least = opt.param_groups[0]["lr"], loss.item()

# In[3]:


BATCH_SIZE = 4
ds = {
    "train_batch_size": BATCH_SIZE,
    "optimizer": {"type": "Adam", "params": {"lr": min(best, 1e-3), "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
model = net()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config_params=ds
)

# In[4]:


for _ in range(2):
    for (x,) in batches(BATCH_SIZE):
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
tell(engine.global_steps, BATCH_SIZE)
