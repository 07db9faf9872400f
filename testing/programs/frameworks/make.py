"""Write a tiny language model, its tokenizer and data into the current folder."""

import json
from pathlib import Path

from common import text, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = 2000


def write(path: Path, rows: list[object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(number: int) -> list[dict[str, str]]:
    pairs = (("user", text(number)), ("assistant", text(number + 1)))
    return [{"role": role, "content": content} for role, content in pairs]


tokenizer().save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(
    **sizes, vocab_size=256, num_attention_heads=2, max_position_embeddings=128, eos_token_id=2
)
LlamaForCausalLM(config).save_pretrained("model")
write(Path("data/data.jsonl"), [{"text": text(number)} for number in range(ROWS)])
write(Path("chat.jsonl"), [{"messages": chat(number)} for number in range(ROWS)])
