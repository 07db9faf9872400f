"""A Trainer script with all arguments in its code; it evaluates, saves, reports and resumes.

Variables: `OUTPUT_DIR`, the output folder, from whose checkpoints training resumes if it exists;
`LOAD_S`, the seconds that loading a row takes.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from train import Record, Sentences, make_model  # type: ignore[import-not-found]
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

CONFIG = json.loads(Path("ds_config.json").read_text())
CONFIG["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 24}}
CONFIG["scheduler"]["params"] |= dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
)


@dataclass
class Arguments(TrainingArguments):  # type: ignore[misc]
    """Arguments with a `__post_init__` that wraps the Trainer's, as trl's classes have."""

    def __post_init__(self) -> None:
        self.weight_decay = 0.01
        super().__post_init__()
        assert self.hf_deepspeed_config.get_value("optimizer.params.weight_decay") == 0.01


def main() -> None:
    output, load_s = os.environ.get("OUTPUT_DIR", ""), float(os.environ.get("LOAD_S", "0"))
    goes_on = os.path.isdir(output)
    args = Arguments(
        output_dir=output or tempfile.mkdtemp(),
        deepspeed=CONFIG,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_steps=24,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="all",
    )
    model = make_model()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sentences(62, load_s),
        eval_dataset=Sentences(8),
        callbacks=[Record(model, "seen.json"), EarlyStoppingCallback(99)],
    )
    trainer.train(resume_from_checkpoint=goes_on)


if __name__ == "__main__":
    main()
