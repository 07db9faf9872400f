"""A tiny language model, its tokenizer and its data, generated in the process."""

from __future__ import annotations

import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(200)]


def model(width: int = 32) -> GPT2LMHeadModel:
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=1, **sizes, **dropout))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def text(number: int, length: int = 30) -> str:
    return " ".join(WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(length))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens; loading a row takes `load_s` seconds."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.tokens = torch.randint(0, 250, (2000, 32), generator=torch.Generator().manual_seed(0))
        self.load_s = load_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.load_s)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}
