"""Context length of a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def context_length(model: nn.Module) -> int | None:
    """Longest context of the model in tokens; ``None`` if its configuration does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def within_context(model: nn.Module, tokens: int) -> int:
    """So many tokens, or as many as the model's context has if that is shorter."""
    context = context_length(model)
    return tokens if context is None else min(tokens, context)
