"""Builds the posterior of an adapter from the layers that the adapter wraps."""

from __future__ import annotations

import torch
from torch import nn

from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.adapter.draw_expansion import Stack
from bayeslora.adapter.expected import require_expected
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.layer_ranges import upper_layers
from bayeslora.posterior import LayerShape, Posterior, build_posterior


def build(model: nn.Module, adapter_name: str, config: BayesLoraConfig, number: int) -> Posterior:
    """Build the posterior over all layers of an adapter, in the order of the configuration.

    ``number`` is how many adapters were added to the model before.
    """
    seed = _own_seed(config.seed, number)
    layers = {
        module.name: module.shape(adapter_name)
        for module in model.modules()
        if isinstance(module, BayesLoraLinear) and adapter_name in module.r
    }
    names = config.layer_names
    if names is None or set(names) != set(layers):
        names = list(layers)
    config.layer_names = names
    points = _points(model, names, config.stochastic_layers)
    shapes: list[LayerShape] = [layers[name] for name in names]
    require_expected(config, shapes, points)
    posterior = build_posterior(config.posterior, shapes, config.settings, seed, points, config.remembered())
    posterior.scale = config.posterior_scale
    if not config.init_weights:
        _move_at_random(posterior, seed)
    return posterior


def _own_seed(seed: int, number: int) -> int:
    """The seed of one of several adapters on a model, counted from 0: the first has the seed of its settings."""
    return (seed + 0x9E3779B97F4A7C15 * number) % 2**63


def _points(model: nn.Module, names: list[str], stochastic_layers: str) -> set[str]:
    """The layers below those with a distribution."""
    if stochastic_layers == "all":
        return set()
    stack = Stack.find(model, names)
    if stack is None:
        raise ValueError(
            f"stochastic_layers={stochastic_layers!r}, but the adapted modules are not in one list of layers; use 'all'"
        )
    cut = len(stack.layers) - upper_layers(stochastic_layers, len(stack.layers), "stochastic_layers")
    points = {name for name in names if stack.index(name) < cut}
    if points == set(names):
        raise ValueError(f"stochastic_layers={stochastic_layers!r} leaves no adapted layer with a distribution")
    return points


@torch.no_grad()
def _move_at_random(posterior: Posterior, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in posterior.parameters():
        if not parameter.is_meta:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
