"""PEFT's MonteCLoRA: LoRA whose factor ``A`` is, in training, a random mixture of noisy copies of itself.

The noise is Gaussian with a Wishart covariance, and the weights of the mixture follow a Dirichlet distribution
(https://arxiv.org/abs/2411.04358). PEFT's loss on both, with PEFT's weights, is our penalty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from bayeslora.adapter.foreign.holder import ForeignHolder, Note
from bayeslora.posterior.hints import TrainingHints

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

MOST_SAMPLES = 16
"""PEFT computes a gamma function of the sum over the mixture, which overflows float32 from about 20 copies on."""


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
        if not 1 <= self.num_samples <= MOST_SAMPLES:
            raise ValueError(f"num_samples must be from 1 to {MOST_SAMPLES}, got {self.num_samples}")
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
        self._loss = model.base_model._get_monteclora_loss

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
        """PEFT's configuration. Noise is not drawn ahead (PEFT would keep 150 draws of every layer in memory)."""
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
        loss = self._loss()
        return loss if isinstance(loss, Tensor) else None

    def _adapts(self, module: nn.Module) -> bool:
        return bool(getattr(module, "lora_monteclora_sampler", None))

    def _renew(self, layer: nn.Module) -> None:
        for sampler in _samplers(layer):
            ahead: Any = sampler.sampler
            ahead.index = ahead.buffer_size

    def _notes(self) -> list[Note]:
        """The covariance and the mixture of the last pass, which are not learnt."""
        samplers = (sampler for layer in self._layers.values() for sampler in _samplers(layer))
        return [(sampler, name, value) for sampler in samplers for name, value in sampler.named_buffers(recurse=False)]


def _samplers(layer: nn.Module) -> list[nn.Module]:
    """The samplers of all adapters of a layer."""
    return list(layer.get_submodule("lora_monteclora_sampler").children())
