"""Distributions over the LoRA factors of all adapted layers at once. Needs nothing but torch."""

from bayeslora.posterior.base import Factors, LayerFactors, Posterior
from bayeslora.posterior.ensemble import EnsemblePosterior
from bayeslora.posterior.inducing import InducingPosterior
from bayeslora.posterior.inducing_config import InducingConfig
from bayeslora.posterior.kl import KL, kl_weight
from bayeslora.posterior.layers import LayerGroup, LayerShape
from bayeslora.posterior.point import PointPosterior
from bayeslora.posterior.projection import IllConditionedError, JitterWarning

__all__ = [
    "KL",
    "EnsemblePosterior",
    "Factors",
    "IllConditionedError",
    "InducingConfig",
    "InducingPosterior",
    "JitterWarning",
    "LayerFactors",
    "LayerGroup",
    "LayerShape",
    "PointPosterior",
    "Posterior",
    "kl_weight",
]
