"""The two decoder families whose GGUF files can be converted: their sizes, their config and their weights.

llama.cpp renames the tensors and, for ``llama``, reorders the rows of the query and key projections, because its
rotary embedding rotates adjacent pairs where Hugging Face's rotates the two halves of a head. Both are undone here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.models.gguf import GGUFError, GGUFFile, GGUFTensor
from bayeslora.models.quants import Values, dequantize

TIED_ERROR = 0.3
"""Relative difference up to which embedding and head count as two quantisations of one matrix.

Four bits cost about 0.1; two different matrices are about 1 or more apart.
"""


@dataclass(frozen=True)
class Family:
    """Differences between the supported architectures."""

    model_class: str
    tokenizer: str
    attention_bias: bool
    permuted: bool


FAMILIES = {
    "llama": Family("LlamaForCausalLM", tokenizer="smollm", attention_bias=False, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", tokenizer="qwen2", attention_bias=True, permuted=False),
}
"""Supported families by ``general.architecture``; ``tokenizer`` is their ``tokenizer.ggml.pre``."""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, as the fields of a GGUF file give them."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_eps: float

    @property
    def family(self) -> Family:
        """Specifics of its architecture."""
        return FAMILIES[self.architecture]

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Decoder:
        """Read and check the sizes; unsupported files are refused."""
        architecture = file.field("general.architecture", str)
        tokenizer = file.field("tokenizer.ggml.pre", str)
        if architecture not in FAMILIES or FAMILIES[architecture].tokenizer != tokenizer:
            known = " and ".join(f"{name!r} with {family.tokenizer!r}" for name, family in FAMILIES.items())
            raise GGUFError(
                f"{file.path}: architecture {architecture[:64]!r} with tokenizer {tokenizer[:64]!r} is not supported, "
                f"only {known} (SmolLM2 and Qwen2.5) are"
            )
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise GGUFError(f"{file.path}: tensor 'token_embd.weight' is missing; is this file a language model?")
        heads = _size(file, f"{architecture}.attention.head_count")
        decoder = cls(
            architecture,
            layers=_size(file, f"{architecture}.block_count"),
            hidden=_size(file, f"{architecture}.embedding_length"),
            inner=_size(file, f"{architecture}.feed_forward_length"),
            heads=heads,
            kv_heads=_size(file, f"{architecture}.attention.head_count_kv", heads),
            vocabulary=embedding.shape[0],
            context=_size(file, f"{architecture}.context_length"),
            rope_theta=_number(file, f"{architecture}.rope.freq_base", 10000.0),
            norm_eps=_number(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        )
        decoder._check(file)
        return decoder

    def _check(self, file: GGUFFile) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise GGUFError(
                f"{file.path}: {self.heads} heads and {self.kv_heads} key-value heads do not fit width {self.hidden}"
            )
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            width = _size(file, f"{self.architecture}.{key}", self.head)
            if width != self.head:
                raise GGUFError(
                    f"{file.path}: {key} {width} is not supported, only {self.head}, the width of a head, is"
                )
        scaling = file.field(f"{self.architecture}.rope.scaling.type", str, "none")
        if scaling != "none":
            raise GGUFError(f"{file.path}: rotary scaling {scaling[:64]!r} is not supported, only 'none' is")
        if self.layers > len(file.tensors):
            raise GGUFError(
                f"{file.path}: {self.layers} layers but only {len(file.tensors)} tensors; get the file again"
            )

    def config(self, *, tied: bool, dtype: str, token_ids: dict[str, int]) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": [self.family.model_class],
            "model_type": self.architecture,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,  # transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},  # transformers 5
            "tie_word_embeddings": tied,
            "dtype": dtype,
            # version of the file layout; without it transformers mistakes the tokenizer for a broken Mistral one and warns
            "transformers_version": "5.0.0",
            **token_ids,
        }

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Hugging Face name and shape of every required tensor, by its name in the GGUF file."""
        queries, keys = self.hidden, self.head * self.kv_heads
        linears = {
            "attn_q": ("self_attn.q_proj", queries, self.hidden),
            "attn_k": ("self_attn.k_proj", keys, self.hidden),
            "attn_v": ("self_attn.v_proj", keys, self.hidden),
            "attn_output": ("self_attn.o_proj", self.hidden, queries),
            "ffn_gate": ("mlp.gate_proj", self.inner, self.hidden),
            "ffn_up": ("mlp.up_proj", self.inner, self.hidden),
            "ffn_down": ("mlp.down_proj", self.hidden, self.inner),
        }
        table: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (self.vocabulary, self.hidden)),
            "output_norm.weight": ("model.norm.weight", (self.hidden,)),
        }
        for layer in range(self.layers):
            old, new = f"blk.{layer}", f"model.layers.{layer}"
            table[f"{old}.attn_norm.weight"] = (f"{new}.input_layernorm.weight", (self.hidden,))
            table[f"{old}.ffn_norm.weight"] = (f"{new}.post_attention_layernorm.weight", (self.hidden,))
            for part, (name, rows, columns) in linears.items():
                table[f"{old}.{part}.weight"] = (f"{new}.{name}.weight", (rows, columns))
                if self.family.attention_bias and part in ("attn_q", "attn_k", "attn_v"):
                    table[f"{old}.{part}.bias"] = (f"{new}.{name}.bias", (rows,))
        return table


