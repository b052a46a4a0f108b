"""Propose the next points of the unit cube, by the largest expected gain in feasible hypervolume.

Every outcome has its own Gaussian process with learnt noise: each objective, each constraint and, once a
trial has failed, whether trials fail. The gain is that of q-NEHVI (Daulton et al. 2021): over draws of all outcomes at the
observed and proposed points, the increase in hypervolume of the draw's own front by the proposed points.
Feasibility enters in one of two ways:

    mc   E[ gain · Π_j 1{c_j ≤ 0} ]      inside the expectation, draw by draw
    pof  E[ gain ] · Π_j P(c_j ≤ 0)      outside, by the normal distribution; the gain is that over feasible trials

As long as no trial is feasible there is no front, and Π_j P(c_j ≤ 0) alone is maximised.

The gain is computed in logarithms, in BoTorch's smooth form (Ament et al. 2023): the same acquisition, whose gradient does
not vanish where the gain is tiny.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from botorch.acquisition import AcquisitionFunction
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.multi_objective.objective import IdentityMCMultiOutputObjective
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.transforms import t_batch_mode_transform
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from linear_operator.utils.errors import NotPSDError
from numpy.typing import NDArray
from torch import Tensor

from bayeslora.tuning.front import Floats, non_dominated, reference_point
from bayeslora.tuning.points import sobol

Feasibility = Literal["mc", "pof"]

DRAWS = 32
"""Draws of all outcomes over which the gain is averaged."""
RESTARTS, RAW_POINTS = 4, 256
"""Starting points of the optimiser: the best few of many."""
ROUNDING = 1e-12
"""Outcomes that differ by no more than this share of their size are equal."""

HOPELESS = 4.0
"""Objectives are clipped at the best plus this many times the median's distance from the best: how bad a hopeless trial is does
not matter, and it would distort the model."""
LOOKED_AT = 1024
"""Points at which the model's expected front is evaluated."""


class ModelFailed(ArithmeticError):
    """The outcomes could not be modelled; the message says why."""


@dataclass(frozen=True, eq=False)
class History:
    """Results of the trials so far.

    Attributes:
        x: ``[N, D]``, their points in the unit cube.
        objectives: ``[N, M]``, all to be minimised; NaN where a trial failed.
        constraints: ``[N, J]``, at most zero where a trial is feasible; ``J`` may be zero.
    """

    x: Floats
    objectives: Floats
    constraints: Floats

    @property
    def done(self) -> NDArray[np.bool_]:
        """``[N]``, which trials did not fail."""
        return np.asarray(np.isfinite(self.objectives).all(1))

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """``[N]``, which trials did not fail and satisfy all constraints."""
        return np.asarray(self.done & (self.constraints <= 0).all(1))


def propose(history: History, count: int, feasibility: Feasibility, seed: int) -> Floats:
    """The next points ``[count, D]``, chosen sequentially, each conditional on the ones before."""
    dimension = history.x.shape[1]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BoTorch warns of every retry
        torch.manual_seed(seed % 2**31)
        try:
            points, _ = optimize_acqf(
                acquisition(history, feasibility, seed),
                torch.tensor([[0.0] * dimension, [1.0] * dimension], dtype=torch.double),
                q=count,
                num_restarts=RESTARTS,
                raw_samples=RAW_POINTS,
                sequential=True,
            )
        except (ModelFittingError, NotPSDError) as error:
            raise ModelFailed(f"the outcomes of {len(history.x)} trials cannot be modelled: {error}") from error
    return np.asarray(points.numpy())


def acquisition(history: History, feasibility: Feasibility, seed: int) -> AcquisitionFunction:
    """Acquisition function that the next point maximises."""
    x, done = torch.as_tensor(history.x), history.done
    gains = to_gains(history.objectives[done])
    limits = _in_units_of_spread(history.constraints[done])
    outcomes = _fitted(x[done], torch.as_tensor(np.hstack([gains, limits])))
    objectives, constraints = list(range(gains.shape[1])), list(range(gains.shape[1], outcomes.num_outputs))
    if not done.all():
        failures = _fitted(x, torch.as_tensor(np.where(done, -0.5, 0.5)[:, None]))
        constraints.append(outcomes.num_outputs)
        outcomes = ModelListGP(outcomes, failures)
    if constraints and not history.feasible.any():
        return FeasibilityOnly(outcomes, constraints)
    inside = feasibility == "mc" and constraints
    seen = gains[history.feasible[done]]
    gain = qLogNoisyExpectedHypervolumeImprovement(
        outcomes,
        torch.as_tensor(-reference_point(-np.vstack([seen, expected_front(outcomes, x, objectives, constraints)]))),
        x[done if inside or not constraints else history.feasible],
        SobolQMCNormalSampler(torch.Size([DRAWS]), seed=seed % 2**31),
        IdentityMCMultiOutputObjective(objectives),
        [_outcome(j) for j in constraints] if inside else None,
        prune_baseline=True,
    )
    return gain if inside or not constraints else FeasibilityWeighted(gain, FeasibilityOnly(outcomes, constraints))


