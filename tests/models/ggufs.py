"""Small random models, and GGUF files of them as llama.cpp would write them (with the reference package)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ċ Ċ", "Ġ Ġ", "i n"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PRE = {"llama": "smollm", "qwen2": "qwen2"}


def tokens() -> list[str]:
    """Special tokens, bytes, merges, one user-defined token and unused rows up to a multiple of 32."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [*SPECIAL, *alphabet, *(m.replace(" ", "") for m in MERGES), "<tool>"]
    return known + [f"[PAD{k}]" for k in range(len(known), -(-len(known) // 32) * 32)]


def tiny_model(architecture: str, *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """A random decoder whose weights are float16 numbers, so that storing them loses nothing."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokens()),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    }
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes)) if architecture == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.half())  # not the whole model, whose rotary frequencies are float32
    return model.eval()


@dataclass
class Recipe:
    """How a GGUF file is written; ``fields`` replaces fields by name, or drops those that are None."""

    architecture: str = "llama"
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    head: np.ndarray | None = None
    fields: dict[str, Any] | None = None
    drop: str = ""
    extra: dict[str, np.ndarray] | None = None

    def write(self, model: PreTrainedModel, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in (self._fields(model) | (self.fields or {})).items():
            _add_field(writer, key, value)
        tensors = self._tensors(model) | (self.extra or {})
        for name, values in tensors.items():
            if name != self.drop:
                self._add_tensor(writer, name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add_tensor(self, writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, self.matrix_type), raw_dtype=self.matrix_type)

    def _fields(self, model: PreTrainedModel) -> dict[str, Any]:
        config, a = model.config, self.architecture
        vocabulary = tokens()
        kinds = [3 if t in SPECIAL else 4 if t == "<tool>" else 5 if t.startswith("[PAD") else 1 for t in vocabulary]
        return {
            f"{a}.block_count": np.uint32(config.num_hidden_layers),
            f"{a}.context_length": np.uint32(config.max_position_embeddings),
            f"{a}.embedding_length": np.uint32(config.hidden_size),
            f"{a}.feed_forward_length": np.uint32(config.intermediate_size),
            f"{a}.attention.head_count": np.uint32(config.num_attention_heads),
            f"{a}.attention.head_count_kv": np.uint32(config.num_key_value_heads),
            f"{a}.attention.layer_norm_rms_epsilon": np.float32(config.rms_norm_eps),
            f"{a}.rope.freq_base": np.float32(1000.0),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": PRE[a],
            "tokenizer.ggml.tokens": vocabulary,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(2),
            "tokenizer.ggml.padding_token_id": np.uint32(2),
            "tokenizer.ggml.unknown_token_id": np.uint32(0),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }

    def _tensors(self, model: PreTrainedModel) -> dict[str, np.ndarray]:
        config = model.config
        state = {name: value.numpy() for name, value in model.state_dict().items()}
        out = {
            "token_embd.weight": state["model.embed_tokens.weight"],
            "output_norm.weight": state["model.norm.weight"],
        }
        if self.head is not None:
            out["output.weight"] = self.head
        for layer in range(config.num_hidden_layers):
            for part, name in LAYER.items():
                for kind in ("weight", "bias"):
                    values = state.get(f"model.layers.{layer}.{name}.{kind}")
                    if values is None:
                        continue
                    if self.architecture == "llama" and part in ("attn_q", "attn_k"):
                        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                        values = _permute(values, heads)
                    out[f"blk.{layer}.{part}.{kind}"] = values
        return out


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering (``LlamaModel.permute`` of its converter)."""
    return np.ascontiguousarray(
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    types = {
        np.uint32: writer.add_uint32,
        np.float32: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        types[type(value)](key, value)
