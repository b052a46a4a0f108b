"""Base models: loading them by name, and converting GGUF files into Hugging Face directories."""

from bayeslora.models.convert import convert_gguf
from bayeslora.models.load import LoadedModel, load_model, load_tokenizer
from bayeslora.models.locate import BUILTINS

__all__ = ["BUILTINS", "LoadedModel", "convert_gguf", "load_model", "load_tokenizer"]
