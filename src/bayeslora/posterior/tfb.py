"""TFB: a Gaussian around a trained LoRA, whose width is searched instead of trained (methods entry 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from bayeslora.posterior.decompose import svd
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.point import PointPosterior

Change = Literal["nll", "accuracy"]


@dataclass(frozen=True, kw_only=True)
class TfbConfig:
    """Settings of :class:`TfbPosterior` and of the search for its width.

    Attributes:
        change: what is bounded on the anchor questions: the relative change of the ``nll``, or the share of changed answers.
        tolerance: bound of the change.
        anchors: number of training questions used, without their answers.
        samples: draws for each width tried.
        low: lower end of the first search interval.
        high: its upper end; the interval is moved if the width lies outside.
        bisections: number of times it is halved.
        smallest: directions of ``B`` with a singular value below this share of the largest get no noise.
        divide_by_anchors: divide the change by the number of anchors, as the published code does.
        upper_end: keep the smallest width found to change too much, as the published code does.
    """

    change: Change = "accuracy"
    tolerance: float = 0.01
    anchors: int = 500
    samples: int = 10
    low: float = 1e-3
    high: float = 0.015
    bisections: int = 5
    smallest: float = 1e-4
    divide_by_anchors: bool = False
    upper_end: bool = False

    def __post_init__(self) -> None:
        if self.change not in get_args(Change):
            raise ValueError(f"change must be one of {', '.join(get_args(Change))}, got {self.change!r}")
        for name in ("tolerance", "low", "high"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("anchors", "samples", "bisections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if not 0 <= self.smallest < 1:
            raise ValueError(f"smallest must be at least 0 and below 1, got {self.smallest}")


class TfbPosterior(PointPosterior):
    """``A' ~ N(Vᵀ A, (σ / d)²)`` row by row and ``B' = U diag(d)``, from ``B = U diag(d) Vᵀ`` of a trained LoRA.

    The mean of the update is the LoRA's, and its noise ``σ U E`` is equally wide in all directions that ``B`` can reach.
    """

    name = "tfb"
    config_class = TfbConfig
    config: TfbConfig
    spread = "width"

    def _initialise(self, generator: torch.Generator) -> None:
        super()._initialise(generator)
        for group in self.groups:
            self._remember(f"width_{group.key}", torch.zeros(len(group), group.rank))
        self._remember("sigma", torch.zeros(1))

    @property
    def width(self) -> float:
        """``σ``, the standard deviation of the update in every direction that has noise, up to LoRA's scaling."""
        return float(self.get_buffer("sigma"))

    @width.setter
    def width(self, value: float) -> None:
        self.get_buffer("sigma").fill_(value)

    def _draw(self, n: int, source: Noise) -> Factors:
        point = self._points(n)
        A = []
        for group, mean in zip(self.groups, point.A, strict=True):
            sd = self.scale * self._tensor("sigma") * self._tensor(f"width_{group.key}")
            A.append(torch.addcmul(mean, sd[:, None, :, None], source.normal(mean.shape)))
        return Factors(self.groups, tuple(A), point.B)

    def _start_from(self, factors: Factors) -> None:
        """Rotate the factors so that the columns of ``B`` are orthogonal; their product does not change."""
        turned_A, turned_B = [], []
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            U, d, Vh = svd(B[:, 0].double())
            missing = group.rank - d.shape[-1]  # where the layer has fewer outputs than the rank
            d = F.pad(d, (0, missing))
            B_turned = F.pad(U, (0, missing)) * d.unsqueeze(-2)
            A_turned = F.pad(Vh @ A[:, 0].double(), (0, 0, 0, missing))
            noisy = d > self.config.smallest * d[:, :1]
            width = torch.where(noisy, 1.0 / d.clamp_min(torch.finfo(d.dtype).tiny), 0.0)
            self.get_buffer(f"width_{group.key}").copy_(width)
            turned_A.append(A_turned.unsqueeze(1))
            turned_B.append(B_turned.unsqueeze(1))
        super()._start_from(Factors(self.groups, tuple(turned_A), tuple(turned_B)))
