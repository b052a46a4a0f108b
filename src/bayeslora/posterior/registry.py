"""The posteriors by name. To add one, add a line here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from bayeslora.errors import did_you_mean
from bayeslora.posterior.adalora import AdaloraPosterior
from bayeslora.posterior.base import NOTHING_KEPT, Posterior
from bayeslora.posterior.blob import BlobPosterior
from bayeslora.posterior.contextual import ContextualPosterior
from bayeslora.posterior.decoupled import DecoupledPosterior
from bayeslora.posterior.dropout import DropoutPosterior
from bayeslora.posterior.ensemble import EnsemblePosterior
from bayeslora.posterior.inducing import InducingPosterior
from bayeslora.posterior.ivon import IvonPosterior
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.posterior.layers import LayerShape
from bayeslora.posterior.meanfield import MeanFieldPosterior
from bayeslora.posterior.point import PointPosterior
from bayeslora.posterior.snapshots import Snapshots
from bayeslora.posterior.swag import SwagPosterior
from bayeslora.posterior.tfb import TfbPosterior
from bayeslora.type_checks import check_kinds

POSTERIORS: dict[str, type[Posterior]] = {
    it.name: it
    for it in (
        DecoupledPosterior,
        InducingPosterior,
        PointPosterior,
        EnsemblePosterior,
        TfbPosterior,
        DropoutPosterior,
        MeanFieldPosterior,
        BlobPosterior,
        IvonPosterior,
        SwagPosterior,
        LaplacePosterior,
        ContextualPosterior,
        AdaloraPosterior,
    )
}


def posterior_config(name: str, settings: Mapping[str, Any]) -> Any:
    """Build the settings dataclass of a posterior; unknown names and values are refused."""
    if name not in POSTERIORS:
        raise ValueError(f"unknown posterior {name!r}; choose {_listed(POSTERIORS)}{did_you_mean(name, POSTERIORS)}")
    return make_settings(name, POSTERIORS[name].config_class, settings)


def make_settings(name: str, config_class: type, settings: Mapping[str, Any]) -> Any:
    """Build the settings dataclass of the posterior ``name``; unknown settings are refused."""
    known = [field.name for field in fields(config_class)]
    for setting in settings:
        if setting not in known:
            allowed = _listed(known) if known else "none: it has no settings"
            raise ValueError(
                f"posterior {name!r} has no setting {setting!r}; it has {allowed}{did_you_mean(setting, known)}"
            )
    check_kinds(config_class, settings)
    return config_class(**settings)


def build_posterior(
    name: str,
    layers: Sequence[LayerShape],
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    points: Collection[str] = (),
    snapshots: Snapshots = NOTHING_KEPT,
) -> Posterior:
    """Build a posterior over these layers, with a point estimate in those named in ``points``."""
    config = posterior_config(name, settings or {})
    if points and not POSTERIORS[name].partial:
        allowed = _listed([known for known, it in POSTERIORS.items() if it.partial])
        raise ValueError(f"posterior {name!r} covers all layers or none; those that can leave some out are {allowed}")
    if snapshots.kept and POSTERIORS[name].amortised:
        raise ValueError(f"posterior {name!r} depends on the input, so snapshots of it have no common mean; keep none")
    if snapshots.kept and POSTERIORS[name] is SwagPosterior:
        raise ValueError(f"posterior {name!r} collects iterates itself, and early snapshots would have none; keep none")
    return POSTERIORS[name](layers, config, seed, points, snapshots)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)
