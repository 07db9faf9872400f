"""A tiny language model and its tokenizer, made on the spot."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(200)]


def model() -> GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=1, eos_token_id=1, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(length))


def rows(count: int = 2000) -> Dataset:
    return Dataset.from_list([{"text": text(number, 30)} for number in range(count)])
