"""PPO: a trained actor, a trained critic and a frozen reference model, each with an engine."""

import json
import sys

import deepspeed
import torch
from small import WIDTH, net, tell

own = json.load(open(sys.argv[-1]))  # noqa: SIM115
size = own["train_micro_batch_size_per_gpu"]
policy, value = net(8), net()
actor, *_ = deepspeed.initialize(
    model=policy, model_parameters=policy.parameters(), config=dict(own)
)
critic, *_ = deepspeed.initialize(
    model=value, model_parameters=value.parameters(), config=dict(own)
)
reference, *_ = deepspeed.initialize(model=net(8), config={"train_batch_size": size})
size, gas = actor.train_micro_batch_size_per_gpu(), actor.gradient_accumulation_steps()
while actor.global_steps < 60:
    seen = torch.randn(size * gas, WIDTH)
    with torch.no_grad():
        old = torch.log_softmax(actor(seen), -1)
        act = torch.multinomial(old.exp(), 1)
        base = torch.log_softmax(reference(seen), -1)
        reward = torch.randn(len(seen)) - 0.1 * (old - base).gather(1, act)[:, 0]
    for _ in range(2):
        for part in torch.tensor_split(torch.randperm(len(seen)), gas):
            new = torch.log_softmax(actor(seen[part]), -1).gather(1, act[part])
            ratio = (new - old[part].gather(1, act[part])).exp()[:, 0]
            actor.backward(-(ratio.clamp(0.8, 1.2) * reward[part]).mean())
            actor.step()
            critic.backward((critic(seen[part])[:, 0] - reward[part]).square().mean())
            critic.step()
tell(actor.global_steps, size)
