"""The models to time: one base model, adapted by PEFT's LoRA and by ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from bayeslora.adapter import BayesLoraConfig, find_holder
from bayeslora.bench.config import LORA, BenchConfig
from bayeslora.bench.shapes import build_model, quantise, twin
from bayeslora.errors import InputError
from bayeslora.methods import find_method, find_preset
from bayeslora.models.device import resolve_device, resolve_dtype
from bayeslora.posterior.registry import POSTERIORS, make_settings


class Subjects:
    """Builds the models to time. All of them share one copy of the frozen weights."""

    def __init__(self, config: BenchConfig, device: str) -> None:
        self.config = config
        for name in config.methods:
            self._posterior(name)  # refuses one that cannot be timed before anything is built
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self._base = build_model(config.model, self.device, self.dtype, config.depth)
        if config.bits is not None:
            quantise(self._base)
        self.vocabulary: int = self._base.config.vocab_size

    def changed(self, config: BenchConfig) -> Subjects:
        """The same with other settings; the frozen weights are shared if the depth is the same."""
        if config.depth != self.config.depth:
            return Subjects(config, str(self.device))
        found = copy(self)
        found.config = config
        return found

    def make(self, name: str, **settings: Any) -> Any:
        """Build a model with a new adapter of a method, or with PEFT's LoRA; ``settings`` are those of the posterior."""
        config = self.config
        targets = self._targets()
        if name == LORA:
            peft_config: Any = LoraConfig(
                r=config.rank, lora_alpha=2 * config.rank, target_modules=targets, task_type="CAUSAL_LM"
            )
        else:
            posterior, own = self._posterior(name)
            peft_config = BayesLoraConfig(
                r=config.rank,
                lora_alpha=2 * config.rank,
                target_modules=targets,
                task_type="CAUSAL_LM",
                posterior=posterior,
                settings={**own, **self._inducing(posterior), **settings},
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied heads
            try:
                model: Any = get_peft_model(twin(self._base), peft_config)
            except ValueError as error:
                raise InputError(f"{config.model} cannot be adapted at {', '.join(targets)}: {error}") from error
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def settings_of(self, name: str) -> dict[str, Any]:
        """All settings of a method's posterior."""
        posterior, own = self._posterior(name)
        return asdict(make_settings(posterior, POSTERIORS[posterior].config_class, own))

    def _posterior(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """The posterior of a method, and the settings that its preset changes."""
        known, _, preset = name.partition(":")
        method = find_method(known)
        if method.foreign() is not None:
            raise InputError(f"method {name!r} is an adapter of PEFT's own, which is not timed here; leave it out")
        chosen = find_preset(method, preset or "default")
        return method.posterior_name if chosen.posterior is None else chosen.posterior.name, chosen.settings

    def load(self, place: Path) -> Any:
        """Build a model with the adapter in a directory."""
        return PeftModel.from_pretrained(twin(self._base), str(place))

    def _inducing(self, posterior: str) -> dict[str, int]:
        """The number of inducing points, if it is given and the posterior has any."""
        names = {"inducing": ("inducing_rows", "inducing_cols"), "decoupled": ("inducing_points",)}
        count = self.config.inducing
        return {} if count is None else dict.fromkeys(names.get(posterior, ()), count)

    def bare(self) -> Any:
        """The base model itself."""
        return twin(self._base)

    def merged(self, name: str) -> Any:
        """The base model with the mean of a new adapter (zero) merged into its weights; ``None`` if it depends on the input."""
        model = self.make(name)
        depends_on_input = find_holder(model).posterior("default").mean().inners
        return None if depends_on_input else model.merge_and_unload()

    def tokens(self, rows: int, length: int) -> Tensor:
        """Random tokens, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocabulary, (rows, length), generator=generator).to(self.device)

    def _targets(self) -> list[str]:
        if self.config.targets != ("all-linear",):
            return list(self.config.targets)
        linear = (name for name, module in self._base.named_modules() if isinstance(module, nn.Linear))
        return sorted({name.rpartition(".")[2] for name in linear})


def trainable(model: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
