"""Distributions over the LoRA factors of all adapted layers at once. Depends only on torch."""

from bayeslora.posterior.adalora import AdaloraConfig, AdaloraPosterior
from bayeslora.posterior.base import Posterior
from bayeslora.posterior.blob import BlobConfig, BlobPosterior
from bayeslora.posterior.contextual import ContextualConfig, ContextualPosterior
from bayeslora.posterior.decoupled import DecoupledConfig, DecoupledPosterior
from bayeslora.posterior.dropout import DropoutConfig, DropoutPosterior
from bayeslora.posterior.ensemble import EnsembleConfig, EnsemblePosterior
from bayeslora.posterior.factors import Factors, LayerFactors
from bayeslora.posterior.inducing import InducingPosterior
from bayeslora.posterior.inducing_config import InducingConfig
from bayeslora.posterior.ivon import IvonConfig, IvonPosterior
from bayeslora.posterior.kl import KL, kl_weight
from bayeslora.posterior.laplace import FactorCurvature, LaplaceConfig, LaplacePosterior, LayerCurvature
from bayeslora.posterior.layers import LayerGroup, LayerShape
from bayeslora.posterior.meanfield import MeanFieldConfig, MeanFieldPosterior
from bayeslora.posterior.point import PointConfig, PointPosterior
from bayeslora.posterior.projection import IllConditionedError, JitterWarning
from bayeslora.posterior.registry import POSTERIORS, build_posterior
from bayeslora.posterior.snapshots import Snapshots
from bayeslora.posterior.swag import SwagConfig, SwagPosterior

__all__ = [
    "KL",
    "POSTERIORS",
    "AdaloraConfig",
    "AdaloraPosterior",
    "BlobConfig",
    "BlobPosterior",
    "ContextualConfig",
    "ContextualPosterior",
    "DecoupledConfig",
    "DecoupledPosterior",
    "DropoutConfig",
    "DropoutPosterior",
    "EnsembleConfig",
    "EnsemblePosterior",
    "FactorCurvature",
    "Factors",
    "IllConditionedError",
    "InducingConfig",
    "InducingPosterior",
    "IvonConfig",
    "IvonPosterior",
    "JitterWarning",
    "LaplaceConfig",
    "LaplacePosterior",
    "LayerCurvature",
    "LayerFactors",
    "LayerGroup",
    "LayerShape",
    "MeanFieldConfig",
    "MeanFieldPosterior",
    "PointConfig",
    "PointPosterior",
    "Posterior",
    "Snapshots",
    "SwagConfig",
    "SwagPosterior",
    "build_posterior",
    "kl_weight",
]
