"""Laplace approximation: a Gaussian around trained LoRA factors, with widths from the curvature (methods entry 9)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.posterior.factors import Factors
from bayeslora.posterior.kronecker import Spectrum, spectrum
from bayeslora.posterior.layers import LayerGroup, group_by_shape
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.point import PointPosterior

Scope = Literal["all", "last"]
Prior = Literal["evidence", "validation", "given"]
Predictive = Literal["mc", "probit", "draws"]

PRECISIONS = (1e-8, 1e8)
"""Smallest and largest prior precision that the evidence may choose."""

_HALVINGS = 60
"""Bisection steps, which narrow the range of ``log τ`` down to 4e-17."""

_PARTS = ("small_vectors", "small_values", "long_vectors", "long_values")


@dataclass(frozen=True, kw_only=True)
class LaplaceConfig:
    """Settings of :class:`LaplacePosterior`.

    Attributes:
        scope: random layers: ``all`` adapted ones (LA), or only the ``last`` of them (LLLA).
        prior: how ``τ`` is chosen: by the NLL of ``validation`` questions, by the ``evidence``, or ``given`` by the user.
        prior_precision: initial ``τ``; :attr:`LaplacePosterior.prior_precision` is the one in use.
        curvature_rank: number of curvature directions kept on the long side of a factor.
        predictive: how predictions are computed: linearised, by ``mc`` draws of the scores or by the ``probit`` formula, or
            by ``draws`` of the weights.
    """

    scope: Scope = "all"
    prior: Prior = "validation"
    prior_precision: float = 1.0
    curvature_rank: int = 10
    predictive: Predictive = "mc"

    def __post_init__(self) -> None:
        for name, choices in (("scope", Scope), ("prior", Prior), ("predictive", Predictive)):
            allowed = get_args(choices)
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        _check_precision(self.prior_precision)
        if not isinstance(self.curvature_rank, int) or self.curvature_rank < 1:
            raise ValueError(f"curvature_rank must be a whole number of at least 1, got {self.curvature_rank!r}")


class FactorCurvature(NamedTuple):
    """Curvature of one factor: ``small [R, R]`` on the side of the rank, ``long longᵀ`` with ``long [d, m]`` on the other.

    As in K-FAC, one of the two is a sum over output gradients and the other a mean over inputs.
    """

    small: Tensor
    long: Tensor


class LayerCurvature(NamedTuple):
    """Curvature of the two factors of one layer; their blocks are taken to be independent."""

    A: FactorCurvature
    B: FactorCurvature


class LaplacePosterior(PointPosterior):
    """``N(θ̂, Λ⁻¹)`` with ``Λ = H + τ I``, block by block: one for each factor of each layer in scope.

    Training sees only the point ``θ̂``. After it :func:`bayeslora.predict.linearised.curvature.fit_curvature` sets ``H``, and
    :meth:`best_precision` returns the ``τ`` with the greatest evidence. Without curvature ``Λ`` is ``τ I``. Curvature and ``τ``
    are buffers, so they are saved with the adapter.
    """

    name = "laplace"
    config_class = LaplaceConfig
    config: LaplaceConfig
    spread = "width"
    random_groups: tuple[LayerGroup, ...]
    """The layers in scope, stacked by shape; the others are points."""

    @property
    def linearised(self) -> bool:
        """True unless the settings ask for sampled networks."""
        return self.config.predictive != "draws"

    def _initialise(self, generator: torch.Generator) -> None:
        self.random_groups = group_by_shape(self.layers if self.config.scope == "all" else self.layers[-1:])
        super()._initialise(generator)
        self._remember("log_precision", torch.tensor(math.log(self.config.prior_precision)))
        for group in self.random_groups:
            layers, R = len(group), group.rank
            for factor, d in (("A", group.in_features), ("B", group.out_features)):
                k = min(self.config.curvature_rank, d)
                for part, shape in zip(_PARTS, ((R, R), (R,), (d, k), (k,)), strict=True):
                    self._remember(f"{part}_{factor}_{group.key}", torch.zeros(layers, *shape))

    # Draws ------------------------------------------------------------------------------------------------------------

    def _draw(self, n: int, source: Noise) -> Factors:
        """Draw the factors; in training all draws are the point, as a plain LoRA is trained."""
        if self.training:
            return self._points(n)
        A, B = ([self._noisy(factor, group, n, source) for group in self.random_groups] for factor in ("A", "B"))
        points = self._points()
        return Factors(self.groups, self._placed(points.A, A), self._placed(points.B, [b.mT for b in B]))

    def _noisy(self, factor: str, group: LayerGroup, n: int, source: Noise) -> Tensor:
        """Draws ``[L, n, R, d]`` of a factor, with the rank first, of the layers of a group that are random."""
        mean = self._short_first(factor, group)
        noise = source.normal((mean.shape[0], n, *mean.shape[1:]))
        root = self._spectrum(factor, group).inverse_root(noise, self._precision)
        return mean.unsqueeze(1) + self.scale * root

    def _placed(self, points: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = {group.key: value for group, value in zip(self.random_groups, values, strict=True)}
        placed = []
        for group, point in zip(self.groups, points, strict=True):
            value, repeated = given.get(group.key), point.expand(-1, values[0].shape[1], -1, -1)
            if value is None:
                placed.append(repeated)
            elif len(value) == len(group):
                placed.append(value)
            else:
                placed.append(repeated.index_copy(0, self._random_rows(group), value))
        return tuple(placed)

    def place(self, points: Factors, A: Sequence[Tensor], B: Sequence[Tensor]) -> Factors:
        """``n`` sets of factors whose random layers are ``A [L, n, R, i]`` and ``B [L, n, o, R]``, for each of
        ``random_groups``; all other layers are as in ``points``, which is one set.

        Layers in scope and others share no tensor, so gradients by ``A`` and ``B`` need only the layers in scope.
        """
        groups, random = list(self.random_groups), self.random_names
        placed_A, placed_B = list(A), list(B)
        for group, a, b in zip(points.groups, points.A, points.B, strict=True):
            rows = [row for row, name in enumerate(group.names) if name not in random]
            if rows:
                groups.append(replace(group, names=tuple(group.names[row] for row in rows)))
                placed_A.append(a[rows])
                placed_B.append(b[rows])
        return Factors(tuple(groups), tuple(placed_A), tuple(placed_B))

    @property
    def random_names(self) -> set[str]:
        """Names of the layers in scope."""
        return {name for group in self.random_groups for name in group.names}

    def random_points(self) -> tuple[list[Tensor], list[Tensor]]:
        """``A [L, R, i]`` and ``B [L, o, R]`` of ``θ̂``, for each of ``random_groups``."""
        A, B = ([self._short_first(factor, group) for group in self.random_groups] for factor in ("A", "B"))
        return A, [b.mT for b in B]

    def _start_from(self, factors: Factors) -> None:
        """Reset the curvature, which belongs to the point where it was computed."""
        super()._start_from(factors)
        for name, buffer in self.named_buffers():
            if name.startswith(_PARTS):
                buffer.zero_()

    # Curvature and prior ----------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> float:
        """``τ``, the precision of every entry under the prior; saved with the adapter."""
        return math.exp(float(self.get_buffer("log_precision")))

    @prior_precision.setter
    def prior_precision(self, value: float) -> None:
        _check_precision(value)
        with torch.no_grad():
            self.get_buffer("log_precision").fill_(math.log(value))

    @torch.no_grad()
    def set_curvature(self, curvature: Mapping[str, LayerCurvature]) -> None:
        """Set ``H`` of every layer in scope, by name, summed over the whole training set.

        The long side is truncated to its ``curvature_rank`` largest directions.
        """
        wanted = self.random_names
        if wanted != set(curvature):
            example = min(wanted ^ set(curvature))
            raise ValueError(
                f"curvature is wanted for {len(wanted)} layers and was given for {len(curvature)}; they must be the same "
                f"(for example {example} is in one only)"
            )
        for group in self.random_groups:
            for factor in ("A", "B"):
                blocks: list[FactorCurvature] = [getattr(curvature[name], factor) for name in group.names]
                self._set_block(factor, group, blocks)

    def _set_block(self, factor: str, group: LayerGroup, blocks: Sequence[FactorCurvature]) -> None:
        for name, block in zip(group.names, blocks, strict=True):
            if not all(bool(side.isfinite().all()) for side in block):
                raise ArithmeticError(f"the curvature of factor {factor} of {name} is not finite: the model overflows")
        width = max(block.long.shape[-1] for block in blocks)
        small = torch.stack([block.small for block in blocks])
        long = torch.stack([F.pad(block.long, (0, width - block.long.shape[-1])) for block in blocks])
        found = spectrum(small, long, self.get_buffer(f"long_values_{factor}_{group.key}").shape[-1])
        for part in _PARTS:
            self.get_buffer(f"{part}_{factor}_{group.key}").copy_(getattr(found, part))

    def log_evidence(self, prior_precision: float | None = None, log_likelihood: float = 0.0) -> float:
        """Laplace's log marginal likelihood, ``log p(D|θ̂) − ½ τ ‖θ̂‖² − ½ log det(Λ/τ)``, over the layers in scope.

        Args:
            prior_precision: ``τ``; the one in use if not given.
            log_likelihood: of the training set at ``θ̂``, summed. It does not depend on ``τ``.
        """
        tau = self.prior_precision if prior_precision is None else prior_precision
        _check_precision(tau)
        log_det = float(torch.log1p(self._eigenvalues() / tau).sum())
        return log_likelihood - 0.5 * tau * self._squared_norm() - 0.5 * log_det

    def best_precision(self) -> float:
        """The ``τ`` in :data:`PRECISIONS` with the greatest evidence.

        The evidence is concave in ``log τ``, and its slope is half of ``Σ h/(h+τ) − τ ‖θ̂‖²`` over the eigenvalues ``h`` of
        ``H``: the slope's only change of sign is found by bisection.
        """
        eigenvalues, norm = self._eigenvalues(), self._squared_norm()
        if not bool((eigenvalues > 0).any()):
            raise ValueError("there is no curvature to choose a prior precision by; set it with fit_curvature() first")
        low, high = (math.log(end) for end in PRECISIONS)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            tau = math.exp(middle)
            rising = float((eigenvalues / (eigenvalues + tau)).sum()) > tau * norm
            low, high = (middle, high) if rising else (low, middle)
        return math.exp(0.5 * (low + high))

    @torch.no_grad()
    def functional_variance(
        self, jacobian: Sequence[tuple[Tensor, Tensor]], precisions: Sequence[float] | None = None
    ) -> Tensor:
        """``J Λ⁻¹ Jᵀ``, covariances ``[k, N, O, O]`` of ``O`` outputs for each of ``N`` inputs, posterior scale included.

        Args:
            jacobian: for each of ``random_groups`` the derivatives by ``A``, ``[L, N, O, R, i]``, and by ``B``,
                ``[L, N, O, o, R]``.
            precisions: ``k`` values of ``τ``; the one in use if not given.
        """
        taus = self._precision.reshape(1) if precisions is None else self._precision.new_tensor(precisions)
        terms = [
            self._spectrum(factor, group).inverse_grams(rows, taus)
            for group, (by_A, by_B) in zip(self.random_groups, jacobian, strict=True)
            for factor, rows in (("A", by_A), ("B", by_B.mT))
        ]
        return self.scale**2 * torch.stack(terms).sum(0)

    # Pieces -----------------------------------------------------------------------------------------------------------

    @property
    def _precision(self) -> Tensor:
        return self._tensor("log_precision").exp()

    def _spectrum(self, factor: str, group: LayerGroup) -> Spectrum:
        return Spectrum(*(self._tensor(f"{part}_{factor}_{group.key}") for part in _PARTS))

    def _short_first(self, factor: str, group: LayerGroup) -> Tensor:
        """A factor ``[L, R, d]`` of the layers of a random group, so that both factors obey the same formulas."""
        whole = next(other for other in self.groups if other.key == group.key)
        values = self._tensor(f"{factor}_{group.key}")
        if len(group) < len(whole):
            values = values[self._random_rows(whole)]
        return values if factor == "A" else values.mT

    def _random_rows(self, group: LayerGroup) -> Tensor:
        """Rows of a group whose layers are random."""
        random = self.random_names
        rows = [row for row, name in enumerate(group.names) if name in random]
        return torch.tensor(rows, device=self._reference.device)

    def _blocks(self) -> Iterator[tuple[str, LayerGroup]]:
        return ((factor, group) for group in self.random_groups for factor in ("A", "B"))

    @torch.no_grad()
    def _eigenvalues(self) -> Tensor:
        """Kept eigenvalues of ``H`` of all blocks, in float64."""
        found = (self._spectrum(*block).eigenvalues.flatten() for block in self._blocks())
        return torch.cat([values.cpu().double() for values in found])

    @torch.no_grad()
    def _squared_norm(self) -> float:
        """``‖θ̂‖²`` over the layers in scope."""
        return sum(float(self._short_first(*block).cpu().double().square().sum()) for block in self._blocks())


def _check_precision(value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"prior_precision must be positive and finite, got {value}")
