"""BLoB: a Gaussian on the factor A, a point on B, with its own optimisers (methods entry 7)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.blob import BlobPosterior

SPLIT = {"optimiser": "split", "kl_scaling": "blob", "kl_rate": 0.01}
"""AdamW on the likelihood, SGD on the KL, which weighs most at the end of every epoch."""

METHOD = Method(
    name="blob",
    description="a Gaussian on every entry of factor A and a point on B, with flipout",
    posterior=BlobPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4, **SPLIT}),
        "paper": Preset(training={**PAPER, **SPLIT}),
    },
)
