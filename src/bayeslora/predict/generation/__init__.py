"""Text from the distribution averaged over draws, and answers with a confidence."""

from bayeslora.predict.generation.results import Generation
from bayeslora.predict.generation.writing import (
    Prompt,
    Writing,
    encode_prompts,
    generate,
    generate_apart,
    generate_by_draw,
)

__all__ = ["Generation", "Prompt", "Writing", "encode_prompts", "generate", "generate_apart", "generate_by_draw"]