def convert_weights(
    file: GGUFFile, decoder: Decoder, progress: Callable[[int, int], None]
) -> tuple[dict[str, NDArray[Any]], bool]:
    """All weights under their Hugging Face names, and whether embedding and head are tied.

    A file may hold a tied matrix twice, the head in more bits than the embedding. Then the head is used for both: it is
    the more precise copy, and a model that was trained tied stays tied.
    """
    table = decoder.tensors()
    head = file.tensors.get("output.weight")
    if head is not None:
        table["output.weight"] = ("lm_head.weight", table["token_embd.weight"][1])
    _check_tensors(file, table)
    tied = head is None or _is_same_matrix(file.tensors["token_embd.weight"], head)
    if head is not None and tied:
        table["output.weight"] = table.pop("token_embd.weight")
    weights: dict[str, NDArray[Any]] = {}
    for done, (old, (new, _)) in enumerate(table.items()):
        progress(done, len(table))
        values = file.tensors[old].values()
        if not np.isfinite(values).all():
            raise GGUFError(f"{file.path}: tensor {old!r} holds values that are not finite; get the file again")
        if decoder.family.permuted and ".attn_q." in old:
            values = _unpermute(values, decoder.heads)
        if decoder.family.permuted and ".attn_k." in old:
            values = _unpermute(values, decoder.kv_heads)
        weights[new] = _compact(values)
    progress(len(table), len(table))
    return weights, tied


def _check_tensors(file: GGUFFile, table: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Require exactly these tensors with their shapes: an unknown tensor would be dropped silently."""
    for name, (_, shape) in table.items():
        if name not in file.tensors:
            raise GGUFError(
                f"{file.path}: tensor {name!r} is missing; the file is incomplete or not of this architecture"
            )
        if file.tensors[name].shape != shape:
            raise GGUFError(f"{file.path}: tensor {name!r} must have shape {shape}, got {file.tensors[name].shape}")
    unknown = file.tensors.keys() - table.keys()
    if unknown:
        raise GGUFError(
            f"{file.path}: tensor {min(unknown)!r} is not known; this variant of the model is not supported"
        )


def _is_same_matrix(embedding: GGUFTensor, head: GGUFTensor) -> bool:
    """Whether two tensors are one matrix in two precisions, judged by about a thousand rows."""
    rows = slice(None, None, max(1, head.shape[0] // 1024))
    a, b = (dequantize(tensor.raw[rows], tensor.form) for tensor in (embedding, head))
    return bool(np.linalg.norm(a - b) <= TIED_ERROR * np.linalg.norm(b))


def _unpermute(values: Values, heads: int) -> Values:
    """Rows of each head from interleaved pairs back to two halves."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _compact(values: Values) -> NDArray[Any]:
    """The values in float16, or unchanged where float16 would overflow.

    float16 preserves the precision of a quantised file (KL to float32 about 2e-6 for SmolLM2) better than bfloat16 (6e-5).
    """
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.isfinite(half).all() else values


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.field(key, int, default)
    if value < 1:
        raise GGUFError(f"{file.path}: field {key!r} must be at least 1, got {value}")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A positive float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
    value = file.field(key, float, default)
    with np.errstate(over="ignore"):
        short = float(str(np.float32(value)))
    if not (np.isfinite(short) and short > 0):
        raise GGUFError(f"{file.path}: field {key!r} must be positive and finite, got {value}")
    return short
