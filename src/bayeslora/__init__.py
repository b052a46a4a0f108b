"""Fine-tuned language models that know what they do not know: distributions over LoRA factors."""

__version__ = "0.1.0.dev0"
