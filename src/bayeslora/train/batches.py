"""Batches of a trainer in smaller parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import Trainer

from bayeslora.predict.tokens.predictions import CELLS

NEXT_TOKENS = ("ForCausalLM", "ForConditionalGeneration", None)
"""Losses of transformers that compare each position with the next token; models that name none are mostly of this kind."""


def predicts_next_tokens(model: Any) -> bool:
    """Whether a model predicts each token from those before it, so that the label of a position belongs to the one before."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not encodes and getattr(model, "loss_type", None) in NEXT_TOKENS


def rows_at_once(trainer: Trainer, inputs: Mapping[str, Any]) -> int:
    """How many rows may have their distributions in memory; all where processes must run sharded layers together."""
    rows, length = inputs["input_ids"].shape
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return int(rows)
    config: Any = getattr(trainer.model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 1
    return max(1, CELLS // (int(length) * int(config.get_text_config().vocab_size)))


def split_rows(inputs: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as batches of at most ``size`` rows; what has no row for each is in all of them."""
    count = len(inputs["input_ids"])
    for first in range(0, count, size):
        yield {
            name: value[first : first + size]
            if isinstance(value, Tensor) and value.ndim and len(value) == count
            else value
            for name, value in inputs.items()
        }
