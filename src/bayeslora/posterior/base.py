"""Base class of all posteriors over LoRA factors: draw, mean, KL and scale, for all layers at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.kl import KL
from bayeslora.posterior.layers import LayerGroup, LayerShape, group_by_shape, lora_start, trainable_rows
from bayeslora.posterior.noise import Noise, Variates
from bayeslora.posterior.snapshots import Snapshots, balanced_choice, side_by_side, take_turns

POINT_KINDS: Mapping[str, str] = {"point_A_": "weights_a", "point_B_": "weights_b"}
"""Kind of the parameters of layers with a point estimate, for the optimiser."""

HALF = frozenset({torch.bfloat16, torch.float16})
"""Precisions in which neither small steps nor variances survive."""

NOTHING_KEPT = Snapshots()

Spread = Literal["nothing", "members", "width"]


class Posterior(nn.Module, ABC):
    """A distribution over the LoRA factors of all adapted layers.

    Subclasses implement :meth:`_draw`, :meth:`_mean` and, if they are trained with one, :meth:`_kl`.
    They register their parameters flat on the module (no sub-modules), one tensor per layer shape
    with the layers along the first dimension, so that cost in kernel launches and size of the
    state dict grow with the number of shapes and not of layers.

    Arithmetic is float32 (float64 if the parameters are) with autocast disabled: in half precision
    the small differences that make up a covariance are lost. The scale is not part of the state dict.

    Args:
        layers: the adapted layers.
        config: settings, an instance of ``config_class``; its defaults if not given.
        seed: seed of the initial values; the global random state is not touched.
        points: names of layers with a point estimate instead, as in LoRA; subclasses never see them.
        snapshots: which snapshots training keeps: in evaluation, draws come from these in turn.
    """

    name: ClassVar[str]
    """Name in adapter configurations and on the command line."""

    config_class: ClassVar[type]
    """Dataclass of the settings, validated at construction."""

    spread: ClassVar[Spread] = "width"
    """Source of variation between draws. ``nothing``: all are equal. ``members``: points of a set, or masks. ``width``:
    Gaussian noise, multiplied by the posterior's scale."""

    partial: ClassVar[bool] = False
    """Whether some layers may have a point estimate instead: only for posteriors that are trained themselves."""

    capturable: ClassVar[bool] = False
    """Whether draw and KL always run the same operators, with only Gaussian noise, so that a CUDA graph can capture them."""

    amortised: ClassVar[bool] = False
    """Whether the KL is a sum over the inputs seen, and so adds up over the parts of a batch."""

    hints: ClassVar[TrainingHints] = TrainingHints()
    """How an optimiser treats its parameters."""

    @property
    def stochastic(self) -> bool:
        """Whether draws differ; those of a mixture over snapshots always do."""
        return self.spread != "nothing" or self.snapshots.kept > 0

    def component_parameters(self) -> list[Tensor]:
        """Parameters ``[L, K, ...]`` of the components of a mixture; none where there is only one."""
        return []

    @property
    def linearised(self) -> bool:
        """Whether predictions use the model linearised in its weights instead of sampled networks."""
        return False

    @property
    def has_kl(self) -> bool:
        """Whether its objective has a KL."""
        return type(self)._kl is not Posterior._kl

    @property
    def aims(self) -> bool:
        """Whether :meth:`aim` has an effect: for posteriors that start with few directions to move in."""
        return type(self)._aim is not Posterior._aim

    def __init__(
        self,
        layers: Sequence[LayerShape],
        config: Any = None,
        seed: int = 0,
        points: Collection[str] = (),
        snapshots: Snapshots = NOTHING_KEPT,
    ) -> None:
        super().__init__()
        self.config = self.config_class() if config is None else config
        self.layers = tuple(layers)
        self.groups = group_by_shape([layer for layer in self.layers if layer.name not in points])
        self.point_groups = group_by_shape([layer for layer in self.layers if layer.name in points]) if points else ()
        self._scale = 1.0
        self.snapshots = snapshots
        self._kept_names: list[str] = []
        self._member: int | None = None  # the snapshot in use
        generator = torch.Generator().manual_seed(seed)
        self._initialise(generator)
        for group in self.point_groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"point_{factor}_{group.key}", value)
        if snapshots.kept:
            self._remember_snapshots()

    def _remember_snapshots(self) -> None:
        """Register buffers for the members of the mixture: every tensor of the adapter, ``[L, K, ...]``."""
        self._kept_names = [name for name, tensor in self.state_dict().items() if tensor.ndim]
        for name in self._kept_names:
            layers, *rest = getattr(self, name).shape
            self._remember(f"kept_{name}", getattr(self, name).new_zeros((layers, self.snapshots.kept, *rest)))
        self._remember("taken", torch.zeros((), dtype=torch.int64))

    @property
    def held(self) -> int:
        """Number of snapshots to draw from; with none, draws come from the parameters."""
        return min(int(self.get_buffer("taken")), self.snapshots.kept) if self.snapshots.kept else 0

    @property
    def empty(self) -> bool:
        """Whether draws are all equal because training has not collected yet what makes them differ."""
        return self.spread == "nothing" and self.snapshots.kept > 0 and self.held == 0

    @property
    def all_groups(self) -> tuple[LayerGroup, ...]:
        """The layers as :class:`Factors` stacks them: those with a distribution first, then those with a point."""
        return (*self.groups, *self.point_groups)

    @property
    def scale(self) -> float:
        """Multiplier of every posterior standard deviation, 1 as trained; chosen by calibration."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"posterior scale must be finite and not negative, got {value}")
        self._scale = float(value)

    def draw(self, n: int = 1, generator: torch.Generator | None = None, variates: Variates = "antithetic") -> Factors:
        """Draw ``n`` coherent sets of factors; a ``generator`` makes them reproducible.

        Args:
            n: number of draws, at least 1.
            generator: gives the seed of all noise. A CPU generator is best: it gives the same draws on every device, and one
                of a GPU makes the host wait.
            variates: how Gaussian noise is arranged over the draws.
        """
        return self.draw_from(self.noise(generator, variates), n)

    def draw_from(self, source: Noise, n: int = 1) -> Factors:
        """Draw ``n`` coherent sets of factors with noise from ``source``."""
        if n < 1:
            raise ValueError(f"number of draws must be at least 1, got {n}")
        with self._full_precision():
            return self._draw_members(n, source)

    def noise(self, generator: torch.Generator | None = None, variates: Variates = "independent") -> Noise:
        """A source of noise on the parameters' device and in their precision."""
        reference = self._reference
        dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
        return Noise(generator, reference.device, dtype, variates)

    def mean(self) -> Factors:
        """Factors, as one draw, whose product is the mean of ``B A``; for deterministic mode and merging.

        The rank of these factors may exceed the layer's rank where the mean of the product requires it.
        """
        with self._full_precision():
            if not self.held:
                return self._with_points(self._mean())
            means = take_turns([self._of_member(member, self._mean) for member in range(self.held)])
        A, B = side_by_side(means.A, means.B)
        return replace(means, A=A, B=B)

    def _draw_members(self, n: int, source: Noise) -> Factors:
        """Draw from the parameters in training, and from the snapshots in turn in evaluation, if there are any."""
        if self.training or not self.held:
            return self._with_points(self._draw(n, source))
        order = balanced_choice(min(n, self.held), self.held, source)

        def draws(place: int, member: int) -> Factors:
            return self._of_member(member, lambda: self._draw(len(range(place, n, self.held)), source))

        return take_turns([draws(place, member) for place, member in enumerate(order)])

    def _of_member(self, member: int, make: Callable[[], Factors]) -> Factors:
        """Call ``make`` with the tensors of a snapshot in use."""
        self._member = member
        try:
            return self._with_points(make())
        finally:
            self._member = None

    def _with_points(self, factors: Factors) -> Factors:
        """Add the layers that have a point estimate."""
        A, B = (
            tuple(self._tensor(f"point_{factor}_{group.key}").unsqueeze(1) for group in self.point_groups)
            for factor in ("A", "B")
        )
        return replace(factors, groups=self.all_groups, A=(*factors.A, *A), B=(*factors.B, *B))

    def kl(self, factors: Factors | None = None, generator: torch.Generator | None = None) -> KL:
        """KL to the prior, at the draw ``factors`` where it is a Monte-Carlo estimate.

        Without ``factors`` an estimate takes a fresh sample. Exact terms ignore both arguments.
        """
        if factors is not None and isinstance(factors.latents, KL):
            return factors.latents
        with self._full_precision():
            return self._kl(factors, self.noise(generator))

    @torch.no_grad()
    def start_from(self, factors: Factors) -> None:
        """Set the mean to existing LoRA factors (one draw); raise ``ValueError`` where that is impossible."""
        if factors.groups != self.all_groups:
            raise ValueError("the factors to start from must cover the same layers, at the same rank")
        count = len(self.groups)
        with self._full_precision():
            self._start_from(replace(factors, groups=self.groups, A=factors.A[:count], B=factors.B[:count]))
        if self.snapshots.kept:
            self.get_buffer("taken").zero_()
        for group, A, B in zip(self.point_groups, factors.A[count:], factors.B[count:], strict=True):
            own = self.get_parameter(f"point_A_{group.key}")
            own.copy_(trainable_rows(A[:, 0], B[:, 0], own))
            self.get_parameter(f"point_B_{group.key}").copy_(B[:, 0])

    @torch.no_grad()
    def aim(self, slope: Factors) -> None:
        """Choose, before training, the directions in which the loss falls fastest, from its gradient ``slope`` at the mean.

        Only the choice of directions changes, not the mean. No effect for most posteriors, which can move in every direction
        from the start.
        """
        count = len(self.groups)
        with self._full_precision():
            self._aim(replace(slope, groups=self.groups, A=slope.A[:count], B=slope.B[:count]))

    def draw_count(self, samples: int) -> int:
        """Number of draws for a prediction with a budget of ``samples``, at least 1: fewer where more would be redundant."""
        return max(1, self.held) if self.spread == "nothing" else samples

    def penalty(self) -> Tensor | None:
        """Term that training adds to the loss besides the KL, weight included; ``None`` for most posteriors."""
        return None

    def after_step(self, step: int, steps: int) -> None:
        """Called after each of ``steps`` optimiser steps, counted from 1, while the gradients are still there."""
        if not any(parameter.requires_grad for parameter in self.parameters()):
            return  # this adapter is not being trained
        self._after_step(step, steps)
        if self.snapshots.kept and step == 1:
            self.get_buffer("taken").fill_(0)  # those of an earlier run
        if self.snapshots.kept and self.snapshots.due(step, steps):
            self._take_snapshot()

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        taken = self.get_buffer("taken")
        for name in self._kept_names:
            self.get_buffer(f"kept_{name}")[:, int(taken) % self.snapshots.kept] = getattr(self, name)
        taken += 1

    def kind(self, name: str) -> str:
        """Kind of a parameter for the optimiser, by name; ``scale`` is a logit whose gradient the KL dominates."""
        kinds = {**POINT_KINDS, **self.hints.kinds}
        return next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), "weights")

    def parameter_count(self) -> int:
        """Number of trainable scalars."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @abstractmethod
    def _initialise(self, generator: torch.Generator) -> None:
        """Register the parameters with their initial values."""

    @abstractmethod
    def _draw(self, n: int, source: Noise) -> Factors: ...

    @abstractmethod
    def _mean(self) -> Factors: ...

    @abstractmethod
    def _start_from(self, factors: Factors) -> None: ...

    def _after_step(self, step: int, steps: int) -> None:
        """Override to react to an optimiser step. State must be kept in buffers: they are saved with checkpoints."""

    def _aim(self, slope: Factors) -> None:
        """Override to choose directions; see :meth:`aim`."""

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        """No terms unless the posterior has a prior: points and sets of points are not penalised."""
        return KL()

    def _add(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(value))

    def _remember(self, name: str, value: Tensor, *, saved: bool = True) -> None:
        """Register a buffer, which is saved with the adapter or, if not ``saved``, with a run's checkpoints only."""
        self.register_buffer(name, value, persistent=saved)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the tensors, but keep buffers in float32: variances and curvatures leave the range of half precision."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype in HALF and before[name].dtype not in HALF:
                setattr(self, name, before[name].to(buffer.device, torch.float32))
        return self

    @property
    def _reference(self) -> nn.Parameter:
        """Any parameter, for device and dtype."""
        return next(self.parameters())

    def _full_precision(self) -> torch.autocast:
        return torch.autocast(self._reference.device.type, enabled=False)

    def _tensor(self, name: str) -> Tensor:
        """A parameter or buffer by name, in at least float32 (trainers may have cast it to half precision).

        While a snapshot is in use, its value in that snapshot.
        """
        tensor: Tensor = getattr(self, name)
        if self._member is not None and name in self._kept_names:
            tensor = self.get_buffer(f"kept_{name}")[:, self._member]
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"layers={len(self.layers)}, shapes={len(self.groups)}, scale={self.scale}"
