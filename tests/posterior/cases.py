"""Inputs shared by the tests of the maths."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslora.posterior import (
    AdaloraPosterior,
    BlobPosterior,
    ContextualPosterior,
    DecoupledConfig,
    DecoupledPosterior,
    DropoutPosterior,
    EnsembleConfig,
    EnsemblePosterior,
    InducingConfig,
    InducingPosterior,
    IvonPosterior,
    LaplacePosterior,
    MeanFieldPosterior,
    PointPosterior,
    SwagPosterior,
)
from bayeslora.posterior.projection import Side
from bayeslora.posterior.tfb import TfbPosterior


def random_side(m, width, d, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(layers, m, width, generator=generator, dtype=torch.float64) / m**0.5
    return Side(z, torch.full((layers, m), d, dtype=torch.float64))


class NoLooking(TorchDispatchMode):
    """Inside the block no number may be read off a tensor: on a GPU the host would wait for all that is queued there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.partition(".")[0] not in ("_local_scalar_dense", "nonzero"), func
        return func(*args, **(kwargs or {}))


def randomised(posterior, seed=5):
    """Every parameter moved from its start, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return posterior


def inducing(**settings):
    return lambda layers, seed=0: InducingPosterior(layers, InducingConfig(**settings), seed)


ONE_MEAN = {"components": 1, "width": 0.3}
"""Settings of a decoupled posterior with one mean and a good deal of noise."""


def decoupled(**settings):
    return lambda layers, seed=0: DecoupledPosterior(layers, DecoupledConfig(**{**ONE_MEAN, **settings}), seed)


def tfb(layers, seed=0):
    """Around a LoRA whose B is not zero, as TFB's always is."""
    posterior = TfbPosterior(layers, seed=seed).eval()
    posterior.start_from(randomised(PointPosterior(layers, seed=seed), seed).mean())
    posterior.width = 0.1
    return posterior


def swag(layers, seed=0):
    """With a few iterates, which differ."""
    posterior = SwagPosterior(layers, seed=seed).eval()
    for step in range(1, 5):
        randomised(posterior, seed + step)
        posterior.after_step(step, 4)
    return posterior


POSTERIORS = {
    "point": lambda layers, seed=0: PointPosterior(layers, seed=seed),
    "ensemble": lambda layers, seed=0: EnsemblePosterior(layers, EnsembleConfig(members=3), seed),
    "meanfield": lambda layers, seed=0: MeanFieldPosterior(layers, seed=seed),
    "dropout": lambda layers, seed=0: DropoutPosterior(layers, seed=seed).eval(),
    "blob": lambda layers, seed=0: BlobPosterior(layers, seed=seed).eval(),
    "contextual": lambda layers, seed=0: ContextualPosterior(layers, seed=seed).eval(),
    "adalora": lambda layers, seed=0: AdaloraPosterior(layers, seed=seed),
    "laplace": lambda layers, seed=0: LaplacePosterior(layers, seed=seed).eval(),
    "ivon": lambda layers, seed=0: IvonPosterior(layers, seed=seed),
    "swag": swag,
    "tfb": tfb,
    "decoupled": decoupled(),
    "decoupled-both": decoupled(random_factors="both", learn_widths=True),
    "decoupled-components": decoupled(components=3),
    "decoupled-flow": decoupled(flow_depth=2, flow_hidden=8),
    "inducing": inducing(),
    "inducing-gaussian": inducing(flow_depth=0),
    "inducing-deep-flow": inducing(flow_depth=3, flow_hidden=8),
    "inducing-shared": inducing(share_inducing=True),
    "inducing-unwhitened": inducing(whitened=False),
    "inducing-fixed-noise": inducing(learn_lambda=False),
    "inducing-wide": inducing(inducing_rows=4, inducing_cols=3),
}
"""Every posterior, in its forms. A new one adds a row here, and gets all tests of the interface and of launches."""
