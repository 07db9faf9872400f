"""Subcommands and arguments, parsed by click."""

import click
import deepspeed
from small import batches, config, net, tell


@click.group()
def cli() -> None:
    pass


@cli.command()
@click.option("--batch-size", default=4)
@click.argument("name")
def train(batch_size: int, name: str) -> None:
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(batch_size // 4, 4)
    )
    for _ in range(2):
        for (batch,) in batches(engine.train_micro_batch_size_per_gpu()):
            engine.backward(engine(batch).square().mean())
            engine.step()
    tell(engine.global_steps, len(batch))


if __name__ == "__main__":
    cli()
