"""Kinds of programs that people write; a search's verdict is compared with what each one trains.

At its end, each program prints its number of steps and micro batch for
`testing/tuned_scripts.py: fault_of_statements`.
"""

from __future__ import annotations

from typing import Any

from testing.catalogue import PROGRAMS, Failure, Script


def _program(
    name: str, words: str, says: str = "", *, ranks: int = 1, config: bool = False, **more: Any
) -> Script:
    """Make the entry of a program in `programs/kinds`; with 0 ranks it starts without
    `torchrun`."""
    given = {"options": "--zero-stages 1", "method": "tune", **more}
    return Script(
        name,
        words,
        PROGRAMS / "kinds",
        config="--deepspeed --deepspeed_config ds.json" if config else "",
        launchers=("torchrun",) if ranks else ("python",),
        most_ranks=max(ranks, 1),
        suites=(),
        says=says,
        **given,
    )


KINDS = (
    _program("PPO with three engines", "ppo.py ds.json", "trains several engines"),
    _program(
        "CLIP with gathered features",
        "clip.py --batch-size 8",
        "the loss compares the samples of a micro batch",
        ranks=2,
    ),
    _program("GAN of two engines", "gan.py --batchSize 8", "trains several engines"),
    _program("a stream without a length", "stream.py", config=True),
    _program(
        "a boundary by hand",
        "boundary.py --micro-batch-size 2",
        "trials set --accumulate to their accumulation steps",
    ),
    _program("a notebook with a search of its own", "notebook.py"),
    _program("spawned ranks", "", command="python3 spawn.py 4 29731", ranks=0),
    _program("click", "by_click.py train --batch-size 8 first"),
    _program(
        "subcommands",
        "subcommands.py train --bs 2 --accum 4",
        "trials set --bs to their micro batch",
    ),
    _program(
        "a flag in front of a subcommand",
        "front.py train",
        "(?s)trials set --batch-size to(?!.*trials no longer set)",
    ),
    _program("dotted arguments", "dotted.py train.batch_size=2", "trials set train.batch_size to"),
    # Any micro batch must divide the data: a partial last batch adds a step to each epoch.
    _program("few data", "loop.py --rows 16 --epochs 50", config=True),
    _program("accumulation by hand", "loop.py --by-hand 4", "do not divide the loss", config=True),
    _program(
        "batches of a number of tokens",
        "tokens.py",
        options="--zero-stages 1 --finals 2 --max-trials 6",
        config=True,
    ),
    _program("a cross-validation", "loop.py --folds 4 --epochs 1", config=True),
    _program(
        "three steps",
        "loop.py --rows 24 --epochs 1",
        fails=Failure(2, ("the script ended after 3 optimizer steps",)),
        config=True,
    ),
    _program("a folder that must be new", "loop.py --out made", config=True),
)
