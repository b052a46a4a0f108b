"""BBB: independent Gaussians on both factors, trained by Bayes by Backprop (methods entry 6)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.meanfield import MeanFieldPosterior

METHOD = Method(
    name="bbb",
    description="an independent Gaussian on every entry of both factors (Bayes by Backprop)",
    posterior=MeanFieldPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4}),
        "paper": Preset(training=PAPER),
    },
)
