"""The Trainer of transformers; variants: with gradient checkpointing, or on GPUs only."""

import tempfile

import transformers
from parts import Sentences, arguments, llama_settings, micro_batch  # type: ignore[import-not-found]

args = arguments()
training = transformers.TrainingArguments(
    tempfile.mkdtemp(),
    deepspeed=args.deepspeed_config,
    per_device_train_batch_size=micro_batch(args.deepspeed_config),
    gradient_checkpointing=args.variant == "gradient_checkpointing",
    bf16=True,
    use_cpu=args.variant != "gpu",
    learning_rate=1e-3,
    max_steps=1000,
    save_strategy="no",
    report_to=[],
)
config = transformers.LlamaConfig(**llama_settings())
model = transformers.LlamaForCausalLM(config)
transformers.Trainer(model=model, args=training, train_dataset=Sentences()).train()
