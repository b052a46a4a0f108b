"""Whether two answers mean the same, by a model for natural language inference: each must entail the other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from safetensors import SafetensorError

from bayeslora.errors import InputError, first_line
from bayeslora.hub_access import hub_or_cache
from bayeslora.hub_names import is_hub_id
from bayeslora.models.context import context_length
from bayeslora.predict.generation.agreement import Same
from bayeslora.tasks.answers import same_free_answer

MOST_KNOWN = 10_000
"""Most pairs of answers that are remembered: a server may run for long."""

OFFSET = 2
"""Number of a model's positions that no token takes, at most: those of RoBERTa begin there."""


def find_same(nli: str | None, device: torch.device) -> Same:
    """How answers are compared: by their words alone, or also by a model with the given directory or hub id."""
    return same_free_answer if nli is None else load_entailment(nli, device)


@dataclass(frozen=True, eq=False)
class Entailment:
    """Asks a model for natural language inference about both directions. Answers with equal words need not be asked about.

    Attributes:
        model: a sequence classifier.
        tokenizer: of it.
        label: number of its class for entailment.
    """

    model: Any
    tokenizer: Any
    label: int
    _known: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False)

    def __call__(self, left: str, right: str) -> bool:
        """Whether two answers mean the same."""
        if same_free_answer(left, right):
            return True
        first, second = sorted((left.strip(), right.strip()))
        if not first or not second:
            return False
        if (first, second) not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[first, second] = self._entail_each_other(first, second)
        return self._known[first, second]

    @torch.no_grad()
    def _entail_each_other(self, first: str, second: str) -> bool:
        given = self.tokenizer([first, second], [second, first], padding=True, truncation=True, return_tensors="pt").to(
            self.model.device
        )
        return bool((self.model(**given).logits.argmax(-1) == self.label).all())


@cache
def load_entailment(name: str, device: torch.device) -> Entailment:
    """Load a model for natural language inference, in float32, from safetensors; remote code is not run."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        with hub_or_cache() if is_hub_id(name) else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"nli is {name!r}, which cannot be loaded ({first_line(error)}); give the directory or hub id of a model for natural "
            "language inference, such as one trained on MNLI"
        ) from error
    labels = {str(label).lower(): number for number, label in model.config.id2label.items()}
    label = next((number for said, number in labels.items() if said.startswith("entail")), None)
    if label is None:
        raise InputError(
            f"nli is {name!r}, whose classes are {', '.join(labels)}; give a model with a class for entailment"
        )
    if (positions := context_length(model)) is not None:  # which many tokenizers do not know
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions - OFFSET)
    return Entailment(model.eval().to(device), tokenizer, label)
