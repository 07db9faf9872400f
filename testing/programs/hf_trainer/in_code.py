"""The same with all arguments in the code, and what a real training does besides its steps."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from train import Record, Sentences, make_model  # type: ignore[import-not-found]
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments


@dataclass
class Arguments(TrainingArguments):  # type: ignore[misc]
    """With a method of its own around the Trainer's, as trl's classes have."""

    def __post_init__(self) -> None:
        self.weight_decay = 0.01
        super().__post_init__()
        assert self.hf_deepspeed_config.get_value("optimizer.params.weight_decay") == 0.01


def main() -> None:
    output = os.environ["OUTPUT_DIR"]
    goes_on = os.path.isdir(output)
    args = Arguments(
        output_dir=output,
        deepspeed=json.loads(Path("ds_in_code.json").read_text()),
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
        train_dataset=Sentences(62),
        eval_dataset=Sentences(8),
        callbacks=[Record(model, "seen.json"), EarlyStoppingCallback(99)],
    )
    trainer.train(resume_from_checkpoint=goes_on)


if __name__ == "__main__":
    main()
