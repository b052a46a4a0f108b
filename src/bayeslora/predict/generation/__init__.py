"""Text from the distribution averaged over draws."""

from bayeslora.predict.generation.results import Generation
from bayeslora.predict.generation.writing import Prompt, Writing, encode_prompts, generate, generate_apart

__all__ = ["Generation", "Prompt", "Writing", "encode_prompts", "generate", "generate_apart"]
