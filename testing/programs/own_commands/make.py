"""Makes a tiny language model with its tokenizer, and data, in the current folder."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(200)]
ROWS = 2000


def text(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(30))


def write(path: Path, rows: list[object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens,
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
    pad_token="</s>",
)
tokenizer.save_pretrained("model")
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
)
LlamaForCausalLM(config).save_pretrained("model")
write(Path("data/data.jsonl"), [{"text": text(number)} for number in range(ROWS)])
chats = [
    {
        "messages": [
            {"role": "user", "content": text(number)},
            {"role": "assistant", "content": text(number + 1)},
        ]
    }
    for number in range(ROWS)
]
write(Path("chat.jsonl"), list(chats))
