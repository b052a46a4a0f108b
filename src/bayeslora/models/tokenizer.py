"""The tokenizer of a GGUF file as Hugging Face files: byte-level BPE with the pre-tokenizer of its family.

The file holds vocabulary and merges, but names its pre-tokenizer only. SmolLM2 splits every digit off *before* the
byte-level pattern, which affects white space in front of a number; Qwen2 has its own pattern.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bayeslora.models.gguf import GGUFError, GGUFFile

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CONTROL, USER_DEFINED = 3, 4
"""Token types that are matched verbatim, before any splitting; control tokens are special."""

SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Special tokens: short name at Hugging Face, name in ``tokenizer.ggml.*_token_id``."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer, its special tokens and its chat template, ready to be written."""

    tokenizer: Tokenizer
    special: dict[str, int]
    tokens: list[str]
    chat_template: str | None

    @property
    def token_ids(self) -> dict[str, int]:
        """Ids for ``config.json`` and ``generation_config.json``."""
        return {f"{name}_token_id": index for name, index in self.special.items() if name != "unk"}

    def write(self, directory: Path, context: int) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and, if there is one, ``chat_template.jinja``."""
        self.tokenizer.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": self.tokens[index] for name, index in self.special.items()},
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def convert_tokenizer(file: GGUFFile, vocabulary: int) -> TokenizerFiles:
    """Build the tokenizer for an embedding of ``vocabulary`` rows."""
    if file.field("tokenizer.ggml.model", str) != "gpt2":
        raise GGUFError(f"{file.path}: only byte-level BPE tokenizers ('gpt2') are supported")
    if file.field("tokenizer.ggml.add_bos_token", bool, False):
        raise GGUFError(f"{file.path}: a tokenizer that puts a BOS token in front is not supported")
    tokens = _tokens(file, vocabulary)
    kinds = file.field("tokenizer.ggml.token_type", np.ndarray)
    if len(kinds) != len(tokens):
        raise GGUFError(f"{file.path}: {len(kinds)} token types for {len(tokens)} tokens; the file may be damaged")
    vocab = {token: index for index, token in enumerate(tokens) if token != f"[PAD{index}]"}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(file, vocab)))
    _set_pipeline(tokenizer, file.field("tokenizer.ggml.pre", str))
    tokenizer.add_tokens(
        [
            AddedToken(tokens[index], normalized=False, special=bool(kinds[index] == CONTROL))
            for index in np.flatnonzero(np.isin(kinds, (CONTROL, USER_DEFINED)))
            if tokens[index] in vocab
        ]
    )
    template = file.field("tokenizer.chat_template", str, "")
    return TokenizerFiles(tokenizer, _special(file, tokens, vocab), tokens, template or None)


def _tokens(file: GGUFFile, vocabulary: int) -> list[str]:
    """All tokens in the order of their ids; llama.cpp fills unused rows with ``[PADn]``, which are not tokens."""
    tokens: list[str] = file.field("tokenizer.ggml.tokens", list)
    if len(tokens) != vocabulary:
        raise GGUFError(f"{file.path}: {len(tokens)} tokens for an embedding of {vocabulary} rows; get the file again")
    if len(set(tokens)) != len(tokens) or "" in tokens:
        raise GGUFError(f"{file.path}: a token is empty or listed twice; the file may be damaged")
    return tokens


def _merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens to merge, checked here because the library's errors are hard to read."""
    merges: list[tuple[str, str]] = []
    for line in file.field("tokenizer.ggml.merges", list):
        left, _, right = line.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise GGUFError(f"{file.path}: merge {line[:64]!r} is not of two known tokens; the file may be damaged")
        merges.append((left, right))
    return merges


def _set_pipeline(tokenizer: Tokenizer, name: str) -> None:
    """Set up everything around the BPE model for ``tokenizer.ggml.pre``, which the architecture has checked."""
    first: pre_tokenizers.PreTokenizer
    if name == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tokenizer.normalizer = normalizers.NFC()
        first = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


def _special(file: GGUFFile, tokens: list[str], vocab: dict[str, int]) -> dict[str, int]:
    """Ids of the special tokens named by the file."""
    special: dict[str, int] = {}
    for name, key in SPECIAL.items():
        full = f"tokenizer.ggml.{key}_token_id"
        if full not in file.fields:
            continue
        index = file.field(full, int)
        if not (0 <= index < len(tokens) and tokens[index] in vocab):
            raise GGUFError(f"{file.path}: field {full!r} is {index}, which is no token; the file may be damaged")
        special[name] = index
    return special
