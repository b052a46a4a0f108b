"""Bayesian-LoRA: inducing matrices, a flow and conditional noise for each factor (methods entry 13).

Per adapted layer and factor ``F ∈ {A, B}`` of shape ``[o_F, i_F]``, with ``σ_F`` the scale of the prior:

    V0 ~ N(m, diag s²),   V = T_φ(V0),   F = σ_F (P_rᵀ V P_c + λ ε),   ε ~ N(0, Σ_X)

The prior of ``V`` is standard normal, under which every entry of ``F/σ_F`` is marginally ``N(0, 1)``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.conditional import conditional_mean, conditional_sample
from bayeslora.posterior.decompose import svd
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.flow import FlowParameters, apply_flow, init_flow, reset_to_identity
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.inducing_config import InducingConfig
from bayeslora.posterior.kl import (
    KL,
    conditional_noise_kl,
    gaussian_entropy,
    half_log_det,
    matrix_normal_kl,
    standard_normal_energy,
    standard_normal_kl,
)
from bayeslora.posterior.layers import LayerGroup
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.projection import Projection, Side, project

MEAN_SAMPLES = 256
"""Number of antithetic samples for ``E[V]`` where a flow leaves it without a closed form."""

_MEAN_CHUNK = 32


@dataclass(frozen=True)
class _Block:
    """One factor of one group of layers, and the rows of the latent stack that belong to it."""

    group: LayerGroup
    factor: str
    size: tuple[int, int]
    rows: slice
    scale: float

    @property
    def key(self) -> str:
        return f"{self.factor}_{self.group.key}"

    @property
    def shape(self) -> tuple[int, int]:
        return self.group.factor_shapes[self.factor]


class _Latent(NamedTuple):
    """Draws of all inducing matrices of one size, ``[M, n, m_r, m_c]``, and ``log|det J|``, ``[M, n]``."""

    value: Tensor
    log_det: Tensor


Latents = dict[tuple[int, int], _Latent]
"""Draws of the inducing matrices by their size ``(m_r, m_c)``."""


class _Projections(NamedTuple):
    row: Projection
    col: Projection


Projected = list[tuple[_Block, _Projections]]
"""The projectors of all factors."""


class InducingPosterior(Posterior):
    """Bayesian-LoRA's posterior over the factors of all layers, with the settings of :class:`InducingConfig`.

    Example:
        >>> from bayeslora.posterior import LayerShape
        >>> layers = [LayerShape(f"block{k}.q", 64, 64, rank=4) for k in range(3)]
        >>> posterior = InducingPosterior(layers)
        >>> factors = posterior.draw(2, torch.Generator().manual_seed(0))
        >>> [tuple(f.shape) for f in factors["block1.q"]]
        [(2, 4, 64), (2, 64, 4)]
        >>> bool(posterior.mean().product("block1.q").abs().max() == 0)
        True
    """

    name = "inducing"
    config_class = InducingConfig
    partial = True
    capturable = True
    config: InducingConfig
    hints = TrainingHints(
        {
            "z_": "points",
            "log_d_": "diagonals",
            "mean_": "mean",
            "sd_logit_": "scale",
            "lambda_logit_": "scale",
            "flow_": "flow",
        },
        {"points": 20.0, "flow": 0.1, "weights": 0.35},  # point estimates learn at LoRA's rate
    )

    # Initial values ---------------------------------------------------------------------------------------------

    def _initialise(self, generator: torch.Generator) -> None:
        def normal(shape: Sequence[int], sd: float = 1.0) -> Tensor:
            return sd * torch.randn(tuple(shape), generator=generator)

        def uniform(shape: Sequence[int], bound: float) -> Tensor:
            return bound * (2.0 * torch.rand(tuple(shape), generator=generator) - 1.0)

        config = self.config
        self._blocks, self._stacks = _plan(self.groups, config)
        for block in self._blocks:
            (m_r, m_c), (rows, columns), count = block.size, block.shape, len(block.group)
            self._add(f"z_row_{block.key}", normal((count, m_r, rows), m_r**-0.5))
            self._add(f"z_col_{block.key}", normal((count, m_c, columns), m_c**-0.5))
            self._add(f"log_d_row_{block.key}", torch.full((count, m_r), math.log(config.init_d)))
            self._add(f"log_d_col_{block.key}", torch.full((count, m_c), math.log(config.init_d)))
            if config.learn_lambda:
                start = _inverse_bound(config.init_lambda, config.max_lambda)
                self._add(f"lambda_logit_{block.key}", torch.full((count,), start))
        for size, count in self._stacks.items():
            key = _size_key(size)
            self._add(f"mean_{key}", normal((count, *size)))
            start = _inverse_bound(config.init_sd_u, config.max_sd_u)
            self._add(f"sd_logit_{key}", torch.full((count, *size), start))
            if config.flow_depth > 0:
                flow = init_flow(count, size[1], config.flow_depth, config.flow_hidden, uniform)
                for name, value in flow._asdict().items():
                    self._add(f"flow_{name}_{key}", value)
        if not self._reference.is_meta:
            self._start_means()

    @torch.no_grad()
    def _start_means(self) -> None:
        """Map the random means from ``V`` to the parametrised space, and start ``B`` at zero if ``zero_start`` is set."""
        zero_start = self.config.zero_start
        if zero_start is None:
            zero_start = not self.config.share_inducing
        if not self.config.whitened:
            for block, sides in self._projections():
                mean = self._mean_rows(block)
                mean.copy_(_unwhiten(mean, sides))
        if zero_start:
            for block in self._blocks:
                if block.factor == "B":
                    self._mean_rows(block).zero_()

    def _mean_rows(self, block: _Block) -> Tensor:
        """The part of the parameter ``m`` that belongs to one block."""
        return self.get_parameter(f"mean_{_size_key(block.size)}")[block.rows]

    def _long_points(self, block: _Block) -> Tensor:
        """The inducing points of a factor's long side."""
        rows, columns = block.shape
        return self.get_parameter(f"z_{'row' if rows > columns else 'col'}_{block.key}")

    def _start_from(self, factors: Factors) -> None:
        """Solve ``σ_F P_rᵀ V P_c = F`` for the mean, after aligning inducing points of the long side with ``F``."""
        if self.config.share_inducing:
            raise ValueError("a posterior with share_inducing=True cannot start from a LoRA: its factors are not free")
        wanted = {"A": iter(factors.A), "B": iter(factors.B)}
        targets = [next(wanted[block.factor])[:, 0].double() for block in self._blocks]
        for block, target in zip(self._blocks, targets, strict=True):
            if min(block.size) < block.group.rank:
                raise ValueError(
                    f"inducing size {_size_key(block.size)} is below the rank {block.group.rank}: such a posterior "
                    "cannot represent an arbitrary LoRA; use at least as many inducing rows and columns as the rank"
                )
            self._span(block, target)
        for (block, (row, col)), target in zip(self._projections(), targets, strict=True):
            left = torch.linalg.pinv(row.p.mT.double())
            right = torch.linalg.pinv(col.p.double())
            core = left @ (target / block.scale) @ right
            exact = _Projections(*(Projection(*(part.double() for part in side)) for side in (row, col)))
            self._mean_rows(block).copy_(core if self.config.whitened else _unwhiten(core, exact))
        for size in self._stacks:
            if self.config.flow_depth > 0:
                names = FlowParameters._fields
                reset_to_identity(FlowParameters(*(self.get_parameter(f"flow_{n}_{_size_key(size)}") for n in names)))

    def _aim(self, slope: Factors) -> None:
        """Span the slope of ``B`` where ``B`` starts at zero.

        ``B = σ P_rᵀ V P_c`` can at first only move within the columns of ``P_rᵀ``, which are random, and a gradient of a wide
        layer is nearly orthogonal to those. It has at most rank ``R``, so ``R`` inducing points span it.
        """
        given = {block.group.key: slope.B[row] for row, block in enumerate(b for b in self._blocks if b.factor == "B")}
        for block in self._blocks:
            if block.factor == "B" and not bool(self._mean_rows(block).any()):
                self._span(block, given[block.group.key][:, 0].double())

    def _span(self, block: _Block, target: Tensor) -> None:
        """Make the first inducing points of the factor's long side span ``target [L, o_F, i_F]``, where it is not zero."""
        rows, columns = block.shape
        z = self._long_points(block)
        basis = svd(target.mT if rows > columns else target)[2][:, : z.shape[1]]
        length = float(z.norm(dim=-1).mean())
        wanted = target.flatten(1).any(1)
        z[wanted, : basis.shape[-2]] = (length * basis[wanted]).to(z.dtype)

    # Pieces of the posterior ------------------------------------------------------------------------------------

    def inducing_mean(self, size: tuple[int, int]) -> Tensor:
        """Means ``m`` of all inducing matrices of one size, before the flow, ``[M, m_r, m_c]``."""
        return self._tensor(f"mean_{_size_key(size)}")

    def inducing_sd(self, size: tuple[int, int]) -> Tensor:
        """Standard deviations ``s`` of all inducing matrices of one size, posterior scale included."""
        logit = self._tensor(f"sd_logit_{_size_key(size)}")
        return self.scale * self.config.max_sd_u * torch.sigmoid(logit)

    def _noise_scale(self, block: _Block) -> Tensor:
        """``λ`` of one block, ``[L]``, posterior scale included."""
        if not self.config.learn_lambda:
            z = self._tensor(f"z_row_{block.key}")
            return z.new_full((len(block.group),), self.scale * self.config.init_lambda)
        logit = self._tensor(f"lambda_logit_{block.key}")
        return self.scale * self.config.max_lambda * torch.sigmoid(logit)

    def _flow(self, size: tuple[int, int]) -> FlowParameters:
        names = FlowParameters._fields
        return FlowParameters(*(self._tensor(f"flow_{name}_{_size_key(size)}") for name in names))

    def _projections(self) -> Projected:
        sides = [
            Side(self._tensor(f"z_{side}_{b.key}"), self._tensor(f"log_d_{side}_{b.key}").exp())
            for b in self._blocks
            for side in ("row", "col")
        ]
        projections = project(sides)
        pairs = zip(projections[0::2], projections[1::2], strict=True)
        return [(b, _Projections(*pair)) for b, pair in zip(self._blocks, pairs, strict=True)]

    def _transform(self, size: tuple[int, int], mean: Tensor, noise: Tensor) -> _Latent:
        """``T_φ(m + s ⊙ noise)`` for ``noise [M, n, m_r, m_c]``."""
        base = torch.addcmul(mean.unsqueeze(1), self.inducing_sd(size).unsqueeze(1), noise)
        if self.config.flow_depth == 0:
            return _Latent(base, base.new_zeros(base.shape[:2]))
        rows, log_det = apply_flow(self._flow(size).to(base.dtype), base.flatten(1, 2))
        return _Latent(rows.view_as(base), log_det.unflatten(1, base.shape[1:3]).sum(-1))

    def _sample(self, n: int, source: Noise) -> Latents:
        return {
            size: self._transform(size, self.inducing_mean(size), source.normal((count, n, *size)))
            for size, count in self._stacks.items()
        }

    def _whiten(self, latent: Tensor, sides: _Projections) -> Tensor:
        """The whitened matrix ``V`` of a latent ``[L, n, m_r, m_c]``: ``𝓛_r⁻¹ U 𝓛_c⁻ᵀ`` if that is ``U``."""
        if self.config.whitened:
            return latent
        row, col = (side.chol.unsqueeze(1) for side in sides)
        left = torch.linalg.solve_triangular(row, latent, upper=False)
        return torch.linalg.solve_triangular(col.mT, left, upper=True, left=False)

    # Draws and mean ---------------------------------------------------------------------------------------------

    def _draw(self, n: int, source: Noise) -> Factors:
        latents = self._sample(n, source)
        factors: dict[str, list[Tensor]] = {"A": [], "B": []}
        for block, sides in self._projections():
            core = self._whiten(latents[block.size].value[block.rows], sides)
            sample = conditional_sample(
                sides.row,
                sides.col,
                block.scale * core,
                block.scale * self._noise_scale(block).view(-1, 1, 1, 1),
                source.normal,
            )
            factors[block.factor].append(sample)
        return Factors(self.groups, tuple(factors["A"]), tuple(factors["B"]), latents)

    def _mean(self) -> Factors:
        if self.config.share_inducing:
            return self._shared_mean()
        means = {size: self._expect(size).unsqueeze(1) for size in self._stacks}
        factors: dict[str, list[Tensor]] = {"A": [], "B": []}
        for block, sides in self._projections():
            core = self._whiten(means[block.size][block.rows], sides)
            mean = conditional_mean(sides.row, sides.col, block.scale * core)
            factors[block.factor].append(mean)
        return Factors(self.groups, tuple(factors["A"]), tuple(factors["B"]))

    def _shared_mean(self) -> Factors:
        """``E[B A] = σ_B P_rBᵀ · E[V M V] · σ_A P_cA`` with ``M = P_cB P_rAᵀ``, as factors of rank ``m_c``."""
        wide, tall = [], []
        pairs = self._projections()
        for (a, sides_a), (b, sides_b) in zip(pairs[0::2], pairs[1::2], strict=True):
            core = self._expect_quadratic(a, sides_b.col.p @ sides_a.row.p.mT)
            wide.append((a.scale * sides_a.col.p).unsqueeze(1))
            tall.append((b.scale * (sides_b.row.p.mT @ core)).unsqueeze(1))
        return Factors(self.groups, tuple(wide), tuple(tall))

    def _expect(self, size: tuple[int, int]) -> Tensor:
        """``E[T_φ(V0)]``: the mean itself without a flow, an average over antithetic samples with one.

        Partners are added first, so that the mean of an identity flow at zero is exactly zero.
        """
        if self.config.flow_depth == 0:
            return self.inducing_mean(size)
        halves = (latent.chunk(2, dim=1) for latent in self._antithetic(size))
        return torch.cat([0.5 * (plus + minus) for plus, minus in halves], dim=1).mean(1)

    def _expect_quadratic(self, block: _Block, middle: Tensor) -> Tensor:
        """``E[V M V]`` for ``M = middle [L, m_c, m_r]``; without a flow exactly ``m M m + Mᵀ ⊙ s²``."""
        if self.config.flow_depth == 0:
            mean, sd = self.inducing_mean(block.size), self.inducing_sd(block.size)
            mean, sd = mean[block.rows], sd[block.rows]
            return mean @ middle @ mean + middle.mT * sd.square()
        middle = middle.unsqueeze(1)
        samples = (latent[block.rows] for latent in self._antithetic(block.size))
        return torch.stack([(v @ middle @ v).mean(1) for v in samples]).mean(0)

    def _antithetic(self, size: tuple[int, int]) -> list[Tensor]:
        """Fixed samples ``T_φ(m ± s ⊙ noise)`` in chunks ``[M, chunk, m_r, m_c]``; the same at every call."""
        source = self.noise(torch.Generator().manual_seed(0))
        shape = (self._stacks[size], _MEAN_CHUNK // 2, *size)
        noises = [source.normal(shape) for _ in range(MEAN_SAMPLES // _MEAN_CHUNK)]
        mean = self.inducing_mean(size)
        return [self._transform(size, mean, torch.cat([e, -e], dim=1)).value for e in noises]

    # KL terms ---------------------------------------------------------------------------------------------------

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        conditional = [conditional_noise_kl(self._noise_scale(block), math.prod(block.shape)) for block in self._blocks]
        if self.config.flow_depth == 0:
            inducing = self._exact_kl()
        else:
            latents = None if factors is None else factors.latents  # a mean, or a part of draws, has none
            inducing = self._sampled_kl(self._sample(1, source) if latents is None else latents)
        return KL({"inducing": inducing, "conditional": torch.stack(conditional).sum()})

    def _exact_kl(self) -> Tensor:
        """KL of the Gaussian over the inducing matrices, in the space it is parametrised in."""
        moments = {s: (self.inducing_mean(s), self.inducing_sd(s)) for s in self._stacks}
        if self.config.whitened:
            return torch.stack([standard_normal_kl(*m) for m in moments.values()]).sum()
        terms = []
        for block, (row, col) in self._projections():
            mean, sd = (moment[block.rows] for moment in moments[block.size])
            terms.append(matrix_normal_kl(mean, sd, row.chol, col.chol))
        return torch.stack(terms).sum()

    def _sampled_kl(self, latents: Latents) -> Tensor:
        """``E[log q(V) − log p(V)]`` averaged over the draws, with the entropy of ``V0`` in closed form."""
        terms = [self._cross_entropy(latents)]
        for size, latent in latents.items():
            terms.append(-gaussian_entropy(self.inducing_sd(size)))
            terms.append(-latent.log_det.mean(1).sum())
        return torch.stack(terms).sum()

    def _cross_entropy(self, latents: Latents) -> Tensor:
        """``−log p`` of the latents under their prior, averaged over the draws and summed over layers."""
        if self.config.whitened:
            return torch.stack([standard_normal_energy(x.value) for x in latents.values()]).sum()
        terms = []
        for block, sides in self._projections():
            whitened = self._whiten(latents[block.size].value[block.rows], sides)
            terms.append(standard_normal_energy(whitened) + half_log_det(sides.row.chol, sides.col.chol))
        return torch.stack(terms).sum()


def _unwhiten(mean: Tensor, sides: _Projections) -> Tensor:
    """``U = 𝓛_r V 𝓛_cᵀ``."""
    return sides.row.chol @ mean @ sides.col.chol.mT


def _plan(
    groups: Sequence[LayerGroup], config: InducingConfig
) -> tuple[tuple[_Block, ...], dict[tuple[int, int], int]]:
    """The rows of the latent stacks that each factor of each group uses, and the heights of the stacks."""
    blocks: list[_Block] = []
    stacks: dict[tuple[int, int], int] = {}
    for group in groups:
        size = config.size(group.rank)
        if max(size) > 2 * group.rank:
            warnings.warn(
                f"inducing size {size[0]}x{size[1]} is more than twice the rank {group.rank}: beyond the rank it adds "
                "parameters but no capacity",
                stacklevel=4,
            )
        start = stacks.get(size, 0)
        for factor, (_, columns) in group.factor_shapes.items():
            if factor == "B" and not config.share_inducing:
                start += len(group)
            rows = slice(start, start + len(group))
            blocks.append(_Block(group, factor, size, rows, config.factor_scale(columns)))
        stacks[size] = start + len(group)
    return tuple(blocks), stacks


def _size_key(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _inverse_bound(value: float, bound: float) -> float:
    """Logit for which ``bound · sigmoid(logit)`` is ``value``."""
    return math.log(value / (bound - value))
