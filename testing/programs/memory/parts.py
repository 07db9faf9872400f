"""Common parts of the scripts in this folder: arguments, data, a small model."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from models import GPT, Task  # type: ignore[import-not-found]

VOCABULARY, LENGTH, WIDTH = 2048, 64, 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def batches(size: int) -> Iterator[torch.Tensor]:
    """Yield batches of random tokens forever."""
    while True:
        yield torch.randint(0, VOCABULARY, (size, LENGTH))


class Language(GPT):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(VOCABULARY, LENGTH, WIDTH, layers=4, heads=4)


loss_of = Task.loss


def llama_settings() -> dict[str, Any]:
    """Return the configuration of a small Llama, for transformers."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }
