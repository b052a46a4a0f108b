"""Bayesian-LoRA with a free mean: inducing matrices, a flow and conditional noise around it (methods entry 13).

Per adapted layer and random factor ``F`` of shape ``[o_F, i_F]``, with ``σ`` the scale of the prior and ``P`` orthonormal:

    F = M + σ (V P + λ ε),   V = T_φ(s ⊙ E),   ε ~ N(0, I − PᵀP) row by row

written for a wide factor; a tall one is a transposed wide one. ``M`` is a free parameter like LoRA's factor, so the mean can
follow the data from the start. ``V [R, m]`` has mean zero, also with a flow, since ``T_φ`` is odd. Under the prior every entry
of ``F/σ`` is standard normal, and as ``V`` is a function of ``F`` the KL is that of ``F`` itself:

    KL = KL(q(V) ‖ N(0, I)) + ½ R (w − m) (λ² − 1 − 2 ln λ) + ½ ‖M/σ‖²

With several means, ``M_1 … M_K`` with ``B_1 … B_K``, a draw comes from one of ``K`` equally likely components, the same in
all layers, and the KL is the mean of theirs, an upper bound of the mixture's that is at most ``ln K`` above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.flow import FlowParameters, apply_flow, init_flow
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.kl import (
    KL,
    conditional_noise_kl,
    gaussian_entropy,
    standard_normal_energy,
    standard_normal_kl,
)
from bayeslora.posterior.layers import LayerGroup, lora_start, trainable_rows
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.projection import Side, project
from bayeslora.posterior.snapshots import side_by_side

RandomFactors = Literal["A", "both"]

MOST_COMPONENTS = 256
"""More would only come from a damaged or hostile configuration, and take for ever to build."""

JITTER = 1e-12
"""Jitter relative to ``diag(Z Zᵀ)``, in float64, for a finite Cholesky factor: ``P`` is orthonormal up to that."""


@dataclass(frozen=True, kw_only=True)
class DecoupledConfig:
    """Settings of :class:`DecoupledPosterior`.

    Attributes:
        components: number of means ``K``. Each learns from its own part of every batch, so that several take no longer to
            train than one, but see fewer questions each.
        random_factors: factors with a distribution: ``A``, with ``B`` a point, or ``both``.
        inducing_points: number of directions ``m`` of a factor's long side with their own noise; the rank if not given, or
            all of them where that is more.
        width: standard deviation ``s`` of the inducing matrix. LoRA starts ``A`` with entries of ``1/√(3 i)``; in the
            ``m`` of ``i`` directions that an input is seen through, noise of ``s`` is ``s √(3 m)`` times that, however
            wide the layer is.
        noise: scale ``λ`` of the noise in all other directions.
        learn_widths: train ``s`` and ``λ``, one of each for every factor, instead of fixing them.
        flow_depth: layers of the flow; 0 leaves a Gaussian.
        flow_hidden: hidden units of the flow's network.
        prior_sd: prior standard deviation ``σ`` of a factor's entries.
    """

    components: int = 4
    random_factors: RandomFactors = "A"
    inducing_points: int | None = None
    width: float = 0.03
    noise: float = 1e-3
    learn_widths: bool = False
    flow_depth: int = 0
    flow_hidden: int = 16
    prior_sd: float = 1.0

    def __post_init__(self) -> None:
        if self.random_factors not in get_args(RandomFactors):
            raise ValueError(
                f"random_factors must be one of {', '.join(get_args(RandomFactors))}, got {self.random_factors!r}"
            )
        if not 1 <= self.components <= MOST_COMPONENTS:
            raise ValueError(f"components must be at least 1 and at most {MOST_COMPONENTS}, got {self.components}")
        if self.inducing_points is not None and self.inducing_points < 1:
            raise ValueError(f"inducing_points must be at least 1, got {self.inducing_points}")
        if self.flow_depth < 0:
            raise ValueError(f"flow_depth must be 0 (no flow) or more, got {self.flow_depth}")
        if self.flow_hidden < 1:
            raise ValueError(f"flow_hidden must be at least 1, got {self.flow_hidden}")
        for name in ("width", "noise", "prior_sd"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True)
class _Block:
    """A random factor of one group of layers with long side ``w``, and the rows of the latent stack that belong to it."""

    group: LayerGroup
    factor: str
    points: int
    long: int
    rows: slice

    @property
    def key(self) -> str:
        return f"{self.factor}_{self.group.key}"

    @property
    def size(self) -> tuple[int, int]:
        """Size ``(R, m)`` of its inducing matrix."""
        return self.group.rank, self.points


class _Latent(NamedTuple):
    """Draws of all inducing matrices of one size, ``[M, n, R, m]``, and ``log|det J|``, ``[M, n]``."""

    value: Tensor
    log_det: Tensor


Latents = dict[tuple[int, int], _Latent]


class DecoupledPosterior(Posterior):
    """Bayesian-LoRA's posterior around a free mean.

    Example:
        >>> from bayeslora.posterior import LayerShape
        >>> posterior = DecoupledPosterior([LayerShape(f"block{k}.q", 64, 64, rank=4) for k in range(3)])
        >>> factors = posterior.draw(2, torch.Generator().manual_seed(0))
        >>> [tuple(f.shape) for f in factors["block1.q"]]
        [(2, 4, 64), (2, 64, 4)]
        >>> bool(posterior.mean().product("block1.q").abs().max() == 0)
        True
    """

    name = "decoupled"
    config_class = DecoupledConfig
    partial = True
    capturable = True
    config: DecoupledConfig
    hints = TrainingHints(
        {
            "mean_": "mean",
            "B_": "weights_b",
            "z_": "points",
            "log_width_": "scale",
            "log_noise_": "scale",
            "flow_": "flow",
        },
        {"flow": 0.1},
        draws=8,
    )

    def _initialise(self, generator: torch.Generator) -> None:
        def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
            return bound * (2.0 * torch.rand(tuple(shape), generator=generator) - 1.0)

        config = self.config
        self._random = ("A",) if config.random_factors == "A" else ("A", "B")
        self._blocks, self._stacks = self._plan()
        for group in self.groups:
            starts = [lora_start(group, generator) for _ in range(config.components)]
            for factor in ("A", "B"):
                values = torch.stack([start[factor] for start in starts], dim=1)
                self._add(self._name(group, factor), values if config.components > 1 else values[:, 0])
        for block in self._blocks:
            shape = (len(block.group), block.points, block.long)
            self._add(f"z_{block.key}", torch.randn(shape, generator=generator) / block.long**0.5)
            if config.learn_widths:
                self._add(f"log_width_{block.key}", torch.full((len(block.group),), math.log(config.width)))
                self._add(f"log_noise_{block.key}", torch.full((len(block.group),), math.log(config.noise)))
        for size, count in self._stacks.items():
            if config.flow_depth > 0:
                flow = init_flow(count, size[1], config.flow_depth, config.flow_hidden, uniform)
                for name, value in flow._asdict().items():
                    self._add(f"flow_{name}_{size[0]}x{size[1]}", value)

    def _plan(self) -> tuple[tuple[_Block, ...], dict[tuple[int, int], int]]:
        """The rows of the latent stacks that each factor of each group uses, and the heights of the stacks."""
        blocks: list[_Block] = []
        stacks: dict[tuple[int, int], int] = {}
        for group in self.groups:
            for factor in self._random:
                long = group.in_features if factor == "A" else group.out_features
                points = self.config.inducing_points or min(group.rank, long)
                if points > long:
                    raise ValueError(f"inducing_points={points} is more than a factor's long side has entries, {long}")
                start = stacks.get((group.rank, points), 0)
                stacks[group.rank, points] = start + len(group)
                blocks.append(_Block(group, factor, points, long, slice(start, start + len(group))))
        return tuple(blocks), stacks

    # Pieces -------------------------------------------------------------------------------------------------------

    def _name(self, group: LayerGroup, factor: str) -> str:
        """Name of the parameter with the means ``M_k`` of a random factor, or with the factor itself where that is a point."""
        return f"{'mean_' if factor in self._random else ''}{factor}_{group.key}"

    def _means(self, group: LayerGroup, factor: str) -> Tensor:
        """``M_k`` of a random factor, or the factor itself where that is a point, ``[L, K, ...]``."""
        shape = (len(group), self.config.components, *group.factor_shapes[factor])
        return self._tensor(self._name(group, factor)).view(shape)

    def component_parameters(self) -> list[Tensor]:
        """The means of all factors, and the factors that are points."""
        if self.config.components == 1:
            return []
        return [self.get_parameter(self._name(group, factor)) for group in self.groups for factor in ("A", "B")]

    def _choose(self, n: int, source: Noise) -> Tensor | None:
        """Component of each of ``n`` draws; ``None`` where all components have equally many, next to each other.

        Sorting Gaussian noise gives a random order that a CUDA graph can capture. Neighbours, which have opposite noise, share a
        component as far as possible.
        """
        components = self.config.components
        if n % components == 0:
            return None
        order = source.normal((1, 1, components)).flatten().argsort()
        places = torch.arange(n, device=order.device) * min(n, components) // n
        return order[places]

    def _of_components(self, means: Tensor, n: int, chosen: Tensor | None) -> Tensor:
        """The mean ``[L, n, ...]`` of every draw."""
        if chosen is not None:
            return means.index_select(1, chosen)
        each = n // self.config.components
        return means.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2)

    def _scales(self, block: _Block) -> tuple[Tensor, Tensor]:
        """``s`` and ``λ`` of one block, ``[L]``, posterior scale included."""
        if self.config.learn_widths:
            return tuple(self.scale * self._tensor(f"log_{name}_{block.key}").exp() for name in ("width", "noise"))  # type: ignore[return-value]
        reference = self._tensor(f"z_{block.key}")
        values = (self.config.width, self.config.noise)
        return tuple(reference.new_full((len(block.group),), self.scale * value) for value in values)  # type: ignore[return-value]

    def _projections(self) -> list[Tensor]:
        """Orthonormalised inducing points ``P [L, m, w]`` of every block."""
        points = [self._tensor(f"z_{block.key}") for block in self._blocks]
        return [it.p for it in project([Side(z, torch.zeros_like(z[..., 0])) for z in points], JITTER)]

    def _widths(self, size: tuple[int, int]) -> Tensor:
        """``s`` of all inducing matrices of one size, ``[M, R, m]``."""
        widths = [self._scales(block)[0] for block in self._blocks if block.size == size]
        return torch.cat(widths).view(-1, 1, 1).expand(-1, *size)

    def _sample(self, n: int, source: Noise) -> Latents:
        return {
            size: self._transform(size, self._widths(size).unsqueeze(1) * source.normal((count, n, *size)))
            for size, count in self._stacks.items()
        }

    def _transform(self, size: tuple[int, int], base: Tensor) -> _Latent:
        if self.config.flow_depth == 0:
            return _Latent(base, base.new_zeros(base.shape[:2]))
        flow = FlowParameters(*(self._tensor(f"flow_{name}_{size[0]}x{size[1]}") for name in FlowParameters._fields))
        rows, log_det = apply_flow(flow.to(base.dtype), base.flatten(1, 2), odd=True)
        return _Latent(rows.view_as(base), log_det.unflatten(1, base.shape[1:3]).sum(-1))

    # Draws, mean and KL ---------------------------------------------------------------------------------------------

    def _draw(self, n: int, source: Noise) -> Factors:
        latents, chosen = self._sample(n, source), self._choose(n, source)
        drawn: dict[str, list[Tensor]] = {"A": [], "B": []}
        for block, p in zip(self._blocks, self._projections(), strict=True):
            noise = self._around(block, p, latents[block.size].value[block.rows], source)
            mean = self._of_components(self._means(block.group, block.factor), n, chosen)
            drawn[block.factor].append(mean + (noise if block.factor == "A" else noise.mT))
        for group in self.groups:
            if "B" not in self._random:
                drawn["B"].append(self._of_components(self._means(group, "B"), n, chosen))
        return Factors(self.groups, tuple(drawn["A"]), tuple(drawn["B"]), latents)

    def _around(self, block: _Block, p: Tensor, core: Tensor, source: Noise) -> Tensor:
        """``σ (V P + λ E (I − PᵀP))`` for ``V = core [L, n, R, m]``, as ``[L, n, R, w]``."""
        layers, n, rank, _ = core.shape
        amount = (self.config.prior_sd * self._scales(block)[1]).view(-1, 1, 1)
        noise = amount * source.normal((layers, n, rank, block.long)).flatten(1, 2)
        inside = torch.baddbmm(self.config.prior_sd * core.flatten(1, 2), noise, p.mT, alpha=-1.0)
        return torch.baddbmm(noise, inside, p).unflatten(1, (n, rank))

    def _mean(self) -> Factors:
        """Within a component the factors are independent, so the mean of the product is the product of the means."""
        A, B = ([self._means(group, factor) for group in self.groups] for factor in ("A", "B"))
        return Factors(self.groups, *side_by_side(A, B))

    def _start_from(self, factors: Factors) -> None:
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            own_a, own_b = (self.get_parameter(self._name(group, factor)) for factor in ("A", "B"))
            if self.config.components == 1:
                A, B = A[:, 0], B[:, 0]
            own_a.copy_(trainable_rows(A, B, own_a))
            own_b.copy_(B.expand_as(own_b))

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        outside, means = [], []
        for block in self._blocks:
            entries = block.group.rank * (block.long - block.points)
            outside.append(conditional_noise_kl(self._scales(block)[1], entries))
            mean = self._means(block.group, block.factor) / self.config.prior_sd
            means.append(0.5 * mean.square().sum() / self.config.components)
        if self.config.flow_depth == 0:
            inducing = [standard_normal_kl(torch.zeros_like(s), s) for s in map(self._widths, self._stacks)]
        else:
            latents = None if factors is None else factors.latents  # a mean, or a part of draws, has none
            inducing = self._sampled_kl(self._sample(1, source) if latents is None else latents)
        terms = {"mean": means, "inducing": inducing, "conditional": outside}
        return KL({name: torch.stack(values).sum() for name, values in terms.items()})

    def _sampled_kl(self, latents: Latents) -> list[Tensor]:
        """``E[log q(V) − log p(V)]`` averaged over the draws, with the entropy before the flow in closed form."""
        return [
            standard_normal_energy(latent.value) - gaussian_entropy(self._widths(size)) - latent.log_det.mean(1).sum()
            for size, latent in latents.items()
        ]
