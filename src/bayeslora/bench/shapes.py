"""Models of known shapes with random weights: time and memory can be measured anywhere, without a download."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bayeslora.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import torch


def _tiny() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )


def _smollm2() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )


def _llama2_7b() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )


def _qwen25_15b() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


def _qwen25_14b() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    )


def _qwen3_30b_a3b() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": _tiny,
    "smollm2": _smollm2,
    "qwen2.5-1.5b": _qwen25_15b,
    "llama2-7b": _llama2_7b,
    "qwen2.5-14b": _qwen25_14b,
    "qwen3-30b-a3b": _qwen3_30b_a3b,
}


def build_model(name: str, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Build a frozen model of this shape on a device; ``layers`` overrides its number of layers."""
    if name not in SHAPES:
        raise InputError(f"model is {name!r}; choose one of {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    import torch
    from transformers import AutoModelForCausalLM

    config = SHAPES[name]()
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1] * layers  # all layers of these shapes are of one type
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.requires_grad_(False)


def quantise(model: Any) -> None:
    """Quantise the linear layers of a model, except the head, to NF4 with double quantisation. Fused experts are unchanged."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("bits is 4, which needs bitsandbytes; run: pip install bitsandbytes")
    from bitsandbytes.nn import Linear4bit, Params4bit
    from torch import nn

    head = model.get_output_embeddings()
    for name, old in list(model.named_modules()):
        if not isinstance(old, nn.Linear) or old is head:
            continue
        has_bias = old.bias is not None
        new = Linear4bit(old.in_features, old.out_features, has_bias, old.weight.dtype, quant_type="nf4", device="meta")
        new.weight = Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = old.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new.to(old.weight.device))
    model.is_loaded_in_4bit = True  # PEFT checks this flag


def twin(model: Any) -> Any:
    """Copy the modules of a model but share its weights, so that two adapters can be used side by side."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
