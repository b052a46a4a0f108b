"""Limits of the serving engines, and their command lines.

Facts about vLLM are those of its version 0.32.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bayeslora.adapter.lora import SERVED_RANKS
from bayeslora.export.manifest import Served

HEADS = {
    "granite": True,
    "llama": True,
    "mistral": False,
    "qwen2": False,
    "qwen3": True,
    "qwen3_moe": True,
}
"""Whether vLLM supports adapters of the output head, by model type."""

LARGEST_VOCABULARY = 258048
"""Largest vocabulary of an output head that vLLM can adapt."""


@dataclass(frozen=True)
class Service:
    """An export to serve.

    Attributes:
        model: hub id or directory of the base model.
        model_type: its architecture, as ``config.json`` names it.
        vocabulary: its number of tokens.
        revision: of a hub model.
        dtype: precision of the base model where the run was loaded.
        own_code: whether it needs code from its repository.
        adapters: to be served, with absolute paths.
        rank: of the adapters.
        adapts_head: whether they change the output head.
    """

    model: str
    model_type: str
    vocabulary: int
    revision: str | None
    dtype: str
    own_code: bool
    adapters: Sequence[Served]
    rank: int
    adapts_head: bool

    def commands(self) -> dict[str, str]:
        """Command lines of the engines that can serve it, by engine."""
        lines = {"sglang": self._sglang()}
        if not self.vllm_refusals():
            lines = {"vllm": self._vllm(), **lines}
        return {engine: shlex.join(words) for engine, words in lines.items()}

    def _vllm(self) -> list[str]:
        limits = ["--max-loras", str(len(self.adapters)), "--max-lora-rank", str(self.rank)]
        return [
            "vllm",
            "serve",
            self.model,
            *self._base(),
            "--enable-lora",
            *limits,
            "--lora-modules",
            *self._modules(),
        ]

    def _sglang(self) -> list[str]:
        start = ["python", "-m", "sglang.launch_server", "--model-path", self.model, *self._base(), "--enable-lora"]
        limits = ["--max-loras-per-batch", str(len(self.adapters)), "--max-lora-rank", str(self.rank)]
        return [*start, *limits, "--lora-paths", *self._modules()]

    def _base(self) -> list[str]:
        """Options of both engines for the base model; its precision is that of the run, so that answers agree."""
        revision = [] if self.revision is None else ["--revision", self.revision]
        return ["--dtype", self.dtype, *revision]

    def _modules(self) -> list[str]:
        return [f"{adapter.name}={adapter.path}" for adapter in self.adapters]

    def vllm_refusals(self) -> list[str]:
        """Reasons why vLLM cannot serve it; empty if it can."""
        reasons = []
        if self.rank not in SERVED_RANKS:
            reasons.append(f"vLLM serves adapters of rank {SERVED_RANKS[-1]} at most, and these have {self.rank}")
        if self.adapts_head and not HEADS.get(self.model_type, True):
            reasons.append(f"vLLM takes no adapters of the output head (lm_head) of {self.model_type} models")
        if self.adapts_head and self.vocabulary > LARGEST_VOCABULARY:
            reasons.append(
                f"vLLM adapts output heads of {LARGEST_VOCABULARY} tokens at most, and this model has {self.vocabulary}"
            )
        return [f"{reason}; serve with SGLang, or train another adapter" for reason in reasons]

    def doubts(self) -> list[str]:
        """Warnings to read before using the commands."""
        return [*self._own_code(), *self._head()]

    def _own_code(self) -> list[str]:
        if not self.own_code:
            return []
        return [
            "the base model brings code of its own, which the commands do not run; read it, and add --trust-remote-code if "
            "you trust it"
        ]

    def _head(self) -> list[str]:
        if not self.adapts_head:
            return []
        found = [
            "the adapters change the output head (lm_head), which vLLM leaves out of log-probabilities of prompts (its issue "
            "51594): clients must ask for next tokens with logprob_token_ids, as bayeslora.remote does"
        ]
        if self.model_type not in HEADS:
            found.append(
                f"it is not known whether vLLM takes adapters of the output head (lm_head) of {self.model_type} models; if it "
                "does not, serve with SGLang"
            )
        return found
