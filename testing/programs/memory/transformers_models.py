"""Models of transformers, trained with DeepSpeed's own API; `--variant` selects the model."""

from typing import Any

import deepspeed
import torch
import transformers
from parts import LENGTH, VOCABULARY, arguments, llama_settings  # type: ignore[import-not-found]

args = arguments()
settings = llama_settings()


def model_of(variant: str) -> Any:
    """Make the model of a variant; `batch_of` makes its training data."""
    if variant == "moe":
        config = transformers.MixtralConfig(**settings, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    if variant == "vision":
        vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        config = transformers.ViTConfig(**vision, num_attention_heads=4, image_size=64)
        return transformers.ViTForImageClassification(config)
    if variant == "vision and language":
        vision = transformers.CLIPVisionConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=64,
            patch_size=16,
        )
        text = transformers.LlamaConfig(**settings)
        return transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1
            )
        )
    is_tied = variant == "tied weights"
    config = transformers.LlamaConfig(**{**settings, "tie_word_embeddings": is_tied})
    config._attn_implementation = "eager" if variant == "eager attention" else "sdpa"
    model = transformers.LlamaForCausalLM(config)
    if variant == "lora":
        import peft  # type: ignore[import-not-found,unused-ignore]

        lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora)
    return model


def batch_of(variant: str, samples: int) -> dict[str, torch.Tensor]:
    if variant == "vision":
        pixels = torch.randn(samples, 3, 64, 64)
        return {"pixel_values": pixels, "labels": torch.zeros(samples, dtype=torch.long)}
    tokens = torch.randint(0, VOCABULARY - 1, (samples, LENGTH))
    if variant == "vision and language":
        tokens[:, :16] = VOCABULARY - 1
        pixels = torch.randn(samples, 3, 64, 64)
        return {"input_ids": tokens, "labels": tokens, "pixel_values": pixels}
    if variant == "packed":  # one row with all samples, whose positions all begin at 0
        places = torch.arange(LENGTH).repeat(samples)[None]
        return {
            "input_ids": tokens.reshape(1, -1),
            "labels": tokens.reshape(1, -1),
            "position_ids": places,
        }
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


model = model_of(args.variant)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=trained, config=args.deepspeed_config
)
dtype = next(engine.module.parameters()).dtype
while True:
    batch = batch_of(args.variant, engine.train_micro_batch_size_per_gpu())
    batch = {
        name: t.to(engine.device, dtype if t.is_floating_point() else None)
        for name, t in batch.items()
    }
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    loss.item()
