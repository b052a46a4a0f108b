"""Settings of Bayesian-LoRA's posterior, with the published ones as a preset."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class InducingConfig:
    """Settings of :class:`InducingPosterior`, named after the paper.

    Attributes:
        inducing_rows: inducing rows ``m_r`` of every factor; the layer's rank if not given.
        inducing_cols: inducing columns ``m_c`` of every factor; the layer's rank if not given.
        whitened: put the variational distribution on ``V`` (prior ``N(0, I)``) or on
            ``U = 𝓛_r V 𝓛_cᵀ`` (prior ``N(0, K_r ⊗ K_c)``).
        share_inducing: one matrix for both factors of a layer, as in Algorithm 1, instead of one each.
        flow_depth: layers of the flow; 0 leaves a Gaussian.
        flow_hidden: hidden units of the flow's network.
        prior_sd: prior standard deviation ``σ_F`` of a factor's entries.
        sqrt_width_scaling: divide ``prior_sd`` by the square root of the factor's number of columns.
        init_sd_u: initial standard deviation ``s`` of the inducing matrix. It hardly moves in training, so it determines
            the width of the posterior.
        max_sd_u: smooth upper bound of ``s``.
        init_lambda: initial scale ``λ`` of the conditional noise.
        max_lambda: smooth upper bound of ``λ``; in long runs ``λ`` climbs towards it.
        learn_lambda: train ``λ``, one per factor, instead of fixing it at ``init_lambda``.
        init_d: initial diagonal ``D`` of the kernels.
        zero_start: start ``B``'s inducing mean at zero, so that the mean update ``B A`` is zero. By default on for
            separate inducing matrices and off for shared ones, where zero is a saddle point.
    """

    inducing_rows: int | None = None
    inducing_cols: int | None = None
    whitened: bool = True
    share_inducing: bool = False
    flow_depth: int = 1
    flow_hidden: int = 16
    prior_sd: float = 1.0
    sqrt_width_scaling: bool = False
    init_sd_u: float = 0.02
    max_sd_u: float = 0.2
    init_lambda: float = 1e-3
    max_lambda: float = 0.03
    learn_lambda: bool = True
    init_d: float = 1e-3
    zero_start: bool | None = None

    def __post_init__(self) -> None:
        for name in ("inducing_rows", "inducing_cols", "flow_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.flow_depth < 0:
            raise ValueError(f"flow_depth must be 0 (no flow) or more, got {self.flow_depth}")
        for name in ("prior_sd", "init_d"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for start, bound in (("init_sd_u", "max_sd_u"), ("init_lambda", "max_lambda")):
            low, high = getattr(self, start), getattr(self, bound)
            if not (0 < low < high and math.isfinite(high)):
                raise ValueError(f"need 0 < {start} < {bound}, got {start}={low} and {bound}={high}")
        if self.share_inducing and not self.whitened:
            raise ValueError(
                "share_inducing=True needs whitened=True: without whitening, two factors with different kernels "
                "cannot share one inducing matrix (their joint prior would not exist)"
            )
        if self.share_inducing and self.zero_start:
            raise ValueError(
                "zero_start=True needs share_inducing=False: the update is quadratic in a shared inducing matrix, "
                "so its gradient vanishes at zero and nothing would ever be learned"
            )

    @classmethod
    def preset(cls, name: Literal["default", "paper"]) -> InducingConfig:
        """``default`` is the library's choice; ``paper`` is the published one, for rank 8."""
        if name == "default":
            return cls()
        if name == "paper":
            return cls(
                inducing_rows=9,
                inducing_cols=9,
                prior_sd=0.1,
                sqrt_width_scaling=True,
                init_sd_u=1e-3,
                max_sd_u=0.1,
                zero_start=False,
            )
        raise ValueError(f"unknown preset {name!r}; choose 'default' or 'paper'")

    def size(self, rank: int) -> tuple[int, int]:
        """Inducing rows and columns for a layer of this rank."""
        return self.inducing_rows or rank, self.inducing_cols or rank

    def factor_scale(self, columns: int) -> float:
        """``σ_F`` of a factor with that many columns."""
        return self.prior_sd / math.sqrt(columns) if self.sqrt_width_scaling else self.prior_sd
