"""PEFT's PVeRA: random projections that all layers share, and a Gaussian per token between them.

A layer adds ``λ_b ∘ B z`` to its output, with ``z ~ N(μ, σ²)`` for each token, ``(μ, log σ²) = λ_d ∘ A x``. Only the
vectors ``λ_b`` and ``λ_d`` are trained (https://arxiv.org/abs/2512.07703). PEFT adds no KL to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from bayeslora.adapter.foreign.holder import ForeignHolder

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class PveraSettings:
    """Settings of PVeRA; the run's rank and alpha are LoRA's and have no effect here.

    Attributes:
        r: width of the shared projections. Only vectors are trained, so it is much larger than a rank of LoRA.
        d_initial: initial entries of ``λ_d``.
        dropout: on the adapter's input, in training.
    """

    r: int = 256
    d_initial: float = 0.1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"r must be at least 1, got {self.r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")


class PveraHolder(ForeignHolder):
    """Draws from PVeRA. Its noise is per token, so a draw is not a network: it depends on how questions are batched."""

    config_class: ClassVar[type] = PveraSettings

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
        """PEFT's configuration. The projections are determined by the seed, and are saved with the adapter."""
        from peft import PveraConfig

        given = PveraSettings(**settings)
        return PveraConfig(
            task_type="CAUSAL_LM",
            r=given.r,
            d_initial=given.d_initial,
            pvera_dropout=given.dropout,
            target_modules=list(targets),
            layers_to_transform=layers,
            projection_prng_key=seed,
        )

    def _adapts(self, module: nn.Module) -> bool:
        from peft.tuners.pvera.layer import PveraLayer

        return isinstance(module, PveraLayer)
