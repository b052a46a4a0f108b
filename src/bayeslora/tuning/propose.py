"""Where to look next: points of the unit cube with the largest expected gain in feasible hypervolume.

Every outcome has a Gaussian process of its own, with noise that is learnt: each objective, each constraint and, once a
trial has failed, whether trials fail. The gain is that of q-NEHVI (Daulton et al. 2021): over draws of all outcomes at the
points seen and proposed, by how much the proposed ones raise the hypervolume of the front that the draw itself has.
Feasibility enters in one of two ways:

    mc   E[ gain · Π_j 1{c_j ≤ 0} ]      inside the expectation, draw by draw
    pof  E[ gain ] · Π_j P(c_j ≤ 0)      outside, by the normal distribution; the gain is that over feasible trials

As long as no trial is feasible there is no front to gain on, and Π_j P(c_j ≤ 0) alone is maximised.

The gain is computed in logarithms, in BoTorch's smooth form (Ament et al. 2023): the same acquisition, whose slope does not
vanish where the gain is tiny.
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
"""Of all outcomes, over which the gain is averaged."""
RESTARTS, RAW_POINTS = 4, 256
"""Where the search for the best point begins: the best few of many."""
ROUNDING = 1e-12
"""Outcomes that differ by no more than this share of their size are equal."""

HOPELESS = 4.0
"""A trial that is worse than the best by more than so many times as much as the middle one is counts as no worse than that:
how bad it is does not matter, and the model would bend for it."""
LOOKED_AT = 1024
"""Points at which the model is asked how far the front reaches."""


class ModelFailed(ArithmeticError):
    """The outcomes could not be modelled; the message says why."""


@dataclass(frozen=True, eq=False)
class History:
    """What is known from trials.

    Attributes:
        x: ``[N, D]``, where they were in the unit cube.
        objectives: ``[N, M]``, all to be small; not a number where a trial failed.
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
        """``[N]``, which trials did not fail and keep all constraints."""
        return np.asarray(self.done & (self.constraints <= 0).all(1))


def propose(history: History, count: int, feasibility: Feasibility, seed: int) -> Floats:
    """The next points ``[count, D]``, one chosen after another, each knowing where the ones before it are."""
    dimension = history.x.shape[1]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BoTorch tells of every retry
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
    """What the next point maximises."""
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
    """Objectives as what the model maximises: negated, in units of their spread, and hopeless ones cut off."""
    best, middle = objectives.min(0), np.median(objectives, axis=0)
    worst = np.where(middle > best, best + HOPELESS * (middle - best), np.inf)
    return -_in_units_of_spread(np.minimum(objectives, worst))


def expected_front(
    model: SingleTaskGP | ModelListGP, x: Tensor, objectives: list[int], constraints: list[int]
) -> Floats:
    """``[K, M]``, the front of the model's means where it expects trials to be feasible.

    Hypervolumes are measured from behind it. From just behind the trials so far, a part of the front that is worse in one
    objective than all of them would count for nothing, and never be looked for.
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
        """Points that are chosen already: as if they had come out as expected, so that there is less to hope for near them."""
        super().set_X_pending(X_pending)
        self.model = self._before if X_pending is None else _as_expected(self._before, X_pending)

    @t_batch_mode_transform()
    def forward(self, X: Tensor) -> Tensor:
        """``[B]`` for points ``[B, q, D]``."""
        return self.logarithm(X).exp()

    def logarithm(self, X: Tensor) -> Tensor:
        """The same in logarithms."""
        posterior = self.model.posterior(X)
        mean, sd = (it[..., self.constraints] for it in (posterior.mean, posterior.variance.clamp_min(1e-12).sqrt()))
        return torch.special.log_ndtr(-mean / sd).sum((-1, -2))


@torch.no_grad()
def _as_expected(model: SingleTaskGP | ModelListGP, x: Tensor) -> SingleTaskGP | ModelListGP:
    """The model if these points had come out as it expects them to."""
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
        """Points that are chosen already."""
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
        outputscale_prior=LogNormalPrior(0.0, 2.0),  # wide: a bowl needs a larger scale than its own range
        outputscale_constraint=GreaterThan(1e-3),
    )
    model = SingleTaskGP(x, y, covar_module=kernel)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def _in_units_of_spread(values: Floats) -> Floats:
    """So that the indicator of feasibility, which BoTorch smooths a little, is as sharp for seconds as for shares.

    The spread of equal values is not quite zero but their rounding, and no unit to measure in.
    """
    spread = values.std(0)
    told = spread > ROUNDING * np.abs(values).max(0, initial=0.0)
    return np.asarray(values / np.where(told, spread, 1.0))


def _outcome(number: int) -> Callable[[Tensor], Tensor]:
    return lambda draws: draws[..., number]
