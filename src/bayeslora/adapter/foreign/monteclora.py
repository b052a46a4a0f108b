"""PEFT's MonteCLoRA: LoRA whose factor ``A`` is, in training, a random mixture of noisy copies of itself.

The noise is Gaussian with a Wishart covariance, and the weights of the mixture follow a Dirichlet distribution
(https://arxiv.org/abs/2411.04358). PEFT's loss on both, with PEFT's weights, is our penalty.

PEFT decomposes two diagonal matrices per layer and pass, and tests for NaN; each of these waits for the GPU. :func:`noise`
is the same distribution without waiting, and :func:`variational_loss` the same loss for all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayeslora.adapter.foreign.holder import ForeignHolder, Note
from bayeslora.posterior.hints import TrainingHints

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


@dataclass(frozen=True)
class MontecloraSettings:
    """Settings of MonteCLoRA.

    Attributes:
        num_samples: noisy copies of ``A`` in the mixture, within one draw.
        sample_scaler: multiplier of their noise.
        kl_loss_weight: weight of the KL divergences in the loss.
        use_entropy: whether the loss also has the sum of the squared weights of the mixture.
    """

    num_samples: int = 8
    sample_scaler: float = 1e-4
    kl_loss_weight: float = 1e-5
    use_entropy: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}")
        for name in ("sample_scaler", "kl_loss_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")


class MontecloraHolder(ForeignHolder):
    """Draws from MonteCLoRA, in prediction too, where PEFT itself uses the mean. A draw is one network, as with ours."""

    config_class: ClassVar[type] = MontecloraSettings
    hints = TrainingHints({"lora_monteclora_sampler": "scale"})

    def __init__(self, model: PeftModel) -> None:
        super().__init__(model)
        for layer in self._layers.values():
            variants: Any = layer.lora_variant
            variants.update({name: Variant(own) for name, own in variants.items()})

    @classmethod
    def peft_config(
        cls,
        settings: Mapping[str, Any],
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        layers: Sequence[int] | None,
        seed: int,
    ) -> PeftConfig:
        """PEFT's configuration. PEFT itself draws no noise ahead (it would keep 150 draws of every layer in memory)."""
        from peft import LoraConfig, MontecloraConfig

        given = MontecloraSettings(**settings)
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=alpha,
            target_modules=list(targets),
            layers_to_transform=layers,
            monteclora_config=MontecloraConfig(
                num_samples=given.num_samples,
                sample_scaler=given.sample_scaler,
                kl_loss_weight=given.kl_loss_weight,
                use_entropy=given.use_entropy,
                buffer_size=1,
            ),
        )

    def penalty(self) -> Tensor | None:
        """PEFT's loss on the distributions, averaged over layers, at the last draw in use."""
        samplers = [
            sampler for layer in self._layers.values() for sampler in _active_samplers(layer) if sampler.training
        ]
        return variational_loss(samplers) if samplers else None

    def _adapts(self, module: nn.Module) -> bool:
        return bool(getattr(module, "lora_monteclora_sampler", None))

    def _notes(self) -> list[Note]:
        """The covariance and the mixture of the last pass, which are not learnt."""
        samplers = (sampler for layer in self._layers.values() for sampler in _samplers(layer))
        return [(sampler, name, value) for sampler in samplers for name, value in sampler.named_buffers(recurse=False)]


def noise(sampler: Any, copies: Tensor, chi2: Tensor, mixture: Tensor) -> Tensor:
    """Noise of ``Aᵀ`` ``[in, r]``: ``s Σₙ wₙ Zₙ diag(√g)`` with ``g = max(σ² χ², 10⁻³)`` and ``w = softmax(μ + τ z)``.

    ``μ`` and ``τ`` are those of a Dirichlet distribution in log space. Of the Wishart matrix PEFT uses only the diagonal, whose
    entries are independent and follow a chi-squared distribution with ``r`` degrees of freedom.

    Args:
        sampler: PEFT's sampler of a layer. It keeps ``g`` and ``w`` for its loss.
        copies: standard normal ``Z``, ``[N, in, r]``.
        chi2: ``χ²``, ``[r]``.
        mixture: standard normal ``z``, ``[N]``.
    """
    variance = (sampler.std_prior.exp().square() * chi2).clamp(min=1e-3)
    concentration = sampler.expert_weights_prior.exp().clamp(min=1e-6)
    mean = concentration.log() - concentration.log().mean()
    count = sampler.num_samples
    spread = (1 - 2 / count) / concentration + (1 / concentration).sum() / count**2
    weights = (mean + (spread.clamp(min=1e-6) + 1e-6).sqrt() * mixture).softmax(-1)
    sampler.gaussian_var_prior, sampler.expert_weights = variance.diag(), weights
    return sampler.sample_scaler * torch.einsum("n,nir->ir", weights, copies) * variance.sqrt()


def variational_loss(samplers: Sequence[Any]) -> Tensor:
    """PEFT's loss, averaged over layers: KL divergences of the Dirichlet, Wishart and normal distributions to their priors.

    The first is not quite one: PEFT adds the log-gamma functions of the single weights, and a KL subtracts them.
    """
    one = samplers[0]
    weights = torch.stack([it.expert_weights_prior for it in samplers]).exp()
    variance = torch.stack([it.std_prior for it in samplers]).mul(2).exp()
    last = torch.stack([it.gaussian_var_prior.diagonal() for it in samplers])
    prior, total = one.dirichlet_prior * torch.ones(one.num_samples, device=weights.device), weights.sum(-1)
    dirichlet = (
        (total.lgamma() - prior.sum().lgamma())
        + (weights.lgamma() - prior.lgamma()).sum(-1)
        + ((weights - prior) * (weights.digamma() - total.digamma().unsqueeze(-1))).sum(-1)
    )
    wishart = 0.5 * one.out_features * (variance - variance.log() - 1).sum(-1)
    normal = 0.5 * one.num_samples * (last - last.log() - 1).sum(-1)
    loss = one.kl_loss_weight * (dirichlet + wishart + normal)
    if one.use_entropy:
        loss = loss + torch.stack([it.expert_weights for it in samplers]).square().sum(-1)
    return loss.mean()


def _drawn(sampler: Any) -> Tensor:
    """:func:`noise` from torch's global random numbers."""
    rank = sampler.out_features

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=sampler.std_prior.device, dtype=sampler.std_prior.dtype)

    copies, mixture = normal(sampler.num_samples, sampler.in_features, rank), normal(sampler.num_samples)
    return noise(sampler, copies, normal(rank, rank).square().sum(0), mixture)


class Variant:
    """PEFT's forward pass of a layer, with :func:`noise`; for all else PEFT's own.

    Args:
        peft: the class of PEFT that does the same.
    """

    def __init__(self, peft: Any) -> None:
        self._peft = peft

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # or copying would look for it for ever
        return getattr(self._peft, name)

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """The result with the update of one adapter."""
        weight = module.lora_A[active_adapter].weight
        if module.training:
            weight = weight + _drawn(module.lora_monteclora_sampler[active_adapter]).T
        x = module.lora_dropout[active_adapter](x.to(weight.dtype))
        update = module.lora_B[active_adapter](functional.linear(x, weight))
        return result + update * module.scaling[active_adapter]


def _active_samplers(layer: Any) -> list[nn.Module]:
    """The samplers of the active adapters of a layer."""
    samplers = layer.lora_monteclora_sampler
    return [samplers[name] for name in layer.active_adapters if name in samplers]


def _samplers(layer: nn.Module) -> list[nn.Module]:
    """The samplers of all adapters of a layer."""
    return list(layer.get_submodule("lora_monteclora_sampler").children())
