"""Context length of a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def context_length(model: nn.Module) -> int | None:
    """Longest context of the model in tokens; ``None`` if its configuration does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)
