"""Settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bayeslora.bench.shapes import SHAPES
from bayeslora.errors import InputError, did_you_mean
from bayeslora.layer_ranges import check_depth
from bayeslora.number_checks import check_count

LORA = "peft lora"
"""Baseline of every comparison: PEFT's LoRA with the same rank, targets, tokens and precision."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure, and on which model shapes."""

    model: str = "tiny"
    """Shape with random weights: tiny, smollm2, qwen2.5-1.5b, llama2-7b, qwen2.5-14b or qwen3-30b-a3b."""
    depth: int | None = None
    """Number of layers; the shape's own by default."""
    batches: tuple[str, ...] = ("8x128",)
    """Rows times tokens, such as 16x256 8x128."""
    methods: tuple[str, ...] = ("bayesian-lora",)
    """Trained methods to compare with PEFT's LoRA; METHOD:PRESET is another form of one, such as bayesian-lora:inducing."""
    rank: int = 8
    """Rank of the update."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "lm_head")
    """Modules to adapt, by name, or all-linear for all of them and the head."""
    inducing: int | None = None
    """Inducing points of Bayesian-LoRA; as many as the rank by default."""
    samples: tuple[int, ...] = (1, 2, 4)
    """Numbers of draws in prediction."""
    draw_layers: tuple[str, ...] = ("all",)
    """Layers in which draws differ, for prediction: all, last:K or fractions."""
    questions: int = 256
    """Number of questions with four options each, for timing questions."""
    new_tokens: int = 32
    """Tokens to generate, for timing decoding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for the method and for LoRA."""
    bits: Literal[4] | None = None
    """Store the linear layers of the frozen model, except the head, in 4 bits (NF4), as QLoRA does; needs bitsandbytes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen model; auto is bfloat16 on CUDA and float32 elsewhere."""
    repeats: int = 20
    """Timed rounds; each action is timed once per round."""
    warmup: int = 3
    """Untimed rounds before them."""

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise InputError(
                f"model is {self.model!r}; choose one of {', '.join(SHAPES)}{did_you_mean(self.model, SHAPES)}"
            )
        for name in ("rank", "repeats", "questions", "new_tokens", "depth", "inducing"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("warmup", self.warmup, least=0)
        for name in ("batches", "methods", "targets", "draw_layers"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give at least one, or leave it out for the default")
        if any(count < 1 for count in self.samples) or not self.samples:
            raise InputError(f"samples is {self.samples}; give numbers of at least 1")
        for layers in self.draw_layers:
            check_depth(layers, "draw_layers")
        for batch in self.batches:
            parse_batch(batch)


def parse_batch(text: str) -> tuple[int, int]:
    """Parse rows and tokens, such as ``16x256``."""
    rows, _, tokens = text.partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) > 0 and int(tokens) > 1):
        raise InputError(f"batches has {text!r}; give rows times tokens, of which there are at least 2, such as 16x256")
    return int(rows), int(tokens)