def to_gains(objectives: Floats) -> Floats:
    """Objectives for the model to maximise: negated, in units of their spread, with hopeless ones clipped."""
    best, middle = objectives.min(0), np.median(objectives, axis=0)
    worst = np.where(middle > best, best + HOPELESS * (middle - best), np.inf)
    return -_in_units_of_spread(np.minimum(objectives, worst))


def expected_front(
    model: SingleTaskGP | ModelListGP, x: Tensor, objectives: list[int], constraints: list[int]
) -> Floats:
    """``[K, M]``, the front of the model's means where it expects trials to be feasible.

    The reference point of hypervolumes lies behind it. If it lay just behind the trials so far, a part of the front that is
    worse in one objective than all of them would have no volume and never be explored.
    """
    points = torch.vstack([torch.as_tensor(sobol(x.shape[1], 0, LOOKED_AT, seed=0)), x])
    with torch.no_grad():
        means = model.posterior(points).mean.numpy()
    likely = means[(means[:, constraints] <= 0).all(1)][:, objectives]
    return np.asarray(likely[non_dominated(-likely)])


class FeasibilityOnly(AcquisitionFunction):
    """``Π_j P(c_j ≤ 0)`` under the model, over all points of a batch."""

    def __init__(self, model: SingleTaskGP | ModelListGP, constraints: list[int]) -> None:
        super().__init__(model)
        self.constraints = constraints
        self.X_pending = None
        self._before = model

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Condition on points already chosen as if they had their expected outcomes, which lowers the gain near them."""
        super().set_X_pending(X_pending)
        self.model = self._before if X_pending is None else _as_expected(self._before, X_pending)

    @t_batch_mode_transform()
    def forward(self, X: Tensor) -> Tensor:
        """``[B]`` for points ``[B, q, D]``."""
        return self.logarithm(X).exp()

    def logarithm(self, X: Tensor) -> Tensor:
        """Logarithm of :meth:`forward`."""
        posterior = self.model.posterior(X)
        mean, sd = (it[..., self.constraints] for it in (posterior.mean, posterior.variance.clamp_min(1e-12).sqrt()))
        return torch.special.log_ndtr(-mean / sd).sum((-1, -2))


@torch.no_grad()
def _as_expected(model: SingleTaskGP | ModelListGP, x: Tensor) -> SingleTaskGP | ModelListGP:
    """The model conditioned on its own expectation at these points."""
    if isinstance(model, ModelListGP):
        return ModelListGP(*(_as_expected(part, x) for part in model.models))
    return model.condition_on_observations(x, model.posterior(x).mean)


class FeasibilityWeighted(AcquisitionFunction):
    """The logarithm of a gain times the probability of being feasible."""

    def __init__(self, gain: qLogNoisyExpectedHypervolumeImprovement, feasibility: FeasibilityOnly) -> None:
        super().__init__(gain.model)
        self.gain, self.feasibility = gain, feasibility
        self.X_pending = None

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Set the points already chosen."""
        super().set_X_pending(X_pending)
        self.gain.set_X_pending(X_pending)

    @t_batch_mode_transform()
    def forward(self, X: Tensor) -> Tensor:
        """``[B]`` for points ``[B, q, D]``."""
        return self.gain(X) + self.feasibility.logarithm(X)


def _fitted(x: Tensor, y: Tensor) -> SingleTaskGP:
    """A Gaussian process for each column of ``y``, independent of each other, all fitted in one batch."""
    batch = torch.Size([y.shape[1]] if y.shape[1] > 1 else [])
    kernel = ScaleKernel(
        get_covar_module_with_dim_scaled_prior(ard_num_dims=x.shape[1], batch_shape=batch),
        batch_shape=batch,
        outputscale_prior=LogNormalPrior(0.0, 2.0),  # wide: a quadratic needs a larger scale than its range
        outputscale_constraint=GreaterThan(1e-3),
    )
    model = SingleTaskGP(x, y, covar_module=kernel)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def _in_units_of_spread(values: Floats) -> Floats:
    """Scale values by their spread, so that BoTorch's smoothed feasibility indicator is equally sharp for all units.

    The spread of equal values is only round-off, and is not used as a unit.
    """
    spread = values.std(0)
    told = spread > ROUNDING * np.abs(values).max(0, initial=0.0)
    return np.asarray(values / np.where(told, spread, 1.0))


def _outcome(number: int) -> Callable[[Tensor], Tensor]:
    return lambda draws: draws[..., number]
